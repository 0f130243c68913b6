"""Tests OperatorService: who may call it, and what it does to a server that runs."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from schedsvc_client.v1 import mode_pb2, scheduler_pb2
from schedsvc_client.v1 import operator_pb2 as pb
from schedsvc_client.v1.operator_pb2_grpc import OperatorServiceStub
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

from schedsvc.server import Server
from schedsvc.service import operator as service
from schedsvc_lab.sim.replay.exact import Exact
from schedsvc_lab.sim.replay.reader import Recording as Recorded
from tests.waiting import until

from .certificates import Authority
from .conftest import ask, config_of, failure, open_channel, serving, token_of, totals
from .test_drain import health
from .test_session import admit, stream

OPEN = {"listeners": [{"tcp": "127.0.0.1:0", "operate": True}]}
SERVING, NOT_SERVING = 1, 2


class Both:
    """Holds the stubs of both services on one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.operator = OperatorServiceStub(channel)
        self.scheduler = SchedulerServiceStub(channel)

    async def admit(self, tokens: int = 100, **fields: Any) -> scheduler_pb2.AdmitResponse:
        return await self.scheduler.Admit(ask(tokens, **fields))

    async def complete(self, lease_id: int) -> scheduler_pb2.CompleteResponse:
        request = scheduler_pb2.CompleteRequest(lease_id=lease_id, pool_epoch=1)
        return await self.scheduler.Complete(request)


@asynccontextmanager
async def operating(**keys: Any) -> AsyncIterator[tuple[Server, Both]]:
    async with serving(**(OPEN | keys)) as server, open_channel(server.targets[0]) as channel:
        yield server, Both(channel)


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


async def every_code(channel: grpc.aio.Channel, metadata: Any = ()) -> set[grpc.StatusCode]:
    stub = OperatorServiceStub(channel)
    calls = [
        stub.Drain(pb.DrainRequest(pool="pool"), metadata=metadata),
        stub.ListLeases(pb.ListLeasesRequest(), metadata=metadata),
        stub.RevokeLeases(pb.RevokeLeasesRequest(lease_ids=[1]), metadata=metadata),
        stub.SetMode(pb.SetModeRequest(mode=mode_pb2.MODE_AUDIT), metadata=metadata),
        stub.ForgiveTenant(pb.ForgiveTenantRequest(tenant="a"), metadata=metadata),
        stub.ReleasePool(pb.ReleasePoolRequest(pool="pool"), metadata=metadata),
    ]
    return {await call.code() for call in calls}


# Authorization.


async def test_only_operators_may_and_others_hear_what_to_configure() -> None:
    names = ("ops-token-of-16", "shim-token-of-16")
    auth = {
        "principals": [
            token_of("ops", names[0], operator=True),
            token_of("shim", names[1]),
        ]
    }
    async with serving(auth=auth) as server, open_channel(server.targets[0]) as channel:
        for token, wanted in zip(names, ("OK", "PERMISSION_DENIED"), strict=True):
            metadata = (("authorization", f"Bearer {token}"),)
            before = server.driver.stats(0)
            assert {code.name for code in await every_code(channel, metadata)} == {wanted}
            if wanted != "OK":
                assert server.driver.stats(0)["pools"] == before["pools"]
                call = OperatorServiceStub(channel).Drain(pb.DrainRequest(), metadata=metadata)
                assert "'shim'" in (await failure(call)).details()
                assert "`operator: true`" in (await failure(call)).details()
        assert await every_code(channel) == {grpc.StatusCode.UNAUTHENTICATED}
        wrong = (("authorization", "Bearer ops-token-of-17"),)
        assert await every_code(channel, wrong) == {grpc.StatusCode.UNAUTHENTICATED}


async def test_without_authentication_a_unix_socket_lets_operate_and_tcp_does_not(
    tmp_path: Path,
) -> None:
    sockets = [
        {"unix": str(tmp_path / "s")},
        {"tcp": "127.0.0.1:0"},
        {"unix": str(tmp_path / "t"), "operate": False},
        {"tcp": "127.0.0.1:0", "operate": True},
    ]
    async with serving(listeners=sockets) as server:
        codes = []
        for target in server.targets:
            async with open_channel(target) as channel:
                codes += [code.name for code in await every_code(channel) - {None}]
                call = OperatorServiceStub(channel).ListLeases(pb.ListLeasesRequest())
                if codes[-1] != "OK":
                    assert "`operate: true`" in (await failure(call)).details()
        assert codes == ["OK", "PERMISSION_DENIED", "PERMISSION_DENIED", "OK"]


async def test_a_certificate_is_an_operator_by_its_common_name(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("scheduler")
    tls = {"cert": str(own.cert_file), "key": str(own.key_file)}
    listener = {
        "tcp": "127.0.0.1:0",
        "tls": tls | {"client_ca": str(authority.file)},
    }
    codes = {}
    principals = [
        {"name": "alice", "certificate": "ops", "operator": True},
        {"name": "gate", "certificate": "shim", "pools": ["*"]},
    ]
    async with serving(listeners=[listener], auth={"principals": principals}) as server:
        for name in ("ops", "shim"):
            pair = authority.issue(name)
            credentials = grpc.ssl_channel_credentials(
                authority.cert,
                pair.key,
                pair.cert,
            )
            async with open_channel(server.targets[0], credentials) as channel:
                call = OperatorServiceStub(channel).ListLeases(pb.ListLeasesRequest())
                codes[name] = await call.code()
    assert codes == {"ops": grpc.StatusCode.OK, "shim": grpc.StatusCode.PERMISSION_DENIED}


# Drains.


async def test_a_drain_of_all_evicts_changes_health_and_can_be_undone() -> None:
    async with operating() as (server, both), stream(server) as peer:
        runs = await both.admit(1_500)
        waits = asyncio.ensure_future(both.admit(1_500))
        await peer.send(admit(9, 1_500))
        await until(lambda: totals(server)["queued"] == 2, "both wait")
        answer = await both.operator.Drain(pb.DrainRequest())
        assert answer.live_leases == 1
        refused = await waits
        assert refused.outcome == scheduler_pb2.OUTCOME_EVICTED_DRAINING
        assert refused.refusal.retry_after_ms >= 4_000
        verdict = await peer.verdict()
        assert verdict.response.outcome == scheduler_pb2.OUTCOME_EVICTED_DRAINING
        for name in ("", "schedsvc.v1.SchedulerService", "readiness"):
            assert await health(server, name) == NOT_SERVING
        assert await health(server, "liveness") == SERVING
        error = await failure(both.admit())
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        stats = await both.scheduler.Stats(scheduler_pb2.StatsRequest())
        assert stats.draining
        assert stats.pools[0].draining
        await both.complete(runs.grant.lease_id)
        assert (await both.operator.Drain(pb.DrainRequest())).live_leases == 0  # a repeat

        await both.operator.Drain(pb.DrainRequest(undo=True))
        for name in ("", "schedsvc.v1.SchedulerService", "readiness", "liveness"):
            assert await health(server, name) == SERVING
        assert (await both.admit()).outcome == scheduler_pb2.OUTCOME_GRANTED


async def test_a_drain_of_a_pool_leaves_the_others() -> None:
    pools = [{"name": name, "capacity_tokens": 1_600} for name in ("p", "q")]
    async with operating(pools=pools) as (server, both):
        await both.operator.Drain(pb.DrainRequest(pool="p"))
        error = await failure(both.admit(pools=["p"]))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert (await both.admit()).grant.pool == "q"
        assert await health(server) == SERVING
        page = (await server.metrics.page()).decode()
        assert 'schedsvc_pool_draining{pool="p"} 1.0' in page
        assert 'schedsvc_pool_draining{pool="q"} 0.0' in page


async def test_the_end_of_the_process_is_not_undone() -> None:
    async with operating(limits={"drain_ms": 5_000}) as (server, both):
        runs = await both.admit()
        ending = asyncio.ensure_future(server.drain())
        await until(lambda: server.driver.stats(0)["draining"], "it drains")
        error = await failure(both.operator.Drain(pb.DrainRequest(undo=True)))
        assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
        await both.complete(runs.grant.lease_id)
        await ending


# Leases.


async def test_leases_are_listed_by_pages_and_filters() -> None:
    async with operating() as (server, both), stream(server) as peer:
        await peer.send(admit(1, 10))
        held = (await peer.verdict()).response.grant.lease_id
        ids = {(await both.admit(10, tenant="b")).grant.lease_id for _ in range(5)}
        found, token, pages = [], 0, 0
        while token or not pages:
            request = pb.ListLeasesRequest(page_size=2, page_token=token)
            page = await both.operator.ListLeases(request)
            assert len(page.leases) <= 2
            found += [lease.lease_id for lease in page.leases]
            token, pages = page.next_page_token, pages + 1
        assert sorted(found) == sorted({held, *ids})
        assert pages >= 3

        async def meant(**fields: Any) -> set[int]:
            request = pb.ListLeasesRequest(filter=pb.LeaseFilter(**fields))
            page = await both.operator.ListLeases(request)
            return {lease.lease_id for lease in page.leases}

        assert await meant(tenant="b") == ids
        [lease] = (await both.operator.ListLeases(pb.ListLeasesRequest())).leases[:1]
        assert (lease.pool, lease.state) == ("pool", scheduler_pb2.LEASE_STATE_LIVE)
        client = next(row for row in (await _all(both)) if row.lease_id == held).client_id
        assert await meant(client_id=client) == {held}
        assert await meant(age_min_ms=3_600_000) == set()


async def _all(both: Both) -> list[pb.Lease]:
    return list((await both.operator.ListLeases(pb.ListLeasesRequest())).leases)


async def test_revoked_leases_make_room_and_their_holders_get_a_notice() -> None:
    async with operating() as (server, both), stream(server) as peer:
        await peer.send(admit(1, 1_500))
        held = (await peer.verdict()).response.grant.lease_id
        waits = asyncio.ensure_future(both.admit(1_500))
        await until(lambda: totals(server)["queued"] == 1, "it waits")
        dry = pb.RevokeLeasesRequest(filter=pb.LeaseFilter(tenant="a"), dry_run=True)
        assert (await both.operator.RevokeLeases(dry)).revoked == 1
        assert totals(server)["queued"] == 1
        answer = await both.operator.RevokeLeases(pb.RevokeLeasesRequest(lease_ids=[held, 5]))
        assert (answer.revoked, list(answer.unknown_lease_ids)) == (1, [5])
        granted = (await waits).grant.lease_id
        notice = (await peer.hear()).leases[0]
        assert (notice.lease_id, notice.state) == (held, scheduler_pb2.LEASE_STATE_VOID)
        # A void lease is not revoked again, and a lease granted meanwhile can be.
        answer = await both.operator.RevokeLeases(
            pb.RevokeLeasesRequest(filter=pb.LeaseFilter(tenant="a"))
        )
        assert answer.revoked == 1
        assert server.driver.stats(0)["pools"][0]["promised_tokens"] == 0
        for lease_id in (held, granted):
            ended = await both.complete(lease_id)
            assert not ended.repeated_call
        assert totals(server)["live_leases"] == 0


async def test_a_filter_revokes_only_what_was_granted_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The room of a revoked lease goes to a waiting request, which keeps it."""
    monkeypatch.setattr(service, "_ROWS", 1)
    async with operating() as (server, both):
        for _ in range(4):
            await both.admit(384)
        waiting = [asyncio.ensure_future(both.admit(384)) for _ in range(4)]
        await until(lambda: totals(server)["queued"] == 4, "they wait")
        answer = await both.operator.RevokeLeases(
            pb.RevokeLeasesRequest(filter=pb.LeaseFilter(tenant="a"))
        )
        assert answer.revoked == 4
        grants = {(await call).grant.lease_id for call in waiting}
        live = {row.lease_id for row in await _all(both) if row.state == 2}
        assert live == grants


@pytest.mark.parametrize(
    ("method", "request_", "code", "field"),
    [
        ("Drain", pb.DrainRequest(pool="nowhere"), "NOT_FOUND", "pool"),
        ("ListLeases", {"filter": {"pool": "nowhere"}}, "NOT_FOUND", "filter.pool"),
        ("ListLeases", {"filter": {"tenant": "nobody"}}, "NOT_FOUND", "filter.tenant"),
        ("ListLeases", {"filter": {"client_id": "gone"}}, "NOT_FOUND", "filter.client_id"),
        ("ListLeases", {"filter": {"age_min_ms": -1}}, "INVALID_ARGUMENT", "age_min_ms"),
        ("ListLeases", {"page_size": 1_001}, "INVALID_ARGUMENT", "page_size"),
        ("ListLeases", {"page_token": -1}, "INVALID_ARGUMENT", "page_token"),
        ("RevokeLeases", {}, "INVALID_ARGUMENT", "filter"),
        ("RevokeLeases", {"filter": {}}, "INVALID_ARGUMENT", "filter"),
        ("RevokeLeases", {"lease_ids": [1], "dry_run": True}, "INVALID_ARGUMENT", "dry_run"),
        ("RevokeLeases", {"filter": {"pool": "nowhere"}}, "NOT_FOUND", "filter.pool"),
        (
            "RevokeLeases",
            {"lease_ids": [1], "filter": {"pool": "pool"}},
            "INVALID_ARGUMENT",
            "filter",
        ),
        ("SetMode", {}, "INVALID_ARGUMENT", "mode"),
        ("SetMode", {"mode": 9}, "INVALID_ARGUMENT", "mode"),
        ("SetMode", {"mode": 1, "tenant": "nobody"}, "NOT_FOUND", "tenant"),
        ("ForgiveTenant", {"tenant": "nobody"}, "NOT_FOUND", "tenant"),
        ("ReleasePool", {"pool": "nowhere"}, "NOT_FOUND", "pool"),
    ],
)
async def test_wrong_call_is_named(method: str, request_: Any, code: str, field: str) -> None:
    if isinstance(request_, dict):
        request_ = getattr(pb, f"{method}Request")(**request_)
    async with operating() as (server, both):
        before = server.driver.stats(0)["digest"]
        error = await failure(getattr(both.operator, method)(request_))
        assert error.code().name == code
        assert field in error.details()
        assert server.driver.stats(0)["digest"] == before


# Modes.


async def modes_of(both: Both) -> tuple[mode_pb2.ModeStats, dict[str, bool]]:
    stats = await both.scheduler.Stats(scheduler_pb2.StatsRequest())
    return stats.mode, {flow.tenant: flow.audit for flow in stats.flows}


async def test_audit_for_all_at_once_and_back() -> None:
    tenants = [{"name": "a"}, {"name": "b", "mode": "dry_run"}, {"name": "c", "mode": "enforce"}]
    async with operating(tenants=tenants) as (server, both):
        configured = {"a": False, "b": True, "c": False, "unknown": False}
        assert (await modes_of(both))[1] == configured
        await both.admit(1_500)
        waits = asyncio.ensure_future(both.admit(1_500))
        await until(lambda: totals(server)["queued"] == 1, "it waits")
        answer = await both.operator.SetMode(pb.SetModeRequest(mode=mode_pb2.MODE_AUDIT))
        assert answer.mode.overlay == mode_pb2.MODE_AUDIT
        assert answer.mode.configured == mode_pb2.MODE_ENFORCE
        assert (await waits).outcome == scheduler_pb2.OUTCOME_GRANTED
        assert set((await modes_of(both))[1].values()) == {True}

        one = pb.SetModeRequest(mode=mode_pb2.MODE_ENFORCE, tenant="c")
        answer = await both.operator.SetMode(one)
        assert [(t.tenant, t.mode) for t in answer.mode.tenants] == [("c", mode_pb2.MODE_ENFORCE)]
        assert not (await modes_of(both))[1]["c"]

        # It outlives a reload of the file; a tenant that is gone takes its own with it.
        server.reconfigure(config_of(**OPEN, tenants=tenants[:2], mode="enforce"))
        modes, audits = await modes_of(both)
        assert modes.overlay == mode_pb2.MODE_AUDIT
        assert (audits["a"], audits["b"], modes.tenants_overlaid) == (True, True, 0)

        for mode, wanted in ((mode_pb2.MODE_ENFORCE, False), (mode_pb2.MODE_CONFIGURED, None)):
            await both.operator.SetMode(pb.SetModeRequest(mode=mode))
            modes, audits = await modes_of(both)
            if wanted is None:
                assert (audits["a"], audits["b"], modes.overlay) == (False, True, 0)
            else:
                assert (audits["a"], audits["b"]) == (wanted, wanted)


async def test_in_audit_for_all_unknown_tenants_are_served_too() -> None:
    async with operating(unknown_tenants="refuse") as (_, both):
        stranger = await both.admit(tenant="stranger")
        assert stranger.outcome == scheduler_pb2.OUTCOME_REJECTED_UNKNOWN_TENANT
        await both.operator.SetMode(pb.SetModeRequest(mode=mode_pb2.MODE_AUDIT))
        assert (await both.admit(tenant="stranger")).outcome == scheduler_pb2.OUTCOME_GRANTED
        await both.operator.SetMode(pb.SetModeRequest(mode=mode_pb2.MODE_CONFIGURED))
        stranger = await both.admit(tenant="stranger")
        assert stranger.outcome == scheduler_pb2.OUTCOME_REJECTED_UNKNOWN_TENANT


async def test_a_recording_holds_what_an_operator_does(tmp_path: Path) -> None:
    file = tmp_path / "recording"
    async with operating(record=str(file)) as (server, both):
        runs = await both.admit(1_500)
        waits = asyncio.ensure_future(both.admit(1_500))
        await until(lambda: totals(server)["queued"] == 1, "it waits")
        request = pb.RevokeLeasesRequest(lease_ids=[runs.grant.lease_id])
        await both.operator.RevokeLeases(request)
        await waits
        await both.operator.SetMode(pb.SetModeRequest(mode=mode_pb2.MODE_AUDIT))
        await both.admit(1_500)
        await both.operator.SetMode(pb.SetModeRequest(mode=mode_pb2.MODE_CONFIGURED))
        later = asyncio.ensure_future(both.admit(1_500))
        await until(lambda: totals(server)["queued"] == 1, "it waits")
        await both.operator.Drain(pb.DrainRequest(pool="pool"))
        assert (await later).outcome == scheduler_pb2.OUTCOME_EVICTED_DRAINING
        decided = server.driver.stats(0)["digest"]
    assert Exact(Recorded(file)).run().digest == decided
