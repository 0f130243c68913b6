"""Adds the options of commands that keep running, and reads their file before anything."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from schedsvc.config import Config, ConfigError, load_version
from schedsvc.config.file_rules import used_files, written_files
from schedsvc.config.files import kind_of
from schedsvc.config.yaml_positions import path_text

F = TypeVar("F", bound=Callable[..., Any])


#: Where packages and images keep the configuration, unless SCHEDSVC_CONFIG names another place.
USUAL_CONFIG = Path("/etc/schedsvc/schedsvc.yaml")


def config_option(help_text: str) -> Callable[[F], F]:
    """Return the decorator of `--config`."""
    return click.option(
        "--config",
        "config_file",
        envvar="SCHEDSVC_CONFIG",
        show_envvar=True,
        show_default=str(USUAL_CONFIG),
        callback=lambda _context, _option, file: usable_config(file),
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help=help_text,
    )


def usable_config(file: Path | None = None) -> Path:
    """Return the file, or the usual one if none is given. Raises UsageError if that is missing."""
    if given := file or os.environ.get("SCHEDSVC_CONFIG"):
        return Path(given)
    if not USUAL_CONFIG.exists():
        raise click.UsageError(
            f"no configuration is given, and {USUAL_CONFIG} does not exist; give --config FILE,"
            " or set SCHEDSVC_CONFIG"
        )
    return USUAL_CONFIG


def ready_file_option(metrics: str) -> Callable[[F], F]:
    """Return the decorator of `--ready-file`; `metrics`: what stands under that key."""
    return click.option(
        "--ready-file",
        type=click.Path(dir_okay=False, path_type=Path),
        help=f'Write {{"targets": [...], "metrics": {metrics}}} here as JSON while listening.',
    )


def read_config(
    config_file: Path, ready_file: Path | None, effect: str = "; nothing was started"
) -> tuple[Config, bytes]:
    """Read the configuration and the digest of its file; `effect`: what an error means.

    Raises click's errors if it, or the other file's place, is wrong.
    """
    try:
        found = load_version(config_file)
    except ConfigError as error:
        for line in str(error).splitlines():
            click.echo(line, err=True)
        raise click.ClickException(f"{config_file} is not valid{effect}") from None
    if ready_file is not None and (
        problem := _ready_file_problem(ready_file, config_file, found[0])
    ):
        raise click.BadParameter(problem, param_hint="--ready-file")
    return found


def _ready_file_problem(ready_file: Path, config_file: Path, config: Config) -> str:
    """Return why the ready file cannot be made; it is removed at the start and at the end."""
    if not ready_file.absolute().parent.is_dir():
        return f"the folder of {ready_file} does not exist; make it"
    data = config.model_dump()
    used = used_files(data, config_file.absolute())
    for where, name, _ in written_files(data):
        used[os.path.realpath(config.resolve(name))] = f"the file of {path_text(where)}"
    if use := used.get(os.path.realpath(ready_file)):
        return f"{ready_file} is {use}; name another file"
    try:
        kind = kind_of(ready_file)
    except OSError as error:
        return f"cannot use {ready_file}: {error.strerror}"
    return f"{ready_file} is {kind}; name a file" if kind else ""
