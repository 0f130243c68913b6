"""Measures what the plug-in adds to a request: with and without it in turn, in one worker.

`python -m tests.litellm.cost --rounds 300`. A request without it goes around the middleware, to a
model whose deployments name no pool. The engine answers at once, and one request runs at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Mapping

import aiohttp

from tests.processes.programs import standing

from .stand import AUTH, Stand, chat, client, key

BAR_MS = 1.5
_WARMUP = 20
#: A header of the request chooses the app with the middleware, or the one within it.
_SWITCH = """
from litellm.proxy import proxy_server

plugged = proxy_server.app.middleware_stack


async def switch(scope, receive, send):
    is_plain = any(name == b"x-plain" for name, _ in scope.get("headers", ()))
    await (plugged._app if is_plain else plugged)(scope, receive, send)


proxy_server.app.middleware_stack = switch
"""
SIDES: Mapping[str, tuple[str, dict[str, str]]] = {
    "without": ("plain", {"x-plain": "1"}),
    "with": ("m", {}),
}


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
    model, headers = SIDES[side]
    body = chat(1, model=model, stream=stream)
    began_s = time.perf_counter()
    path, headers = "/v1/chat/completions", headers | key("a/b/c")
    async with http.post(path, json=body, headers=headers) as response:
        await response.read()
        assert response.status == 200, await response.text()
    return (time.perf_counter() - began_s) * 1_000


async def _main(rounds: int) -> None:
    engine = ("--profile", "fast")
    with standing(lambda folder: Stand(folder, engine=engine, auth=AUTH + _SWITCH)) as stand:
        stand.start_scheduler()
        stand.start_engines()
        stand.start_litellm(workers=1)
        for stream in (False, True):
            taken = await measure(stand, rounds, stream)
            p50 = {side: statistics.median(times) for side, times in taken.items()}
            pairs = zip(taken["with"], taken["without"], strict=True)
            added_ms = statistics.median(one - other for one, other in pairs)
            kind = "stream" if stream else "whole answer"
            print(
                f"{kind}: p50 {p50['without']:.2f} ms without, {p50['with']:.2f} ms with;"
                f" added p50 {added_ms:.2f} ms (bar {BAR_MS} ms) of {rounds} pairs"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    asyncio.run(_main(parser.parse_args().rounds))
