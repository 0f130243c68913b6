"""Lists tenants and their terms, and changes them for an operator: `schedsvc tenants`."""

import json
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal, InvalidOperation
from itertools import chain, islice
from typing import Any

import click
from schedsvc_client.operator import ORIGINS, Operator

from schedsvc.cli.complete import complete_tenants
from schedsvc.cli.connect import Connection, connects
from schedsvc.cli.tenant_entry import LIMITS, listed_tenants, origin_of, tenant_entry, weight_of
from schedsvc.cli.tenant_keys import keys
from schedsvc.config import tenants_yaml
from schedsvc.text.option_types import WholeRange
from schedsvc.text.printable import printable

_EPILOG = """\b
Example:
  schedsvc tenants list
  schedsvc tenants set research --weight 2 --tokens-per-minute 200000
  schedsvc tenants delete research
"""
_LIST_EPILOG = """\b
Example:
  schedsvc tenants list
  schedsvc tenants list --origin operator --json

Origin: `operator` if an operator has set the tenant, `file` if the configuration lists it, `rule`
if the scheduler knows it since its first request. Version grows with each change by an operator.
"""
_GET_EPILOG = """\b
Example:
  schedsvc tenants get research
"""
_SET_EPILOG = """\b
Example:
  schedsvc tenants set research --weight 2 --tokens-per-minute 200000
  schedsvc tenants set research --tokens-per-minute 0 --group ""
  schedsvc tenants set lab --share-tokens-per-minute 60000 --share-borrows 0
  schedsvc tenants set trial --budget-tokens-per-day 2000000 \\
      --budget-timezone Europe/Paris

What no option changes stays as it is in force: by an operator, the file, or a rule. From then on
the entry precedes the file's, also after a reload, until `schedsvc tenants delete`. The command
ends once the entry is in the state file, if there is one.
"""
_DELETE_EPILOG = """\b
Example:
  schedsvc tenants delete research

Deletes what operators have set. The tenant falls back to the file's entry, else to the rule that
fits its name. Requests that run or wait go on; new ones get what the tenant falls back to.
"""
_EXPORT_EPILOG = """\b
Example:
  schedsvc tenants export > tenants.yaml

Prints all tenants that an operator or the file lists as the section `tenants` of a configuration,
with the hashes of their API keys that never expire. `schedsvc check` accepts a file with this
section in place of its own, and the file then lists the same tenants.
"""
_FORGIVE_EPILOG = """\b
Example:
  schedsvc tenants forgive research

A quota owes what requests used beyond it, at most one minute of its limit and one request. After
this the tenant's own quota owes nothing, and the tenant is served again. Quotas of its groups stay
as they are.
"""

_COLUMNS = ("tenant", "origin", "version", "weight", "group", "class", "limits")
_PAGE = 500


class _Weight(click.ParamType):  # type: ignore[type-arg] # it has none at run time
    """Reads a weight, in thousandths."""

    name = "WEIGHT"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Read a number with at most three decimals."""
        try:
            milli = Decimal(str(value)) * 1_000
        except InvalidOperation:
            milli = Decimal("nan")
        if not milli.is_finite():
            self.fail(f"{value!r} is not a number", param, ctx)
        if milli != milli.to_integral_value():
            self.fail(f"{value!r} has more than 3 decimals", param, ctx)
        return int(milli)


@click.group(epilog=_EPILOG)
def tenants() -> None:
    """List, change and delete tenants, and forgive their debts."""


tenants.add_command(keys)


@tenants.command("list", epilog=_LIST_EPILOG)
@connects
@click.option("--origin", type=click.Choice(sorted(ORIGINS)), help="Only tenants of this origin.")
@click.option("--json", "as_json", is_flag=True, help="Print each tenant as a line of JSON.")
def list_(connection: Connection, origin: str | None, as_json: bool) -> None:
    """List tenants: those that are listed by name, then those known by a rule."""
    with Operator(connection.target, **connection.proof) as operator:
        found = operator.tenants(origin or "")
        if as_json:
            for tenant in found:
                click.echo(json.dumps(_plain(tenant)))
        else:
            _table(found)


@tenants.command(epilog=_GET_EPILOG)
@connects
@click.argument("name", shell_complete=complete_tenants)
@click.option("--json", "as_json", is_flag=True, help="Print the tenant as JSON.")
def get(connection: Connection, name: str, as_json: bool) -> None:
    """Show the tenant NAME as it is in force."""
    with Operator(connection.target, **connection.proof) as operator:
        _show(operator.tenant(name), as_json)


def _changes(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say what to change of a tenant."""
    options = (
        click.option("--weight", "weight_milli", type=_Weight(), help="Weight of its share."),
        click.option("--group", metavar="NAME", help="Group that it belongs to; empty: none."),
        *(
            click.option(
                f"--{limit.replace('_', '-')}",
                type=WholeRange(0),
                help=f"Limit its {limit.replace('_', ' ')}; 0: no limit.",
            )
            for limit in LIMITS
        ),
        click.option(
            "--over",
            type=click.Choice(("wait", "refuse")),
            help="Let requests beyond the quota wait, or refuse them.",
        ),
        click.option(
            "--share-tokens-per-minute",
            type=WholeRange(0),
            help="Service that it can count on while the pools are saturated; 0: no share.",
        ),
        click.option(
            "--share-lends",
            type=WholeRange(-1),
            help="Most of its share that others may use; -1: all.",
        ),
        click.option(
            "--share-borrows",
            type=WholeRange(-1),
            help="Most that it may use beyond its share; -1: no limit.",
        ),
        *(
            click.option(
                f"--budget-tokens-per-{period}",
                type=WholeRange(0),
                help=f"Most tokens in a calendar {period}; 0: no limit.",
            )
            for period in ("day", "month")
        ),
        click.option(
            "--budget-timezone", metavar="ZONE", help="Time zone of its budget; empty: UTC."
        ),
        click.option(
            "--class",
            "request_class",
            metavar="CLASS",
            help="Class of requests that name none; empty: default.",
        ),
        click.option(
            "--classes",
            multiple=True,
            metavar="CLASS",
            help="Class that its requests may name; repeat it for several; empty: none.",
        ),
        click.option(
            "--if-version",
            type=WholeRange(0),
            help="Fail if the tenant has another version; 0: no operator has set it.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@tenants.command("set", epilog=_SET_EPILOG)
@connects
@click.argument("name", shell_complete=complete_tenants)
@_changes
@click.option("--json", "as_json", is_flag=True, help="Print the tenant as JSON.")
def set_(
    connection: Connection, name: str, as_json: bool, classes: tuple[str, ...], **given: Any
) -> None:
    """List the tenant NAME, or change what it has."""
    changes = {key: value for key, value in given.items() if value is not None}
    if classes:
        changes["classes"] = [cls for cls in classes if cls]
    with Operator(connection.target, **connection.proof) as operator:
        _show(operator.set_tenant(name, **changes), as_json)


@tenants.command(epilog=_DELETE_EPILOG)
@connects
@click.argument("name", shell_complete=complete_tenants)
@click.option("--if-version", type=WholeRange(0), help="Fail if it has another version.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def delete(connection: Connection, name: str, if_version: int | None, as_json: bool) -> None:
    """Delete what operators have set of the tenant NAME."""
    with Operator(connection.target, **connection.proof) as operator:
        fallback, keys = operator.delete_tenant(name, if_version=if_version)
    if as_json:
        click.echo(json.dumps({"tenant": name, "fallback": fallback, "keys_revoked": keys}))
        return
    what = {"file": "the entry of the file", "rule": "the first rule that fits its name"}
    revoked = f"; {keys} API key{'s'[: keys != 1]} revoked" if keys else ""
    click.echo(f"{printable(name)} falls back to {what[fallback]}{revoked}")


@tenants.command(epilog=_EXPORT_EPILOG)
@connects
def export(connection: Connection) -> None:
    """Print all listed tenants as the section `tenants` of a configuration."""
    with Operator(connection.target, **connection.proof) as operator:
        found = listed_tenants(operator)
    click.echo(tenants_yaml(found), nl=False)


@tenants.command(epilog=_FORGIVE_EPILOG)
@connects
@click.argument("name", shell_complete=complete_tenants)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def forgive(connection: Connection, name: str, as_json: bool) -> None:
    """Forgive what the quota of the tenant NAME owes."""
    with Operator(connection.target, **connection.proof) as operator:
        limits = operator.forgive(name)
    if as_json:
        click.echo(json.dumps({"tenant": name, "limits": limits}))
    elif limits:
        click.echo(
            f"{printable(name)} owed on {limits} limit{'s'[: limits != 1]}, and owes nothing now"
        )
    else:
        click.echo(f"{printable(name)} owed nothing")


def _plain(tenant: Any) -> dict[str, Any]:
    """Return a tenant as JSON shows it: hashes of keys only as a number."""
    keys = len(tenant.api_keys_sha256)
    entry = {key: value for key, value in tenant_entry(tenant).items() if key != "api_keys_sha256"}
    return {**entry, "origin": origin_of(tenant), "version": tenant.version, "api_keys": keys}


def _show(tenant: Any, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(_plain(tenant)))
    else:
        _table([tenant])


def _rows(tenants: Iterable[Any]) -> Iterator[tuple[str, ...]]:
    for tenant in tenants:
        limits = [
            f"{getattr(tenant, limit):,} {limit}" for limit in LIMITS if getattr(tenant, limit)
        ]
        yield (
            printable(tenant.name),
            origin_of(tenant),
            str(tenant.version) if tenant.version else "-",
            f"{weight_of(tenant):g}",
            printable(tenant.group) or "-",
            printable(tenant.request_class) or "-",
            ", ".join(limits) or "-",
        )


def _table(tenants: Iterable[Any]) -> None:
    """Print rows as they come. The first page says how wide the columns are."""
    rows = _rows(tenants)
    first = [_COLUMNS, *islice(rows, _PAGE)]
    widths = [max(map(len, column)) for column in zip(*first, strict=True)]
    for cells in chain(first, rows):
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        click.echo("  ".join(padded).rstrip())
