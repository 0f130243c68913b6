"""`schedsvc simtest` makes all that can go wrong happen, in virtual time, from a seed."""

import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib import resources
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from schedsvc.text.option_types import FiniteRange, WholeRange, check_file
from schedsvc.text.tables import table_console
from schedsvc_lab.faults.cluster_options import CLUSTER, REFUSING
from schedsvc_lab.faults.marathon import Marathon, run_marathon
from schedsvc_lab.faults.options import FAULTS, NEWEST, NO_TREES, TREES
from schedsvc_lab.faults.run import EVENTS, Case, Tally, run_cases, shrink
from schedsvc_lab.faults.totals_file import STORE_EACH, TotalsFile

_FAILURES_MAX = 5
"""The run makes this many failing seeds small and shows them, then begins no new seed."""

EPILOG = """\b
Example:
  schedsvc simtest --seeds 1000
  schedsvc simtest --minutes 1 --json
  schedsvc simtest --seed 4711 --events 250 --only stream-cut,admit-twice
  schedsvc simtest --seed 281474976710656 --seeds 50000 --totals hostile.json
  schedsvc simtest --cluster --seeds 200
  schedsvc simtest --regressions
  schedsvc simtest --marathon 10000000

One seed is one run: the same on every machine, as long as the code is the same. Without --seed,
--seeds begins where everything is drawn (at 2^47; lower seeds leave the newer features out), and
--minutes at a fresh one beyond, which is printed. From 2^48 on, one caller acts against all others.
From 2^54 on, where --cluster begins, a seed is a run of two to five schedulers and their store.
With --totals, the same command again goes on after the last seed. The exit status is 1 where a
promise was broken.
"""


def _parse_faults(
    _: click.Context, __: click.Parameter, value: str | None
) -> frozenset[str] | None:
    if value is None:
        return None
    names = frozenset(name.strip() for name in value.split(",") if name.strip()) - {"none"}
    unknown = sorted(names - set(FAULTS))
    if unknown:
        raise click.BadParameter(
            f"unknown: {', '.join(unknown)}; schedsvc simtest --faults lists them, 'none' is none"
        )
    return names


def _regressions() -> list[Case]:
    text = resources.files("schedsvc_lab.faults").joinpath("seeds.json").read_text()
    return [Case(entry["seed"]) for entry in json.loads(text)]


def _cases(
    seed: int, seeds: int | None, minutes: float | None, events: int, only: frozenset[str] | None
) -> Iterator[Case]:
    """Give seeds until there are enough, or the time is up."""
    until_s = None if minutes is None else time.monotonic() + 60 * minutes
    for number in count(seed):
        if seeds is not None and number >= seed + seeds:
            return
        if until_s is not None and time.monotonic() >= until_s:
            return
        yield Case(number, events, only)


def _run(
    cases: Iterator[Case],
    tally: Tally,
    total: int | None,
    minutes: float | None,
    file: TotalsFile | None,
) -> float:
    """Run all, with a bar. Returns the CPU seconds that they took."""
    began_s, before_ns = time.monotonic(), time.process_time_ns()
    with Progress(
        TextColumn("{task.fields[seeds]:,} seeds, {task.fields[events]:,} events"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        whole = float(total) if total is not None else 60 * (minutes or 0)
        task = bar.add_task("", total=whole, seeds=0, events=0)
        for _ in run_cases(cases, tally):
            done = tally.seeds if total is not None else time.monotonic() - began_s
            bar.update(task, completed=done, seeds=tally.seeds, events=tally.events)
            if file is not None and tally.seeds % STORE_EACH == 0:
                file.store((time.process_time_ns() - before_ns) / 1e9)
            if len(tally.failures) >= _FAILURES_MAX:
                break
    # A clock may not advance over a very short run.
    cpu_s = max(time.process_time_ns() - before_ns, 1_000) / 1e9
    if file is None:
        return cpu_s
    file.store(cpu_s)
    return file.cpu_s + cpu_s


def _report(tally: Tally, cpu_s: float, first: int | None) -> dict[str, Any]:
    failures = []
    for case, violation in tally.failures:
        small = shrink(case, violation)
        failures.append({"seed": case.seed, "violation": violation, "reproduce": small.command()})
    return {
        "seeds": tally.seeds,
        "events": tally.events,
        "violations": len(tally.failures),
        "events_per_s": round(tally.events / cpu_s),
        "first_seed": first,
        "faults": tally.faults,
        "failures": failures,
    }


def _show(report: dict[str, Any], console: Console) -> None:
    table = Table(title="faults", title_justify="left")
    table.add_column("fault")
    table.add_column("times", justify="right")
    for name, times in report["faults"].items():
        table.add_row(name, f"{times:,}")
    console.print(table)
    first = "" if report["first_seed"] is None else f" from {report['first_seed']}"
    console.print(
        f"{report['seeds']:,} seeds{first}, {report['events']:,} events,"
        f" {report['events_per_s']:,} events per CPU second,"
        f" {report['violations']} violations",
        highlight=False,
    )
    for failure in report["failures"]:
        console.print(
            f"seed {failure['seed']}: {failure['violation']}\n  {failure['reproduce']}",
            highlight=False,
            soft_wrap=True,
        )


def _run_marathon(requests: int, seed: int, as_json: bool) -> None:
    """Run it, show what is left, and fail where that is anything."""
    before_ns = time.process_time_ns()
    with Progress(
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("", total=requests)
        found = run_marathon(
            requests, seed=seed, watch=lambda done: bar.update(task, completed=done)
        )
    cpu_s = max(time.process_time_ns() - before_ns, 1_000) / 1e9
    left = found.promised_tokens or found.live_leases or found.queued
    if as_json:
        report = asdict(found) | {"requests_per_s": round(requests / cpu_s)}
        click.echo(json.dumps(report, indent=2))
    else:
        _show_marathon(found, cpu_s)
    if left:
        raise click.ClickException("something is left at rest: see promised, live and queued above")


def _show_marathon(found: Marathon, cpu_s: float) -> None:
    table = Table(
        title=f"{found.requests:,} requests, {cpu_s:.1f} CPU seconds", title_justify="left"
    )
    table.add_column("")
    table.add_column("requests", justify="right")
    for name, value in asdict(found).items():
        if name in ("granted", "completed", "cancelled", "lost", "expired", "refused"):
            table.add_row(name, f"{value:,}")
    table_console(markup=True).print(table)
    table_console(markup=True).print(
        f"at rest: {found.promised_tokens:,} tokens promised, {found.live_leases:,} leases live,"
        f" {found.queued:,} requests queued",
        highlight=False,
    )


def _cluster_seed(seed: int | None, minutes: float | None) -> int:
    """Return the first seed of a run of clusters: the newest ones if none is given.

    A small `seed` counts from the first of all.
    """
    for package in ("redis", "lupa", "msgpack"):
        if find_spec(package) is None:
            raise click.UsageError(
                f"--cluster needs the package {package}: pip install 'schedsvc-lab[cluster]'"
            )
    if seed is None:
        return REFUSING + (0 if minutes is None else secrets.randbelow(CLUSTER))
    return seed if seed >= CLUSTER else CLUSTER + seed


def _totals_file(path: Path, first: int) -> TotalsFile:
    check_file(path, "--totals")
    try:
        return TotalsFile(path, first)
    except (OSError, ValueError, KeyError) as error:
        raise click.UsageError(f"--totals: {error}") from error


def _list_faults() -> None:
    table = Table(box=None)
    table.add_column("fault")
    table.add_column("what happens")
    for name, (_, what) in FAULTS.items():
        table.add_row(name, what)
    table_console(markup=True).print(table)


@click.command("simtest", epilog=EPILOG)
@click.option("--seed", type=WholeRange(0, 1 << 60), help="The seed, or the first of several.")
@click.option(
    "--seeds",
    type=WholeRange(1),
    help="Number of seeds; default: 1, or as many as the time allows.",
)
@click.option(
    "--minutes",
    type=FiniteRange(0, 10_000, min_open=True),
    metavar="MINUTES",
    help="Run for this many minutes.",
)
@click.option(
    "--events",
    type=WholeRange(1, 100_000_000),
    default=EVENTS,
    show_default=True,
    help="Events of a seed, before the phase without faults.",
)
@click.option(
    "--only",
    callback=_parse_faults,
    metavar="NAME,...",
    help="Only these faults, separated by commas, or 'none'.",
)
@click.option(
    "--cluster",
    is_flag=True,
    help="Several schedulers with one store: seeds from 7 * 2^53; --seed counts from 2^54.",
)
@click.option("--regressions", is_flag=True, help="Run the seeds that have failed once.")
@click.option(
    "--marathon",
    type=WholeRange(1, 1_000_000_000),
    help="Run this many requests instead, cancel 20 %, lose 5 % of Completes; show what is left.",
)
@click.option(
    "--totals",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep totals in FILE, and go on after the last seed in it. Needs --seed and --seeds.",
)
@click.option("--faults", "list_faults", is_flag=True, help="List the faults.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def simtest(
    seed: int | None,
    seeds: int | None,
    minutes: float | None,
    events: int,
    only: frozenset[str] | None,
    cluster: bool,
    regressions: bool,
    marathon: int | None,
    totals: Path | None,
    list_faults: bool,
    as_json: bool,
) -> None:
    """Test the scheduling core against every fault, in virtual time, with an independent audit."""
    if list_faults:
        _list_faults()
        return
    if cluster and (regressions or marathon):
        alone = "--regressions" if regressions else "--marathon"
        raise click.UsageError(f"{alone} cannot be given with --cluster")
    if cluster:
        seed = _cluster_seed(seed, minutes)
    if (regressions or marathon) and (seeds is not None or minutes is not None):
        alone = "--regressions" if regressions else "--marathon"
        raise click.UsageError(f"{alone} cannot be given with --seeds or --minutes")
    if regressions and (seed is not None or marathon):
        raise click.UsageError("--regressions cannot be given with --seed or --marathon")
    if marathon:
        _run_marathon(marathon, seed or 0, as_json)
        return
    if totals is not None and (seed is None or seeds is None or minutes is not None):
        raise click.UsageError("--totals needs --seed and --seeds, and no --minutes")
    cases: Iterator[Case]
    tally, total, first = Tally(), seeds, seed
    file = None
    if regressions:
        known = _regressions()
        cases, total = iter(known), len(known)
    else:
        if minutes is None and seeds is None:
            if seed is None:
                raise click.UsageError("give --seed N, --seeds N, --minutes M or --regressions")
            total = seeds = 1
        if first is None:
            fresh = NEWEST + secrets.randbelow(NO_TREES - NEWEST)
            first = TREES if minutes is None else fresh
        cases = _cases(first, seeds, minutes, events, only)
        if totals is not None and seeds is not None:
            file = _totals_file(totals, first)
            tally = file.tally
            left = seeds - tally.seeds
            cases = _cases(file.next_seed, left, None, events, only)
    cpu_s = _run(cases, tally, total, minutes, file)
    report = _report(tally, cpu_s, first)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _show(report, table_console(markup=True))
    if report["violations"]:
        raise click.exceptions.Exit(1)
