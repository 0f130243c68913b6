"""`schedsvc demo` runs every phase and writes its report, its picture, its verdict."""

from pathlib import Path
from typing import Any

from rich.console import Console

from schedsvc_lab.demo.harness import Scene, Stage
from schedsvc_lab.demo.phases import Measured, Setting, run_all
from schedsvc_lab.demo.plot import draw
from schedsvc_lab.demo.show import show
from schedsvc_lab.demo.traffic import QUICK_S, TRACE_FILE, bundled, generate
from schedsvc_lab.demo.verdict import judge
from schedsvc_lab.load.files import write_report, write_requests
from schedsvc_lab.load.report import full_report, run_report


async def play(stage: Stage) -> Measured:
    """Run every phase on the bundled workload, or on another one that the seed draws."""
    seed = stage.seed
    trace = bundled() if seed is None else generate(seed)
    if stage.quick:
        trace = [request for request in trace if request.arrival_s < QUICK_S]
    name = TRACE_FILE.name if seed is None else f"drawn with seed {seed}"
    stage.say(
        f"{len(trace)} requests of three tenants over {trace[-1].arrival_s:.0f} s ({name}); "
        f"output in {stage.out}"
    )
    if stage.quick:
        stage.console.print("--quick checks that everything runs; its figures compare nothing")
    setting = Setting(trace, seed or 0, stage.out, stage.console, repeats=not stage.quick)
    return await run_all(setting)


def report_of(measured: Measured) -> dict[str, Any]:
    """Make the report."""
    phases = measured.phases.values()
    report = {phase.name: run_report(phase.result, phase.preemptions) for phase in phases}
    return report | {"after": measured.after}


def details_of(measured: Measured) -> dict[str, Any]:
    """Make the report with reasons, queue times and the generator's health."""
    phases = measured.phases.values()
    details = {phase.name: full_report(phase.result, phase.preemptions) for phase in phases}
    return details | {"after": measured.after}


def _write(measured: Measured, out: Path) -> None:
    write_report(details_of(measured), out / "details.json")
    for phase in measured.phases.values():
        write_requests(phase.result, out / f"requests-{phase.name}.csv")


def _draw(measured: Measured, report: dict[str, Any], path: Path) -> None:
    draw(report, {phase.name: phase.result for phase in measured.phases.values()}, path)


def _show(measured: Measured, report: dict[str, Any], console: Console) -> None:
    show(report, details_of(measured), console)


SCENE = Scene(play, report_of, judge, _draw, _show, "demo.png", _write, is_timed=True)
