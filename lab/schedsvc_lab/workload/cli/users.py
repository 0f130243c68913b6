"""Defines `schedsvc workload users`."""

import json
from collections.abc import Mapping
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from schedsvc.text.option_types import WholeRange, make_folder
from schedsvc_lab.workload.cli.common import FROM, open_trace, progress, tell_skipped, told
from schedsvc_lab.workload.record import TraceError
from schedsvc_lab.workload.users import KEYS, TooFewUsersError, Users, count, markdown, study

EPILOG = """\b
Example:
  schedsvc workload users --trace wildchat.jsonl --out out/users
  schedsvc workload users --trace burstgpt_3.csv --by conversation --json
"""


@click.command("users", epilog=EPILOG)
@click.option(
    "--trace",
    required=True,
    type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path),
    help="The trace; its order does not matter.",
)
@FROM
@click.option(
    "--by",
    type=click.Choice(KEYS),
    default=KEYS[0],
    show_default=True,
    help="Field that identifies the user of a request.",
)
@click.option(
    "--rounds",
    type=WholeRange(min=20, max=100_000),
    default=200,
    show_default=True,
    help="Samples of each bootstrap; 2,500 make a p-value certain to 0.01.",
)
@click.option(
    "--seed",
    type=WholeRange(min=0),
    default=0,
    show_default=True,
    help="Seed of all that is drawn.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the fits as JSON.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for users.md, users.json and users.png; without it the document is printed.",
)
def users(
    trace: Path, form: str, by: str, rounds: int, seed: int, as_json: bool, out: Path | None
) -> None:
    """Write a document on a trace's users: who asks how often, and what law that follows."""
    if out is not None:
        make_folder(out)
    # The order of arrival does not matter here, so it is not asked for.
    reader = open_trace(trace, form, sort=True)
    try:
        with progress(reader, sort=False) as records:
            counts, unnamed, duration_s = count(records, by)
        found = _study(counts, unnamed, duration_s, by, rounds, seed)
    except TooFewUsersError as error:
        raise click.ClickException(f"{trace}: {error}") from None
    except (TraceError, OSError) as error:
        raise told(error) from None
    text = json.dumps(found.summary(), indent=2)
    document = markdown(found, trace.name, "users.png")
    if out is not None:
        # Takes a second to import, which only this needs.
        from schedsvc_lab.workload.plot import draw_users

        (out / "users.md").write_text(document)
        (out / "users.json").write_text(text + "\n")
        draw_users(found, f"Users of {trace.name}", out / "users.png")
    if as_json:
        click.echo(text)
        return
    if out is None:
        click.echo(document)
    else:
        names = ("users.md", "users.json", "users.png")
        click.echo(", ".join(str(out / name) for name in names))
    tell_skipped(reader)


def _study(
    counts: Mapping[str, int], unnamed: int, duration_s: float, by: str, rounds: int, seed: int
) -> Users:
    """Fit, with a bar if the output is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("bootstrap"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("bootstrap", total=2 * rounds)
        return study(
            counts,
            unnamed,
            duration_s,
            by=by,
            rounds=rounds,
            seed=seed,
            step=lambda: bar.advance(task),
        )
