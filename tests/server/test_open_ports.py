"""Tests a TCP port without authentication beside a listener that bounds its callers."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

import schedsvc.cli.check as check
from schedsvc.config import Config

from .conftest import ask, calling, serving, token_of
from .test_cli import run
from .test_principals import bearer

TOKEN = "gate-token-of-enough"
PORT: dict[str, Any] = {"tcp": "127.0.0.1:0", "auth": "none"}


async def rights(target: str, **call: Any) -> dict[str, Any]:
    """Return whether a caller may ask, offer a pool, and see the Stats of all."""
    async with calling(target) as stub:
        admitted = await stub.Admit(ask(10), **call)
        stats = await stub.Stats(pb.StatsRequest(), **call)
        session = stub.Session(**call)
        offer = pool_pb2.PoolRegistration(
            pool="stranger", epoch=1, capacity_tokens=1_600, block_size_tokens=16
        )
        hello = pb.SessionHello(client_id="s", incarnation=1)
        events = [pb.SessionEvent(hello=hello), pb.SessionEvent(pool=offer)]
        await session.write(pb.SessionRequest(seq=1, events=events))
        answer = await session.read()
    assert isinstance(answer, pb.SessionResponse)
    return {
        "asks": admitted.outcome == pb.OUTCOME_GRANTED,
        "offers": not answer.faults,
        "sees_all": stats.HasField("totals"),
    }


ALL = {"asks": True, "offers": True, "sees_all": True}
ASKS = {"asks": True, "offers": False, "sees_all": False}


async def test_a_port_beside_a_socket_only_asks(tmp_path: Path) -> None:
    """A user who may not open the socket must not get the engine's pool over the port."""
    socket = {"unix": str(tmp_path / "s"), "mode": "0600"}
    async with serving(listeners=[PORT, socket]) as server:
        port, unix = server.targets
        assert await rights(port) == ASKS
        assert await rights(unix) == ALL
        row = server.driver.stats(0)["pools"][-1]
        assert row["name"] == "stranger"


async def test_a_port_beside_tokens_only_asks() -> None:
    auth = {"principals": [token_of("gate", TOKEN)]}
    async with serving(listeners=[PORT, {"tcp": "127.0.0.1:0"}], auth=auth) as server:
        port, guarded = server.targets
        assert await rights(port) == ASKS
        assert await rights(guarded, metadata=bearer(TOKEN)) == ALL


@pytest.mark.parametrize("ports", [[PORT], [PORT, PORT]])
async def test_ports_alone_may_do_everything(ports: list[dict[str, Any]]) -> None:
    async with serving(listeners=ports) as server:
        assert await rights(server.targets[-1]) == ALL


async def test_a_port_that_is_listed_has_its_own_grants(tmp_path: Path) -> None:
    local = {"name": "local", "listener": PORT["tcp"], "pools": ["*"], "stats": "all"}
    listeners = [PORT, {"unix": str(tmp_path / "s")}]
    async with serving(listeners=listeners, auth={"principals": [local]}) as server:
        assert await rights(server.targets[0]) == ALL


async def test_a_port_cannot_end_what_another_listener_began(tmp_path: Path) -> None:
    listeners = [PORT, {"unix": str(tmp_path / "s")}]
    async with serving(listeners=listeners) as server, calling(server.targets[1]) as unix:
        lease = (await unix.Admit(ask(10))).grant.lease_id
        end = pb.CompleteRequest(lease_id=lease, pool_epoch=1)
        async with calling(server.targets[0]) as tcp:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await tcp.Complete(end)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        assert (await unix.Complete(end)).outcome == pb.OUTCOME_COMPLETED


LOCAL = "auth: {principals: [{name: l, listener: '127.0.0.1:7600', pools: ['*']}]}"
GATE = f"auth: {{principals: [{{name: g, sha256: {'a' * 64}, pools: ['*']}}]}}"


@pytest.mark.parametrize(
    ("others", "auth", "warned"),
    [
        ("{unix: s, mode: '0600'}", "", True),
        ("{tcp: '127.0.0.1:7601', auth: token}", GATE, True),
        ("{unix: s, mode: '0600'}", LOCAL, False),
        ("{tcp: '127.0.0.1:7601', auth: none}", "", False),
    ],
)
def test_check_warns_of_a_port_beside_another_listener(
    tmp_path: Path, others: str, auth: str, warned: bool
) -> None:
    text = f"listeners: [{others}, {{tcp: '127.0.0.1:7600', auth: none}}]\n{auth}\n"
    (tmp_path / "c.yaml").write_text(text)
    shown = run("check", str(tmp_path / "c.yaml"))
    found = json.loads(run("check", str(tmp_path / "c.yaml"), "--json").stdout)["warnings"]
    assert [w["path"] for w in found if "file mode" in w["message"]] == ["listeners[1]"] * warned
    default = "listener:127.0.0.1:7600: offers none, vouches for *"
    assert (default in shown.stdout) == warned


def test_check_survives_a_listener_that_is_no_text(tmp_path: Path) -> None:
    text = "listeners: [{unix: s}, {tcp: '127.0.0.1:7600'}]\n"
    (tmp_path / "c.yaml").write_text(text + "auth: {principals: [{name: a, listener: [x]}]}\n")
    shown = run("check", str(tmp_path / "c.yaml"))
    assert "auth.principals[0].listener: has to be text" in shown.output


def test_check_names_the_limits_of_connections_and_what_a_certificate_has() -> None:
    auth = "auth: {principals: [{name: g, certificate: %s, listener: s}]}\n"
    for name, expected in (
        ("a.example", "by the DNS SAN a.example (without SANs the common name)"),
        ("spiffe://corp/a", "by the URI SAN spiffe://corp/a"),
    ):
        config = Config.model_validate(yaml.safe_load("listeners: [{unix: s}]\n" + auth % name))
        summary = dict(check._summary(config))
        assert expected in summary["principals"]
        assert "1,024 on each listener; one without a token" in summary["connections"]


@pytest.mark.parametrize(
    ("mode", "auth", "warned"),
    [
        ("0666", "none", True),
        ("662", "none", True),
        ("0664", "none", True),
        ("0660", "none", False),
        ("0666", "token", False),
    ],
)
def test_check_warns_of_a_socket_that_everyone_can_open(
    tmp_path: Path, mode: str, auth: str, warned: bool
) -> None:
    """The file mode says who can connect; one that lets all users in counted as a guard."""
    text = f"listeners: [{{unix: s, mode: '{mode}', auth: {auth}}}]\n{GATE}\n"
    (tmp_path / "c.yaml").write_text(text)
    found = json.loads(run("check", str(tmp_path / "c.yaml"), "--json").stdout)["warnings"]
    assert [w["path"] for w in found if f"has mode {mode}" in w["message"]] == (
        ["listeners[0].mode"] * warned
    )


NARROW = f"{{name: a, sha256: {'a' * 64}, pools: ['a*'], tenants: [x]}}"


@pytest.mark.parametrize(
    ("listener", "others", "warned"),
    [
        ("{tcp: '127.0.0.1:7600', auth: token}", "", []),
        ("{unix: s, auth: none}", "", ["a"]),
        ("{unix: s, auth: token}", f"{{name: b, sha256: {'b' * 64}, pools: ['*']}}", ["a"]),
        ("{unix: s, auth: token}", f"{{name: b, sha256: {'b' * 64}, pools: ['b*']}}", ["a, b"]),
        ("{unix: s, auth: token}", f"{{name: b, sha256: {'b' * 64}, operator: true}}", []),
    ],
)
def test_check_warns_of_pools_that_take_only_requests_which_name_them(
    tmp_path: Path, listener: str, others: str, warned: list[str]
) -> None:
    entries = ", ".join(filter(None, (NARROW, others)))
    text = f"listeners: [{listener}]\nauth: {{principals: [{entries}]}}\n"
    (tmp_path / "c.yaml").write_text(text)
    found = json.loads(run("check", str(tmp_path / "c.yaml"), "--json").stdout)["warnings"]
    messages = [w["message"] for w in found if "offer every pool" in w["message"]]
    assert [each.split(" may ask")[0].split(" may")[0] for each in messages] == warned


def test_a_pool_without_capacity_states_no_other_figures(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("listeners: [{unix: s}]\npools: [{name: p, max_running: 3}]\n")
    shown = run("check", str(tmp_path / "c.yaml"))
    assert "pools[0].max_running: needs capacity_tokens beside it" in shown.output
