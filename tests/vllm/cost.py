"""What the gate costs vLLM's API server: its CPU for each request, with the gate and without.

    python -m tests.vllm.cost --rounds 8 --out out/vllm/cost.json

Two servers run at once, and short slices of the same requests go to one and to the other in turn
(plain, gated, gated, plain). Nothing waits in either: the gate's own work is measured, not what it
changes in the engine's queue. The plain server against itself shows the noise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from . import programs
from .figures import interval
from .stack import completion

# The mix of the noisy neighbour: of eleven requests ten are long.
LONG, SHORT = (512, 256), (64, 64)
SLICE = [LONG] * 40 + [SHORT] * 4
IN_FLIGHT = 12
TENANT = "cost"


@dataclass
class Slice:
    """One slice at one server."""

    gated: bool
    cpu_ms: float  # for each request
    events: float  # of each answer: vLLM merges tokens where it cannot keep up


async def run_slice(server: programs.Server, *, gated: bool) -> Slice:
    """Send one slice, a fixed number in flight, and read the server's clock before and after."""
    queue = list(SLICE)
    events = 0

    async def work(session: aiohttp.ClientSession) -> None:
        nonlocal events
        while queue:
            body = completion(*queue.pop(), stream=True)
            async with session.post("/v1/completions", json=body) as response:
                response.raise_for_status()
                events += (await response.read()).count(b"data: {")

    async with aiohttp.ClientSession(server.url, headers={"x-tenant-id": TENANT}) as session:
        before_s = server.cpu_s()
        await asyncio.gather(*(work(session) for _ in range(IN_FLIGHT)))
        # The last answers are logged and their leases ended a moment later.
        await asyncio.sleep(0.3)
        used_s = server.cpu_s() - before_s
    return Slice(gated, 1e3 * used_s / len(SLICE), events / len(SLICE))


async def measure(plain: programs.Server, gated: programs.Server, rounds: int) -> list[Slice]:
    """Run the slices, after one at each server that does not count."""
    slices: list[Slice] = []
    for number in range(-1, rounds):
        for is_gated in (False, True, True, False):
            made = await run_slice(gated if is_gated else plain, gated=is_gated)
            if number >= 0:
                slices.append(made)
        if sys.stderr.isatty() or number == rounds - 1:
            sys.stderr.write(f"\rround {number + 1} of {rounds} ")
            sys.stderr.flush()
    sys.stderr.write("\n")
    return slices


def report(slices: list[Slice]) -> dict[str, Any]:
    """Compare each gated slice with the plain one beside it, and the plain ones with each other."""
    fours = [slices[start : start + 4] for start in range(0, len(slices), 4)]
    pairs = [b.cpu_ms / a.cpu_ms for four in fours for a, b in (four[:2], four[:1:-1])]
    null = [four[3].cpu_ms / four[0].cpu_ms for four in fours]
    ratio, low, high = interval(pairs)
    by_arm = {
        name: {
            "cpu_ms_per_request": round(statistics.median(s.cpu_ms for s in arm), 3),
            "events_per_answer": round(statistics.mean(s.events for s in arm), 1),
        }
        for name, arm in (
            ("plain", [s for s in slices if not s.gated]),
            ("gated", [s for s in slices if s.gated]),
        )
    }
    null_ratio, null_low, null_high = interval(null)
    return {
        **by_arm,
        "ratio": {"median": round(ratio, 4), "low": round(low, 4), "high": round(high, 4)},
        "null": {
            "median": round(null_ratio, 4),
            "low": round(null_low, 4),
            "high": round(null_high, 4),
        },
        "slices": [asdict(made) for made in slices],
    }


def main() -> None:
    """Measure, write the report, print its figures."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.vllm.cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=8, help="of four slices each (default 8)")
    parser.add_argument("--out", type=Path, default=Path("out/vllm/cost.json"))
    parser.add_argument("--json", action="store_true", help="print the whole report")
    options = parser.parse_args()
    programs.end_on_signal()
    if options.rounds < 1:
        parser.error("--rounds: must be at least 1")
    if not programs.installed():
        parser.error("the real vLLM is not installed; `make test-vllm` does it")
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / arm for arm in ("p", "g")]
        for folder in folders:
            folder.mkdir()
        with (
            programs.Scheduler(folders[1], [TENANT]),
            programs.vllm(folders[0], gated=False) as plain,
            programs.vllm(folders[1], gated=True) as gated,
        ):
            made = report(asyncio.run(measure(plain, gated, options.rounds)))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(made, indent=1) + "\n")
    shown = made if options.json else {k: v for k, v in made.items() if k != "slices"}
    print(json.dumps(shown, indent=1))


if __name__ == "__main__":
    main()
