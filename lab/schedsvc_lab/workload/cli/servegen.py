"""Defines `schedsvc workload servegen`."""

import json
import math
from pathlib import Path

import click

from schedsvc.text.option_types import FiniteRange, WholeRange, check_file
from schedsvc_lab.workload.cli.common import told, write_own
from schedsvc_lab.workload.record import TraceError
from schedsvc_lab.workload.servegen import draw, read_pool

EPILOG = """\b
Example:
  schedsvc workload servegen ServeGen/data/language/m-large --start 72000 \\
      --duration 600 --rate-scale 0.1 --out servegen.jsonl
"""


@click.command("servegen", epilog=EPILOG)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--start",
    "from_s",
    type=FiniteRange(min=0),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="Second of the pool's time at which the trace begins.",
)
@click.option(
    "--duration",
    "duration_s",
    required=True,
    type=FiniteRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Seconds of the pool's time.",
)
@click.option(
    "--rate-scale",
    type=FiniteRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Multiply each client's rate by this factor; 0.1 is a tenth.",
)
@click.option(
    "--seed",
    type=WholeRange(min=0),
    default=0,
    show_default=True,
    help="Seed of all that is drawn.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON.")
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="File to write.",
)
def servegen(
    folder: Path,
    from_s: float,
    duration_s: float,
    rate_scale: float,
    seed: int,
    as_json: bool,
    out: Path,
) -> None:
    """Draw a trace from a FOLDER of ServeGen's clients; each is a tenant."""
    if not math.isfinite(from_s) or not math.isfinite(duration_s):
        raise click.UsageError("--start and --duration: must be finite numbers of seconds")
    check_file(out)
    try:
        clients = read_pool(folder)
        records = draw(
            clients, from_s=from_s, duration_s=duration_s, rate_scale=rate_scale, seed=seed
        )
        count = write_own(records, out)
    except (TraceError, OSError) as error:
        raise told(error) from None
    if as_json:
        click.echo(json.dumps({"requests": count, "clients": len(clients), "out": str(out)}))
    else:
        click.echo(f"{count:,} requests of at most {len(clients):,} clients written to {out}")
    if not count:
        raise click.ClickException("no request falls into this time; choose another --start")
