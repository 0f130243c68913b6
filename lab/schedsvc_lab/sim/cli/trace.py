"""`schedsvc sim --trace` runs a trace under one or several policies."""

import gc
import json
import resource
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import click

from schedsvc.text.tables import table_console
from schedsvc_lab.sim.cli.bars import progress_bar, watch
from schedsvc_lab.sim.cli.show import show
from schedsvc_lab.sim.details import detail
from schedsvc_lab.sim.own_policy import PolicyError
from schedsvc_lab.sim.report import summarise, write_decisions, write_report, write_requests
from schedsvc_lab.sim.requests import Requests
from schedsvc_lab.sim.scenario import Run, Scenario, engine_configs, simulate


def run_trace(
    scenario: Scenario,
    requests: Requests,
    policies: tuple[str, ...],
    seeds: int,
    *,
    span_s: float | None,
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
    pools = tuple(engine_configs(scenario))
    drawn = []
    # Exempt all objects so far from collection: the collector would scan them again and again.
    is_frozen = gc.get_freeze_count() > 0  # the caller froze it, and it stays frozen
    gc.freeze()
    with progress_bar("requests") as progress:
        for policy in policies:
            for seed in range(seeds):
                task = progress.add_task(f"{policy}, seed {seed}", total=len(requests))
                before_ns = time.process_time_ns()
                try:
                    run = simulate(scenario, requests, policy, seed, partial(watch, progress, task))
                except PolicyError as error:
                    raise click.ClickException(str(error)) from error
                # A clock may stand still over a very short run.
                cpu_ns = max(time.process_time_ns() - before_ns, 1_000)
                progress.remove_task(task)
                report["policies"][policy].append(summarise(run, cpu_ns / 1e9, span_s))
                details["policies"][policy].append(detail(run))
                if out is not None:
                    _write(out, run, pools)
                # Other runs are not drawn, and their requests need not be kept.
                if seed == 0 and figures:
                    drawn.append(run)
    if not is_frozen:
        gc.unfreeze()
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


def _write(out: Path, run: Run, pools: tuple[str, ...]) -> None:
    name = f"{run.policy.replace(':', '.')}_{run.seed}"
    write_requests(run, out / f"requests_{name}.csv")
    write_decisions(run, out / f"decisions_{name}.csv", pools)


def peak_memory_bytes() -> int:
    """Return the most memory that this process has ever held."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
