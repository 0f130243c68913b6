"""Lists what runs, and ends it if an operator wants that: `schedsvc leases`."""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import click
from schedsvc_client.operator import Operator

from schedsvc.cli.complete import complete_leases, complete_pools, complete_tenants
from schedsvc.cli.connect import Connection, connects
from schedsvc.text.option_types import FiniteRange, WholeRange
from schedsvc.text.printable import printable

_EPILOG = """\b
Example:
  schedsvc leases list --pool gpu-1 --older-than 60
  schedsvc leases revoke --tenant research --yes
  schedsvc leases revoke --principal gpu-1-gate --yes
"""
_LIST_EPILOG = """\b
Example:
  schedsvc leases list --tenant research --older-than 300
  schedsvc leases list --limit 0 --json | jq -r 'select(.suspect) | .lease_id'

The scheduler is asked for a page at a time, so that a list of any length needs little memory. With
--json each line is one lease; its id is text, since it has more digits than a JSON number keeps.
"""
_REVOKE_EPILOG = """\b
Example:
  schedsvc leases revoke 1234567890123456789
  schedsvc leases revoke --shim gpu-1/4711 --older-than 60 --yes

A revoked lease holds nothing from this moment on. The scheduler notifies its shim, which aborts the
request. The tenant is charged for the usage that the shim reports at the end. To revoke more than
one lease, give --yes.
"""
_PAGE = 1_000
_COLUMNS = ("lease", "tenant", "pool", "shim", "age", "state", "reserved", "posted", "in", "out")
_LEFT = 4  # columns of text, aligned to the left
_ID_MAX = (1 << 64) - 1


def _meaning(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say which leases are meant, as one filter."""
    options = (
        click.option(
            "--tenant",
            "--flow",
            default="",
            shell_complete=complete_tenants,
            metavar="NAME",
            help="Only leases of this tenant.",
        ),
        click.option(
            "--pool",
            default="",
            shell_complete=complete_pools,
            metavar="NAME",
            help="Only leases in this pool.",
        ),
        click.option(
            "--principal",
            default="",
            metavar="NAME",
            help="Only leases held by this caller, as `principal` in the JSON of `leases list`.",
        ),
        click.option(
            "--shim",
            "client_id",
            default="",
            metavar="NAME",
            help="Only leases on the stream of this shim process.",
        ),
        click.option(
            "--epoch",
            "pool_epoch",
            type=WholeRange(0),
            default=0,
            help="Only leases granted in this epoch of the pool. Default: any.",
        ),
        click.option(
            "--older-than",
            "age_min_s",
            type=FiniteRange(min=0.0),
            default=0.0,
            metavar="SECONDS",
            help="Only leases granted at least SECONDS ago. Default: all.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.group(epilog=_EPILOG)
def leases() -> None:
    """List the leases that run, or revoke them."""


@leases.command("list", epilog=_LIST_EPILOG)
@connects
@_meaning
@click.option(
    "--limit",
    type=WholeRange(0),
    default=100,
    show_default=True,
    help="Most leases shown; 0: all.",
)
@click.option("--json", "as_json", is_flag=True, help="Print each lease as a line of JSON.")
def list_(connection: Connection, limit: int, as_json: bool, **meant: Any) -> None:
    """Show the leases that run, in no order."""
    with Operator(connection.target, **connection.proof) as operator:
        size = min(limit + 1, _PAGE) if limit else _PAGE
        found = operator.leases(Operator.filter(**meant), page_size=size)
        shown = found if limit == 0 else islice(found, limit)
        if as_json:
            for lease in shown:
                click.echo(json.dumps(_plain(lease)))
        else:
            _table(shown)
        if limit and next(found, None) is not None:
            click.echo(f"more than {limit:,}; --limit 0 shows all", err=True)


@leases.command("revoke", epilog=_REVOKE_EPILOG)
@connects
@click.argument(
    "lease_ids",
    metavar="[ID]...",
    nargs=-1,
    type=WholeRange(1, _ID_MAX),
    shell_complete=complete_leases,
)
@_meaning
@click.option("--yes", is_flag=True, help="Revoke even if more than one lease is meant.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def revoke(
    connection: Connection, lease_ids: tuple[int, ...], yes: bool, as_json: bool, **meant: Any
) -> None:
    """Void leases by ID, or all that the options mean together."""
    by_options = any(meant.values())
    if lease_ids and by_options:
        raise click.UsageError(
            "lease ids and options that say which leases are meant exclude each other; give one"
        )
    if not lease_ids and not by_options:
        raise click.UsageError("give lease ids, or options that say which leases are meant")
    unknown: list[int] = []
    with Operator(connection.target, **connection.proof) as operator:
        wanted = Operator.filter(**meant)
        if not yes:
            count = operator.revoke_all(wanted, dry_run=True) if by_options else len(lease_ids)
            if count > 1:
                raise click.ClickException(f"this would revoke {count:,} leases; add --yes")
        if by_options:
            revoked = operator.revoke_all(wanted)
        else:
            answer = operator.revoke(lease_ids)
            revoked, unknown = answer.revoked, list(answer.unknown_lease_ids)
    if as_json:
        names = [str(lease_id) for lease_id in unknown]
        click.echo(json.dumps({"revoked": revoked, "unknown_lease_ids": names}))
    else:
        click.echo(f"{revoked:,} revoked")
    if unknown:
        named = ", ".join(map(str, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
        raise click.ClickException(f"no such lease, or it has ended: {named}")


def _plain(lease: Any) -> dict[str, Any]:
    values = {field.name: getattr(lease, field.name) for field in lease.DESCRIPTOR.fields}
    return {**values, "lease_id": str(lease.lease_id), "state": _state(lease)}


def _table(shown: Iterator[Any]) -> None:
    """Print rows as they come. The first page says how wide the columns are."""
    first = [_cells(lease) for lease in islice(shown, _PAGE)]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *first, strict=True)]
    for cells in [_COLUMNS, *first]:
        click.echo(_line(cells, widths))
    for lease in shown:
        click.echo(_line(_cells(lease), widths))


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    padded = [
        cell.ljust(width) if at < _LEFT else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()


def _cells(lease: Any) -> tuple[str, ...]:
    return (
        str(lease.lease_id),
        printable(lease.tenant),
        printable(lease.pool),
        printable(lease.client_id),
        f"{lease.age_ms / 1_000:,.1f} s",
        _state(lease),
        f"{lease.reserved_tokens:,}",
        f"{lease.posted_tokens:,}",
        f"{lease.prompt_tokens:,}",
        f"{lease.output_tokens:,}",
    )


def _state(lease: Any) -> str:
    """Return what a lease is called: live, suspect or void."""
    if lease.suspect:
        return "suspect"
    # LEASE_STATE_VOID
    return "void" if lease.state == 3 else "live"
