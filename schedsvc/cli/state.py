"""Backs the state file up, with the terms of a member of a cluster: `schedsvc state`."""

import shutil
from pathlib import Path

import click

from schedsvc.cli.backups import write_backup
from schedsvc.cli.starting import config_option, read_config
from schedsvc.records.state.store import check_form

_EPILOG = """\b
Example:
  schedsvc state backup --config schedsvc.yaml state-2026-12-01.db

docs/operate/operations.md has the steps to restore it.
"""


@click.group(epilog=_EPILOG)
def state() -> None:
    """Back up counters, quotas, and what operators set."""


@state.command(epilog=_EPILOG)
@config_option("Configuration file, for state.file.")
@click.argument("file", type=click.Path(path_type=Path))
def backup(config_file: Path, file: Path) -> None:
    """Copy the state to a new FILE, also while a scheduler writes it.

    The terms of a member of a cluster go to FILE.term.
    """
    config = read_config(config_file, None, "")[0]
    if config.state is None:
        raise click.ClickException(f"{config_file} has no state.file, so no state is kept; add it")
    source = config.resolve(config.state.file)
    write_backup(source, file, check_form)
    terms = source.with_name(f"{source.name}.term")
    if terms.exists():
        try:
            shutil.copyfile(terms, f"{file}.term")
        except OSError as error:
            raise click.ClickException(f"cannot write {file}.term: {error.strerror}") from None
        click.echo(f"{file}.term: the terms")
