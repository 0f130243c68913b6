"""What the commands that stay have in common: their options, and the file read before anything."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from schedsvc.config import Config, ConfigError, load_version

F = TypeVar("F", bound=Callable[..., Any])


def config_option(help_text: str) -> Callable[[F], F]:
    """Return the decorator of `--config`."""
    return click.option(
        "--config",
        "config_file",
        required=True,
        type=click.Path(dir_okay=False, path_type=Path),
        help=help_text,
    )


def ready_file_option(metrics: str) -> Callable[[F], F]:
    """Return the decorator of `--ready-file`; `metrics`: what stands under that key."""
    return click.option(
        "--ready-file",
        type=click.Path(dir_okay=False, path_type=Path),
        help=f'Write {{"targets": [...], "metrics": {metrics}}} here as JSON while listening.',
    )


def read_config(config_file: Path, ready_file: Path | None) -> tuple[Config, bytes]:
    """Read the configuration and the digest of its file.

    Raises click's errors if it, or the other file's place, is wrong.
    """
    try:
        found = load_version(config_file)
    except ConfigError as error:
        for line in str(error).splitlines():
            click.echo(line, err=True)
        raise click.ClickException(f"{config_file} is not valid; nothing was started") from None
    if ready_file is not None and not ready_file.absolute().parent.is_dir():
        raise click.BadParameter(
            f"the folder of {ready_file} does not exist", param_hint="--ready-file"
        )
    return found
