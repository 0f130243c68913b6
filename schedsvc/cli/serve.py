"""Runs the scheduler: `schedsvc serve`."""

from pathlib import Path

import click

from schedsvc.cli.early_signals import hung_up
from schedsvc.cli.starting import config_option, read_config, ready_file_option
from schedsvc.server import (
    ClusterError,
    ListenError,
    ReadyFileError,
    RecordingError,
    Source,
    StateError,
    UsageError,
)
from schedsvc.server.serve import serve as run
from schedsvc.text.option_types import FiniteRange

_EPILOG = """\b
Example:
  schedsvc serve --config schedsvc.yaml

SIGTERM or SIGINT drains: nothing new is admitted, what is queued and running gets limits.drain_ms.
A second signal stops at once. SIGHUP reloads the file: policy, prices, limits, tenants, weights,
keys, quotas and modes change while everything runs; a file with an error changes nothing.
"""


@click.command(epilog=_EPILOG)
@config_option("Configuration file; `schedsvc check` says whether it is right.")
@ready_file_option("URL")
@click.option(
    "--watch-config",
    "watch_s",
    type=FiniteRange(min=0.1),
    metavar="SECONDS",
    help="Also reload the file when it has changed; look this often. It is loaded after two looks"
    " that found the same, so a pause between the steps of a write has to be shorter.",
)
def serve(config_file: Path, ready_file: Path | None, watch_s: float | None) -> None:
    """Serve admission over gRPC until SIGTERM or SIGINT."""
    config, digest = read_config(config_file, ready_file)
    tenants_dir = None if config.tenants_dir is None else config.resolve(config.tenants_dir)
    source = Source(config_file, digest, watch_s or 0.0, tenants_dir)
    try:
        run(config, ready_file, source, hung_up)
    except (
        ClusterError,
        ListenError,
        ReadyFileError,
        RecordingError,
        StateError,
        UsageError,
    ) as error:
        raise click.ClickException(str(error)) from None
