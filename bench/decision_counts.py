"""Makes the core's decisions that `python -m bench.decisions` counts, one core in each process.

    python -m bench.decision_counts FOLDER CORE --flows 100000 --rounds 400

callgrind runs it, see `instructions.under_callgrind()`. It prints the instructions of each kind of
decision as JSON. It imports little, since callgrind slows all of it down.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from bench import inside
from bench.cores import Overload, Running
from bench.instructions import Counter

__all__ = ["LEASES", "Blocked"]

LEASES = (25, 240)
_CALLS = ("admit", "poll", "progress", "complete")
_METHOD = r"__pyx_pw_\w*9Scheduler_\d+(" + "|".join(_CALLS) + ")"
_PAIR_FLOWS = 1_000
_LEASE = (100, 100)  # input and output of the requests that run
_CANDIDATES = 8
_NEVER_NS = 1 << 50


class Blocked:
    """Holds a pool with leases of eight tenants, each of which has another request that fits.

    None of these may pass the next request, because they would delay its start.
    """

    def __init__(self, leases: int, scheduler: Any) -> None:
        self._now_ns = 0
        capacity = sum(_LEASE) * leases * 5 // 4 // 16 * 16
        self.core = scheduler(
            ledger="peak", dispatch="backfill", queue_ttl_ns=_NEVER_NS, lease_ttl_ns=_NEVER_NS,
            headroom_ppm=0, headroom_min_ppm=0, headroom_max_ppm=0,
        )  # fmt: skip
        self._head = self.core.set_flow(b"head", 1_000)
        flows = [self.core.set_flow(b"tenant%d" % flow, 1_000) for flow in range(_CANDIDATES)]
        self.core.set_pool(0, b"pool", 1, capacity, 16)
        for number in range(leases):
            self._admit(flows[number % _CANDIDATES], b"lease%d" % number, *_LEASE)
        self._leases = [granted.lease_id for granted in self.core.poll(0)]
        self._outputs = [0] * leases
        for at in range(leases):
            self._report(at, 1 + at * 60 // leases)
        # An eighth is kept for light tenants.
        self._waiting = self._admit(self._head, b"head", capacity * 7 // 8 - 300, 100)
        for number, flow in enumerate(flows):
            # With it a tenant holds more than its share, so it is not light.
            self._admit(flow, b"candidate%d" % number, 200 + capacity // 50, 2 * _LEASE[1])
        self._round = 0
        if len(self._leases) != leases or self.core.poll(self._now_ns):
            raise RuntimeError("the pool does not hold what it has to, and no more")

    def _admit(self, flow: int, request: bytes, tokens: int, most: int) -> int:
        handle: int = self.core.admit(
            self._now_ns, flow, request, tokens, most, reports_progress=True
        )
        return handle

    def _report(self, at: int, more: int) -> None:
        self._now_ns += 1_000
        self._outputs[at] += more
        self.core.progress(self._now_ns, self._leases[at], 1, _LEASE[0], 0, self._outputs[at])

    def run(self, rounds: int) -> None:
        """Report a token of a lease, and poll, which grants nothing."""
        for _ in range(rounds):
            self._report(self._round % len(self._leases), 1)
            self._round += 1
            if self.core.poll(self._now_ns):
                raise RuntimeError("a request passed that would move the start of the next one")

    def end(self) -> int:
        """Let the next request leave, and return how many of the others had fit."""
        self.core.cancel(self._now_ns, self._waiting)
        return len(self.core.poll(self._now_ns))


def _admits(scheduler: Any, flows: int) -> Callable[[int], None]:
    world = Overload(flows, flows, scheduler=scheduler)

    def run(rounds: int) -> None:
        for _ in range(rounds):
            world.admit(*world.next_ask())

    return run


def _pairs(scheduler: Any) -> Callable[[int], None]:
    world = Running(_PAIR_FLOWS, 1_000, scheduler)

    def run(rounds: int) -> None:
        for _ in range(rounds):
            world.pair(*world.next_ask())

    return run


def _count(folder: Path, core: Path, flows: int, rounds: int) -> dict[str, float]:
    """Count the instructions of each kind of decision."""
    scheduler = inside.load_from(core).Scheduler
    counter, found = Counter(folder), dict[str, float]()

    def counted(name: str, run: Callable[[int], None]) -> None:
        run(rounds // 4)
        counter.look()
        run(rounds)
        found[name] = sum(counter.look_at(_METHOD).values()) / rounds

    counted("admit", _admits(scheduler, flows))
    counted("pair", _pairs(scheduler))
    for leases in LEASES:
        world = Blocked(leases, scheduler)
        counted(f"blocked {leases}", world.run)
        if not world.end():
            raise RuntimeError("no candidate had room")
    return found


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("core", type=click.Path(path_type=Path))
@click.option("--flows", type=int, required=True)
@click.option("--rounds", type=int, required=True)
def main(folder: Path, core: Path, flows: int, rounds: int) -> None:
    """Count the instructions of one core's decisions."""
    click.echo(json.dumps(_count(folder, core, flows, rounds)))


if __name__ == "__main__":
    main()
