"""Tests the edge: who is let through to the scheduler, and what never gets there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc
from schedsvc_client import ClientOptions
from schedsvc_client.aio import AsyncScheduler, SchedulerSession
from schedsvc_client.v1 import operator_pb2, operator_pb2_grpc
from schedsvc_client.v1 import scheduler_pb2 as pb

from bench import http2
from schedsvc.cli import main
from schedsvc.edge import Edge
from schedsvc.edge.relay import Allowance
from schedsvc.edge.serve import WINDOW_BYTES
from schedsvc.server import ListenError, Server
from tests.waiting import until

from .certificates import Authority
from .conftest import ask, calling, config_of, failure, in_time, open_channel, token_of, totals
from .test_auth import BEARER, TOKEN, TOKENS, every_call
from .test_config import MINIMAL, found, reading
from .test_stranger import WRONG, state

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


@asynccontextmanager
async def edged(folder: Path, **keys: Any) -> AsyncIterator[tuple[Server, Edge]]:
    """Run a scheduler on a Unix socket, and the edge before it."""
    listeners = [{"unix": str(folder / "s"), "auth": "token"}]
    edge = {"tcp": "127.0.0.1:0"} | keys.pop("edge", {})
    config = config_of(listeners=listeners, auth=TOKENS | keys.pop("auth", {}), edge=edge, **keys)
    server, door = Server(config), Edge(config)
    await server.start()
    await door.start()
    try:
        yield server, door
        server.driver._core.check()
    finally:
        await door.stop(None)
        await server.stop(None)


async def test_every_call_of_a_known_caller_passes(tmp_path: Path) -> None:
    async with edged(tmp_path) as (server, door), calling(door.target) as stub:
        granted = await stub.Admit(ask(10), metadata=BEARER)
        assert granted.outcome == pb.OUTCOME_GRANTED
        codes = await every_call(stub, BEARER)
        assert grpc.StatusCode.UNAUTHENTICATED not in codes
        done = pb.CompleteRequest(lease_id=granted.grant.lease_id, pool_epoch=1, output_tokens=1)
        assert (await stub.Complete(done, metadata=BEARER)).outcome == pb.OUTCOME_COMPLETED
        assert totals(server)["completed"] == 1


async def test_edge_ignores_a_proxy_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    async with edged(tmp_path) as (_, door), AsyncScheduler(door.target, token=TOKEN) as client:
        await client.stats()


async def test_a_client_holds_a_session_through_it(tmp_path: Path) -> None:
    async with edged(tmp_path) as (server, door):
        patient = ClientOptions(unavailable_after_s=30)
        async with SchedulerSession(
            door.target, client_id="shim", incarnation=7, token=TOKEN, options=patient
        ) as opened:
            for _ in range(20):
                async with opened.admission(
                    tenant="a", input_tokens=[10], max_output_tokens=10
                ) as held:
                    held.complete(input_tokens=10, output_tokens=5)
        await until(lambda: totals(server)["completed"] == 20, "completed")
        assert totals(server)["live_leases"] == 0


@pytest.mark.parametrize("metadata", [(), WRONG], ids=["none", "wrong"])
async def test_calls_of_strangers_do_not_reach_the_scheduler(tmp_path: Path, metadata: Any) -> None:
    async with edged(tmp_path) as (server, door), calling(door.target) as stub:
        failures: list[str] = []
        for service in server._services:
            service._on_failure = lambda method, _: failures.append(method)
        before = state(server)
        for _ in range(5):
            codes = await every_call(stub, metadata)
            # gRPC may reset a refused call before the client has sent all of it.
            assert grpc.StatusCode.UNAUTHENTICATED in codes
            assert grpc.StatusCode.OK not in codes
        assert state(server) == before
        assert failures == []


async def test_a_stranger_may_send_one_window_of_a_call(tmp_path: Path) -> None:
    """If the window is larger than 64 KiB, 1,000 connections can make the edge 300 MB larger."""
    async with edged(tmp_path) as (_, door):
        host, _, port = door.target.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(http2.OPENING)
        data = bytearray()
        settings: list[http2.Frame] = []
        while not settings:
            data += await reader.read(65_536)
            settings = [each for each in http2.frames(data) if each.kind == http2.Kind.SETTINGS]
        assert settings[0].initial_window == WINDOW_BYTES
        writer.close()


async def test_connections_beyond_its_limit_are_closed(tmp_path: Path) -> None:
    async with edged(tmp_path, edge={"connections_max": 1}) as (_, door):
        host, _, port = door.target.rpartition(":")
        kept = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        for reader, writer in kept:
            writer.write(http2.OPENING)
            assert await reader.read(1)
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await asyncio.wait_for(reader.read(), 60) == b""
        for _, each in (*kept, (reader, writer)):
            each.close()


async def test_a_message_larger_than_the_window_passes(tmp_path: Path) -> None:
    async with edged(tmp_path) as (_, door), calling(door.target) as stub:
        request = ask(10)
        request.prefix_block_hashes.extend(range(1 << 40, (1 << 40) + 4_096))
        assert request.ByteSize() > WINDOW_BYTES
        assert (await stub.Admit(request, metadata=BEARER)).outcome == pb.OUTCOME_GRANTED


async def test_errors_and_their_details_are_returned_unchanged(tmp_path: Path) -> None:
    socket = f"unix:{tmp_path}/s"
    async with edged(tmp_path) as (_, door), calling(door.target) as far, calling(socket) as near:
        for wrong in (ask(10, max_output_tokens=0), ask(10, request_id="")):
            told = [await failure(stub.Admit(wrong, metadata=BEARER)) for stub in (far, near)]
            assert told[0].code() == told[1].code() == grpc.StatusCode.INVALID_ARGUMENT
            assert told[0].details() == told[1].details()
            details = [dict(error.trailing_metadata() or ()) for error in told]
            assert details[0] == details[1] != {}


async def test_deadline_and_cancellation_reach_the_scheduler(tmp_path: Path) -> None:
    async with edged(tmp_path) as (server, door), calling(door.target) as stub:
        await stub.Admit(ask(1_500), metadata=BEARER)
        waiting = stub.Admit(ask(1_500), metadata=BEARER)
        await until(lambda: totals(server)["queued"] == 1, "queued")
        waiting.cancel()
        await until(lambda: totals(server)["queued"] == 0, "withdrawn")

        async def admitted(deadline_s: float) -> pb.AdmitResponse:
            return await stub.Admit(ask(1_500), metadata=BEARER, timeout=deadline_s)

        answer = await in_time(admitted)
        assert answer.outcome == pb.OUTCOME_EVICTED_TTL


async def test_forbidden_call_is_refused_before_it_is_read(tmp_path: Path) -> None:
    limits = {"edge": {"calls_per_second": 5, "calls_max": 3}}
    async with edged(tmp_path, **limits) as (server, door), calling(door.target) as stub:
        # Wrong messages, which the scheduler would name as such.
        wrong = pb.ProgressRequest(leases=[pb.LeaseProgress()] * 5_000)
        calls = [failure(stub.Progress(wrong, metadata=BEARER)) for _ in range(20)]
        told = await asyncio.gather(*calls)
        refused = [error.details() or "" for error in told if error.code() == EXHAUSTED]
        assert len(refused) >= 10
        assert all("with this token" in details for details in refused)
        assert totals(server)["received"] == 0


def test_an_allowance_is_a_burst_a_rate_and_a_number_of_open_calls() -> None:
    second = 1_000_000_000
    allowed = Allowance(per_second=10, open_max=3)
    assert sum(not allowed.refuses(second) for _ in range(50)) == 10
    assert sum(not allowed.refuses(2 * second - 1) for _ in range(50)) == 9
    assert sum(not allowed.refuses(100 * second) for _ in range(50)) == 10
    assert "more than 10 calls a second" in allowed.refuses(100 * second)
    allowed.open = 3
    assert "3 calls are open" in allowed.refuses(200 * second)
    allowed.open = 2
    assert allowed.refuses(200 * second) == ""


async def test_calls_that_ended_are_open_no_more(tmp_path: Path) -> None:
    async with edged(tmp_path, edge={"calls_max": 2}) as (_, door), calling(door.target) as stub:
        for _ in range(10):
            assert (await stub.Admit(ask(1), metadata=BEARER)).outcome == pb.OUTCOME_GRANTED
        sessions = [stub.Session(metadata=BEARER) for _ in range(2)]
        hello = pb.SessionEvent(hello=pb.SessionHello(client_id="shim", incarnation=1))
        for session in sessions:
            await session.write(pb.SessionRequest(seq=1, events=[hello]))
            await session.read()
        assert (await failure(stub.Admit(ask(1), metadata=BEARER))).code() == EXHAUSTED
        for session in sessions:
            session.cancel()
        for _ in range(200):
            try:
                await stub.Admit(ask(1), metadata=BEARER)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.02)
                continue
            break
        else:
            pytest.fail("cancelled streams still count")


async def test_its_health_is_the_schedulers_and_costs_it_nothing(tmp_path: Path) -> None:
    async with edged(tmp_path) as (server, door), open_channel(door.target) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def now(name: str) -> int:
            return int((await health.Check(health_pb2.HealthCheckRequest(service=name))).status)

        async def becomes(status: int) -> None:
            for name in ("", "schedsvc.v1.SchedulerService", "readiness"):
                for _ in range(400):
                    if await now(name) == status:
                        break
                    await asyncio.sleep(0.02)
                else:
                    pytest.fail(f"health of {name!r} is not {status}")
            assert await now("liveness") == 1

        await becomes(1)
        await server._handles.drain("", undo=False)
        await becomes(2)
        await server._handles.drain("", undo=True)
        await becomes(1)
        await server.stop(None)
        await becomes(2)


ADMIT = "/schedsvc.v1.SchedulerService/Admit"


async def test_unknown_rpc_is_unimplemented_and_forgotten(tmp_path: Path) -> None:
    """The edge must keep no memory for each name of a method that a caller makes up."""
    made_up = [f"/schedsvc.v1.SchedulerService/Method{number}" for number in range(50)]
    async with edged(tmp_path) as (_, door), open_channel(door.target) as channel:
        for method in ("/other.Service/Method", *made_up):
            error = await failure(channel.unary_unary(method)(b"", metadata=BEARER))
            assert error.code() == grpc.StatusCode.UNIMPLEMENTED
        assert (await channel.unary_unary(ADMIT)(b"", metadata=BEARER).code()).name != "OK"
        assert set(door.relay.methods) == {ADMIT}


async def test_operators_operate_through_it(tmp_path: Path) -> None:
    keys = {"auth": {"principals": [token_of("shim", TOKEN, operator=True)]}}
    async with edged(tmp_path, **keys) as (_, door), open_channel(door.target) as channel:
        stub = operator_pb2_grpc.OperatorServiceStub(channel)
        answer = await stub.ListLeases(operator_pb2.ListLeasesRequest(), metadata=BEARER)
        assert list(answer.leases) == []


async def test_a_scheduler_that_is_away_is_unavailable_and_found_again(tmp_path: Path) -> None:
    config = config_of(
        listeners=[{"unix": str(tmp_path / "s"), "auth": "token"}],
        auth=TOKENS,
        edge={"tcp": "127.0.0.1:0"},
    )
    door, server = Edge(config), Server(config)
    await door.start()
    try:
        async with calling(door.target) as stub:
            error = await failure(stub.Admit(ask(1), metadata=BEARER))
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            await server.start()
            answer = None
            for _ in range(200):
                try:
                    answer = await stub.Admit(ask(1), metadata=BEARER)
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)
                    continue
                break
            assert answer is not None
            assert answer.outcome == pb.OUTCOME_GRANTED
    finally:
        await door.stop(None)
        await server.stop(None)


async def test_tls_of_the_edge(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("edge")
    tls = {"cert": str(pair.cert_file), "key": str(pair.key_file)}
    async with edged(tmp_path, edge={"tls": tls}) as (_, door):
        credentials = grpc.ssl_channel_credentials(authority.cert)
        target = door.target.replace("127.0.0.1", "localhost")
        async with calling(target, credentials) as stub:
            assert (await stub.Admit(ask(1), metadata=BEARER)).outcome == pb.OUTCOME_GRANTED


async def test_an_address_in_use_is_an_error_that_names_it(tmp_path: Path) -> None:
    async with edged(tmp_path) as (_, door):
        config = config_of(
            listeners=[{"unix": str(tmp_path / "t"), "auth": "token"}],
            auth=TOKENS,
            edge={"tcp": door.target},
        )
        second = Edge(config)
        with pytest.raises(ListenError, match="in use"):
            await second.start()
        await second.stop(None)


TOKENED = (
    "auth: {principals: [{name: t, sha256: " + "ab" * 32 + "}]}\n"
    "listeners: [{unix: s, auth: token}, {tcp: '127.0.0.1:7'}]\n"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            MINIMAL + "edge: {tcp: 'a:1'}\n",
            ["2:7 edge: lets in callers with a token, and no entry of auth.principals has one"],
        ),
        (
            TOKENED.replace("unix: s, auth: token", "unix: s, auth: none") + "edge: {tcp: 'a:1'}\n",
            [
                "3:7 edge: passes calls on to a Unix socket that asks for tokens; add to listeners"
                " one with `unix: PATH` and `auth: token`"
            ],
        ),
        (
            TOKENED + "edge: {tcp: '127.0.0.1:7'}\n",
            ["3:13 edge.tcp: this address stands twice, first at listeners[1].tcp; remove one"],
        ),
        (
            TOKENED + "edge: {tcp: 'a:99999'}\n",
            ["3:13 edge.tcp: port 99999 does not exist; the largest is 65535"],
        ),
        (
            TOKENED + "edge: {tcp: 'a:1', calls_max: 0}\n",
            ["3:31 edge.calls_max: is 0; it has to be at least 1"],
        ),
        (TOKENED + "edge: {}\n", ["3:7 edge: the key 'tcp' is missing; add it"]),
        (
            TOKENED + "edge: {tcp: 'a:1', tls: {cert: c, key: k, client_ca: x}}\n",
            ["3:54 edge.tls.client_ca: is for listeners: an edge goes by tokens; remove it"],
        ),
    ],
)
def test_a_wrong_edge_is_named_by_place(text: str, expected: list[str], tmp_path: Path) -> None:
    assert found(tmp_path, text) == expected


def test_an_edge_without_tls_is_warned_of(tmp_path: Path) -> None:
    read = reading(tmp_path, TOKENED + "edge: {tcp: '0.0.0.0:1'}\n")
    assert [warning.message for warning in read.warnings] == [
        "0.0.0.0:1 has no TLS: tokens travel in clear"
    ]


def test_the_command_names_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(MINIMAL)
    ended = CliRunner().invoke(main, ["edge", "--config", str(file)])
    assert ended.exit_code == 1
    assert "the key 'edge' is missing" in ended.output
