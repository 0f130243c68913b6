"""Tests the rights of a caller at a running scheduler, by its grants in the configuration."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb
from structlog.testing import capture_logs

from schedsvc.service.auth import Credentials, Known

from .certificates import Authority
from .conftest import POOL, ask, calling, failure, serving, token_of
from .test_cli import run

pytestmark = pytest.mark.usefixtures("both_transports")

GATE, OTHER = "gate-token-of-enough", "other-token-of-enough"
PRINCIPALS = [
    token_of("gate", GATE, pools=["gpu-*"], tenants=["a"], stats="own"),
    token_of("other", OTHER),
]


def bearer(token: str) -> Any:
    return (("authorization", f"Bearer {token}"),)


async def test_tenant_that_is_not_granted_is_denied_by_name() -> None:
    async with (
        serving(auth={"principals": PRINCIPALS}) as server,
        calling(server.targets[0]) as stub,
    ):
        granted = await stub.Admit(ask(10, tenant="a"), metadata=bearer(GATE))
        assert granted.outcome == pb.OUTCOME_GRANTED
        error = await failure(stub.Admit(ask(10, tenant="b"), metadata=bearer(GATE)))
        assert error.code() == grpc.StatusCode.PERMISSION_DENIED
        assert "tenant: is not granted to gate: add it to `tenants`" in (error.details() or "")
        granted = await stub.Admit(ask(10, tenant="b"), metadata=bearer(OTHER))
        assert granted.outcome == pb.OUTCOME_GRANTED


async def test_pool_that_is_not_granted_is_a_fault_on_the_stream() -> None:
    async with (
        serving(auth={"principals": PRINCIPALS}) as server,
        calling(server.targets[0]) as stub,
    ):
        call = stub.Session(metadata=bearer(GATE))
        offers = [
            pool_pb2.PoolRegistration(pool=name, epoch=1, capacity_tokens=100, block_size_tokens=1)
            for name in ("gpu-1", "pool")
        ]
        hello = pb.SessionEvent(hello=pb.SessionHello(client_id="shim", incarnation=1))
        events = [hello, *(pb.SessionEvent(pool=offer) for offer in offers)]
        await call.write(pb.SessionRequest(seq=1, events=events))
        answer = await call.read()
        assert [(fault.code, fault.field) for fault in answer.faults] == [(7, "pool.pool")]
        names = [row["name"] for row in server.driver.stats(0)["pools"]]
        assert names == [POOL["name"], "gpu-1"]


async def test_stats_show_a_caller_its_own_pools_and_tenants() -> None:
    tenants = [{"name": name} for name in ("a", "b")]
    async with (
        serving(auth={"principals": PRINCIPALS}, tenants=tenants) as server,
        calling(server.targets[0]) as stub,
    ):
        own = await stub.Stats(pb.StatsRequest(), metadata=bearer(GATE))
        assert [flow.tenant for flow in own.flows] == ["a"]
        assert list(own.pools) == []
        assert not own.HasField("totals")
        named = pb.StatsRequest(tenants=["a", "b"])
        own = await stub.Stats(named, metadata=bearer(GATE))
        assert [flow.tenant for flow in own.flows] == ["a"]
        every = await stub.Stats(named, metadata=bearer(OTHER))
        assert [flow.tenant for flow in every.flows] == ["a", "b"]
        assert every.HasField("totals")
        assert [pool.name for pool in every.pools] == [POOL["name"]]
        old = pb.StatsRequest(max_age_ms=3_600_000)
        assert (await stub.Stats(old, metadata=bearer(OTHER))).HasField("totals")
        own = await stub.Stats(old, metadata=bearer(GATE))
        assert [flow.tenant for flow in own.flows] == ["a"]
        assert not own.HasField("totals")


async def test_stats_command_says_that_it_shows_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATE_TOKEN", GATE)
    async with serving(auth={"principals": PRINCIPALS}) as server:
        words = ("stats", "--target", server.targets[0], "--token-env", "GATE_TOKEN")
        result = await asyncio.to_thread(run, *words)
    assert result.exit_code == 0
    assert "only the pools and tenants of this caller (`stats: own`" in result.output


async def test_each_open_listener_is_a_principal_of_its_own(tmp_path: Path) -> None:
    """A caller on a loopback port could end the leases granted on a Unix socket."""
    socket = str(tmp_path / "s")
    listeners = [{"tcp": "127.0.0.1:0"}, {"unix": socket}]
    local = {"name": "local", "listener": socket, "pools": ["*"], "tenants": ["a"]}
    async with (
        serving(listeners=listeners, auth={"principals": [local]}) as server,
        calling(server.targets[0]) as tcp,
        calling(server.targets[1]) as unix,
    ):
        granted = await unix.Admit(ask(10, tenant="a"))
        lease = pb.CompleteRequest(lease_id=granted.grant.lease_id, pool_epoch=1)
        assert (await failure(tcp.Complete(lease))).code() == grpc.StatusCode.NOT_FOUND
        assert (await unix.Complete(lease)).outcome == pb.OUTCOME_COMPLETED
        denied = await failure(unix.Admit(ask(10, tenant="b")))
        assert denied.code() == grpc.StatusCode.PERMISSION_DENIED
        assert (await tcp.Admit(ask(10, tenant="b"))).outcome == pb.OUTCOME_GRANTED


async def test_certificate_is_known_by_its_exact_name(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("scheduler")
    tls = {
        "cert": str(own.cert_file),
        "key": str(own.key_file),
        "client_ca": str(authority.file),
    }
    principals = [{"name": "gpu-1", "certificate": "gate.example", "pools": ["*"]}]
    listeners = [{"tcp": "127.0.0.1:0", "tls": tls}]
    outcomes = {}
    async with serving(listeners=listeners, auth={"principals": principals}) as server:
        for name in ("gate.example", "GATE.example", "gate.example.org"):
            pair = authority.issue(name)
            proof = grpc.ssl_channel_credentials(authority.cert, pair.key, pair.cert)
            async with calling(server.targets[0], proof) as stub:
                outcomes[name] = (await stub.Stats(pb.StatsRequest()).code()).name
    assert outcomes == {
        "gate.example": "OK",
        "GATE.example": "UNAUTHENTICATED",
        "gate.example.org": "UNAUTHENTICATED",
    }


async def test_a_certificate_names_one_caller_by_its_sans(tmp_path: Path) -> None:
    """A common name counted beside SANs, and the first of two SPIFFE IDs was taken."""
    authority = Authority(tmp_path)
    own = authority.issue("scheduler")
    tls = {"cert": str(own.cert_file), "key": str(own.key_file), "client_ca": str(authority.file)}
    gate, other = "spiffe://corp/gate", "spiffe://corp/other"
    principals = [
        {"name": name, "certificate": name} for name in (gate, other, "ops.example", "b.example")
    ]
    auth = {"principals": principals}
    listeners = [{"tcp": "127.0.0.1:0", "tls": tls}]
    outcomes = {}
    async with serving(listeners=listeners, auth=auth) as server:
        for sans in (
            (None,),
            ("ops.example",),
            ("a.example",),
            ("ops@corp.example",),
            (gate,),
            (gate, "a.example"),
            (gate, other),
            (gate, "spiffe://corp/unknown"),
            (gate, "https://corp.example"),
            (gate, "b.example"),
            ("ops.example", "b.example"),
        ):
            pair = authority.issue("ops.example", *sans)
            proof = grpc.ssl_channel_credentials(authority.cert, pair.key, pair.cert)
            async with calling(server.targets[0], proof) as stub:
                call = stub.Stats(pb.StatsRequest())
                outcomes[sans] = ((await call.code()).name, await call.details())
    why = "this client certificate names several callers; issue one with a single URI SAN"
    assert outcomes == {
        (None,): ("OK", ""),
        ("ops.example",): ("OK", ""),
        ("a.example",): ("UNAUTHENTICATED", "no principal has this client certificate"),
        ("ops@corp.example",): ("UNAUTHENTICATED", "no principal has this client certificate"),
        (gate,): ("OK", ""),
        (gate, "a.example"): ("OK", ""),
        (gate, other): ("UNAUTHENTICATED", why),
        (gate, "spiffe://corp/unknown"): ("UNAUTHENTICATED", why),
        (gate, "https://corp.example"): ("UNAUTHENTICATED", why),
        (gate, "b.example"): ("UNAUTHENTICATED", why),
        ("ops.example", "b.example"): ("UNAUTHENTICATED", why),
    }


@pytest.mark.parametrize(
    ("uris", "names", "found"),
    [
        (("spiffe://corp/gpu-1",), (), "gpu-1"),
        ((), ("spiffe://corp/gpu-1",), None),  # a common name that imitates a URI
        ((), ("b.example",), "gpu-2"),
        (("https://b.example",), ("a.example", "b.example"), "gpu-2"),
        ((), ("c.example",), None),
        ((), (), None),
    ],
)
def test_uri_is_matched_by_uris_only(
    uris: tuple[str, ...], names: tuple[str, ...], found: str | None
) -> None:
    known = Credentials(
        [
            Known("gpu-1", certificate="spiffe://corp/gpu-1"),
            Known("gpu-2", certificate="b.example"),
        ],
        unlisted_certificates=False,
    )
    number = known.of_certificate(uris, names)
    assert (None if number is None else known.name(number)) == found


def test_streams_end_if_the_listener_of_a_principal_changes() -> None:
    known = Credentials([Known("a", listener="s")])
    number = known.of_listener("s")
    assert known.replace([Known("a", listener="t")], unlisted_certificates=True) == {number}


def test_unlisted_certificates_end_once_they_are_refused() -> None:
    known = Credentials([])
    number = known.of_certificate((), ("u",))
    assert known.replace([], unlisted_certificates=False) == {number}
    assert known.of_certificate((), ("u",)) is None


def test_unlisted_certificate_has_no_grant_of_a_listed_one() -> None:
    known = Credentials([Known("ops", tokens=(b"s" * 32,), is_operator=True)])
    number = known.of_certificate((), ("ops",))
    assert number is not None
    assert known.name(number) == "certificate:ops"
    assert not known.may_operate(number)
    assert known.of_certificate((), ()) is None


@pytest.mark.parametrize(
    ("changed", "ended"),
    [
        ([Known("a", (b"1", b"2")), Known("b", certificate="b")], []),
        ([Known("a", (b"2",)), Known("b", certificate="b")], ["a"]),
        ([Known("b", certificate="b")], ["a"]),
        ([Known("a", (b"1",), is_operator=True), Known("b", certificate="c")], ["b"]),
        ([Known("c", (b"1",))], ["a", "b"]),
        (
            [Known("a", (b"1",)), Known("b", certificate="b"), Known("l", listener="s")],
            ["listener:s"],
        ),
        (
            [Known("a", (b"1",)), Known("b", certificate="b"), Known("u", certificate="u")],
            ["certificate:u"],
        ),
    ],
)
def test_streams_end_if_a_proof_is_withdrawn(changed: list[Known], ended: list[str]) -> None:
    known = Credentials([Known("a", (b"1",)), Known("b", certificate="b")])
    numbers = {known.name(number): number for number in known.listed}
    # Both are let in unlisted, with all grants, and have fewer once they are listed.
    known.of_listener("s")
    known.of_certificate((), ("u",))
    found = known.replace(changed, unlisted_certificates=True)
    assert sorted(known.name(number) for number in found) == ended
    for name in ("a", "b"):  # a number is never given away
        if name in {known.name(number) for number in known.listed}:
            assert known.name(numbers[name]) == name


async def test_limited_reports_are_logged_with_their_number() -> None:
    async with serving() as server, calling(server.targets[0]) as stub:
        for _ in range(2):
            lease = (await stub.Admit(ask(10))).grant
            await stub.Complete(
                pb.CompleteRequest(
                    lease_id=lease.lease_id, pool_epoch=lease.pool_epoch, output_tokens=10_000
                )
            )
        with capture_logs() as logs:
            server.log_limited()
            server.log_limited()
    assert [(entry["event"], entry["leases"]) for entry in logs] == [("reports_limited", 2)]
