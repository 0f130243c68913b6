"""`schedsvc sim --trace` runs a trace under one or several policies."""

import gc
import json
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import click

from schedsvc.text.tables import table_console
from schedsvc_lab.sim.cli.bars import progress_bar
from schedsvc_lab.sim.cli.show import show
from schedsvc_lab.sim.details import detail
from schedsvc_lab.sim.notebook import Measured, each_run
from schedsvc_lab.sim.own_policy import PolicyError
from schedsvc_lab.sim.report import summarise, write_decisions, write_report, write_requests
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.sim.scenario import Run, Scenario
from schedsvc_lab.sim.workers import WorkerError


def run_trace(
    scenario: Scenario,
    requests: Requests,
    policies: tuple[str, ...],
    seeds: int,
    *,
    span_s: float | None,
    jobs: int,
    out: Path | None,
    figures: bool,
    as_json: bool,
) -> None:
    """Run every policy with every seed; write files and print what came of it."""
    report: dict[str, Any] = {
        "engine": scenario.profile.name,
        "policies": {policy: [] for policy in policies},
    }
    details: dict[str, Any] = {"policies": {policy: [] for policy in policies}}
    drawn = []
    with _frozen(), _table(out) as table:
        for run, cpu_s in _watched(scenario, requests, policies, seeds, jobs):
            if out is not None and table is not None:
                _write(out, table, run)
            report["policies"][run.policy].append(summarise(run, cpu_s, span_s))
            details["policies"][run.policy].append(detail(run))
            # Other runs are not drawn, and their requests need not be kept.
            if run.seed == 0 and figures:
                drawn.append(run)
    details["peak_memory_bytes"] = peak_memory_bytes()
    if out is not None:
        write_report(report, out / "report.json")
        write_report(details, out / "details.json")
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        show(report, details, table_console(markup=True))
    if out is not None and figures:
        # Imported here: matplotlib would make other runs start later.
        from schedsvc_lab.sim.figures import draw_all

        draw_all(drawn, out, span_s)


@contextmanager
def _frozen() -> Iterator[None]:
    """Take all objects so far from the collector, which would scan them again and again."""
    is_frozen = gc.get_freeze_count() > 0  # the caller froze it, and it stays frozen
    gc.freeze()
    yield
    if not is_frozen:
        gc.unfreeze()


@contextmanager
def _table(out: Path | None) -> Iterator[TextIO | None]:
    """Open the tidy table of all runs, if files are written."""
    if out is None:
        yield None
        return
    with (out / "requests.csv").open("w", newline="") as file:
        yield file


def _watched(
    scenario: Scenario, requests: Requests, policies: tuple[str, ...], seeds: int, jobs: int
) -> Iterator[Measured]:
    """Yield the runs, with a bar of their requests."""
    with progress_bar("requests") as progress:
        bar = progress.add_task("", total=len(requests) * len(policies) * seeds)
        done = 0

        def watch(policy: str, seed: int, ended: int) -> None:
            progress.update(bar, completed=done + ended, description=f"{policy}, seed {seed}")

        try:
            for measured in each_run(scenario, requests, policies, seeds, jobs, watch):
                done += len(requests)
                progress.update(bar, completed=done)
                yield measured
        except (PolicyError, WorkerError) as error:
            raise click.ClickException(str(error)) from error


def _write(out: Path, table: TextIO, run: Run) -> None:
    write_requests(run, table, header=table.tell() == 0)
    write_decisions(run, out / f"decisions_{run.policy.replace(':', '.')}_{run.seed}.csv")


def peak_memory_bytes() -> int:
    """Return the most memory that this process, or one that worked for it, has ever held."""
    unit = 1 if sys.platform == "darwin" else 1024
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(kind).ru_maxrss for kind in kinds) * unit
