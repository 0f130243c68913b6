"""`schedsvc demo` shows the noisy neighbour, without and with the scheduler."""

import asyncio
from importlib import import_module
from pathlib import Path

import click

from schedsvc.text.option_types import WholeRange, make_folder

EPILOG = """\b
Example:
  schedsvc demo --out out/demo
  schedsvc demo --quick
  schedsvc demo --failover --out out/demo-failover
  schedsvc demo --cluster --out out/demo-cluster

Writes report.json, details.json, demo.png, one CSV of requests for each run, and the logs of the
programs it started. --failover writes report.json, failover.png, requests.csv and the logs;
--cluster writes report.json, cluster.png and the logs. The exit status is 0 only if every bar
holds.
"""


@click.command("demo", epilog=EPILOG)
@click.option(
    "--out",
    default="out/demo",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the report, the picture and the logs; made where it is missing.",
)
@click.option(
    "--seed",
    type=WholeRange(min=0),
    help="Draw another workload of the same kind instead of the bundled one.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="Send the first 3 seconds of the workload, and check only that everything runs.",
)
@click.option(
    "--failover",
    is_flag=True,
    help="Kill the leader of two schedulers under load instead. Needs valkey-server, or "
    "redis-server 7.0 or newer.",
)
@click.option(
    "--cluster",
    is_flag=True,
    help="Kill the store of four schedulers that share one fairness instead. Needs valkey-server, "
    "or redis-server 7.0 or newer.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def demo(
    out: Path, seed: int | None, quick: bool, failover: bool, cluster: bool, as_json: bool
) -> None:
    """Show what one flooding tenant does to the others, and what the scheduler does about it.

    Starts emulated engines and a scheduler, and sends the same requests of three tenants four
    times: the quiet tenant alone, all on the plain engine, all through the scheduler, and once
    more through the same scheduler. Takes less than two minutes.
    """
    # Imported here: numpy and matplotlib would make every other command start later.
    from rich.console import Console

    from schedsvc_lab.demo.harness import Stage, perform
    from schedsvc_lab.demo.processes import DemoError
    from schedsvc_lab.load.generator import TargetError

    if failover and cluster:
        raise click.UsageError("--failover and --cluster are two demos; give one of them")
    if cluster and seed is not None:
        raise click.UsageError("--seed draws no workload for --cluster: its requests are all alike")
    make_folder(out)
    module = "schedsvc_lab.demo.run"
    if failover or cluster:
        module = "schedsvc_lab.demo.cluster" if cluster else "schedsvc_lab.demo.failover"
    scene = import_module(module).SCENE
    stage = Stage(out, Console(stderr=as_json), seed, quick)
    try:
        holds = perform(scene, stage, as_json=as_json)
    except (DemoError, TargetError, OSError) as error:
        raise click.ClickException(str(error)) from None
    except asyncio.CancelledError:
        raise click.ClickException("ended by a signal") from None
    if not holds:
        raise click.ClickException("a bar does not hold; see above")
