"""Measures what the plug-in adds to a request: with and without it in turn, in one worker.

`python -m tests.litellm.cost --rounds 300`. A request without it asks for a model whose
deployments name no pool. Both pass the middleware, whose time is measured by itself and added. The
engine answers at once, and one request runs at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

import aiohttp
from schedsvc_litellm.middleware import Middleware

from tests.processes.programs import standing

from .stand import Stand, chat, client, key

BAR_MS = 1.5
_WARMUP = 20
#: Models of the same engines: the deployments of `plain` name no pool.
SIDES = {"without": "plain", "with": "m"}
_PASSES = 5_000


async def middleware_ms() -> float:
    """Return the time of the middleware, which both sides pass, around an app that reads a body."""

    async def app(_: Any, receive: Any, send: Any) -> None:
        await receive()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(_: Any) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": "/"}
    taken = []
    for inner in (app, Middleware(app)):
        began_s = time.perf_counter()
        for _ in range(_PASSES):
            await inner(scope, receive, send)
        taken.append(time.perf_counter() - began_s)
    return (taken[1] - taken[0]) * 1_000 / _PASSES


async def measure(stand: Stand, rounds: int, stream: bool) -> dict[str, list[float]]:
    """Return the time of each request in ms, by side."""
    taken: dict[str, list[float]] = {side: [] for side in SIDES}
    async with client(stand) as http:
        for number in range(rounds + _WARMUP):
            order = list(SIDES) if number % 2 else list(SIDES)[::-1]
            for side in order:
                ms = await _one(http, side, stream)
                if number >= _WARMUP:
                    taken[side].append(ms)
    return taken


async def _one(http: aiohttp.ClientSession, side: str, stream: bool) -> float:
    body = chat(1, model=SIDES[side], stream=stream)
    began_s = time.perf_counter()
    async with http.post("/v1/chat/completions", json=body, headers=key("a/b/c")) as response:
        await response.read()
        assert response.status == 200, await response.text()
    return (time.perf_counter() - began_s) * 1_000


async def _main(rounds: int) -> None:
    engine = ("--profile", "fast")
    with standing(lambda folder: Stand(folder, engine=engine)) as stand:
        stand.start_scheduler()
        stand.start_engines()
        stand.start_litellm(workers=1)
        beside_ms = await middleware_ms()
        for stream in (False, True):
            taken = await measure(stand, rounds, stream)
            p50 = {side: statistics.median(times) for side, times in taken.items()}
            pairs = zip(taken["with"], taken["without"], strict=True)
            added_ms = statistics.median(one - other for one, other in pairs) + beside_ms
            kind = "stream" if stream else "whole answer"
            print(
                f"{kind}: p50 {p50['without']:.2f} ms without, {p50['with']:.2f} ms with;"
                f" added p50 {added_ms:.2f} ms, the middleware's {beside_ms:.3f} ms included"
                f" (bar {BAR_MS} ms), of {rounds} pairs"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    asyncio.run(_main(parser.parse_args().rounds))
