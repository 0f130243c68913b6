"""What the gate costs vLLM's API server: its CPU for each request, with the gate and without.

    python -m tests.vllm.cost --starts 3 --rounds 3 --out out/vllm/cost.json

Three servers run at once, two plain and one gated, and each gets the same slice of requests at the
same time: what the machine does meanwhile, all of them feel. Nothing waits in any: the gate's own
work is measured, not what it changes in the engine's queue. The second plain server beside the
first shows the noise. Which of them comes first is worth some percent, and two processes of one
program differ by a few for as long as they live: so all are started anew, each time in another
order, and three starts give each of them every place once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from . import programs
from .stack import completion

# The mix of the noisy neighbour: of eleven requests ten are long.
LONG, SHORT = (512, 256), (64, 64)
SLICE = [LONG] * 40 + [SHORT] * 4
IN_FLIGHT = 12  # at all servers together
TENANT = "cost"
ARMS = ("plain", "gated", "again")


@dataclass
class Slice:
    """One slice at one server."""

    cpu_ms: float  # for each request
    events: float  # of each answer: vLLM merges tokens where it cannot keep up


Round = dict[str, Slice]
"""The slices that ran at once: `plain`, `gated`, and `again` where there is a second plain one."""


async def run_slice(server: programs.Server, in_flight: int) -> Slice:
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
        await asyncio.gather(*(work(session) for _ in range(in_flight)))
        # The last answers are logged and their leases ended a moment later.
        await asyncio.sleep(0.3)
        used_s = server.cpu_s() - before_s
    return Slice(1e3 * used_s / len(SLICE), events / len(SLICE))


async def measure(servers: dict[str, programs.Server], rounds: int) -> list[Round]:
    """Run the slices, each at all servers at once, after a round that does not count."""
    made: list[Round] = []
    for number in range(-1, rounds):
        in_flight = IN_FLIGHT // len(servers)
        runs = (run_slice(server, in_flight) for server in servers.values())
        slices = dict(zip(servers, await asyncio.gather(*runs), strict=True))
        if number >= 0:
            made.append(slices)
        if sys.stderr.isatty() or number == rounds - 1:
            sys.stderr.write(f"\rround {number + 1} of {rounds} ")
            sys.stderr.flush()
    sys.stderr.write("\n")
    return made


def ratios(start: Sequence[Round]) -> dict[str, float]:
    """Compare the medians of one start: the gate with all plain servers, and these with another."""
    cpu = {name: statistics.median(made[name].cpu_ms for made in start) for name in start[0]}
    plain = [cpu[name] for name in cpu if name != "gated"]
    told = {"ratio": cpu["gated"] / statistics.fmean(plain)}
    return told | ({"null": cpu["again"] / cpu["plain"]} if "again" in cpu else {})


def report(starts: Sequence[Sequence[Round]]) -> dict[str, Any]:
    """Sum up: each ratio of every start, and their geometric mean."""
    told: dict[str, Any] = {}
    rounds = [made for start in starts for made in start]
    for name in rounds[0]:
        told[name] = {
            "cpu_ms_per_request": round(statistics.median(r[name].cpu_ms for r in rounds), 3),
            "events_per_answer": round(statistics.mean(r[name].events for r in rounds), 1),
        }
    compared = [ratios(start) for start in starts]
    for title in compared[0]:
        of_starts = [each[title] for each in compared]
        told[title] = {
            "mean": round(statistics.geometric_mean(of_starts), 4),
            "starts": [round(each, 4) for each in of_starts],
        }
    told["starts"] = [
        [{name: asdict(made) for name, made in r.items()} for r in start] for start in starts
    ]
    return told


def one_start(number: int, rounds: int) -> list[Round]:
    """Start all servers in the order that is that start's, measure, and end them."""
    at = number % len(ARMS)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as running:
        servers: dict[str, programs.Server] = {}
        for arm in (*ARMS[at:], *ARMS[:at]):
            folder = Path(name) / arm[0]
            folder.mkdir()
            if arm == "gated":
                running.enter_context(programs.Scheduler(folder, [TENANT]))
            server = programs.vllm(folder, gated=arm == "gated")
            servers[arm] = running.enter_context(server)
        return asyncio.run(measure(servers, rounds))


def main() -> None:
    """Measure, write the report, print its figures."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.vllm.cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--starts", type=int, default=3, help="of all servers (default 3)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of a slice at each server, a start (default 3)"
    )
    parser.add_argument("--out", type=Path, default=Path("out/vllm/cost.json"))
    parser.add_argument("--json", action="store_true", help="print the whole report")
    options = parser.parse_args()
    programs.end_on_signal()
    for name in ("starts", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: must be at least 1")
    if not programs.installed():
        parser.error("the real vLLM is not installed; `make test-vllm` does it")
    starts = []
    for number in range(options.starts):
        sys.stderr.write(f"start {number + 1} of {options.starts}\n")
        starts.append(one_start(number, options.rounds))
        sys.stderr.write(f"{ratios(starts[-1])}\n")
    made = report(starts)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(made, indent=1) + "\n")
    shown = made if options.json else {k: v for k, v in made.items() if k != "starts"}
    print(json.dumps(shown, indent=1))


if __name__ == "__main__":
    main()
