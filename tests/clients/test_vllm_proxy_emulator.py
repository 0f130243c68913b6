"""Tests `schedsvc-proxy` as a process, before the emulator and the real scheduler."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from schedsvc_client.aio import AsyncScheduler

from tests import forked
from tests.processes.programs import Programs, standing
from tests.waiting import until, wait_until

from .test_end_to_end import CAPACITY_TOKENS, CONFIG, ENGINE

# It takes five seconds: longer than a machine stalls.
LONG = 1_900


@pytest.fixture(scope="module")
def programs() -> Iterator[Programs]:
    with standing(lambda folder: Programs(folder, CONFIG, engine=ENGINE, gated=False)) as made:
        made.start_scheduler()
        made.start_engine()
        made.start_proxy()
        yield made


async def running(programs: Programs) -> int:
    """Ask the engine how many requests it runs."""
    async with aiohttp.ClientSession(programs.engine_url) as http, http.get("/metrics") as page:
        lines = (await page.text()).splitlines()
    (line,) = [line for line in lines if line.startswith("vllm:num_requests_running{")]
    return round(float(line.split()[-1]))


async def at_rest(scheduler: AsyncScheduler, programs: Programs) -> Any:
    """Wait until nothing is promised and nothing runs; return the scheduler's books."""

    async def rests() -> Any:
        stats = await scheduler.stats()
        return None if stats.totals.live_leases or await running(programs) else stats

    return await until(rests)


def body(output_tokens: int, **fields: Any) -> dict[str, Any]:
    exact = {"emulated_output_tokens": output_tokens}
    return {"model": "emulated", "prompt": [5] * 40, "max_tokens": LONG} | exact | fields


async def left(http: aiohttp.ClientSession, programs: Programs, stream: bool) -> None:
    """Ask for much, and leave as soon as the engine runs it."""
    asked = asyncio.ensure_future(http.post("/v1/completions", json=body(LONG, stream=stream)))
    while not (asked.done() or await running(programs)):  # noqa: ASYNC110 - Stats has no event
        await asyncio.sleep(0.01)
    if stream:
        response = await asked
        await response.content.readany()
        response.close()
    else:
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def test_streams_pass_and_are_billed_to_the_token(programs: Programs) -> None:
    async with (
        AsyncScheduler(programs.target) as scheduler,
        aiohttp.ClientSession(programs.proxy_url, headers={"x-tenant-id": "a"}) as http,
    ):
        before = await scheduler.stats()
        assert before.pools[0].capacity_tokens == CAPACITY_TOKENS
        for stream in (False, True):
            async with http.post("/v1/completions", json=body(30, stream=stream)) as response:
                text = await response.text()
                assert response.status == 200, text
                assert response.headers["x-schedsvc-mode"] == "enforced"
                assert text.endswith("data: [DONE]\n\n") is stream
        stats = await at_rest(scheduler, programs)
    flow = next(flow for flow in stats.flows if flow.tenant == "a")
    assert (flow.completed, flow.input_tokens, flow.output_tokens) == (2, 80, 60)


async def test_the_protocol_of_lightllm_is_billed_to_the_token(programs: Programs) -> None:
    asked = {"inputs": "one two three", "parameters": {"max_new_tokens": 25, "ignore_eos": True}}
    async with (
        AsyncScheduler(programs.target) as scheduler,
        aiohttp.ClientSession(programs.proxy_url, headers={"x-tenant-id": "a"}) as http,
    ):
        before = used(await at_rest(scheduler, programs), "a")
        async with http.post("/generate", json=asked) as response:
            assert response.headers["x-schedsvc-mode"] == "enforced"
            counted = (await response.json())["prompt_tokens"]
        async with http.post("/generate_stream", json=asked) as response:
            assert response.headers["x-schedsvc-mode"] == "enforced"
            text = await response.text()
        assert text.count("data:") == 25
        async with http.post("/generate", json={"inputs": ""}) as response:
            assert response.status == 400
            assert "inputs" in await response.text()
        stats = await at_rest(scheduler, programs)
    after = used(stats, "a")
    assert [new - old for old, new in zip(before, after, strict=True)] == [2, 2 * counted, 50]


def flow_of(stats: Any, tenant: str) -> Any:
    return next(flow for flow in stats.flows if flow.tenant == tenant)


@pytest.mark.parametrize("stream", [False, True])
async def test_input_of_a_running_answer_is_posted(programs: Programs, stream: bool) -> None:
    """It is posted in one piece from the grant; a stream posts it with its first report."""
    async with (
        AsyncScheduler(programs.target) as scheduler,
        aiohttp.ClientSession(programs.proxy_url, headers={"x-tenant-id": "b"}) as http,
    ):
        await at_rest(scheduler, programs)
        asked = asyncio.ensure_future(http.post("/v1/completions", json=body(LONG, stream=stream)))
        while not (flow := flow_of(await scheduler.stats(), "b")).posted_tokens:
            assert stream or not asked.done(), "it has ended, and its input was never posted"
        assert (flow.live_leases, flow.posted_tokens >= 40) == (1, True)
        asked.cancel()
        for answer in await asyncio.gather(asked, return_exceptions=True):
            if isinstance(answer, aiohttp.ClientResponse):
                answer.close()
        await at_rest(scheduler, programs)


def used(stats: Any, tenant: str) -> tuple[int, int, int]:
    """Return a tenant's row in the books: requests, input and output tokens."""
    flow = flow_of(stats, tenant)
    return flow.completed, flow.input_tokens, flow.output_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_engine_and_lease(
    programs: Programs, stream: bool
) -> None:
    async with (
        AsyncScheduler(programs.target) as scheduler,
        aiohttp.ClientSession(programs.proxy_url, headers={"x-tenant-id": "b"}) as http,
    ):
        async with http.post("/v1/completions", json=body(30)) as response:
            assert response.status == 200  # so that the pool has a pace
        before = flow_of(await at_rest(scheduler, programs), "b")
        await left(http, programs, stream)
        flow = flow_of(await at_rest(scheduler, programs), "b")
    assert flow.cancelled - before.cancelled == 1
    assert 1 <= flow.input_tokens - before.input_tokens <= 40
    assert flow.output_tokens - before.output_tokens < LONG


async def generated(programs: Programs) -> int:
    """Ask the engine how many tokens it has made."""
    async with aiohttp.ClientSession(programs.engine_url) as http, http.get("/metrics") as page:
        lines = (await page.text()).splitlines()
    (line,) = [line for line in lines if line.startswith("vllm:generation_tokens_total{")]
    return round(float(line.split()[-1]))


async def test_an_answer_in_one_piece_that_is_given_up_is_charged(programs: Programs) -> None:
    async with (
        AsyncScheduler(programs.target) as scheduler,
        aiohttp.ClientSession(programs.proxy_url, headers={"x-tenant-id": "b"}) as http,
    ):
        for _ in range(3):  # so that its pool has a pace
            async with http.post("/v1/completions", json=body(200)) as response:
                assert response.status == 200
        before, made = flow_of(await at_rest(scheduler, programs), "b"), await generated(programs)
        asked = asyncio.ensure_future(http.post("/v1/completions", json=body(LONG)))

        async def is_at_half() -> bool:
            return await generated(programs) - made > LONG // 2

        await until(is_at_half)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        flow = flow_of(await at_rest(scheduler, programs), "b")
        computed = await generated(programs) - made
    charged = flow.output_tokens - before.output_tokens
    assert flow.cancelled - before.cancelled == 1
    assert flow.input_tokens - before.input_tokens == 40
    # The machine may stall while one of both counts; the tolerance is 35 %.
    assert computed // 4 <= charged <= LONG


async def test_an_engine_that_dies_is_reported_and_serves_again(programs: Programs) -> None:
    async with (
        AsyncScheduler(programs.target) as scheduler,
        aiohttp.ClientSession(programs.proxy_url, headers={"x-tenant-id": "c"}) as http,
    ):
        streaming = await http.post("/v1/completions", json=body(LONG, stream=True))
        programs.kill("engine")
        with pytest.raises(aiohttp.ClientError):
            await streaming.read()
        async with http.post("/v1/completions", json=body(5)) as refused:
            assert refused.status == 503
            assert refused.headers["x-schedsvc-dropped-reason"] == "upstream_unreachable"
        # The loop has to notice the connections that were closed meanwhile.
        await asyncio.to_thread(programs.start_engine)
        async with http.post("/v1/completions", json=body(5)) as again:
            text = await again.text()  # a client that leaves earlier has cancelled
            assert again.status == 200, text
        stats = await at_rest(scheduler, programs)
    flow = next(flow for flow in stats.flows if flow.tenant == "c")
    # One more if the request came before the other engine was known.
    assert flow.completed == 1
    assert flow.cancelled in (2, 3)


def test_a_signal_ends_it_while_it_waits_for_its_upstream(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from schedsvc_vllm.proxy_cli import main; main()"]
    command += ["--upstream", "http://127.0.0.1:9", "--port", "0"]
    command += ["--schedsvc-target", f"unix:{tmp_path}/s"]
    log = tmp_path / "log"
    with log.open("wb") as file, forked.Popen(command, stdout=file, stderr=file) as process:
        wait_until(lambda: "waiting for the upstream" in log.read_text(), log.read_text)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    assert "stopped while waiting" in log.read_text()


def test_a_signal_ends_it(programs: Programs) -> None:
    process = programs.running.pop("proxy")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
