"""Counts what the histograms of times cost beside a core that counts in none.

    python -m tests.core.histogram_cost

Each request is admitted, granted, reports its first output and is completed, so two of its times
are counted. It exits with status 1 if a time costs more than 60 instructions (callgrind).
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import click

from bench.instructions import Counter, under_callgrind
from bench.machine import FLAGS, need_release_core
from tests.other_core import compile_extension, core_sources, load
from tests.tidy.sources import ROOT

__all__ = ["INSTRUCTIONS_MAX", "main"]

INSTRUCTIONS_MAX = 60.0
#: Times that are counted of a request: its wait and that to its first output.
_TIMES = 2
_TENANTS = 64
_OBSERVE = re.compile(
    r'(cdef inline void observe\(.*?\) noexcept nogil:\n    """[^"]*"""\n).*?(?=\n\n\n)', re.DOTALL
)


def _without_histograms(folder: Path) -> Path:
    """Build the core with an empty `observe()`; return the extension's file."""
    for name, path in core_sources().items():
        text = path.read_text()
        if name == "model/histograms.pxi":
            text, found = _OBSERVE.subn(r"\1    pass", text)
            if found != 1:
                raise click.ClickException(f"{path}: has no observe() to leave out")
        copy = folder / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text)
    compile_extension(folder / "source" / "core.pyx", folder, FLAGS)
    return next(folder.glob("lib/_core*"))


class _Requests:
    """Takes requests through one core."""

    def __init__(self) -> None:
        from schedsvc import _core as core

        self._core = core
        self._scheduler = scheduler = core.Scheduler(lease_ttl_ns=1 << 55, queue_ttl_ns=1 << 55)
        self._flows = [scheduler.set_flow(b"tenant%d" % n, 1000) for n in range(_TENANTS)]
        scheduler.set_pool(0, b"pool", 1, 1 << 30, 16)
        self._asked = 0

    def run(self, count: int) -> None:
        """Admit, report and complete."""
        scheduler, completed = self._scheduler, self._core.COMPLETED
        for number in range(self._asked, self._asked + count):
            now_ns = 1_000_000 * number + 1
            flow = self._flows[number % _TENANTS]
            scheduler.admit(now_ns, flow, b"r%d" % number, 50, 50, -1, reports_progress=True)
            (granted,) = scheduler.poll(now_ns)
            lease = granted.lease_id
            scheduler.progress(now_ns + 500_000, lease, 1, 50, 0, 10)
            scheduler.complete(now_ns + 900_000, lease, 1, completed, 50, 0, 20)
        self._asked += count

    def counted(self) -> int:
        """How many times the histograms hold."""
        return sum(
            sum(row[name][0])
            for row in self._scheduler.histograms()
            for name in ("queue_wait", "time_to_first_token")
        )


def _both(path: Path) -> tuple[_Requests, _Requests]:
    """Requests of the core as it is, and of the one without histograms."""
    import schedsvc._core

    kept, as_it_is = schedsvc._core, _Requests()
    load(path)
    without = _Requests()
    sys.modules["schedsvc._core"] = schedsvc._core = kept  # type: ignore[attr-defined]
    return as_it_is, without


def _report(as_it_is: _Requests, without: _Requests, cost: Callable[[], bool]) -> bool:
    """Warm both up, and see that one counts and the other does not; then return the verdict."""
    for each, times in ((as_it_is, 2_000 * _TIMES), (without, 0)):
        each.run(2_000)
        if each.counted() != times:
            raise click.ClickException(f"{each.counted()} times were counted, not {times}")
    return cost()


def _instructions(path: Path, folder: Path, requests: int) -> bool:
    counter = Counter(folder)
    pair = _both(path)

    def cost() -> bool:
        found = []
        for each in pair:
            counter.look()
            each.run(requests)
            found.append(counter.look() / requests)
        a_time = (found[0] - found[1]) / _TIMES
        click.echo(f"instructions of a request: {found[0]:,.0f}, without {found[1]:,.0f}")
        click.echo(f"a time: {a_time:.1f} instructions, at most {INSTRUCTIONS_MAX:.0f}")
        return a_time <= INSTRUCTIONS_MAX

    return _report(*pair, cost)


@click.command(epilog="Example: python -m tests.core.histogram_cost --requests 1000")
@click.option("--requests", default=500, show_default=True, type=click.IntRange(min=1))
@click.option("--counted-in", type=click.Path(path_type=Path), hidden=True)
def main(requests: int, counted_in: Path | None) -> None:
    """Count what the histograms of times cost; exit with status 1 if that is too much."""
    if counted_in is not None:
        sys.exit(not _instructions(next(counted_in.glob("lib/_core*")), counted_in, requests))
    need_release_core()
    with tempfile.TemporaryDirectory() as name:
        _without_histograms(Path(name))
        command = [sys.executable, "-m", "tests.core.histogram_cost", "--counted-in", name]
        command += ["--requests", str(requests)]
        done = subprocess.run(under_callgrind(command, Path(name)), cwd=ROOT, check=False)
        sys.exit(done.returncode)


if __name__ == "__main__":
    main(prog_name="python -m tests.core.histogram_cost")
