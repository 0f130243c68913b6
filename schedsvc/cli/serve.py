"""`schedsvc serve`: the scheduler."""

from pathlib import Path

import click

from schedsvc.config import ConfigError, load
from schedsvc.server import ListenError, RecordingError, StateError
from schedsvc.server import serve as run

_EPILOG = """\b
Example:
  schedsvc serve --config schedsvc.yaml

SIGTERM or SIGINT drains: nothing new is admitted, what is queued and running gets limits.drain_ms.
A second signal stops at once. SIGHUP reloads the file: policy, prices, limits, tenants, weights,
keys, quotas and modes change while everything runs; a file with an error changes nothing.
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
@click.option(
    "--watch-config",
    "watch_s",
    type=click.FloatRange(min=0.1),
    metavar="SECONDS",
    help="Also reload the file when it has changed; look this often.",
)
def serve(config_file: Path, ready_file: Path | None, watch_s: float | None) -> None:
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
        run(config, ready_file, config_file=config_file, watch_s=watch_s or 0.0)
    except (ListenError, RecordingError, StateError) as error:
        raise click.ClickException(str(error)) from None
