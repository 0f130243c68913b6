"""`schedsvc sim sweep` varies settings, and shows the figures of each run."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.table import Table

from schedsvc.text.option_types import WholeRange, make_folder
from schedsvc.text.tables import table_console
from schedsvc_lab.sim.cli.bars import progress_bar
from schedsvc_lab.sim.cli.options import JOBS, SPAN, changed, world, world_options
from schedsvc_lab.sim.overrides import OverrideError, value_of
from schedsvc_lab.sim.own_policy import PolicyError
from schedsvc_lab.sim.report import write_report
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.sim.scenario import Scenario
from schedsvc_lab.sim.sweep import Goals, Point, combinations, measure, write_points
from schedsvc_lab.sim.workers import WorkerError, work_all

# The columns that fit into the table; the files and the JSON have all figures.
_HEADINGS = {
    "goodput_rps": "good/s",
    "good_part": "good",
    "throughput_tokens_per_s": "tokens/s",
    "first_token_p50_s": "TTFT p50",
    "first_token_p99_s": "p99 (s)",
    "refused": "refused",
    "token_p99_s": "TPOT p99",
    "preemptions": "preempted",
    "reserved_to_used": "res/used",
    "miss_ratio": "miss",
}

#: More runs than this are a mistake.
RUNS_MAX = 10_000

EPILOG = """\b
Example:
  schedsvc sim sweep --trace trace.csv --policy engine --policy vtc \\
      --vary engine.kv_tokens=8000,10000,12000 --goodput ttft:2000 \\
      --out out/sweep
  schedsvc sim sweep --trace mooncake.jsonl --policy engine \\
      --set engine.kv_tokens=2000000 --set engine.context_tokens_max=200000 \\
      --vary engine.cache_tokens_max=100000,400000,1600000 \\
      --vary engine.prefix_cache=lru,fifo,lfu
  schedsvc sim sweep --trace trace.csv --policy vtc \\
      --vary scheduler.expert.quantile=0.5,0.9,0.99 --json
"""


class Task(NamedTuple):
    """Holds one combination under one policy."""

    settings: dict[str, Any]
    scenario: Scenario
    policy: str


@click.command("sweep", epilog=EPILOG)
@world_options
@click.option(
    "--vary",
    multiple=True,
    required=True,
    metavar="NAME=VALUE,VALUE,...",
    help="Values of a setting as in --set; several: every combination. "
    "The first stands along the axis of the picture.",
)
@click.option(
    "--goodput",
    "goals",
    multiple=True,
    metavar="NAME:MS",
    help="Goal that a good request meets: ttft, tpot or e2el, in ms; give one for each.",
)
@click.option(
    "--client", metavar="NAME", help="Take goodput, waits and refusals of this client alone."
)
@click.option("--seeds", type=WholeRange(1, 1_000), default=1, show_default=True,
              help="Average figures over this many seeds.")  # fmt: skip
@SPAN
@JOBS
@click.option("--json", "as_json", is_flag=True, help="Print the points as JSON.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for sweep.json, sweep.csv and sweep.png.",
)
def sweep(
    policies: tuple[str, ...],
    vary: tuple[str, ...],
    goals: tuple[str, ...],
    client: str | None,
    seeds: int,
    span_s: float | None,
    jobs: int,
    as_json: bool,
    out: Path | None,
    **options: Any,
) -> None:
    """Simulate a trace with every combination of some settings."""
    if options["trace_file"] is None or not policies:
        raise click.UsageError("give --trace FILE and at least one --policy")
    values = dict(_values(text) for text in vary)
    goal = _goals(goals)
    scenario, requests = world(**options)
    if client is not None and client not in requests.clients:
        raise click.BadParameter(
            f"the trace has no client {client!r}; it has {', '.join(requests.clients[:20])}",
            param_hint="--client",
        )
    tasks = _tasks(scenario, requests, combinations(values), tuple(dict.fromkeys(policies)))
    if len(tasks) * seeds > RUNS_MAX:
        raise click.UsageError(
            f"{len(tasks) * seeds:,} runs are more than {RUNS_MAX:,}: vary less, or fewer seeds"
        )
    if out is not None:
        make_folder(out)
    try:
        points = _run(tasks, requests, (seeds, goal, span_s, client), jobs)
    except (PolicyError, WorkerError) as error:
        raise click.ClickException(str(error)) from error
    report = {
        "engine": scenario.profile.name,
        "seeds": seeds,
        "goals_ms": goal._asdict(),
        "client": client,
        "points": [{"settings": dict(p.settings), "policy": p.policy, **p.figures} for p in points],
    }
    if out is not None:
        # Imported here: matplotlib would make runs without --out start later.
        from schedsvc_lab.sim.figures.sweep import draw_sweep

        write_report(report, out / "sweep.json")
        write_points(points, out / "sweep.csv")
        draw_sweep(points, out / "sweep.png")
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _show(points, table_console(markup=True))


def _values(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    try:
        if not equals or not all(values.split(",")):
            raise OverrideError(f"{text!r}: give NAME=VALUE,VALUE,...")
        return name.strip(), [value_of(name, value) for value in values.split(",")]
    except OverrideError as error:
        raise click.BadParameter(str(error), param_hint="--vary") from None


def _goals(texts: tuple[str, ...]) -> Goals:
    given: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition(":")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if name not in Goals._fields or not 0 < value < 1e9:
            known = ", ".join(Goals._fields)
            raise click.BadParameter(
                f"{text!r}: give NAME:MS with one of {known}, such as ttft:2000",
                param_hint="--goodput",
            )
        given[name] = value
    return Goals(**given)


def _tasks(
    base: Scenario, requests: Requests, settings: list[dict[str, Any]], policies: tuple[str, ...]
) -> list[Task]:
    """Make every scenario, so that a wrong value is reported before anything starts."""
    made = [(each, changed(base, requests, each, "--vary")) for each in settings]
    return [Task(each, scenario, policy) for each, scenario in made for policy in policies]


# Seeds, goals, span, client.
Arguments = tuple[int, Goals, float | None, str | None]


def _work(common: tuple[Requests, Arguments], task: Task) -> Point:
    requests, arguments = common
    figures = measure(task.scenario, requests, task.policy, *arguments)
    return Point(task.settings, task.policy, figures)


def _run(tasks: list[Task], requests: Requests, arguments: Arguments, jobs: int) -> list[Point]:
    points = []
    with progress_bar("points") as progress:
        bar = progress.add_task("sweep", total=len(tasks))
        for point in work_all(_work, tasks, (requests, arguments), jobs):
            points.append(point)
            progress.advance(bar)
    return points


def _show(points: list[Point], console: Console) -> None:
    names = list(points[0].settings)
    shown = [name for name in _HEADINGS if any(point.figures[name] for point in points)]
    table = Table(pad_edge=False)
    for name in names:
        table.add_column(name.partition(".")[2], justify="right", overflow="fold")
    table.add_column("policy")
    for name in shown:
        table.add_column(_HEADINGS[name], justify="right")
    for point in points:
        table.add_row(
            *(str(value) for value in point.settings.values()),
            point.policy,
            *(_cell(point.figures[name]) for name in shown),
        )
    console.print(table)


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:,.3g}"
