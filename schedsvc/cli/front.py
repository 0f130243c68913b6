"""`schedsvc front`: a door for callers who are not trusted."""

import os
from pathlib import Path

import click

from schedsvc.config import ConfigError, load
from schedsvc.front import serve as run
from schedsvc.server import ListenError

_EPILOG = """\b
Example:
  schedsvc front --config schedsvc.yaml

Reads the key `front` of the scheduler's own file, listens there, and passes on what comes with a
token that auth.tokens lists, to the first Unix socket of `listeners` that asks for tokens. What
strangers send is spent here, and not in the scheduler. SIGTERM or SIGINT ends it; it holds nothing,
and after a change of the file it has to be started again.
"""


@click.command(epilog=_EPILOG)
@click.option(
    "--config",
    "config_file",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The scheduler's configuration file.",
)
@click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help='Write {"targets": [...], "metrics": null} here as JSON while listening.',
)
@click.option(
    "--nice",
    type=click.IntRange(0, 19),
    default=10,
    show_default=True,
    help="Yield the processor to the scheduler beside it: the priority is lower by so much.",
)
def front(config_file: Path, ready_file: Path | None, nice: int) -> None:
    """Let callers who are not trusted reach a scheduler, through a process of its own."""
    try:
        config = load(config_file)
    except ConfigError as error:
        for line in str(error).splitlines():
            click.echo(line, err=True)
        raise click.ClickException(f"{config_file} is not valid; nothing was started") from None
    if config.front is None:
        raise click.ClickException(f"{config_file}: the key 'front' is missing; add it")
    if ready_file is not None and not ready_file.absolute().parent.is_dir():
        raise click.BadParameter(
            f"the folder of {ready_file} does not exist", param_hint="--ready-file"
        )
    os.nice(nice)
    try:
        run(config, ready_file)
    except ListenError as error:
        raise click.ClickException(str(error)) from None
