"""Tests the real scheduler, the real gate and the emulated engine: two processes, one wire."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import openai
import pytest
from schedsvc_client import ClientOptions
from schedsvc_client.aio import AsyncScheduler, SchedulerSession
from schedsvc_client.v1 import scheduler_pb2 as pb

from tests.processes.programs import LOOK_S, Programs, empty, eventually, standing

TRIES = 5
CONFIG = {
    "scheduler": {"flow_queue_max": 4, "queue_ttl_ms": 5_000},
    "tenants": [{"name": name, "weight": 1} for name in ("a", "b", "c")],
    "limits": {"drain_ms": 100},
}
CAPACITY_TOKENS, CONTEXT_TOKENS = 4_096, 2_048
ENGINE = (
    *("--profile", "tiny-cpu", "--block-size", "16"),
    *("--kv-tokens", str(CAPACITY_TOKENS), "--max-model-len", str(CONTEXT_TOKENS)),
)


@pytest.fixture(scope="module")
def programs() -> Iterator[Programs]:
    with standing(lambda folder: Programs(folder, CONFIG, engine=ENGINE)) as made:
        made.start_scheduler()
        made.start_engine()
        yield made


@pytest.fixture
async def http(programs: Programs) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(programs.engine_url, connector=connector) as session:
        yield session


@pytest.fixture
async def scheduler(programs: Programs) -> AsyncIterator[AsyncScheduler]:
    async with AsyncScheduler(programs.target) as client:
        yield client


async def ask(
    http: aiohttp.ClientSession, tenant: str, path: str = "/v1/completions", **fields: Any
) -> tuple[int, dict[str, Any]]:
    """Ask, and give the status and the usage (or the error)."""
    body = {"prompt": [1] * 20, "max_tokens": 8} | fields
    if path != "/v1/completions":
        del body["prompt"]
    async with http.post(path, json=body, headers={"x-tenant-id": tenant}) as response:
        text = await response.text()
        if response.status != 200:
            return response.status, json.loads(text)["error"]
        assert response.headers["x-schedsvc-mode"] == "enforced"
        assert float(response.headers["x-schedsvc-queue-duration-ms"]) >= 0
        if not body.get("stream"):
            return 200, json.loads(text)["usage"]
        events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
        usages = [event["usage"] for event in events if event.get("usage")]
        return 200, usages[-1] if usages else {}


async def test_usage_is_recorded_to_the_token(
    http: aiohttp.ClientSession, scheduler: AsyncScheduler
) -> None:
    before = {flow.tenant: flow for flow in (await scheduler.stats()).flows}
    chat = "/v1/chat/completions"
    messages = [{"role": "user", "content": "tell me a story of three little words"}]
    usage_of = {"stream_options": {"include_usage": True}}
    shapes: list[dict[str, Any]] = [
        {},
        {"max_tokens": 30, "ignore_eos": True},
        {"n": 3, "max_tokens": 12},
        {"prompt": [[1, 2, 3], [4] * 50], "n": 2},
        {"prompt": "some words to begin with"},
        {"stream": True, **usage_of, "max_tokens": 40},
        {"stream": True, **usage_of, "n": 2, "max_tokens": 20},
        {"path": chat, "messages": messages, "max_tokens": 25},
        {"path": chat, "messages": messages, "stream": True, **usage_of, "max_tokens": 25},
    ]
    sums: dict[str, Counter[str]] = {name: Counter() for name in "ab"}

    async def one(tenant: str, shape: dict[str, Any]) -> None:
        status, usage = await ask(http, tenant, **shape)
        assert status == 200, usage
        for name in ("prompt_tokens", "completion_tokens"):
            sums[tenant][name] += usage[name]

    for shape in shapes:
        await asyncio.gather(*(one(tenant, shape) for tenant in "ab"))
    await eventually(scheduler, empty)
    for flow in (await scheduler.stats()).flows:
        if flow.tenant in sums:
            old = before.get(flow.tenant, pb.FlowStats())
            assert flow.input_tokens - old.input_tokens == sums[flow.tenant]["prompt_tokens"]
            output = flow.output_tokens - old.output_tokens
            assert output == sums[flow.tenant]["completion_tokens"]
            assert flow.completed - old.completed == len(shapes)


async def test_a_client_that_leaves_frees_its_lease(
    http: aiohttp.ClientSession, scheduler: AsyncScheduler
) -> None:
    body = {"prompt": [1] * 20, "max_tokens": 1_900, "ignore_eos": True, "stream": True}
    before = (await scheduler.stats(tenants=["a"])).flows[0]
    response = await http.post("/v1/completions", json=body, headers={"x-tenant-id": "a"})
    await response.content.readuntil(b"\n\n")
    assert (await scheduler.stats()).totals.live_leases == 1
    response.close()
    await eventually(scheduler, empty)
    flow = (await scheduler.stats(tenants=["a"])).flows[0]
    assert flow.cancelled - before.cancelled == 1
    assert flow.completed == before.completed
    assert 0 < flow.output_tokens - before.output_tokens < 1_900
    async with http.get("/load") as load:
        assert (await load.json())["server_load"] == 0


async def test_a_client_that_leaves_the_queue_and_a_full_queue(
    http: aiohttp.ClientSession, scheduler: AsyncScheduler
) -> None:
    """A lease holds the pool, four requests fill the queue, the next is refused, and one leaves."""
    shape: dict[str, Any] = {"input_tokens": [1_500] * 2, "max_output_tokens": 440}
    holding = await scheduler.admission(tenant="c", pools=["default"], **shape).__aenter__()
    big = {"prompt": [1] * 1_900, "max_tokens": 8}
    waiting = [asyncio.ensure_future(ask(http, "b", **big)) for _ in range(4)]
    await eventually(scheduler, lambda stats: stats.totals.queued == 4)
    async with http.post(
        "/v1/completions", json=big, headers={"x-tenant-id": "b", "x-request-id": "me"}
    ) as refused:
        assert refused.status == 429
        assert (await refused.json())["error"]["code"] == "slow_down"
        assert int(refused.headers["retry-after"]) >= 1
        assert not [name for name in refused.headers if name.lower().startswith("x-ratelimit-")]
        assert refused.headers["x-request-id"] == "me"
        assert refused.headers["x-schedsvc-dropped-reason"] == "rejected_flow_queue_full"
    waiting[0].cancel()
    await eventually(scheduler, lambda stats: stats.totals.queued == 3)
    holding.complete()
    done = await asyncio.gather(*waiting[1:])
    assert [status for status, _ in done] == [200] * 3
    await eventually(scheduler, empty)


async def test_the_openai_sdk_works_unchanged(
    programs: Programs, scheduler: AsyncScheduler
) -> None:
    client = openai.AsyncOpenAI(base_url=f"{programs.engine_url}/v1", api_key="any", max_retries=8)
    headers = {"x-tenant-id": "c"}
    whole = await client.completions.create(
        model="emulated", prompt="hello there", max_tokens=6, extra_headers=headers
    )
    assert whole.usage is not None
    stream = await client.chat.completions.create(
        model="emulated",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=6,
        stream=True,
        extra_headers=headers,
    )
    chunks = [chunk async for chunk in stream]
    assert all(chunk.usage is None for chunk in chunks)
    assert all(chunk.choices for chunk in chunks)
    # The engine's own words.
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048") as caught:
        await client.completions.create(
            model="emulated", prompt=[1] * CONTEXT_TOKENS, max_tokens=6, extra_headers=headers
        )
    assert caught.value.param == "prompt"
    # Twelve at once for a queue of four: the SDK's retries bring all of them home.
    shape: dict[str, Any] = {"prompt": [1] * 1_900, "max_tokens": 2}
    done = await asyncio.gather(
        *(
            client.completions.create(model="emulated", extra_headers=headers, **shape)
            for _ in range(12)
        )
    )
    assert all(answer.usage is not None for answer in done)
    await eventually(scheduler, empty)
    await client.close()


async def test_a_storm_of_clients_that_leave_anywhere_ends_with_empty_books(
    http: aiohttp.ClientSession, scheduler: AsyncScheduler
) -> None:
    async def one(number: int) -> int:
        await asyncio.sleep(number * 0.004)
        work = ask(http, "abc"[number % 3], max_tokens=20, stream=number % 2 == 0)
        if number % 4 == 0:
            try:
                return (await asyncio.wait_for(work, 0.002 * (number % 23)))[0]
            except asyncio.TimeoutError:
                return 0
        return (await work)[0]

    statuses = Counter(await asyncio.gather(*(one(number) for number in range(200))))
    assert set(statuses) <= {0, 200, 429}
    assert statuses[200] > 20
    await eventually(scheduler, empty)


async def lives(scheduler: AsyncScheduler, stream: asyncio.Future[Any]) -> bool:
    """Wait until the only lease is there; False: its stream has ended before."""
    while not stream.done():
        if (await scheduler.stats()).totals.live_leases == 1:
            return True
        await asyncio.sleep(LOOK_S)
    return False


async def test_a_scheduler_that_restarts_takes_the_leases_over(
    programs: Programs, http: aiohttp.ClientSession
) -> None:
    # The answer takes longer than the scheduler is away: an output token takes 2.7 ms. If the
    # machine stalls, the stream may end first; then the test has seen nothing, and repeats once the
    # gate has found the scheduler.
    tokens = 1_000
    for _ in range(TRIES):
        await asyncio.to_thread(programs.wait_until_connected)
        long = asyncio.ensure_future(
            ask(
                http,
                "a",
                max_tokens=tokens,
                ignore_eos=True,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        async with AsyncScheduler(programs.target) as before:
            began = await lives(before, long)
        programs.kill("scheduler")
        await asyncio.to_thread(programs.start_scheduler)
        async with AsyncScheduler(programs.target) as after:
            if began and await lives(after, long):
                break
        await long
        tokens = 1_900  # as many as fit into the context
    else:
        pytest.fail("the stream always ended before the scheduler was back")
    async with AsyncScheduler(programs.target) as after:
        status, usage = await long
        assert status == 200
        assert usage["completion_tokens"] == tokens
        await eventually(after, empty)
        flows = {flow.tenant: flow for flow in (await after.stats()).flows}
        assert flows["a"].completed == 1
        assert (await ask(http, "a"))[0] == 200


class Cable:
    """Relays to the scheduler's socket, and can be cut."""

    def __init__(self, target: str, path: str) -> None:
        self.target = f"unix:{path}"
        self._upstream, self._path = target.removeprefix("unix:"), path
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Cable:
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_unix_connection(self._upstream)
        self._writers |= {writer, upstream_writer}
        await asyncio.gather(
            self._copy(reader, upstream_writer), self._copy(upstream_reader, writer)
        )

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)
        writer.close()


async def test_a_cut_cable_costs_neither_lease_nor_place(
    programs: Programs, scheduler: AsyncScheduler
) -> None:
    """Cut while one runs, one waits, and one ends: all continue, and the books are right."""
    await eventually(scheduler, empty)  # of the test before: the gate's ends wait for company
    before = {flow.tenant: flow for flow in (await scheduler.stats()).flows}["a"]
    options = ClientOptions(backoff_min_s=0.01, unavailable_after_s=30)
    async with (
        Cable(programs.target, f"{programs.folder}/cable") as cable,
        SchedulerSession(
            cable.target, client_id="cable", incarnation=1, options=options
        ) as session,
    ):
        session.register_pool(
            pool="small", epoch=1, capacity_tokens=1_000, block_size_tokens=10, max_running=1
        )
        shape: dict[str, Any] = {
            "tenant": "a",
            "pools": ["small"],
            "input_tokens": 50,
            "max_output_tokens": 50,
        }
        for _ in range(5):
            first = await session.admission(**shape).__aenter__()
            first.progress(input_tokens=50, output_tokens=10)
            waiting = asyncio.ensure_future(session.admission(**shape).__aenter__())
            gone = asyncio.ensure_future(session.admission(**shape).__aenter__())
            await eventually(scheduler, lambda stats: stats.totals.queued == 2)
            cable.cut()
            gone.cancel()
            first.complete(output_tokens=20)
            second = await asyncio.wait_for(waiting, 30)
            second.complete(input_tokens=50, output_tokens=5)
            await asyncio.gather(gone, return_exceptions=True)
            assert await session.flush(30)
            await eventually(scheduler, empty)
    after = {flow.tenant: flow for flow in (await scheduler.stats()).flows}["a"]
    assert after.completed - before.completed == 10
    assert after.output_tokens - before.output_tokens == 5 * 25
    assert after.input_tokens - before.input_tokens == 5 * 100
