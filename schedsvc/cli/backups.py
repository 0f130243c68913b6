"""Backs up the SQLite files of a scheduler, for the commands that write them."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import click

from schedsvc.records.sqlite_files import back_up

__all__ = ["write_backup"]


def write_backup(
    source: Path, target: Path, check: Callable[[sqlite3.Connection, Path], None]
) -> None:
    """Copy a file and print its size. `check` raises an OSError if it is another program's."""
    try:
        back_up(source, target, check)
    except FileExistsError:
        raise click.ClickException(f"{target} exists; name another file") from None
    except sqlite3.Error as error:
        raise click.ClickException(f"cannot back up {source}: {error}") from None
    except OSError as error:
        problem = error.strerror and f"cannot write {target}: {error.strerror}"
        raise click.ClickException(problem or str(error)) from None
    click.echo(f"{target}: {target.stat().st_size:,} bytes")
