"""Tests prefixes before an engine that caches them: real scheduler, real gate, the emulator."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
from schedsvc_client.aio import AsyncScheduler

from tests.processes.programs import Programs, eventually, standing

from .test_end_to_end import CONFIG

# The engine has room for little more than one prompt: the next request takes its cache.
KV_TOKENS, CONTEXT_TOKENS, BLOCK_TOKENS = 2_048, 2_000, 16
PROMPT_TOKENS = 1_600
EACH = 6


ENGINE = (
    *("--profile", "tiny-cpu", "--speed", "20", "--enable-prefix-caching"),
    *("--kv-tokens", str(KV_TOKENS), "--max-model-len", str(CONTEXT_TOKENS)),
    *("--block-size", str(BLOCK_TOKENS)),
)


def settings(policy: str) -> dict[str, Any]:
    return CONFIG | {
        "scheduler": {
            "policy": policy,
            "queue_ttl_ms": 60_000,
            "expert": {"quantum_tokens": 100_000},
        }
    }


@pytest.fixture(scope="module")
def programs() -> Iterator[Programs]:
    """Run a scheduler whose policy can change, and an engine that runs one request at a time."""
    with standing(lambda folder: Programs(folder, settings("vtc"), engine=ENGINE)) as made:
        made.start_scheduler()
        made.start_engine(SCHEDSVC_POOL_MAX_RUNNING="1")
        yield made


@pytest.fixture
async def http(programs: Programs) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(programs.engine_url) as session:
        yield session


@pytest.fixture
async def scheduler(programs: Programs) -> AsyncIterator[AsyncScheduler]:
    async with AsyncScheduler(programs.target) as client:
        yield client


async def asked(http: aiohttp.ClientSession, tenant: str, **body: Any) -> dict[str, Any]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    body |= {"model": "emulated", "max_tokens": 8, "emulated_output_tokens": 4}
    async with http.post(path, json=body, headers={"x-tenant-id": tenant}) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


def cached(answer: dict[str, Any]) -> int:
    details = answer["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"]) if details else 0


async def at_rest(scheduler: AsyncScheduler) -> Any:
    return await eventually(scheduler, lambda stats: not stats.totals.live_leases)


async def under(programs: Programs, http: aiohttp.ClientSession, policy: str) -> None:
    """Change the policy, and wait until the gate has heard of it."""
    programs.settings = settings(policy)
    programs.configure()
    programs.send("scheduler", signal.SIGHUP)
    async with AsyncScheduler(programs.target) as scheduler:
        await eventually(scheduler, lambda stats: stats.policy == policy)
    await asked(http, "c", prompt=[1] * 10)


async def cached_of_mixed(
    http: aiohttp.ClientSession, scheduler: AsyncScheduler, first: int
) -> tuple[int, int]:
    """Send prompts of two tenants by turns while another runs; each tenant's are alike.

    Returns how many tokens were found cached, by the answers, and of how many.
    """
    async with scheduler.admission(
        tenant="c", input_tokens=1, max_output_tokens=1, pools=["default"]
    ):
        tasks = []
        for number in range(2 * EACH):
            tenant, token = ("a", first) if number % 2 == 0 else ("b", first + 1)
            prompt = [token] * PROMPT_TOKENS
            tasks.append(asyncio.ensure_future(asked(http, tenant, prompt=prompt)))
            await eventually(scheduler, lambda stats: stats.totals.queued == len(tasks))
    answers = await asyncio.gather(*tasks)
    return sum(map(cached, answers)), 2 * EACH * PROMPT_TOKENS


async def test_dlpm_gains_prefix_hits_behind_the_gate(
    programs: Programs, http: aiohttp.ClientSession, scheduler: AsyncScheduler
) -> None:
    """It serves one tenant's prompts after another, and VTC by turns: what one tenant's requests
    leave in the cache, the other's push out of it."""
    await under(programs, http, "vtc")
    before = await at_rest(scheduler)
    by_turns, asked_tokens = await cached_of_mixed(http, scheduler, 100)
    between = await at_rest(scheduler)
    assert between.pools[0].prefix_asked_tokens == before.pools[0].prefix_asked_tokens
    await under(programs, http, "dlpm")
    by_prefix, _ = await cached_of_mixed(http, scheduler, 200)
    after = await at_rest(scheduler)
    believed = after.pools[0].prefix_matched_tokens - between.pools[0].prefix_matched_tokens
    # All blocks are found, except for the first request of each tenant.
    whole = 2 * (EACH - 1) * (PROMPT_TOKENS - BLOCK_TOKENS)
    assert by_turns < asked_tokens // 2
    assert by_prefix >= whole > 1.5 * by_turns
    assert believed == 2 * (EACH - 1) * PROMPT_TOKENS
    flows = {flow.tenant: flow.cached_input_tokens for flow in after.flows}
    assert flows["a"] + flows["b"] == by_turns + by_prefix


async def test_a_conversation_is_found_further_with_every_turn(
    programs: Programs, http: aiohttp.ClientSession, scheduler: AsyncScheduler
) -> None:
    await under(programs, http, "dlpm")
    messages = [{"role": "system", "content": "You answer in one word. " * 40}]
    believed, found = [], []
    for turn in range(4):
        messages.append({"role": "user", "content": f"Question {turn}: " + f"{turn} why " * 120})
        before = (await at_rest(scheduler)).pools[0]
        answer = await asked(http, "a", messages=messages)
        after = (await at_rest(scheduler)).pools[0]
        assert after.prefix_asked_tokens - before.prefix_asked_tokens > 0
        believed.append(after.prefix_matched_tokens - before.prefix_matched_tokens)
        found.append(cached(answer))
        messages.append(answer["choices"][0]["message"])
    assert believed[0] == found[0] == 0
    assert believed == sorted(set(believed))
    assert found == sorted(set(found))
    # The estimate differs from the result by blocks that are not full, and by text that is not
    # counted as the tokenizer does.
    assert 0.5 * found[-1] <= believed[-1] <= 2 * found[-1]
