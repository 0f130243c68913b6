"""Records steps of the real vLLM for `schedsvc sim fit`: `python -m tests.vllm.steps FILE`.

The engine serves requests of many shapes, at several numbers in flight, streaming as clients do.
The steps of a warm-up are thrown away.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from random import Random

import aiohttp

from . import recorded
from .programs import ENVIRONMENT, vllm
from .stack import completion

PHASES = (1, 2, 4, 8, 16, 32, 64, 16)
"""Requests in flight, one phase after the other."""
_SEED = 5


async def _keep_asking(client: aiohttp.ClientSession, url: str, draws: Random) -> None:
    """Send one request after the other."""
    while True:
        # Evenly over orders of magnitude: so there are steps of many small requests, too.
        input_tokens = round(16 * (900 / 16) ** draws.random())
        output_tokens = round(8 * (256 / 8) ** draws.random())
        body = completion(input_tokens, output_tokens, stream=True)
        async with client.post(f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for _ in response.content:
                pass


async def _phase(url: str, in_flight: int, phase_s: float, seed: int) -> None:
    draws = Random(seed)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as client:
        tasks = [asyncio.ensure_future(_keep_asking(client, url, draws)) for _ in range(in_flight)]
        done, _ = await asyncio.wait(tasks, timeout=phase_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()


def record(out: Path, phase_s: float) -> int:
    """Run all phases. Returns how many steps were recorded."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        steps = folder / "steps.jsonl"
        arguments, variables = recorded.ARGUMENTS, recorded.variables(steps)
        with vllm(folder, gated=False, arguments=arguments, variables=variables) as server:
            asyncio.run(_phase(server.url, 8, phase_s / 2, _SEED))
            warm = len(steps.read_text().splitlines())
            for number, in_flight in enumerate(PHASES):
                asyncio.run(_phase(server.url, in_flight, phase_s, _SEED + number))
        lines = steps.read_text().splitlines()[warm:]
    out.write_text("\n".join(lines) + "\n")
    return len(lines)


def main() -> None:
    """Parse the command line and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="FILE", help="JSON lines, one for each step")
    parser.add_argument("--phase-s", type=float, default=10.0, help="seconds of each phase")
    arguments = parser.parse_args()
    if not (ENVIRONMENT / ".installed").exists():
        parser.error("the real vLLM is not installed; `make test-vllm` does it")
    count = record(arguments.out, arguments.phase_s)
    print(f"{count} steps in {arguments.out}")


if __name__ == "__main__":
    main()
