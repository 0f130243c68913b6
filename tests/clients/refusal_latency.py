"""Measures how soon a full pool refuses curl with x-schedsvc-max-queue-ms: 0.

`python -m tests.clients.refusal_latency` prints the medians: the time from the sent request to the
first byte of the answer, in turn with a plain 404 of the same server. It exits with status 1 if a
refusal takes more than 10 ms.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import click
from schedsvc_client.aio import AsyncScheduler

from tests.processes.programs import standing

from .test_end_to_end import CONFIG
from .test_terms_end_to_end import BIG, Both, filled

CURL = shutil.which("curl")
ROUNDS = 200
BAR_MS = 10.0
PLAIN: dict[str, Any] = {"expert": {"delay_factor": 0}}
HOLDING: dict[str, Any] = {"expert": {"delay_factor": 1}}


@contextmanager
def started(scheduler: dict[str, Any]) -> Iterator[Both]:
    """Run a scheduler with these settings, and an engine with the gate."""
    with standing(lambda folder: Both(folder, CONFIG | {"scheduler": scheduler})) as made:
        made.start_scheduler()
        made.start_gated()
        yield made


def curl(url: str, *options: str) -> tuple[int, float, str]:
    """Return the status, the milliseconds to the first byte, and the headers."""
    assert CURL is not None
    form = "\n%{http_code} %{time_pretransfer} %{time_starttransfer}"
    command = [CURL, "-s", "-o", "/dev/null", "-D", "-", "-w", form, *options, url]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    headers, _, figures = shown.rpartition("\n")
    status, sent_s, first_s = figures.split()
    return int(status), (float(first_s) - float(sent_s)) * 1e3, headers.lower()


async def keep_running(url: str) -> None:
    """Stream one small answer after the other, so the pool is never idle."""
    small = BIG | {"prompt": [1] * 40, "max_tokens": 90, "stream": True}
    async with aiohttp.ClientSession(url, headers={"x-tenant-id": "b"}) as http:
        while True:
            async with http.post("/v1/completions", json=small) as answer:
                assert answer.status == 200
                await answer.read()


async def measure(programs: Both) -> tuple[float, float]:
    """Return the medians of a refusal and of a plain 404, in ms."""
    asked = ("-H", "x-schedsvc-max-queue-ms: 0", "-H", "x-tenant-id: a", "--json", json.dumps(BIG))
    urls = [f"{programs.gated_url}{path}" for path in ("/v1/completions", "/nothing")]
    took_ms: tuple[list[float], list[float]] = [], []
    async with AsyncScheduler(programs.target) as scheduler:
        holding = await filled(scheduler, "gated")
        running = asyncio.ensure_future(keep_running(programs.gated_url))
        for _ in range(ROUNDS):
            status, ms, headers = await asyncio.to_thread(curl, urls[0], *asked)
            assert (status, "\nretry-after:" in headers) == (429, True), headers
            took_ms[0].append(ms)
            status, ms, _ = await asyncio.to_thread(curl, urls[1])
            assert status == 404
            took_ms[1].append(ms)
            assert not running.done()
        holding.give_back()
        running.cancel()
    refused, missing = map(statistics.median, took_ms)
    return refused, missing


@click.command(epilog="Example: python -m tests.clients.refusal_latency")
def main() -> None:
    """Measure how soon a request that will not wait is refused; exit with 1 if that is too late."""
    if CURL is None:
        raise click.ClickException("curl is not installed; it measures")
    dear = False
    for name, settings in (("plain", PLAIN), ("batching", HOLDING)):
        with started(settings) as programs:
            refused, missing = asyncio.run(measure(programs))
        click.echo(f"{name}: refused {refused:.2f} ms, a plain 404 {missing:.2f} ms")
        dear = dear or refused > BAR_MS
    sys.exit(dear)


if __name__ == "__main__":
    main(prog_name="python -m tests.clients.refusal_latency")
