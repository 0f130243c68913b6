"""Measures the gate's cost in vLLM's API server: CPU of each request, with it and without.

    python -m tests.vllm.cost --rounds 30 --in-flight 12 --out out/vllm/cost.json

One server serves slices of requests in turn, through the gate and past it (switch.py), each round
in another order, so neither the process nor the load of the machine differs between them. Nothing
waits: the gate's own work is measured, not its effect on the engine's queue. A second slice past
the gate in each round shows the noise. The gate's work while no request passes it, a message of
telemetry in 1.2 s, is on both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from . import programs
from .figures import interval
from .stack import completion

# The mix of the noisy neighbour: of eleven requests ten are long.
LONG, SHORT = (512, 256), (64, 64)
SLICE = [LONG] * 20 + [SHORT] * 2
IN_FLIGHT = 12
TENANT = "cost"
PAST_THE_GATE = {"x-without-gate": "1"}


@dataclass(frozen=True)
class Arm:
    """Says where requests are sent, and with which headers."""

    server: programs.Server
    headers: Mapping[str, str]


@dataclass
class Slice:
    """Holds one slice at one arm."""

    cpu_ms: float  # for each request
    events: float  # events of each answer: vLLM merges tokens when it falls behind


Round = dict[str, Slice]
"""A slice of each arm: `plain`, `gated`, and `again` where there is a second one without gate."""


async def run_slice(arm: Arm, in_flight: int) -> Slice:
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

    headers = {"x-tenant-id": TENANT, **arm.headers}
    async with aiohttp.ClientSession(arm.server.url, headers=headers) as session:
        before_s = arm.server.cpu_s()
        await asyncio.gather(*(work(session) for _ in range(in_flight)))
        # The last answers are logged and their leases ended a moment later.
        await asyncio.sleep(0.3)
        used_s = arm.server.cpu_s() - before_s
    return Slice(1e3 * used_s / len(SLICE), events / len(SLICE))


async def measure(arms: Mapping[str, Arm], rounds: int, in_flight: int = IN_FLIGHT) -> list[Round]:
    """Run the slices one after the other, after a round that does not count.

    Ended by Ctrl-C or SIGTERM, it returns the rounds that are whole, if there are any.
    """
    made: list[Round] = []
    try:
        await _fill(made, arms, rounds, in_flight)
    except asyncio.CancelledError:
        if not made:
            raise
        sys.stderr.write(f"\nended after {len(made)} of {rounds} rounds\n")
    return made


async def _fill(made: list[Round], arms: Mapping[str, Arm], rounds: int, in_flight: int) -> None:
    for number in range(-1, rounds):
        at = number % len(arms)
        order = [*arms][at:] + [*arms][:at]
        if number // len(arms) % 2:
            order.reverse()
        slices = {name: await run_slice(arms[name], in_flight) for name in order}
        if number >= 0:
            made.append(slices)
        if sys.stderr.isatty() or number == rounds - 1:
            sys.stderr.write(f"\rround {number + 1} of {rounds} ")
            sys.stderr.flush()
    sys.stderr.write("\n")


def report(rounds: Sequence[Round]) -> dict[str, Any]:
    """Sum up: medians, and for each ratio of rounds the median with its interval."""
    told: dict[str, Any] = {}
    for name in rounds[0]:
        told[name] = {
            "cpu_ms_per_request": round(statistics.median(r[name].cpu_ms for r in rounds), 3),
            "events_per_answer": round(statistics.mean(r[name].events for r in rounds), 1),
        }
    told["ratio"] = _summary([_gated_by_plain(made) for made in rounds])
    if "again" in rounds[0]:
        told["null"] = _summary([r["again"].cpu_ms / r["plain"].cpu_ms for r in rounds])
    told["rounds"] = [{name: asdict(made) for name, made in r.items()} for r in rounds]
    return told


def _gated_by_plain(made: Round) -> float:
    plain = [made[name].cpu_ms for name in made if name != "gated"]
    return made["gated"].cpu_ms / statistics.fmean(plain)


def _summary(ratios: Sequence[float]) -> dict[str, float]:
    names = ("median", "low", "high")
    return {name: round(each, 4) for name, each in zip(names, interval(ratios), strict=True)}


def main() -> None:
    """Measure, write the report, print its figures."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.vllm.cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=30, help="of three slices (default 30)")
    parser.add_argument(
        "--in-flight",
        type=int,
        default=IN_FLIGHT,
        metavar="N",
        help=f"requests at a time (default {IN_FLIGHT})",
    )
    parser.add_argument("--out", type=Path, default=Path("out/vllm/cost.json"))
    parser.add_argument("--json", action="store_true", help="print the whole report")
    options = parser.parse_args()
    programs.end_on_signal()
    for name in ("rounds", "in_flight"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: must be at least 1")
    if not programs.installed():
        parser.error("the real vLLM is not installed; `make test-vllm` does it")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            programs.Scheduler(folder, [TENANT]),
            programs.vllm(folder, gated=True, switch=True) as server,
        ):
            past = Arm(server, PAST_THE_GATE)
            arms = {"plain": past, "gated": Arm(server, {}), "again": past}
            made = report(asyncio.run(measure(arms, options.rounds, options.in_flight)))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(made, indent=1) + "\n")
    shown = made if options.json else {k: v for k, v in made.items() if k != "rounds"}
    print(json.dumps(shown, indent=1))
    if len(made["rounds"]) < options.rounds:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
