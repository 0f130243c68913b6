"""Exports the usage ledger, and backs it up: `schedsvc usage`."""

import csv
import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import click

from schedsvc.cli.backups import write_backup
from schedsvc.cli.starting import config_option, read_config
from schedsvc.config.outputs import Usage
from schedsvc.records.usage import UsageError
from schedsvc.records.usage.export import (
    DIMENSIONS,
    FOCUS_COLUMNS,
    SUMS,
    Span,
    as_text,
    focus_rows,
    plain_rows,
)
from schedsvc.records.usage.ledger import check_form
from schedsvc.text.option_types import check_file

_EPILOG = """\b
Example:
  schedsvc usage export --config schedsvc.yaml --since 2026-11-01 \\
      --until 2026-12-01
  schedsvc usage export --config schedsvc.yaml --by day,tenant \\
      --format parquet --out u.parquet
  schedsvc usage export --config schedsvc.yaml --format focus --out focus.csv
  schedsvc usage export --config a.yaml --ledger copy-of-b.db

It reads the file of usage.path, also while the scheduler writes it. Times are in UTC.
Guide: docs/operate/usage.md
"""
_DEFAULT_BY = "tenant,model,class"
_NO_PRICES = "no price of usage.prices fits {count} charges: their costs are empty, quantities only"


class _Moment(click.ParamType[int]):
    """Reads a date, or a date and time; without an offset it is UTC."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return Unix time in seconds."""
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is no time; write 2026-11-30 or 2026-11-30T12:00+01:00")
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return int(moment.timestamp())


_GROUP_EPILOG = """\b
Example:
  schedsvc usage export --config schedsvc.yaml --since 2026-11-01 \\
      --until 2026-12-01
"""


@click.group(epilog=_GROUP_EPILOG)
def usage() -> None:
    """Export and back up what tenants used."""


_BACKUP_EPILOG = """\b
Example:
  schedsvc usage backup --config schedsvc.yaml usage-2026-12-01.db

A backup is a ledger: `usage export --ledger` reads it. docs/operate/usage.md has the
steps to restore it.
"""


@usage.command(epilog=_BACKUP_EPILOG)
@config_option("Configuration file, for usage.path.")
@click.argument("file", type=click.Path(path_type=Path))
def backup(config_file: Path, file: Path) -> None:
    """Copy the ledger to a new FILE, also while a scheduler writes it."""
    config = read_config(config_file, None, "")[0]
    if config.usage is None:
        raise click.ClickException(f"{config_file} has no usage.path, so no ledger is kept; add it")
    write_backup(config.resolve(config.usage.path), file, check_form)


@usage.command(epilog=_EPILOG)
@config_option("Configuration file, for usage.path and usage.prices.")
@click.option("--since", type=_Moment(), help="Leave out leases that ended before this time.")
@click.option("--until", type=_Moment(), help="Leave out leases that ended at this time or later.")
@click.option(
    "--by",
    default=_DEFAULT_BY,
    show_default=True,
    metavar="NAMES",
    help=f"Sum up by these, separated by commas: {', '.join(DIMENSIONS)}. For focus: hour or day.",
)
@click.option(
    "--format", "form", type=click.Choice(["csv", "parquet", "focus"]), default="csv",
    show_default=True, help="Write this format; focus is CSV with the columns of FOCUS 1.2.",
)  # fmt: skip
@click.option(
    "--ledger", "others", multiple=True, metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Add the ledger of another member of the cluster, or a copy; a lease that several have"
    " counts once. May be repeated.",
)  # fmt: skip
@click.option(
    "--raw", is_flag=True,
    help="Leave names as they are. Without it, a tenant that is not in the configuration or an"
    " adapter gets a leading quote in CSV if a spreadsheet would take its name for a formula.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON instead.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write to this file, not to stdout.",
)
def export(
    config_file: Path,
    since: int | None,
    until: int | None,
    by: str,
    form: str,
    others: tuple[Path, ...],
    raw: bool,
    as_json: bool,
    out: Path | None,
) -> None:
    """Sum up tokens and requests of the leases that ended."""
    config = read_config(config_file, None, "")[0]
    if config.usage is None:
        raise click.ClickException(f"{config_file} has no usage.path, so no ledger is kept; add it")
    if form == "parquet" and not as_json and out is None:
        raise click.UsageError("--format parquet needs --out FILE")
    if raw and (as_json or form == "parquet"):
        raise click.UsageError("--raw has an effect on CSV alone; leave it out")
    if out is not None:
        check_file(out)
    names = _names(by, form)
    path = config.resolve(config.usage.path)
    try:
        span = Span(since, until)
        columns, rows = _rows([path, *others], names, span, form, config.usage)
    except (UsageError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    try:
        if as_json:
            _write(out, lambda file: print(json.dumps(rows, indent=2), file=file))
        elif form == "parquet":
            _write_parquet(out or Path(), columns, rows)
        else:
            own = {each.name for each in config.tenants} | {each.name for each in config.adapters}
            cells = rows if raw else [as_text(row, own) for row in rows]
            _write(out, lambda file: _write_csv(file, columns, cells))
    except OSError as error:
        if out is None:
            raise
        raise click.ClickException(f"cannot write {out}: {error.strerror}") from None


def _names(by: str, form: str) -> list[str]:
    names = [name.strip() for name in by.split(",") if name.strip()]
    unknown = [name for name in names if name not in DIMENSIONS]
    if unknown:
        known = ", ".join(DIMENSIONS)
        raise click.BadParameter(f"{unknown[0]!r} is none of {known}", param_hint="--by")
    if form == "focus" and by != _DEFAULT_BY and names not in (["hour"], ["day"]):
        raise click.BadParameter(f"{by!r}: a FOCUS export is by hour or day", param_hint="--by")
    return names


def _rows(
    paths: list[Path], names: Sequence[str], span: Span, form: str, usage: Usage
) -> tuple[Sequence[str], list[dict[str, Any]]]:
    if form != "focus":
        return [*names, *SUMS], list(plain_rows(paths[0], names, span, paths[1:]))
    hourly = list(names) == ["hour"]
    charges = list(focus_rows(paths[0], span, usage, hourly, paths[1:]))
    without = sum(not charge["BilledCost"] for charge in charges)
    if without:
        click.echo(f"warning: {_NO_PRICES.format(count=f'{without:,}')}", err=True)
    return FOCUS_COLUMNS, charges


def _write(out: Path | None, write: Any) -> None:
    if out is None:
        write(sys.stdout)
        return
    with out.open("w", newline="", encoding="utf-8") as file:
        write(file)


class _Lines:
    """Ends lines with a line feed alone. The writer quotes only parts of its own line end."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, line: str) -> object:
        return self._file.write(line.removesuffix("\r\n") + "\n")


def _write_csv(file: TextIO, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    writer = csv.DictWriter(_Lines(file), columns, lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(rows)


def _write_parquet(out: Path, columns: Sequence[str], rows: list[dict[str, Any]]) -> None:
    try:
        from schedsvc.records.usage.parquet import write_parquet
    except ModuleNotFoundError:
        raise click.ClickException(
            "--format parquet needs the package pyarrow: pip install 'schedsvc[parquet]'"
        ) from None
    write_parquet(out, columns, rows)
