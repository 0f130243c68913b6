"""`schedsvc sim`: what a configuration would have done to a trace."""

import json
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from schedsvc.config import Config, ConfigError, load
from schedsvc.sim.engine import Profile, ProfileError, load_profile, profile_names
from schedsvc.sim.report import summarise, write_decisions, write_report, write_requests
from schedsvc.sim.requests import Requests
from schedsvc.sim.scenario import (
    POLICIES,
    Run,
    Scenario,
    ScenarioError,
    engine_configs,
    simulate,
)
from schedsvc.sim.suite import SEEDS, Row, VtcPaper, run_count
from schedsvc.sim.world import Settings
from schedsvc.workload import TraceError, read_trace

_NS_PER_MS = 1_000_000
_POSITIVE = click.FloatRange(min=0, min_open=True)
# The core's own bound on the tokens of one request.
_TOKENS_MAX = 1 << 27

EPILOG = """\b
Example:
  schedsvc sim --trace trace.csv --policy engine --policy fcfs --policy vtc --out out/sim
  schedsvc sim --trace trace.csv --policy vtc --config schedsvc.yaml --seeds 5 --jitter 50 --json
  schedsvc sim --suite vtc-paper

Policies: engine (no scheduler), fcfs, vtc. The same arguments give the same digests.
"""


def _read_trace(path: Path, tenant: str) -> Requests:
    """Read the whole trace before anything starts: an error in its last line is told first."""
    try:
        requests = Requests.from_trace(read_trace(path, tenant=tenant))
    except (TraceError, OSError) as error:
        raise click.ClickException(str(error)) from None
    for at, prompt in enumerate(requests.prompt_tokens):
        if prompt + requests.output_tokens[at] > _TOKENS_MAX:
            raise click.ClickException(
                f"{path}: request {at + 1} of client "
                f"{requests.clients[requests.client[at]]!r} has {prompt} input and "
                f"{requests.output_tokens[at]} output tokens; at most {_TOKENS_MAX} in all"
            )
    return requests


def _read_profile(name: str) -> Profile:
    try:
        return load_profile(name)
    except ProfileError as error:
        raise click.BadParameter(str(error), param_hint="--engine") from None


def _read_config(path: Path | None) -> Config | None:
    if path is None:
        return None
    try:
        return load(path)
    except ConfigError as error:
        raise click.ClickException(f"{error}\n{path} is not valid; nothing was started") from None


def _progress_bar(console: Console, unit: str) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def _watch(progress: Progress, task: TaskID, ended: int) -> None:
    progress.update(task, completed=ended)


def _simulate_all(
    scenario: Scenario, requests: Requests, policies: tuple[str, ...], seeds: int, console: Console
) -> list[tuple[Run, float]]:
    """Run every policy with every seed. Returns each run with the CPU seconds that it took."""
    runs = []
    with _progress_bar(console, "requests") as progress:
        for policy in policies:
            for seed in range(seeds):
                task = progress.add_task(f"{policy}, seed {seed}", total=len(requests))
                before_ns = time.process_time_ns()
                watch = partial(_watch, progress, task)
                run = simulate(scenario, requests, policy, seed, watch)
                # A clock may stand still over a very short run.
                cpu_ns = max(time.process_time_ns() - before_ns, 1_000)
                runs.append((run, cpu_ns / 1e9))
                progress.remove_task(task)
    return runs


def _write(
    out: Path, runs: list[Run], report: dict[str, Any], pools: tuple[str, ...], span_s: float | None
) -> None:
    # Imported here: matplotlib would make runs without --out start later.
    from schedsvc.sim.figures import draw_all

    out.mkdir(parents=True, exist_ok=True)
    for run in runs:
        write_requests(run, out / f"requests_{run.policy}_{run.seed}.csv")
        write_decisions(run, out / f"decisions_{run.policy}_{run.seed}.csv", pools)
    draw_all([run for run in runs if run.seed == 0], out, span_s)
    write_report(report, out / "report.json")


def _mean(entries: list[dict[str, Any]], *keys: str) -> float | None:
    """Mean over seeds of one figure; None where some seed has none."""
    values = []
    for entry in entries:
        value: Any = entry
        for key in keys:
            value = value[key]
        if value is None:
            return None
        values.append(float(value))
    return sum(values) / len(values)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


_FIGURES = (
    ("throughput (tokens/s)", ",.1f", ("throughput_tokens_per_s",)),
    ("service difference, mean", ",.1f", ("service_difference", "mean")),
    ("service difference, max", ",.1f", ("service_difference", "max")),
    ("gap of accumulated service", ",.0f", ("cumulative_gap",)),
    ("refused", ",.0f", ("refused",)),
    ("preemptions", ",.0f", ("preemptions",)),
    ("KV cache used", ".1%", ("kv_used_mean",)),
    ("KV cache reserved", ".1%", ("kv_reserved_mean",)),
    ("simulated requests per CPU second", ",.0f", ("simulated_requests_per_cpu_s",)),
)


def _show(report: dict[str, Any], console: Console) -> None:
    """Print the policies side by side; figures are means over the seeds."""
    policies = report["policies"]
    table = Table(title=f"engine {report['engine']}", title_justify="left")
    table.add_column("")
    for policy in policies:
        table.add_column(policy, justify="right")
    for name, form, keys in _FIGURES:
        table.add_row(name, *(_cell(_mean(runs, *keys), form) for runs in policies.values()))
    console.print(table)
    _show_clients(report, console)
    for policy, entries in policies.items():
        digests = ", ".join(entry["digest"] for entry in entries)
        console.print(f"{policy}: digest {digests}", highlight=False)


def _show_clients(report: dict[str, Any], console: Console) -> None:
    table = Table(title="mean time to first token (s)", title_justify="left")
    table.add_column("client")
    policies = report["policies"]
    for policy in policies:
        table.add_column(policy, justify="right")
    for client in next(iter(policies.values()))[0]["first_token_s"]:
        means = (_mean(entries, "first_token_s", client) for entries in policies.values())
        table.add_row(client, *(_cell(mean, ",.2f") for mean in means))
    console.print(table)


def _refuse_others(ctx: click.Context) -> None:
    """Refuse options that would have no effect: a suite fixes everything but its seeds."""
    for parameter in ctx.command.params:
        name = str(parameter.name)
        given = ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE
        if given and name not in ("suite", "seeds", "as_json", "out"):
            raise click.UsageError(f"{parameter.opts[0]} cannot be given with --suite")


def _run_suite(seeds: int, out: Path | None, as_json: bool) -> None:
    """Run the suite, and fail where a row misses."""
    with _progress_bar(Console(stderr=True), "runs") as progress:
        task = progress.add_task("vtc-paper", total=run_count(seeds))
        rows = list(VtcPaper(seeds, partial(_watch, progress, task)).rows())
    report = {"suite": "vtc-paper", "seeds": seeds, "rows": [asdict(row) for row in rows]}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_report(report, out / "vtc-paper.json")
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _show_rows(rows, Console())
    missed = sum(row.verdict == "misses" for row in rows)
    if missed:
        raise click.ClickException(f"{missed} of {len(rows)} rows miss")


def _show_rows(rows: list[Row], console: Console) -> None:
    table = Table(title="VTC paper (arXiv 2401.00588)", title_justify="left")
    for name in ("workload", "policy", "figure"):
        table.add_column(name)
    for name in ("simulated", "published"):
        table.add_column(name, justify="right")
    table.add_column("rule")
    table.add_column("verdict")
    for row in rows:
        style = "bold red" if row.verdict == "misses" else None
        numbers = (_number(row.value), "-" if row.published is None else _number(row.published))
        table.add_row(
            row.workload, row.policy, row.figure, *numbers, row.rule, row.verdict, style=style
        )
    console.print(table)
    console.print(
        "artifact: the paper's server, first come, first served. vtc and fcfs: the production "
        "core, whose memory test is the sum form; shown rows are of a server in peak form."
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:,.3g}"


@click.command("sim", epilog=EPILOG)
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Trace with times and lengths; CSV in the LMSYS or the Azure form among others.",
)
@click.option("--tenant", default="default", show_default=True, help="For traces without tenants.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(list(POLICIES)),
    help="Who decides; give several to compare them.",
)
@click.option(
    "--engine",
    "engine_name",
    default="a10g-llama2-7b",
    show_default=True,
    help=f"Profile: {', '.join(profile_names())}, or a .yaml file.",
)
@click.option(
    "--engines",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="How many, where the configuration names no pools.",
)
@click.option(
    "--config",
    "config_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The server's configuration file; without it nobody is refused, all weigh the same.",
)
@click.option("--seeds", type=click.IntRange(1, 1_000), help="How many; default: 1, of a suite 5.")
@click.option(
    "--jitter",
    "jitter_ms",
    type=click.FloatRange(0, 3_600_000),
    default=0.0,
    show_default=True,
    help="Delay each arrival by up to so many ms, drawn from the seed.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(0, _TOKENS_MAX),
    default=0,
    show_default=True,
    help="Output that each request asks for; 0: exactly what it produces.",
)
@click.option(
    "--progress",
    "progress_ms",
    type=click.FloatRange(1, 60_000),
    default=200.0,
    show_default=True,
    help="A shim reports its running requests every so many ms.",
)
@click.option(
    "--report-delay",
    "report_delay_ms",
    type=click.FloatRange(0, 60_000),
    default=0.0,
    show_default=True,
    help="A report is so many ms on its way.",
)
@click.option(
    "--round-steps",
    type=click.IntRange(0, 10_000),
    default=0,
    show_default=True,
    help="Consider new work only every so many decode steps, as the VTC paper's server does.",
)
@click.option(
    "--span",
    "span_s",
    type=_POSITIVE,
    help="Seconds over which service differences are measured; default: to the last arrival.",
)
@click.option(
    "--suite",
    type=click.Choice(["vtc-paper"]),
    help="Published experiments instead of a trace, each figure with a verdict.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for report.json, requests and decisions as CSV, and PNG figures.",
)
@click.pass_context
def sim(
    ctx: click.Context,
    trace_file: Path | None,
    tenant: str,
    policies: tuple[str, ...],
    engine_name: str,
    engines: int,
    config_file: Path | None,
    seeds: int | None,
    jitter_ms: float,
    max_tokens: int,
    progress_ms: float,
    report_delay_ms: float,
    round_steps: int,
    span_s: float | None,
    suite: str | None,
    as_json: bool,
    out: Path | None,
) -> None:
    """Simulate engines behind the scheduler, in virtual time, under one or several policies."""
    if suite is not None:
        _refuse_others(ctx)
        _run_suite(SEEDS if seeds is None else seeds, out, as_json)
        return
    if trace_file is None or not policies:
        raise click.UsageError("give --trace FILE and at least one --policy, or --suite NAME")
    scenario = Scenario(
        profile=_read_profile(engine_name),
        config=_read_config(config_file),
        engines=engines,
        settings=Settings(
            progress_ns=round(progress_ms * _NS_PER_MS),
            report_delay_ns=round(report_delay_ms * _NS_PER_MS),
            round_steps=round_steps,
        ),
        jitter_ns=round(jitter_ms * _NS_PER_MS),
        output_tokens_max=max_tokens,
    )
    try:
        pools = tuple(engine_configs(scenario))
    except ScenarioError as error:
        raise click.ClickException(str(error)) from None
    requests = _read_trace(trace_file, tenant)
    policies = tuple(dict.fromkeys(policies))
    console = Console(stderr=True)
    runs = _simulate_all(scenario, requests, policies, seeds or 1, console)
    report: dict[str, Any] = {
        "engine": scenario.profile.name,
        "policies": {policy: [] for policy in policies},
    }
    for run, cpu_s in runs:
        report["policies"][run.policy].append(summarise(run, cpu_s, span_s))
    if out is not None:
        _write(out, [run for run, _ in runs], report, pools, span_s)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _show(report, Console())
