"""The scheduler dies and restarts while the engine serves."""

from __future__ import annotations

import asyncio
from collections import Counter

import aiohttp

from .stack import Stack, completion

BACK_S_MAX = 15.0


async def test_no_request_fails_while_the_scheduler_is_away(stack: Stack) -> None:
    """The gate fails open: requests go on, new ones are run under the local limit, and it heals."""
    modes: list[str] = []

    async def ask(session: aiohttp.ClientSession, output_tokens: int) -> None:
        body = completion(60, output_tokens, stream=True, stream_options={"include_usage": True})
        async with session.post("/v1/completions", json=body) as response:
            text = await response.text()
            assert response.status == 200, text
            assert f'"completion_tokens":{output_tokens}' in text
            modes.append(response.headers["x-schedsvc-mode"])

    async with aiohttp.ClientSession(stack.url, headers={"x-tenant-id": "away-0"}) as session:
        long = [asyncio.create_task(ask(session, 1_800)) for _ in range(4)]
        await asyncio.to_thread(stack.until, lambda: stack.flow("away-0").live_leases == 4)
        # One part runs since the last grant, the other may run without the scheduler.
        await asyncio.gather(*(ask(session, 100) for _ in range(8)))
        # An end that is not acknowledged would be sent to the next scheduler.
        await asyncio.to_thread(stack.until, lambda: stack.flow("away-0").completed == 8)
        modes.clear()
        before = stack.stats().incarnation
        stack.scheduler.kill()
        # Nothing continues until the gate has given it up: the number at the last grant runs.
        with stack.server.engine_paused():
            asked = asyncio.gather(*(ask(session, 20) for _ in range(12)))
            await asyncio.to_thread(stack.until, lambda: stack.gauges()["gate_running"] == 12)
        await asked
        assert Counter(modes) == {"fail-open": 12}
        assert not any(task.done() for task in long), "too short to see the replay"
        with stack.server.engine_paused():
            await asyncio.to_thread(stack.scheduler.start)
            # The open leases are replayed to the scheduler that knows nothing of them.
            await asyncio.to_thread(
                stack.until, lambda: stack.flow("away-0").live_leases == 4, BACK_S_MAX
            )
        assert stack.stats().incarnation != before
        assert stack.pool.promised_tokens >= 4 * 60
        modes.clear()
        await ask(session, 20)
        assert modes == ["enforced"]
        await asyncio.gather(*long)
    await asyncio.to_thread(stack.rest)
    books = stack.flow("away-0")
    # The leases that it knows: the replayed ones with their usage, and the last.
    assert books.completed == 5
    assert books.output_tokens == 4 * 1_800 + 20
    assert books.input_tokens == 5 * 60
