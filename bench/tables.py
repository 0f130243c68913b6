"""`python -m bench.tables` measures what one token at full rate costs another's Admit, by table.

For each bounded table of the scheduler, one caller with a token fills it, and continues at full
rate (bench/table_floods.py). Another caller's requests are granted and complete at a steady low
rate. The scheduler has one core, and all clients another. The hostile caller attacks and rests in
turns, so a drift of the machine affects both. It has a quarter of the places, and the `loop_share`
of `--loop-share`.

The hostile client shares the other client's core, so it runs only when nothing else wants to. Even
so the other client waits now and then until the hostile one leaves the kernel. The scheduler does
not cause that: the bench leaves out an Admit for which the calling process waited for its core, and
prints the number of the others.

On a shared machine, latencies include the load of others. So the bench also measures the processor
time that the scheduler used during each Admit: the turns of the hostile caller before the answer.
"""

import tempfile
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.harness import (
    TOKENS,
    Victim,
    attacking,
    json_option,
    percentiles,
    principal,
    take_turns,
    verdict,
)
from bench.machine import generator_cores, pinned, server_cores
from bench.peers import serving
from bench.table_floods import FLOODS, POOL, TENANT

__all__ = ["P99_MS", "RATIO_MAX", "main", "measure"]

#: The other caller's p99 stays below the larger of this part of its quiet p99 and this time.
RATIO_MAX, P99_MS = 2.0, 2.0

#: Only Admits for which the caller waited no longer for its core are timed.
_DELAY_MS_MAX = 0.1
_PERIOD_S = 0.005
_SETTLE_S = 0.2
#: The hostile client shares the other one's core, and runs when nothing else wants to.
_IDLE = ("chrt", "--idle", "0")
_SLICE_S = 0.5
_EPILOG = """\b
Examples:
  python -m bench.tables --seconds 4
  python -m bench.tables --table pools --table "calls of Stats" --json

Exit status 1: with some table the other caller's p99 exceeded twice its quiet one, and 2 ms.
"""


def _settings(folder: Path, loop_share: float) -> dict[str, Any]:
    return {
        "listeners": [{"unix": str(folder / "scheduler.sock"), "auth": "token"}],
        "auth": {
            "principals": [
                principal("victim", pools=["gpu-0"], tenants=["conforming"]),
                principal(
                    "attacker",
                    pools=[f"{POOL}*"],
                    tenants=[f"{TENANT}*"],
                    share_of_places=0.25,
                    loop_share=loop_share,
                ),
            ]
        },
        # No lease of a flood ends while it is measured.
        "scheduler": {"lease_ttl_ms": 600_000, "queue_ttl_ms": 600_000},
        # One process can ask for all of them.
        "limits": {"drain_ms": 0, "sessions_max": 512},
        "tenants": [{"name": "conforming"}],
        "pools": [{"name": "gpu-0", "capacity_tokens": 200_000}],
        "log": {"level": "warning"},
    }


def measure(table: str, seconds: float, loop_share: float) -> dict[str, Any]:
    """Measure one table for `seconds` quiet and as many attacked; times in ms."""
    with (
        tempfile.TemporaryDirectory(prefix="tables-") as name,
        serving(Path(name), _settings(Path(name), loop_share)) as scheduler,
        pinned(generator_cores()),
    ):
        folder, turns = Path(name), max(1, round(seconds / _SLICE_S / 2))
        flood = ["-m", "bench.table_floods", "--table", table, "--target", scheduler.unix]
        flood += ["--token", TOKENS["attacker"]]
        with Victim(
            scheduler.unix, scheduler, _PERIOD_S, tenant="conforming", pools=["gpu-0"]
        ) as victim:
            victim.measure(_SLICE_S)  # warms up
            with attacking(
                flood, folder / "hostile.ready", before=_IDLE, settle_s=_SETTLE_S
            ) as hostile:
                slices = take_turns(victim, hostile, turns, _SLICE_S)
    taken = {when: [one for each in slices[when] for one in each] for when in slices}
    still = {when: [row for row in taken[when] if row.delay_ms <= _DELAY_MS_MAX] for when in taken}
    wall = {when: percentiles([row.ms for row in still[when]]) for when in taken}
    cpu = {when: percentiles([row.cpu_ms for row in still[when]]) for when in taken}
    return {
        "table": table,
        "loop_share": loop_share,
        "ms": {"quiet": wall[False], "attacked": wall[True]},
        "cpu_ms": {"quiet": cpu[False], "attacked": cpu[True]},
        "samples": {"quiet": len(still[False]), "attacked": len(still[True])},
        "left_out": sum(len(taken[when]) - len(still[when]) for when in taken),
        "p99_ratio": round(wall[True]["p99"] / wall[False]["p99"], 2),
        "holds": _holds(wall),
        "cpu_holds": _holds(cpu),
        "hostile": hostile.counts,
    }


def _holds(figures: dict[bool, dict[str, float]]) -> bool:
    quiet, attacked = (figures[attacks]["p99"] for attacks in (False, True))
    return attacked <= max(RATIO_MAX * quiet, P99_MS)


@click.command(epilog=_EPILOG)
@click.option("--table", "tables", type=click.Choice(FLOODS), multiple=True, help="Only this one.")
@click.option("--seconds", type=click.FloatRange(min=0.5), default=4.0, show_default=True)
@click.option(
    "--loop-share",
    type=click.FloatRange(0.001, 1.0),
    default=1.0,
    show_default=True,
    help="The hostile caller's part of the event loop's time; 1: no limit.",
)
@json_option
def main(tables: tuple[str, ...], seconds: float, loop_share: float, as_json: bool) -> None:
    """Measure what a flood of each bounded table costs another caller."""
    machine.need_release_core()
    measured = []
    for table in tables or FLOODS:
        click.echo(f"{table} ...", err=True)
        measured.append(measure(table, seconds, loop_share))
        click.echo(f"    {measured[-1]}", err=True)
    holds = all(each["holds"] for each in measured)
    verdict({"tables": measured, "holds": holds}, as_json, _show)


def _show(report: dict[str, Any]) -> None:
    cores = "one core each" if server_cores() else "shared cores"
    table = Table(
        *(
            "table",
            "quiet ms",
            "attacked",
            "ratio",
            "CPU ms",
            "attacked",
            "left out",
            "hostile events",
        ),
        box=box.SIMPLE_HEAD,
        caption=f"p50, p99 of the other caller's Admit, and of the scheduler's CPU time in it;"
        f" scheduler and clients: {cores}",
        caption_justify="left",
    )
    for each in report["tables"]:
        quiet, attacked, quiet_cpu, attacked_cpu = (
            f"{each[name][when]['p50']:.2f}, {each[name][when]['p99']:.2f}"
            for name in ("ms", "cpu_ms")
            for when in ("quiet", "attacked")
        )
        ratio = f"{each['p99_ratio']:.2f}{'' if each['holds'] else ' missed'}"
        attacked_cpu += "" if each["cpu_holds"] else " missed"
        sent = f"{each['hostile'].get('sent', 0):,}"
        left = f"{each['left_out']}"
        table.add_row(each["table"], quiet, attacked, ratio, quiet_cpu, attacked_cpu, left, sent)
    Console().print(table)


if __name__ == "__main__":
    main(prog_name="python -m bench.tables")
