"""Compares caps on sessions of agents, see `schedsvc_lab.sim.agent_sessions`."""

import json

import click
from rich.table import Table

from schedsvc.text.tables import table_console
from schedsvc_lab.sim.agent_sessions import compare

_HEADS = ("cap", "hit rate", "turns/min", "sessions", "p50 s", "max s", "begin s", "ratio")


@click.command(epilog="Example: python -m schedsvc_lab.sim.cli.agent_sessions --cap 0.8")
@click.option(
    "--cap", "caps", multiple=True, type=click.FloatRange(0.05, 4), default=(0.6, 0.8, 1.0),
    show_default=True, help="Cap, as a part of the KV cache; may be repeated.",
)  # fmt: skip
@click.option(
    "--seconds", default=1_800, show_default=True, type=click.IntRange(60, 86_400),
    help="Virtual time.",
)  # fmt: skip
@click.option("--seed", default=1, show_default=True, type=click.IntRange(min=0), help="Seed.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def main(caps: tuple[float, ...], seconds: int, seed: int, as_json: bool) -> None:
    """Compare the hit rate of the prefix cache with caps on sessions and without."""
    rows = compare((0.0, *caps), seconds, seed)
    if as_json:
        click.echo(json.dumps(rows))
        return
    table = Table()
    for name in _HEADS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    table_console().print(table)


if __name__ == "__main__":
    main()
