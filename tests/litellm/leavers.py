"""Sends requests whose clients leave at one of four moments, and reads what is left of them.

`python -m tests.litellm.leavers --count 10000` prints the gauges afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter

import aiohttp
from schedsvc_client.aio import AsyncScheduler

from tests.processes.programs import at_rest, standing

from .stand import Stand, chat, client, key

#: Before the grant, before the first token, in the middle of the stream, at its last event.
MOMENTS = ("queued", "granted", "middle", "last")
AT_ONCE = 32
_OUTPUT_TOKENS = 40
#: As long as it takes a loaded proxy to get an answer; most wait for their turn then.
_SOON_S = 0.3


async def leave_all(stand: Stand, count: int, seed: int) -> Counter[str]:
    """Let clients leave; return how many left at each moment, and how many were served before."""
    draw = random.Random(seed)
    plan = [(draw.choice(MOMENTS), draw.random()) for _ in range(count)]
    turns = asyncio.Semaphore(AT_ONCE)
    left: Counter[str] = Counter()
    async with client(stand) as http:

        async def one(number: int, moment: str, when: float) -> None:
            async with turns:
                left[await _leave(http, f"team-{number % 3}/u/k", moment, when)] += 1

        await asyncio.gather(*(one(number, *each) for number, each in enumerate(plan)))
    return left


async def _leave(http: aiohttp.ClientSession, tenant: str, moment: str, when: float) -> str:
    """Send a request and leave; return the moment, or another word if it was over before."""
    stream = moment in ("middle", "last")
    body = chat(_OUTPUT_TOKENS, stream=stream or when < 0.5)
    asked = asyncio.ensure_future(http.post("/v1/chat/completions", json=body, headers=key(tenant)))
    if not stream:
        # A short wait ends before the grant, a longer one before the first token.
        scale_s = _SOON_S if moment == "granted" else _SOON_S / 10
        done, _ = await asyncio.wait({asked}, timeout=when * scale_s)
        if not done:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            return moment
    response = await asked
    if not stream or response.status != 200:
        response.close()
        return "served" if response.status == 200 else str(response.status)
    events = 0
    async for line in response.content:
        events += line.startswith(b"data:")
        is_last = line.startswith(b"data: [DONE]") or b'"finish_reason":"length"' in line
        if is_last or (moment == "middle" and events > 2 + when * 10):
            break
    response.close()
    return moment


async def _main(count: int, seed: int) -> None:
    with standing(Stand) as stand:
        stand.start_scheduler()
        stand.start_engines()
        stand.start_litellm()
        left = await leave_all(stand, count, seed)
        async with AsyncScheduler(stand.target) as scheduler:
            totals = (await at_rest(scheduler)).totals
        print(f"seed {seed}, left: {dict(left)}")
        print(
            f"queued {totals.queued}, leases {totals.live_leases}, promised"
            f" {totals.promised_tokens}; {totals.received} received, {totals.granted} granted,"
            f" {totals.completed} completed, {totals.cancelled} cancelled, {totals.expired} expired"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    asyncio.run(_main(given.count, given.seed))
