"""Defines options that several commands have."""

from pathlib import Path

import click

#: The trace that a command reads.
trace_option = click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path),
    required=True,
    help="The trace to read.",
)
