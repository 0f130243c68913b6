"""Opens a door for callers who are not trusted: `schedsvc edge`."""

import os
from pathlib import Path

import click

from schedsvc.cli.starting import config_option, read_config, ready_file_option
from schedsvc.edge import serve as run
from schedsvc.server import ListenError, ReadyFileError
from schedsvc.text.option_types import WholeRange

_EPILOG = """\b
Example:
  schedsvc edge --config schedsvc.yaml

Reads the key `edge` of the scheduler's own file, listens there, and passes on what comes with a
token of auth.principals, to the first Unix socket of `listeners` that asks for tokens. What
strangers send is spent here, and not in the scheduler. SIGTERM or SIGINT ends it; it holds nothing,
and after a change of the file it has to be started again.
"""


@click.command(epilog=_EPILOG)
@config_option("The scheduler's configuration file.")
@ready_file_option("null")
@click.option(
    "--nice",
    type=WholeRange(0, 19),
    default=10,
    show_default=True,
    help="Yield the processor to the scheduler beside it: the priority is lower by so much.",
)
def edge(config_file: Path, ready_file: Path | None, nice: int) -> None:
    """Let callers who are not trusted reach a scheduler, through a process of its own."""
    config, _ = read_config(config_file, ready_file)
    if config.edge is None:
        raise click.ClickException(f"{config_file}: the key 'edge' is missing; add it")
    # A service manager that has set the priority itself may forbid the call.
    if nice:
        os.nice(nice)
    try:
        run(config, ready_file)
    except (ListenError, ReadyFileError) as error:
        raise click.ClickException(str(error)) from None
