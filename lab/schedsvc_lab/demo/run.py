"""The whole demo: every phase, its report, its picture, its verdict."""

import asyncio
import time
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from schedsvc_lab.demo.ending import conclude, until_signalled
from schedsvc_lab.demo.phases import Measured, Setting, run_all
from schedsvc_lab.demo.plot import draw
from schedsvc_lab.demo.show import show
from schedsvc_lab.demo.traffic import QUICK_S, TRACE_FILE, bundled, generate
from schedsvc_lab.demo.verdict import judge
from schedsvc_lab.load.files import write_report, write_requests
from schedsvc_lab.load.report import full_report, run_report


def run_demo(out: Path, *, seed: int | None, quick: bool, as_json: bool) -> bool:
    """Run the demo into a folder that exists; True where every bar holds.

    `seed` draws another workload than the bundled one; `quick` sends only the beginning of it, and
    holds the run against the bars that do not compare figures. Raises DemoError, TargetError,
    OSError; asyncio.CancelledError on SIGTERM and SIGHUP and KeyboardInterrupt on Ctrl-C, with
    every program ended.
    """
    started = time.monotonic()
    trace = bundled() if seed is None else generate(seed)
    if quick:
        trace = [request for request in trace if request.arrival_s < QUICK_S]
    console = Console(stderr=as_json)
    name = TRACE_FILE.name if seed is None else f"drawn with seed {seed}"
    console.print(
        f"{len(trace)} requests of three tenants over {trace[-1].arrival_s:.0f} s ({name}); "
        f"output in {out}",
        highlight=False,
    )
    if quick:
        console.print("--quick checks that everything runs; its figures compare nothing")
    setting = Setting(trace, seed or 0, out, console, repeats=not quick)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        measured = runner.run(until_signalled(run_all(setting)))
    report, details = reports(measured)
    _write(measured, report, details, out)
    bars = judge(report, quick=quick)
    show(report, details, console)
    files = (out / "demo.png", out / "report.json")
    took = f"; {time.monotonic() - started:.0f} s in all"
    return conclude(report, bars, files, console, as_json=as_json, note=took)


def reports(measured: Measured) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make the report, and the same with reasons, queue times and the generator's health."""
    phases = measured.phases.values()
    report = {phase.name: run_report(phase.result, phase.preemptions) for phase in phases}
    details = {phase.name: full_report(phase.result, phase.preemptions) for phase in phases}
    return report | {"after": measured.after}, details | {"after": measured.after}


def _write(measured: Measured, report: dict[str, Any], details: dict[str, Any], out: Path) -> None:
    write_report(report, out / "report.json")
    write_report(details, out / "details.json")
    for phase in measured.phases.values():
        write_requests(phase.result, out / f"requests-{phase.name}.csv")
    draw(report, {phase.name: phase.result for phase in measured.phases.values()}, out / "demo.png")
