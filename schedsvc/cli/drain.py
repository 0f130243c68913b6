"""Lets nothing new into a pool, or into the whole service: `schedsvc drain`."""

import json
import time
from typing import Any

import click
from schedsvc_client.operator import Operator

from schedsvc.cli.complete import complete_pools
from schedsvc.cli.connect import Connection, connects
from schedsvc.text.option_types import FiniteRange

_EPILOG = """\b
Example:
  schedsvc drain gpu-1 --wait 300 && ssh gpu-1 reboot
  schedsvc drain gpu-1 --undo
  schedsvc drain --all --wait 60

Running requests go on. Queued requests that no other pool can hold are refused, with a Retry-After.
A drain lasts until --undo, whatever the engine does meanwhile. It outlasts a restart of the
scheduler if its configuration names a state file. With --wait the exit status is 0 only if no
request runs any more.
"""
_LOOK_S = 0.5


@click.command(epilog=_EPILOG)
@connects
@click.argument("pool", required=False, shell_complete=complete_pools)
@click.option(
    "--all", "everything", is_flag=True, help="Drain all pools; health says that it is not ready."
)
@click.option("--undo", is_flag=True, help="Admit again.")
@click.option(
    "--wait",
    "wait_s",
    type=FiniteRange(min=0.0),
    metavar="SECONDS",
    help="Wait up to SECONDS for running requests to finish.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def drain(
    connection: Connection,
    pool: str | None,
    everything: bool,
    undo: bool,
    wait_s: float | None,
    as_json: bool,
) -> None:
    """Stop admitting to a POOL, or to --all."""
    if pool and everything:
        raise click.UsageError(
            f"{pool!r} and --all exclude each other: name the pool alone, or give --all alone"
        )
    if not pool and not everything:
        raise click.UsageError("name a pool, or give --all")
    if undo and wait_s is not None:
        raise click.UsageError("--wait goes with a drain, not with --undo")
    name = pool or ""
    with Operator(connection.target, **connection.proof) as operator:
        answer = operator.drain(name, undo=undo)
        running, drained = answer.live_leases, not undo
        is_kept = not undo and operator.stats().HasField("state")
        began_s = time.monotonic()
        if wait_s is not None:
            running, drained = _wait(operator, name, began_s + wait_s, running)
    waited_s = round(time.monotonic() - began_s, 1)
    if as_json:
        shown: dict[str, Any] = {"pool": name, "draining": drained, "live_leases": running}
        click.echo(json.dumps({**shown, "waited_s": waited_s, "outlives_restart": is_kept}))
    else:
        what = f"pool {name}" if name else "the scheduler"
        state = "drains" if drained else "admits again"
        if drained and not is_kept:
            state += " until the next restart (no state file is kept)"
        click.echo(f"{what} {state}; {running:,} {'runs' if running == 1 else 'run'}")
    if wait_s is not None and not drained:
        raise click.ClickException(
            "the drain is over: another operator has undone it, or the scheduler has restarted"
            " without a state file"
        )
    if wait_s is not None and running:
        raise click.ClickException(f"after {waited_s:g} s there is still something that runs")


def _wait(operator: Operator, pool: str, until_s: float, told: int) -> tuple[int, bool]:
    """Wait until nothing runs, the time is up, or the drain is undone; return how it stands."""
    click.echo(f"{told:,} running", err=True)
    while True:
        running, drained = _look(operator, pool)
        if running != told:
            click.echo(f"{running:,} running", err=True)
            told = running
        left_s = until_s - time.monotonic()
        if not running or not drained or left_s <= 0:
            return running, drained
        time.sleep(min(_LOOK_S, left_s))


def _look(operator: Operator, pool: str) -> tuple[int, bool]:
    stats = operator.stats()
    if not pool:
        return stats.totals.live_leases + stats.totals.queued, stats.draining
    rows = [row for row in stats.pools if row.name == pool]
    # One that has restarted without a state file knows nothing of the drain, nor yet of the pool.
    return (rows[0].live_leases + rows[0].queued, rows[0].draining) if rows else (0, False)
