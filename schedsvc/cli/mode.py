"""Enforces decisions, or only counts them, whatever the file says: `schedsvc mode`."""

import json
from typing import Any

import click
from schedsvc_client.operator import MODES, Operator

from schedsvc.cli.complete import complete_tenants
from schedsvc.cli.connect import Connection, connects
from schedsvc.text.printable import printable_message

_EPILOG = """\b
Example:
  schedsvc mode dry_run
  schedsvc mode enforce --tenant research
  schedsvc mode configured
  schedsvc mode

dry_run decides and counts everything, and refuses and delays nothing. A mode set here overrides the
configuration's `mode`, also when that is reloaded, until `schedsvc mode configured`. It outlasts a
restart of the scheduler if its configuration names a state file. Without a mode the command only
shows the modes in force.
"""
#: schedsvc.v1.Mode, for people.
NAMES = {number: name for name, number in MODES.items()}


class _ModeName(click.Choice):  # type: ignore[type-arg] # it has none in click 8.1
    """Reads the name of a mode, with `-` or `_` between its words."""

    def __init__(self) -> None:
        super().__init__(list(MODES))

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name as the configuration spells it."""
        name: str = super().convert(value.replace("-", "_"), param, ctx)
        return name


@click.command(epilog=_EPILOG)
@connects
@click.argument("mode", required=False, type=_ModeName())
@click.option(
    "--tenant",
    default="",
    shell_complete=complete_tenants,
    metavar="NAME",
    help="Only this one of the configuration's tenants.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def mode(connection: Connection, mode: str | None, tenant: str, as_json: bool) -> None:
    """Say a MODE for all tenants at once, or for one; or show it."""
    if mode is None and tenant:
        raise click.UsageError("say a mode for the tenant; `schedsvc stats --tenant` shows it")
    with Operator(connection.target, **connection.proof) as operator:
        found = operator.stats().mode if mode is None else operator.set_mode(mode, tenant)
    if as_json:
        click.echo(json.dumps(_plain(found)))
    else:
        click.echo(mode_text(printable_message(found)))


def mode_text(modes: Any) -> str:
    """Return the modes in force as a sentence."""
    configured = NAMES.get(modes.configured, "unknown")
    text = f"mode {NAMES.get(modes.overlay, configured)}"
    if modes.overlay:
        text += f" for all, an operator's word (configured: {configured})"
    elif not modes.tenants:
        text += ", as configured"
    single = ", ".join(f"{entry.tenant} {NAMES[entry.mode]}" for entry in modes.tenants[:10])
    more = modes.tenants_overlaid - len(modes.tenants[:10])
    if single:
        text += f"; by an operator's word {single}{f' and {more:,} more' if more > 0 else ''}"
    return text


def _plain(modes: Any) -> dict[str, Any]:
    return {
        "configured": NAMES.get(modes.configured),
        "overlay": NAMES.get(modes.overlay),
        "tenants": {entry.tenant: NAMES[entry.mode] for entry in modes.tenants},
        "tenants_overlaid": modes.tenants_overlaid,
    }
