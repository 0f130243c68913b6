"""Tests `schedsvc-proxy` before the emulator and before servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from schedsvc_client.testing import FakeScheduler, grant
from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm import engine_offer, proxy_cli
from schedsvc_vllm.door.upstream import UpstreamError
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.gated_request import GatedRequest
from schedsvc_vllm.launcher import LaunchError
from schedsvc_vllm.proxy import Told, Upstream
from schedsvc_vllm.settings import PoolSettings, Settings, SettingsError

from tests import forked
from tests.waiting import until

from .asgi import Exchange, ask
from .upstreams import listening

MODELS = {"data": [{"id": "m", "max_model_len": 1_024}]}
PAGE = """\
process_start_time_seconds 1.5e+09
vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="2048"} 1.0
vllm:cache_config_info{block_size="16",engine="1",kv_cache_size_tokens="2048"} 1.0
vllm:num_requests_running{engine="0"} 3.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
"""


class Server:
    """Runs a scripted server behind the proxy."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.left = 0
        self.pieces = 5
        self.held = asyncio.Event()
        self.held.set()
        self.answers = asyncio.Event()
        self.answers.set()
        self.ended = asyncio.Event()
        self.ended.set()
        self.breaks = False
        self.hangs_up = False
        self.healthy = True
        self.page = PAGE

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        path = request.path
        if path == "/health":
            return web.Response(status=200 if self.healthy else 503)
        if path == "/metrics":
            return web.Response(text=self.page)
        if path == "/v1/models":
            return web.json_response(MODELS)
        if self.hangs_up:
            assert request.transport is not None
            request.transport.abort()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append((request.method, request.path_qs, headers, body))
        if not json.loads(body or b"{}").get("stream"):
            if len(self.seen) == 1:
                await self.answers.wait()
            usage = {"prompt_tokens": 7, "completion_tokens": 5}
            return web.json_response({"choices": [], "usage": usage}, headers={"x-own": "1"})
        return await self.stream(request)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            for number in range(self.pieces):
                usage = {"prompt_tokens": 7, "total_tokens": 0, "completion_tokens": number + 1}
                chunk = {"choices": [{"index": 0, "text": "w"}], "usage": usage}
                text = json.dumps(chunk, separators=(",", ":"))
                await response.write(f"data: {text}\n\n".encode())
            if self.breaks:
                assert request.transport is not None
                request.transport.abort()
            await self.held.wait()
            await response.write(b"data: [DONE]\n\n")
            await self.ended.wait()
        except (asyncio.CancelledError, ConnectionError):
            self.left += 1
            raise
        return response


@pytest.fixture
async def behind() -> AsyncIterator[tuple[Server, str]]:
    server = Server()
    async with listening(server.handle) as url:
        yield server, url
        server.held.set()
        server.answers.set()
        server.ended.set()


@pytest.fixture
async def gate(fake: FakeScheduler, behind: tuple[Server, str]) -> AsyncIterator[Gate]:
    """Run a gate before an upstream, started as a server starts it."""
    async with started(Gate(Upstream(behind[1]), Settings(target=fake.target))) as made:
        yield made


@asynccontextmanager
async def started(made: Gate) -> AsyncIterator[Gate]:
    inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    is_up = asyncio.Event()

    async def send(message: Any) -> None:
        assert message["type"] in ("lifespan.startup.complete", "lifespan.shutdown.complete")
        is_up.set()

    life = asyncio.ensure_future(made({"type": "lifespan"}, inbox.get, send))
    inbox.put_nowait({"type": "lifespan.startup"})
    await is_up.wait()
    yield made
    inbox.put_nowait({"type": "lifespan.shutdown"})
    await life


@pytest.fixture
def looked_at_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_offer, "SCRAPE_PERIOD_S", 0.02)


@pytest.fixture
def looked_at_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that runs something is probed every second, in which a machine may stall."""
    monkeypatch.setattr(engine_offer, "SCRAPE_PERIOD_S", 600.0)
    monkeypatch.setattr(engine_offer, "TELEMETRY_PERIOD_S", 600.0)


@pytest.mark.usefixtures("looked_at_often")
async def test_an_upstream_that_was_restarted_is_another_pool(
    gate: Gate, behind: tuple[Server, str], fake: FakeScheduler
) -> None:
    """Its epoch is new, so leases of the old one are void; its sizes may differ."""
    await until(lambda: fake.pools)
    server = behind[0]
    # It has just come up, and does not report its cache yet.
    server.page = "process_start_time_seconds 1.6e+09\n"
    await asyncio.sleep(0.1)
    assert len(fake.pools) == 1
    server.page = PAGE.replace("1.5e+09", "1.6e+09").replace("2048", "1024")
    await until(lambda: len(fake.pools) == 2)
    assert [(pool.epoch, pool.capacity_tokens) for pool in fake.pools] == [
        (1_500_000_000 * 10**9, 4_096),
        (1_600_000_000 * 10**9, 2_048),
    ]
    await asyncio.sleep(0.1)
    assert len(fake.pools) == 2


@pytest.mark.usefixtures("looked_at_often")
@pytest.mark.parametrize("begun", [False, True])
async def test_request_lost_in_a_restart_repeats_unless_begun(
    gate: Gate, behind: tuple[Server, str], fake: FakeScheduler, begun: bool
) -> None:
    """The request is sent to the new engine under an old lease, before the new one is known."""
    await until(lambda: fake.pools)
    server = behind[0]
    (server.held if begun else server.answers).clear()
    asked = asyncio.ensure_future(Exchange(gate, ask(stream=begun)).run())
    await until(lambda: server.seen)
    await until(lambda: len(fake.books) == 1)
    if begun:
        await until(lambda: gate._runtime is not None and gate._runtime.counts.enforced == 1)
    server.page = PAGE.replace("1.5e+09", "1.6e+09")
    await until(lambda: len(fake.pools) == 2)
    fake.statuses[1] = pb.LEASE_STATE_VOID
    assert gate._runtime is not None
    [flight] = gate._runtime.reports.running
    assert isinstance(flight, GatedRequest)
    assert flight.exchange.admission is not None
    flight.exchange.admission.progress(output_tokens=1)
    exchange = await asyncio.wait_for(asked, 60)
    await gate._runtime.session.flush(5)
    assert not fake.live
    assert fake.books[1].end.outcome == pb.OUTCOME_CANCELLED
    if begun:
        assert not any(m.get("more_body") is False for m in exchange.sent[1:])  # it breaks off
        assert len(server.seen) == 1
    else:
        assert (exchange.status, len(server.seen)) == (200, 2)
        assert server.seen[1][3] == ask(stream=False)
        assert fake.books[2].end.outcome == pb.OUTCOME_COMPLETED
    assert gate._runtime.limit.running == 0


@pytest.mark.usefixtures("looked_at_seldom")
async def test_after_an_upstream_hung_up_the_gate_checks_the_engine(
    gate: Gate, behind: tuple[Server, str], fake: FakeScheduler
) -> None:
    """Its next look would come seconds later: till then all would run on leases of the dead."""
    await until(lambda: fake.telemetry)
    server = behind[0]
    server.hangs_up = True
    assert (await Exchange(gate, ask()).run()).status == 503
    server.hangs_up = False
    # It has just started, and does not report its cache yet: it is asked again.
    server.page = "process_start_time_seconds 1.6e+09\n"
    assert (await Exchange(gate, ask()).run()).status == 200
    assert len(fake.pools) == 1
    server.page = PAGE.replace("1.5e+09", "1.6e+09")
    runs = [asyncio.ensure_future(Exchange(gate, ask(stream=True)).run()) for _ in range(3)]
    for exchange in await asyncio.gather(*runs):
        assert (exchange.status, exchange.answer[-14:]) == (200, b"data: [DONE]\n\n")
    assert [pool.epoch for pool in fake.pools] == [1_500_000_000 * 10**9, 1_600_000_000 * 10**9]
    # Those three were asked for twice, and none of them ran on a lease of the dead engine. The
    # request whose connection it closed was sent once.
    assert (len(fake.admits), len(server.seen)) == (8, 5)
    assert gate._runtime is not None
    assert not gate._runtime.engine.in_doubt
    assert (await Exchange(gate, ask()).run()).status == 200
    assert len(fake.admits) == 9


@pytest.mark.usefixtures("looked_at_often")
async def test_a_grant_lost_in_a_restart_is_asked_for_again(
    gate: Gate, behind: tuple[Server, str], fake: FakeScheduler
) -> None:
    """It asks once: a scheduler may go on granting leases of the old engine."""
    await until(lambda: fake.pools)
    server, old = behind[0], fake.pools[0].epoch
    fake.decide = lambda request: None
    asked = asyncio.ensure_future(Exchange(gate, ask()).run())
    await until(lambda: fake.held)
    server.page = PAGE.replace("1.5e+09", "1.6e+09")
    await until(lambda: len(fake.pools) == 2)
    for lease_id in (71, 72):
        fake.release(next(iter(fake.held)), grant(lease_id, epoch=old))
        if lease_id == 71:
            await until(lambda: len(fake.admits) == 2)
            assert not server.seen
    assert (await asyncio.wait_for(asked, 60)).status == 200
    assert (len(fake.admits), len(server.seen)) == (2, 1)


async def test_sizes_come_from_the_upstream(gate: Gate, fake: FakeScheduler) -> None:
    assert gate._runtime is not None
    assert isinstance(gate.app, Upstream)
    assert gate.app.told == Told(4_096, 16, 1_024, 1_500_000_000 * 10**9)
    await until(lambda: fake.pools)
    pool = fake.pools[0]
    assert (pool.capacity_tokens, pool.block_size_tokens, pool.max_model_tokens) == (
        4_096,
        16,
        1_024,
    )
    assert pool.epoch == 1_500_000_000 * 10**9
    await until(lambda: fake.telemetry)
    assert (fake.telemetry[0].running, fake.telemetry[0].used_tokens) == (3, 2_048)


async def test_prefix_hashes_are_sent_if_they_count(gate: Gate, fake: FakeScheduler) -> None:
    assert gate._runtime is not None
    fake.prefix_use = pool_pb2.PrefixUse(hashes_max=512, order=True, key=5)
    await fake.restart()
    session = gate._runtime.session
    await until(lambda: session.prefix_use.order)
    turns = [{"role": "user", "content": "word " * 500}]
    for _ in range(2):
        body = json.dumps({"model": "m", "messages": turns, "max_tokens": 5}).encode()
        assert (await Exchange(gate, body, path="/v1/chat/completions").run()).status == 200
        turns += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "?" * 900}]
    first, second = (list(request.prefix_block_hashes) for request in fake.admits)
    assert len(first) == 7
    assert second[: len(first)] == first
    assert len(second) > len(first)


async def test_requests_pass_both_ways_and_are_billed(
    gate: Gate, behind: tuple[Server, str], fake: FakeScheduler
) -> None:
    headers = {"x-a": "1", "connection": "x", "transfer-encoding": "chunked", "host": "outside"}
    whole = await Exchange(gate, ask(), headers=headers).run()
    assert (whole.status, whole.answer_headers["x-own"]) == (200, "1")
    assert json.loads(whole.answer)["usage"]["completion_tokens"] == 5
    assert "transfer-encoding" not in whole.answer_headers
    method, path, seen, body = behind[0].seen[0]
    assert (method, path, body) == ("POST", "/v1/completions", ask())
    assert seen["x-a"] == "1"
    assert seen["host"].startswith("127.0.0.1")
    assert {"user-agent", "accept-encoding"}.isdisjoint(seen)
    streamed = await Exchange(gate, ask(stream=True)).run()
    assert streamed.answer.count(b"data: ") == 6
    # The proxy asked for usage in every event, and took it out again.
    assert b"continuous_usage_stats" in behind[0].seen[1][3]
    assert b"usage" not in streamed.answer
    assert gate._runtime is not None
    await gate._runtime.session.flush(5)
    ends = [book.end for book in fake.books.values()]
    assert [(e.outcome, e.input_tokens, e.output_tokens) for e in ends] == [
        (pb.OUTCOME_COMPLETED, 7, 5)
    ] * 2


async def test_ungated_request_passes_with_its_query(
    gate: Gate, behind: tuple[Server, str], fake: FakeScheduler
) -> None:
    for method, path, body in (("GET", "/v1/x%2Fy", b""), ("POST", "/tokenize", b"{}")):
        exchange = Exchange(gate, body, path, method=method)
        exchange.scope["query_string"] = b"a=1&b=%20"
        exchange.scope["raw_path"] = path.encode()
        exchange.scope["headers"] = []
        await exchange.run()
        assert exchange.status == 200
        added = {"accept", "accept-encoding", "content-type", "user-agent"}
        assert added.isdisjoint(behind[0].seen[-1][2])
        assert behind[0].seen[-1][:2] == (method, f"{path}?a=1&b=%20")
    assert fake.admits == []


async def test_a_client_that_leaves_ends_the_upstreams_stream(
    gate: Gate, behind: tuple[Server, str], fake: FakeScheduler
) -> None:
    behind[0].held.clear()
    exchange = Exchange(gate, ask(stream=True))
    task = asyncio.ensure_future(exchange.run())
    await until(lambda: exchange.answer.count(b"data: ") == 5)
    exchange.left.set()
    await asyncio.wait_for(task, 60)
    await until(lambda: behind[0].left == 1)
    assert gate._runtime is not None
    await gate._runtime.session.flush(5)
    end = fake.books[1].end
    assert (end.outcome, end.output_tokens) == (pb.OUTCOME_CANCELLED, 5)


async def test_a_request_that_is_cancelled_ends_the_upstreams_stream(
    gate: Gate, behind: tuple[Server, str]
) -> None:
    behind[0].held.clear()
    exchange = Exchange(gate, ask(stream=True))
    task = asyncio.ensure_future(exchange.run())
    await until(lambda: exchange.answer.count(b"data: ") == 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: behind[0].left == 1)


async def test_an_end_that_came_with_the_last_piece_goes_with_it(gate: Gate) -> None:
    whole = await Exchange(gate, ask()).run()
    assert [message.get("more_body") for message in whole.sent] == [None, False]
    assert json.loads(whole.answer)["usage"]


async def test_a_client_that_leaves_at_the_last_event_has_its_answer(
    gate: Gate, behind: tuple[Server, str], fake: FakeScheduler
) -> None:
    """The upstream's stream ends a moment after its last event: there is nothing to cancel."""
    behind[0].ended.clear()
    exchange = Exchange(gate, ask(stream=True))
    task = asyncio.ensure_future(exchange.run())
    await until(lambda: exchange.answer.endswith(b"data: [DONE]\n\n"))
    exchange.left.set()
    await asyncio.wait_for(task, 60)
    assert exchange.sent[-1]["more_body"]
    assert gate._runtime is not None
    await gate._runtime.session.flush(5)
    end = fake.books[1].end
    assert (end.outcome, end.output_tokens) == (pb.OUTCOME_COMPLETED, 5)


async def test_an_upstream_that_breaks_off_breaks_the_answer_off(
    gate: Gate, behind: tuple[Server, str], fake: FakeScheduler
) -> None:
    behind[0].breaks = True
    exchange = Exchange(gate, ask(stream=True))
    with pytest.raises(UpstreamError):
        await exchange.run()
    assert exchange.sent[-1].get("more_body")
    *events, why, rest = exchange.answer.split(b"\n\n")
    assert len(events) == 5
    assert rest == b""
    name, _, data = why.partition(b"\n")
    assert name == b"event: error"
    assert json.loads(data.removeprefix(b"data: "))["error"]["code"] == "server_is_overloaded"
    assert gate._runtime is not None
    await gate._runtime.session.flush(5)
    assert fake.books[1].end.outcome == pb.OUTCOME_CANCELLED


async def test_an_upstream_that_is_away_is_a_clean_error(fake: FakeScheduler) -> None:
    pool = PoolSettings(capacity_tokens=4_096, block_size_tokens=16)
    gate = Gate(Upstream("http://127.0.0.1:9"), Settings(target=fake.target, pool=pool))
    refused = await Exchange(gate, ask()).run()
    assert (refused.status, refused.error["code"]) == (503, "server_is_overloaded")
    assert refused.answer_headers["x-schedsvc-dropped-reason"] == "upstream_unreachable"
    assert gate._runtime is not None
    await gate._runtime.session.flush(5)
    assert fake.books[1].end.outcome == pb.OUTCOME_CANCELLED
    assert fake.books[1].end.output_tokens == 0
    assert isinstance(gate.app, Upstream)
    gate.app.close()
    await gate._close()


async def test_the_start_waits_for_the_upstream_and_gives_up(behind: tuple[Server, str]) -> None:
    server, url = behind
    server.healthy = False
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    inbox.put_nowait({"type": "lifespan.startup"})
    inbox.put_nowait({"type": "lifespan.shutdown"})
    await Upstream(url, wait_s=0.0)({"type": "lifespan"}, inbox.get, send)
    assert sent[0]["type"] == "lifespan.startup.failed"
    assert "--upstream: after 0 s still" in sent[0]["message"]
    assert "/health answers 503" in sent[0]["message"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--upstream", "localhost:8000"], "--upstream"),
        (["--upstream", "http://h:1/v1"], "without /v1"),
        (["--upstream", "http://h:1", "--port", "70000"], "--port"),
        (["--upstream", "http://h:1", "--wait-s", "-1"], "--wait-s"),
        (["--upstream", "http://h:1", "--wait-s", "nan"], "--wait-s"),
        (["--upstream", "http://h:1", "--schedsvc-pol", "x"], "--schedsvc-pol"),
        (["--upstream", "http://h:1"], "SCHEDSVC_TARGET"),
    ],
)
def test_a_wrong_command_line_is_named(arguments: list[str], named: str) -> None:
    with pytest.raises((LaunchError, SettingsError), match=named):
        proxy_cli.prepare(arguments, {})


def test_the_command_explains_itself_and_fails_with_two() -> None:
    command = [sys.executable, "-c", "from schedsvc_vllm.proxy_cli import main; main()"]
    shown = forked.run([*command, "--help"], check=True, capture_output=True, text=True)
    assert "--schedsvc-tenant-headers" in shown.stdout
    assert "Example:" in shown.stdout
    failed = forked.run(
        [*command, "--upstream", "nonsense"], check=False, capture_output=True, text=True
    )
    assert failed.returncode == 2
    assert failed.stderr.startswith("schedsvc-proxy: --upstream nonsense")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    options, settings = proxy_cli.prepare(
        ["--upstream", "http://h:1"], {"SCHEDSVC_TARGET": "unix:/s"}
    )

    def absent(name: str) -> Any:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(proxy_cli.importlib, "import_module", absent)
    for call in (
        lambda: proxy_cli.build(options, settings),
        lambda: proxy_cli.serve(None, options),
    ):
        with pytest.raises(LaunchError, match=re.escape("schedsvc-vllm[proxy]")):
            call()  # type: ignore[no-untyped-call]
