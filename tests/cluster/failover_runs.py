"""Runs many real failovers, whose results are in a file: `python -m tests.cluster.failovers`."""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from schedsvc_lab.demo.processes import DIES_WITH_PARENT

from .cut_network import missing
from .failovers import GAP_S_MAX, KINDS, NotBegunError, one

#: The tenants ask for less than in a test, so that two failovers at a time fit two cores.
LOAD = {"loops": 16, "hold_s": 0.1}
STOPPED_S = 10.0
#: Times that a failover is set up, if the machine is too busy for it to begin.
TRIES = 5
_WRONG_SHOWN = 20
Row = dict[str, Any]

_EXAMPLE = """\
example:
  python -m tests.cluster.failovers --each 100 --out out/failovers

The results are lines of JSON in OUT/results.jsonl. A run goes on with those that are missing. Exit
status: 0: all are there, and none is wrong; 1: one is wrong, or a median gap is beyond its target;
2: some are missing. OUT/wrong has the logs of the members whose failover was wrong.
"""


@dataclass(frozen=True)
class Asked:
    """Names the failovers that are asked for, and the file of their results."""

    kinds: tuple[str, ...]
    each: int
    out: Path

    @property
    def file(self) -> Path:
        """Return the file of results."""
        return self.out / "results.jsonl"

    def rows(self) -> list[Row]:
        """Return the results so far of what is asked for. O(file)."""
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]  # a kill may cut the last
        return [row for row in rows if row["kind"] in self.kinds and row["number"] < self.each]

    def missing(self) -> list[tuple[int, str]]:
        """Return number and kind of what has no result, all kinds in turn."""
        done = {(row["number"], row["kind"]) for row in self.rows()}
        wanted = [(number, kind) for number in range(self.each) for kind in self.kinds]
        return [each for each in wanted if each not in done]

    def add(self, row: Row) -> None:
        """Append a result; several processes may do so."""
        line = json.dumps(row) + "\n"
        with self.file.open("a") as out:
            out.write(line)


def run_one(kind: str, number: int, out: Path) -> Row | None:
    """Run one failover; None if none began, because the members did not come up.

    If it was wrong, the logs of its members are kept in `out`.
    """
    for _ in range(TRIES):
        with tempfile.TemporaryDirectory(prefix="fo-") as folder:
            try:
                seen = asyncio.run(one(kind, Path(folder), stopped_s=STOPPED_S, **LOAD))
            except NotBegunError as error:
                print(f"{kind} {number} did not begin: {error}", file=sys.stderr)
                continue
            seen.number = number
            if seen.wrong:
                _keep_logs(Path(folder), out / "wrong" / f"{kind}-{number}")
            return asdict(seen)
    return None


def _keep_logs(folder: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for log in folder.glob("*.log"):
        shutil.copy(log, out)


def work(asked: Asked, part: int, parts: int, end_s: float) -> None:
    """Run what is missing of one part, until it is done or the time is over."""
    for number, kind in asked.missing():
        if (number * len(asked.kinds) + asked.kinds.index(kind)) % parts != part:
            continue
        if time.time() >= end_s:
            return
        row = run_one(kind, number, asked.out)
        if row is not None:
            asked.add(row)
            broken, over, other = counted([row])
            gap = "no gap" if row["gap_s"] is None else f"gap {row['gap_s']:.2f} s"
            print(
                f"{datetime.now():%H:%M:%S} {kind} {number}: {gap},"
                f" {row['granted']} grants,"
                f" {broken} broken streams, {over} over-grants, {other} other violations",
                flush=True,
            )


def counted(rows: Sequence[Row]) -> tuple[int, int, int]:
    """Count broken streams, over-grants, and other violations."""
    fields = ("broken_streams", "over_grants", "violations")
    broken, over, other = (sum(len(row[field]) for row in rows) for field in fields)
    return broken, over, other


def table(rows: Sequence[Row]) -> str:
    """Print the results: a line for each kind, then the violations."""
    head = (
        "| leader | failovers | grants | broken streams | over-grants | other violations "
        "| gap median | p95 | most | target | within |"
    )
    lines = [head, "|" + " --- |" * 11]
    for kind in KINDS:
        of_kind = [row for row in rows if row["kind"] == kind]
        if not of_kind:
            continue
        gaps = sorted(row["gap_s"] for row in of_kind if row["gap_s"] is not None)
        within = sum(gap <= GAP_S_MAX[kind] for gap in gaps)
        cells = [
            *(kind, len(of_kind), sum(row["granted"] for row in of_kind), *counted(of_kind)),
            *_points(gaps),
            *(f"{GAP_S_MAX[kind]:g} s", f"{within} of {len(of_kind)}"),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    wrong = [
        f"{row['kind']} {row['number']}: {text}"
        for row in rows
        for field in ("broken_streams", "over_grants", "violations")
        for text in row[field]
    ]
    more = [f"and {len(wrong) - _WRONG_SHOWN} more"] if len(wrong) > _WRONG_SHOWN else []
    return "\n".join([*lines, *wrong[:_WRONG_SHOWN], *more])


def too_slow(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each kind whose median gap is beyond its target."""
    found = []
    for kind, most in GAP_S_MAX.items():
        gaps = [row["gap_s"] for row in rows if row["kind"] == kind and row["gap_s"] is not None]
        if gaps and statistics.median(gaps) > most:
            gap_s = statistics.median(gaps)
            found.append(
                f"{kind}: the median gap is {gap_s:.2f} s, beyond its target of {most:g} s"
            )
    return found


def _points(gaps: Sequence[float]) -> tuple[str, ...]:
    """Write median, 95th percentile and greatest of sorted gaps."""
    if not gaps:
        return "none", "none", "none"
    p95 = gaps[min(len(gaps) - 1, int(len(gaps) * 0.95))]
    return tuple(f"{gap:.2f} s" for gap in (statistics.median(gaps), p95, gaps[-1]))


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster.failovers",
        description="Fail over between two schedulers for real, again and again, under load.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--each", type=int, default=10, help="failovers of each kind (10)")
    parser.add_argument(
        "--kind", choices=KINDS, action="append", help="only this kind; may be repeated"
    )
    parser.add_argument("--out", type=Path, default=Path("out/failovers"), help="folder of results")
    parser.add_argument("--jobs", type=int, default=2, help="failovers at a time (2)")
    parser.add_argument("--minutes", type=float, default=75.0, help="begin none after this (75)")
    parser.add_argument("--json", action="store_true", help="print the results instead of a table")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--end-s", type=float, default=0.0, help=argparse.SUPPRESS)
    found = parser.parse_args(given)
    for name in ("each", "jobs"):
        if getattr(found, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(found, name)}")
    if found.minutes <= 0:
        parser.error(f"--minutes must be positive, not {found.minutes:g}")
    if missing() and "cut" in (found.kind or KINDS):
        others = " ".join(f"--kind {kind}" for kind in KINDS if kind != "cut")
        parser.error(f"cannot cut a network here: {missing()}; choose {others}")
    return found


def main(given: Sequence[str] | None = None) -> int:
    """Run what is missing, and print the results; returns the exit status."""
    options = _arguments(given)
    asked = Asked(tuple(dict.fromkeys(options.kind or KINDS)), options.each, options.out)
    if options.part is not None:
        work(asked, options.part, options.jobs, options.end_s)
        return 0
    asked.out.mkdir(parents=True, exist_ok=True)
    end_s = time.time() + options.minutes * 60
    if asked.missing():
        _run_parts(asked, options.jobs, end_s)
    rows, left = asked.rows(), asked.missing()
    print(json.dumps(rows) if options.json else table(rows))
    if left:
        print(f"{len(left)} are missing; the same command goes on with them", file=sys.stderr)
    slow = too_slow(rows)
    for text in slow:
        print(text, file=sys.stderr)
    if slow or any(counted(rows)):
        return 1
    return 2 if left else 0


def _run_parts(asked: Asked, jobs: int, end_s: float) -> None:
    module = [*DIES_WITH_PARENT, sys.executable, "-m", "tests.cluster.failovers"]
    kinds = [word for kind in asked.kinds for word in ("--kind", kind)]
    words = [*kinds, "--each", str(asked.each), "--out", str(asked.out), "--jobs", str(jobs)]
    parts = [
        subprocess.Popen(
            [*module, *words, "--part", str(part), "--end-s", str(end_s)],
            stdout=sys.stderr,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        for part in range(jobs)
    ]
    for part in parts:
        part.wait()
