"""Counts the cost of a tree of shares for each call: instructions at depth 4 and at depth 1.

    python -m tests.core.depth_cost
    python -m tests.core.depth_cost --pools 1 --any

64 tenants are below no groups, or below three levels of weighted groups with four children each,
all with a backlog. Each round reports on a lease, completes it, admits another request, and polls,
which grants it. It exits with status 1 if groups make a call cost more than 1.5 times as much.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from bench.instructions import Counter, under_callgrind
from schedsvc import _core as core
from tests.tidy.sources import ROOT

__all__ = ["CALLS", "RATIO_MAX", "main"]

RATIO_MAX = 1.5
DEPTHS = (1, 4)
#: The poll makes the grant.
CALLS = ("admit", "poll", "progress", "complete")
_TENANTS = 64
_NEVER_NS = 1 << 55
_WARM_UP = 50
_METHOD = r"__pyx_pw_\w*9Scheduler_\d+(" + "|".join(CALLS) + r")"


class _Requests:
    """Takes requests through one core with a tree of a depth."""

    def __init__(self, depth: int, pools: int, *, names_pool: bool) -> None:
        self._pools, self._names_pool = pools, names_pool
        self._asked, self._now_ns = 0, 1
        self._scheduler = scheduler = core.Scheduler(
            queue_max=1 << 20, flow_queue_max=1 << 16,
            queue_ttl_ns=_NEVER_NS, lease_ttl_ns=_NEVER_NS,
        )  # fmt: skip
        self._flows = [self._tenant(tenant, depth) for tenant in range(_TENANTS)]
        for pool in range(pools):
            scheduler.set_pool(0, b"pool%d" % pool, 1, 3200, 16)
        for _ in range(8 * _TENANTS * pools):
            self._ask()
        self._live = self._granted()

    def _tenant(self, tenant: int, depth: int) -> int:
        parent = -1
        for level in range(1, depth):
            name = b"group:%d.%d" % (level, tenant * 4**level // _TENANTS)
            parent = self._scheduler.set_quota(0, name, parent, weight_milli=1000)
        flow = self._scheduler.set_flow(b"tenant%d" % tenant, 1000)
        self._scheduler.set_flow_quota(0, flow, parent)
        return flow

    def _ask(self) -> None:
        self._asked += 1
        flow = self._flows[self._asked * 7 % _TENANTS]
        pool = self._asked % self._pools if self._names_pool else -1
        request = b"r%d" % self._asked
        self._scheduler.admit(self._now_ns, flow, request, 50, 50, pool, reports_progress=True)

    def _granted(self) -> list[int]:
        decisions = self._scheduler.poll(self._now_ns)
        return [each.lease_id for each in decisions if each.outcome == core.GRANTED]

    def run(self, rounds: int) -> None:
        """Report, complete, admit and poll."""
        for _ in range(rounds):
            self._now_ns += 1
            lease = self._live.pop(0)
            self._scheduler.progress(self._now_ns, lease, 1, 50, 0, 10)
            self._scheduler.complete(self._now_ns, lease, 1, core.COMPLETED, 50, 0, 20)
            self._ask()
            self._live += self._granted()


def _count(folder: Path, pools: int, rounds: int, *, names_pool: bool) -> dict[str, list[float]]:
    """Return the instructions of one call at each depth, by its name."""
    counter = Counter(folder)
    found: dict[str, list[float]] = {call: [] for call in CALLS}
    for depth in DEPTHS:
        requests = _Requests(depth, pools, names_pool=names_pool)
        requests.run(_WARM_UP)
        counter.look()
        requests.run(rounds)
        counts = counter.look_at(_METHOD)
        for call in CALLS:
            if call not in counts:
                raise click.ClickException(f"callgrind counted no call of {call}()")
            found[call].append(counts[call] / rounds)
    return found


def _report(found: dict[str, list[float]], *, as_json: bool) -> bool:
    ratios = {call: deep / flat for call, (flat, deep) in found.items()}
    if as_json:
        rows = {
            call: {"depth_1": flat, "depth_4": deep, "ratio": round(ratios[call], 3)}
            for call, (flat, deep) in found.items()
        }
        click.echo(json.dumps({"calls": rows, "ratio_max": RATIO_MAX}))
    else:
        click.echo(f"{'instructions of':16} {'depth 1':>10} {'depth 4':>10} {'ratio':>6}")
        for call, (flat, deep) in found.items():
            click.echo(f"{call:16} {flat:10,.0f} {deep:10,.0f} {ratios[call]:6.2f}")
        click.echo(f"a ratio may be {RATIO_MAX} at most")
    return max(ratios.values()) <= RATIO_MAX


@click.command(epilog="Example: python -m tests.core.depth_cost --pools 3 --json")
@click.option("--pools", default=3, show_default=True, type=click.IntRange(1, 64))
@click.option("--any", "is_any", is_flag=True, help="Requests name no pool; else each names one.")
@click.option("--rounds", default=200, show_default=True, type=click.IntRange(min=1))
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON.")
@click.option("--counted-in", type=click.Path(path_type=Path), hidden=True)
def main(pools: int, rounds: int, *, is_any: bool, as_json: bool, counted_in: Path | None) -> None:
    """Count the cost of a tree of shares with callgrind; exit with status 1 if it is too high."""
    if counted_in is not None:
        found = _count(counted_in, pools, rounds, names_pool=not is_any)
        sys.exit(not _report(found, as_json=as_json))
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "tests.core.depth_cost", "--counted-in", name]
        command += ["--pools", str(pools), "--rounds", str(rounds)]
        command += ["--any"] * is_any + ["--json"] * as_json
        try:
            done = subprocess.run(under_callgrind(command, Path(name)), cwd=ROOT, check=False)
        except FileNotFoundError:
            raise click.ClickException("valgrind is not installed; it counts") from None
        sys.exit(done.returncode)


if __name__ == "__main__":
    main(prog_name="python -m tests.core.depth_cost")
