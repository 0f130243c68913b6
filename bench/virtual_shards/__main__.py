"""`python -m bench.virtual_shards` starts here."""

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.memory import peak_mb, resident_mb
from bench.virtual_shards.bars import bars
from bench.virtual_shards.chart import draw
from bench.virtual_shards.measures import measure
from bench.virtual_shards.plan import Plan
from bench.virtual_shards.world import World

_EPILOG = """\b
Examples:
  python -m bench.virtual_shards --members 5 --tenants 1000 --active 250 --rate 40
  python -m bench.virtual_shards --out out/virtual-shards

The second one has 100 members and 1,000,000 tenants; it takes 5 minutes of a core, and 5 GB.
The costs of the store are those of a real one as measured before, so its part of a core is an
estimate.

Exit status 1: a bar was missed.
"""
#: Virtual seconds between two lines of progress.
_LINE_S = 5


def _progress(what: str, plan: Plan) -> Callable[[int, int], None]:
    began_s = time.monotonic()

    def show(at_s: int, requests: int) -> None:
        if at_s % _LINE_S == 0 or at_s == plan.end_s:
            click.echo(
                f"{what}: {at_s} of {plan.end_s} virtual seconds, {requests:,} requests,"
                f" {resident_mb('self'):,.0f} MB, {(time.monotonic() - began_s) / 60:.1f} minutes",
                err=True,
            )

    return show


def _run(plan: Plan, what: str) -> dict[str, Any]:
    world = World(plan, _progress(what, plan))
    world.run()
    found = measure(world)
    del world
    gc.collect()
    return found


def compare(plan: Plan) -> dict[str, Any]:
    """Run a plan with its store, and its quiet part without one; return the figures of both."""
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    quiet = replace(plan, has_store=False, stop_s=int(plan.outages[0].from_s))
    apart = _run(quiet, "without a store")
    found = _run(plan, "with a store")
    found["apart"] = apart
    found["memory_mb"] = round(peak_mb("self"))
    found["wall_minutes"] = round((time.monotonic() - began_s) / 60, 1)
    found["cpu_minutes"] = round((time.process_time() - began_cpu_s) / 60, 1)
    found["bars"] = [list(bar) for bar in bars(found)]
    found["holds"] = all(holds for *_, holds in bars(found))
    return found


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    quiet, apart, store = found["quiet"], found["apart"]["all"], found["store"]
    rows = [
        ("requests", f"{found['requests']:,}"),
        ("wait of a tenant that is not active, p99", f"{found['passing']['wait_p99_s']:g} s"),
    ]
    for name, part in (("quiet", quiet), ("whole run", found["all"]), ("no store", apart)):
        errors = (part[f"error_{which}"] for which in ("median", "p99", "max"))
        rows.append(
            (f"share error, {name}: median, p99, greatest", ", ".join(f"{e:.2%}" for e in errors))
        )
        parts = f"{part['thin']:.3f}, {part['full']:.3f}"
        rows.append((f"of the fair part, {name}: little demand at one shard, much at both", parts))
    outages, unsynced = found["outages"], found["unsynced_s"]
    rows += [
        (
            "unsynced: mean, greatest, in outages",
            f"{unsynced['mean']:g} s, {unsynced['greatest']:g} s,"
            f" {max(outage['unsynced_s'] for outage in outages):g} s",
        ),
        (
            "all totals exchanged, after each outage",
            ", ".join(
                "not" if each["exchanged_s"] is None else f"{each['exchanged_s']:g} s"
                for each in outages
            ),
        ),
        ("calls of the store", f"{store['calls_per_s']:g}/s"),
        ("totals: mean, peak", f"{store['totals_per_s']:,}/s, {store['totals_per_s_peak']:,}/s"),
        (
            "bytes written, read",
            f"{store['written_bytes_per_s']:,}/s, {store['read_bytes_per_s']:,}/s",
        ),
        ("bytes of a member", f"{store['member_bytes_per_s']:,}/s"),
        ("the store, of a core: mean, peak", f"{store['core']:.1%}, {store['core_peak']:.1%}"),
        (
            "for 5 % of a core each",
            f"{store['stores_at_5_percent']} stores, or an exchange every"
            f" {store['interval_s_at_5_percent']:g} s",
        ),
        ("time of the run", f"{found['wall_minutes']:g} minutes"),
        ("digest", found["digest"]),
    ]
    return rows


def _show(found: dict[str, Any]) -> None:
    console, table, judged = Console(), Table("", ""), Table("", "bound", "", "")
    for row in _rows(found):
        table.add_row(*row)
    for name, value, bound, holds in found["bars"]:
        text = "-" if value is None else f"{value:,.0f}" if value >= 1_000 else f"{value:g}"
        judged.add_row(name, bound, text, "holds" if holds else "MISSED")
    console.print(table)
    console.print(judged)


@click.command(epilog=_EPILOG)
@click.option("--members", type=click.IntRange(2, 512), default=Plan.members, show_default=True)
@click.option("--tenants", type=click.IntRange(2), default=Plan.tenants, show_default=True)
@click.option(
    "--active", type=click.IntRange(1), default=Plan.active, show_default=True,
    help="Tenants that have requests waiting all the time; the others send one to each shard.",
)  # fmt: skip
@click.option(
    "--rate", type=click.FloatRange(1), default=Plan.rate, show_default=True,
    help="Requests a second of the average shard.",
)  # fmt: skip
@click.option(
    "--seconds", type=click.IntRange(90, 3_600), default=Plan.seconds, show_default=True,
    help="Virtual seconds.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=Plan.seed, show_default=True)
@click.option(
    "--sync-ms", type=click.IntRange(50, 5_000), default=None,
    help="cluster.sync_ms of all members; without it: auto.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=None,
    help="Write result.json and a picture into this folder.",
)  # fmt: skip
def main(
    members: int,
    tenants: int,
    active: int,
    rate: float,
    seconds: int,
    seed: int,
    sync_ms: int | None,
    as_json: bool,
    out: Path | None,
) -> None:
    """Simulate many schedulers that share one fairness, with their real cores and members."""
    plan = Plan(members, tenants, active, rate, seconds, seed, sync_ms or "auto")
    problem = plan.problem
    if problem:
        raise click.UsageError(problem)
    found: dict[str, Any] = {"machine": machine.describe(), "commit": machine.commit()}
    found["plan"] = asdict(plan)
    found |= compare(plan)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "result.json").write_text(json.dumps(found))
        draw(found, out / "virtual_shards.png")
    if as_json:
        whole = {name: value for name, value in found.items() if name not in ("series", "apart")}
        click.echo(json.dumps(whole | {"apart": found["apart"]["all"]}))
    else:
        _show(found)
    sys.exit(0 if found["holds"] else 1)


if __name__ == "__main__":
    main(prog_name="python -m bench.virtual_shards")
