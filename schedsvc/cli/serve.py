"""`schedsvc serve`: the scheduler."""

from pathlib import Path

import click

from schedsvc.config import ConfigError, load
from schedsvc.server import ListenError
from schedsvc.server import serve as run

_EPILOG = """\b
Example:
  schedsvc serve --config schedsvc.yaml

SIGTERM or SIGINT drains: nothing new is admitted, what is queued and running gets limits.drain_ms.
A second signal stops at once.
"""


@click.command(epilog=_EPILOG)
@click.option(
    "--config",
    "config_file",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Configuration file; `schedsvc check` says whether it is right.",
)
@click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help='Write {"targets": [...], "metrics": URL} here as JSON while listening.',
)
def serve(config_file: Path, ready_file: Path | None) -> None:
    """Serve admission over gRPC until SIGTERM or SIGINT."""
    try:
        config = load(config_file)
    except ConfigError as error:
        for line in str(error).splitlines():
            click.echo(line, err=True)
        raise click.ClickException(f"{config_file} is not valid; nothing was started") from None
    if ready_file is not None and not ready_file.absolute().parent.is_dir():
        raise click.BadParameter(
            f"the folder of {ready_file} does not exist", param_hint="--ready-file"
        )
    try:
        run(config, ready_file)
    except ListenError as error:
        raise click.ClickException(str(error)) from None
