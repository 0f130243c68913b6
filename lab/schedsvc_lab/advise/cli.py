"""`schedsvc advise` searches for a configuration that meets goals on recorded traffic."""

import gc
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import yaml
from schedsvc_client.operator import Operator

from schedsvc.cli.connect import Connection, explaining, may_connect
from schedsvc.cli.tenant_entry import listed_tenants
from schedsvc.config import Config, problem_text, read
from schedsvc.config.models import Tenant
from schedsvc.text.option_types import WholeRange, make_folder
from schedsvc.text.tables import table_console
from schedsvc_lab.advise.draft import (
    Draft,
    all_enforced,
    apply,
    changes,
    draft_of,
    draft_yaml,
    listed,
)
from schedsvc_lab.advise.engines import ENGINES_MAX, Needed, fewest, with_engines
from schedsvc_lab.advise.goals import Goal, GoalError, Subject, parse_goal, subject_of
from schedsvc_lab.advise.measure import Table, tenant_rows
from schedsvc_lab.advise.recorded import RecordedError, recorded_traffic
from schedsvc_lab.advise.report import report_of, show, unlisted_notes
from schedsvc_lab.advise.running import Running, as_today
from schedsvc_lab.advise.search import STRESS, Load, Trial, budget_of, judge_run, load_of, search
from schedsvc_lab.engine import profile_names
from schedsvc_lab.sim.cli.bars import progress_bar
from schedsvc_lab.sim.cli.inputs import config_of, profile_of, requests_of
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.sim.scenario import Run, Scenario, ScenarioError, engine_configs, simulate

__all__ = ["advise"]

#: The draft of a file that there is not yet.
_NEW_FILE: dict[str, Any] = {"listeners": [{"tcp": "127.0.0.1:7600"}]}

EPILOG = """\b
Example:
  schedsvc advise --recording recording --config schedsvc.yaml \\
      --goal "production p99 first token <= 2 s" --out out/advice
  schedsvc advise --trace trace.csv --profile a10g-llama2-7b \\
      --goal "* p90 wait <= 500 ms" --goal "batch refusals <= 5 %" --json
  schedsvc advise --recording recording --target 127.0.0.1:7600 \\
      --goal "production p99 first token <= 2 s" --fewest-engines

A goal is SUBJECT pNN first token <= X s|ms, SUBJECT pNN wait <= X s|ms, SUBJECT refusals <= X %,
SUBJECT share >= X %, or SUBJECT throughput >= X tokens/s. SUBJECT is a tenant, a class, or * for
all requests. A refused request counts as one that waits for ever. The same arguments give the same
draft. The exit status is 1 if the draft misses a goal.
"""


def _file(name: str, parameter: str, text: str) -> Callable[[Any], Any]:
    path = click.Path(exists=True, dir_okay=False, path_type=Path)
    return click.option(name, parameter, type=path, help=text)


@click.command("advise", epilog=EPILOG)
@may_connect(
    "Take tenants and engines of this running scheduler (HOST:PORT or unix:PATH) as those of "
    "today, with what operators set."
)
@_file("--recording", "recording", "A server's recording (`record` in its configuration).")
@_file("--trace", "trace_file", "A trace with times and lengths instead; it needs --profile.")
@_file("--config", "config_file", "Today's configuration file; without it the defaults.")
@click.option(
    "--goal",
    "goals",
    multiple=True,
    required=True,
    metavar="GOAL",
    help='A goal, such as "production p99 first token <= 2 s"; repeat it for more.',
)
@click.option(
    "--profile",
    "profile_name",
    metavar="NAME",
    help=f"Costs of an engine: {', '.join(profile_names())}, or a .yaml file; default for a "
    "recording: fitted to it.",
)
@click.option(
    "--engines",
    type=WholeRange(1, 64),
    help="Number of engines, if the configuration names no pools; default: those of the"
    " recording, or 1.",
)
@click.option(
    "--fewest-engines",
    is_flag=True,
    help=f"Find the least number of engines that meets the goals, at most {ENGINES_MAX}, and draft "
    "for that.",
)
@click.option(
    "--tenant",
    default="default",
    show_default=True,
    metavar="NAME",
    help="Tenant of requests that name none.",
)
@click.option(
    "--jobs",
    type=WholeRange(1, 256),
    default=lambda: min(os.cpu_count() or 1, 8),
    help="Processes that simulate side by side; default: one for each processor, at most 8.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for draft.yaml, advice.json, and advice.png.",
)
def advise(
    connection: Connection | None,
    recording: Path | None,
    trace_file: Path | None,
    config_file: Path | None,
    goals: tuple[str, ...],
    profile_name: str | None,
    engines: int | None,
    fewest_engines: bool,
    tenant: str,
    jobs: int,
    as_json: bool,
    out: Path | None,
) -> None:
    """Draft a configuration that meets goals on recorded traffic, and compare it with today's."""
    try:
        wanted = [parse_goal(text) for text in goals]
    except GoalError as error:
        raise click.BadParameter(str(error), param_hint="--goal") from None
    if out is not None:
        make_folder(out)
    if fewest_engines and engines is not None:
        raise click.UsageError("--fewest-engines counts engines itself; give no --engines")
    today = _today(config_file, connection)
    scenario, requests = _traffic(
        recording, trace_file, today.simulated, profile_name, engines, tenant
    )
    advice = Advice(scenario, requests, wanted)
    for note in advice.notes:
        click.echo(note, err=True)
    if out is not None:
        # Checked before the long search, because afterwards it would be too late.
        _write_draft(out, today, advice.config, config_file)
    report, drafted = advice.fewest(jobs) if fewest_engines else advice.run(jobs)
    if out is not None:
        _write_report(out, report)
        _write_draft(out, today, drafted, config_file)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        show(report, table_console())
        if out is not None:
            click.echo(f"written: {out / 'draft.yaml'}, {out / 'advice.png'}")
    if not all(goal["draft"]["met"] for goal in report["goals"]):
        raise SystemExit(1)


class _Today(NamedTuple):
    """Holds the configuration of today: the data of its file, and what that says."""

    data: dict[str, Any]
    config: Config
    simulated: Config  # with the pools of the running scheduler, if one was named


def _today(file: Path | None, connection: Connection | None) -> _Today:
    """Read the file, and ask the running scheduler for its tenants and pools."""
    config, data = config_of(file), dict(_NEW_FILE)
    if file is not None:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    config = Config.model_validate(_NEW_FILE) if config is None else config
    if connection is None:
        return _Today(data, config, config)
    with explaining(connection.target), Operator(connection.target, **connection.proof) as operator:
        running = Running.of(listed_tenants(operator), operator.stats())
        data = as_today(config, data, running)
        tenants = [Tenant.model_validate(entry) for entry in running.tenants]
    config = config.model_copy(update={"tenants": tenants})
    sized = any(pool.capacity_tokens for pool in config.pools)
    pools = config.pools if sized or not running.pools else running.pools
    return _Today(data, config, config.model_copy(update={"pools": pools}))


def _traffic(
    recording: Path | None,
    trace_file: Path | None,
    config: Config,
    profile_name: str | None,
    engines: int | None,
    tenant: str,
) -> tuple[Scenario, Requests]:
    """Read the requests, and the engines that served them."""
    if (recording is None) == (trace_file is None):
        raise click.UsageError("give either --recording FILE or --trace FILE")
    if trace_file is not None:
        if profile_name is None:
            raise click.UsageError(
                f"{trace_file}: a trace has no times of an engine; give --profile NAME|FILE.yaml, "
                "or a --recording, from which the profile is fitted"
            )
        profile = profile_of(profile_name)
        return Scenario(profile, config, engines or 1), requests_of(trace_file, tenant)
    assert recording is not None
    try:
        traffic = recorded_traffic(recording, fits=profile_name is None)
    except RecordedError as error:
        raise click.ClickException(str(error)) from None
    if profile_name is not None:
        profile = profile_of(profile_name)
    else:
        assert traffic.profile is not None
        profile = traffic.profile
        click.echo(traffic.fitted, err=True)
    return Scenario(profile, config, engines or traffic.engines), traffic.requests


class Advice:
    """Runs one search on one trace."""

    def __init__(self, scenario: Scenario, requests: Requests, goals: Sequence[Goal]) -> None:
        """Find the subjects of the goals. Raises click's errors."""
        if scenario.config is None:
            raise ValueError("an advice needs a configuration")
        self.requests = requests
        self._given = scenario
        self._dense = requests.denser(STRESS)
        self.goals = tuple(goals)
        self.config = listed(scenario.config, requests.clients)
        # Clients share one flow until a draft lists them.
        owns = scenario.config.unknown_tenants == "own"
        self.today = self.config if owns else all_enforced(scenario.config)
        self.scenario = replace(scenario, config=self.config)
        by_name = {t.name: t.request_class or "default" for t in self.config.tenants}
        others = self.config.unknown_limits.request_class or "default"
        self.tenant_class = tuple(by_name.get(client, others) for client in requests.clients)
        classes = sorted({*self.tenant_class, *(each for each in requests.classes or () if each)})
        unlisted = [client for client in requests.clients if client not in by_name]
        self.notes = unlisted_notes(requests, unlisted, self.config)
        refused = unlisted if self.config.unknown_tenants == "refuse" else ()
        try:
            self.subjects = tuple(
                subject_of(goal, requests.clients, classes, refused) for goal in goals
            )
            engine_configs(self.scenario)
        except GoalError as error:
            raise click.BadParameter(str(error), param_hint="--goal") from None
        except ScenarioError as error:
            raise click.ClickException(str(error)) from None

    def run(self, jobs: int) -> tuple[dict[str, Any], Config]:
        """Search, and return the report and the drafted configuration."""
        # Exempt the trace from collection: the collector would scan it again and again.
        gc.freeze()
        today_run = self._simulate(self.today)
        today = self._trial(draft_of(self.config), self.today)
        table = Table.of(today_run, self.tenant_class)
        if not len(table.client):
            raise click.ClickException(
                "no configuration can serve any of the requests: "
                + "; ".join([*self.notes, "all others are too large for the engines"])
            )
        budget = budget_of(len(self.requests))
        found = self.find(jobs, budget, table)
        drafted = apply(self.config, found.best.draft)
        if drafted is None or found.best.key >= today.key:
            drafted, best_run, best = self.config, today_run, today
        else:
            best_run, best = self._simulate(drafted), found.best
        rows = (tenant_rows(table), tenant_rows(Table.of(best_run, self.tenant_class)))
        report = report_of(
            self.goals,
            list(zip(today.goals, best.goals, strict=True)),
            changes(self.config, today.draft, best.draft),
            rows,
            engine=self.scenario.profile.name,
            simulations=found.trials,
            notes=self.notes,
        )
        return report, drafted

    def fewest(self, jobs: int) -> tuple[dict[str, Any], Config]:
        """Find the least numbers of engines that meet the goals, and draft for the lesser one."""
        advices: dict[int, Advice] = {}
        results: dict[int, tuple[dict[str, Any], Config]] = {}

        def advice(count: int) -> Advice:
            if count not in advices:
                scenario = with_engines(self._given, count)
                advices[count] = Advice(scenario, self.requests, self.goals)
            return advices[count]

        def drafted(count: int) -> bool:
            results[count] = advice(count).run(jobs)
            return all(goal["draft"]["met"] for goal in results[count][0]["goals"])

        try:
            today = fewest(lambda count: advice(count).meets_today())
            draft = fewest(drafted, ENGINES_MAX if today is None else today)
        except ScenarioError as error:
            raise click.ClickException(str(error)) from None
        report, config = results[draft or max(results)]
        return {**report, "engines_needed": Needed(today, draft).plain()}, config

    def meets_today(self) -> bool:
        """Return whether the settings of today meet all goals. O(a simulation)."""
        run = self._simulate(self.today)
        return judge_run(run, draft_of(self.config), *self._judged_by).is_met

    def find(self, jobs: int, budget: int, table: Table) -> Any:
        """Search with at most `budget` simulations; `table` is today's run."""
        load = self.load(table)
        with progress_bar("simulations") as progress, self._evaluator(jobs) as evaluate:
            task = progress.add_task("drafts", total=budget)

            def counted(drafts: Sequence[Draft]) -> Iterator[Trial | None]:
                for trial in evaluate(drafts):
                    progress.advance(task)
                    yield trial

            return search(self.config, load, lambda drafts: list(counted(drafts)), budget)

    def load(self, table: Table) -> Load:
        """Sum up the trace for the search."""
        minutes = max(self.requests.arrival_ns[-1] / 60e9, 1e-3)
        return load_of(self.config, self.requests, table, self.goals, self.subjects, minutes)

    @property
    def _judged_by(self) -> tuple[Sequence[str], Sequence[Goal], Sequence[Subject]]:
        return self.tenant_class, self.goals, self.subjects

    def _simulate(self, config: Config) -> Run:
        scenario = replace(self.scenario, config=config)
        return simulate(scenario, self.requests, config.scheduler.policy)

    def trial(self, draft: Draft) -> Trial | None:
        """Simulate a draft and judge it; None: the rules forbid it."""
        config = apply(self.config, draft)
        return None if config is None else self._trial(draft, config)

    def _trial(self, draft: Draft, config: Config) -> Trial:
        found = judge_run(self._simulate(config), draft, *self._judged_by)
        if not found.needs_stress:
            return found
        scenario = replace(self.scenario, config=config)
        run = simulate(scenario, self._dense, config.scheduler.policy)
        return found._replace(stress=judge_run(run, draft, *self._judged_by).goals)

    @contextmanager
    def _evaluator(
        self, jobs: int
    ) -> Iterator[Callable[[Sequence[Draft]], Iterator[Trial | None]]]:
        if jobs == 1:
            yield lambda drafts: map(self.trial, drafts)
            return
        # Not forked: this process has threads.
        context = multiprocessing.get_context("spawn")
        try:
            with ProcessPoolExecutor(jobs, context, _begin, (self,)) as pool:
                yield lambda drafts: pool.map(_work, drafts)
        except BrokenProcessPool:
            raise click.ClickException(
                "a worker process died, perhaps for lack of memory; try fewer --jobs"
            ) from None


# All simulations of a worker process share it; each process receives it once.
_common: list[Advice] = []


def _begin(advice: Advice) -> None:
    _common[:] = [advice]
    gc.freeze()


def _work(draft: Draft) -> Trial | None:
    return _common[0].trial(draft)


def _write_report(out: Path, report: dict[str, Any]) -> None:
    # Imported here: matplotlib would make runs without --out start later.
    from schedsvc_lab.advise.figure import draw_advice

    (out / "advice.json").write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    draw_advice(report, out / "advice.png")


def _write_draft(out: Path, today: _Today, drafted: Config, config_file: Path | None) -> None:
    """Write the drafted file, and check it as `schedsvc check` does."""
    path = out / "draft.yaml"
    path.write_text(draft_yaml(today.data, today.config, drafted), encoding="utf-8")
    reading = read(path)
    if reading.problems:
        found = "\n".join(problem_text(path, problem) for problem in reading.problems)
        raise click.ClickException(
            f"{found}\nrelative paths start in the folder of the file: give --out "
            f"{(config_file or path).absolute().parent}"
        )
