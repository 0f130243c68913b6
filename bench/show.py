"""Prints the ladder as a table."""

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.report import LEVELS, Report, Rung

__all__ = ["BESIDE", "duration", "ladder", "show", "verdict"]


def duration(ns: float | None) -> str:
    """Write a time with three digits and its unit."""
    if ns is None:
        return ""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if ns >= size:
            return f"{_three(ns / size)} {unit}"
    return f"{_three(ns)} ns"


def _three(value: float) -> str:
    """Write a number with three digits, thousands with a comma."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def verdict(rung: Rung) -> str:
    """Return what came of the rung's target, in a word."""
    if rung["target"] is None:
        return ""
    if rung["meets_target"]:
        return "met"
    return "missed" if rung["meets_must"] else "MUST missed"


_STYLES = {"met": "green", "missed": "yellow", "MUST missed": "bold red", "": ""}


#: The width if the output is no terminal.
_WIDTH = 140


def show(report: Report) -> None:
    """Print the report for a person."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(ladder(report))


def ladder(report: Report) -> RenderableType:
    """Return the whole report: the ladder, the targets, the controls."""
    machine = report["machine"]
    table = Table(
        title=f"What an admission costs ({report['sizes']} sizes, commit {report['commit']})",
        caption=f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_1_min']};"
        f" Python {machine['python']}, grpcio {machine['grpcio']}",
        title_style="bold",
        header_style="bold",
    )
    table.add_column("rung", min_width=34)
    for name in ("p50", "p99", "per second", "reference", "its p50"):
        table.add_column(name, justify="right" if name != "reference" else "left")
    table.add_column("ratio (95 %)")
    table.add_column("target")
    for level, title in LEVELS.items():
        rungs = [rung for rung in report["rungs"] if rung["level"] == level]
        if rungs:
            table.add_section()
            table.add_row(Text(title, style="bold cyan"))
        for rung in rungs:
            _add(table, rung)
    return Group(table, _features(report), _growth(report), _targets(report), _controls(report))


def _add(table: Table, rung: Rung) -> None:
    ratio = ""
    if rung["ratio"] is not None:
        low, high = rung["ratio_ci95"]
        ratio = f"{_three(rung['ratio'])} ({_three(low)}-{_three(high)})"
    what = verdict(rung)
    table.add_row(
        f"  {rung['label']}",
        duration(rung["median_ns"]),
        duration(rung["p99_ns"]),
        f"{rung['events_per_s']:,.0f}",
        rung["reference"],
        duration(rung["reference_ns"]),
        ratio,
        Text(f"{(rung['target'] or '').partition(':')[0]} {what}", style=_STYLES[what]),
    )


#: Headings of the figures that are compared with the default policies, and with a smaller size.
BESIDE = {"admit": "Admit", "pair": "Admit, grant, Complete", "pick": "pick"}
_GROWTH = {
    "flows": "Admit, flows (T3)",
    "queued_admit": "Admit, queued",
    "queued_pick": "pick, queued",
    "running_pick": "pick, running",
}


def _features(report: Report) -> RenderableType:
    """Return what each feature costs: a time, and its ratio to the default policies'."""
    table = Table(
        title="What each feature adds, to the default policies",
        caption="CPU time, and its ratio to the default policies in the same state, 95 %",
        title_style="bold",
        header_style="bold",
    )
    table.add_column("feature", min_width=34)
    for heading in BESIDE.values():
        table.add_column(heading, justify="right")
    for each in report["features"]:
        cells = [_beside(each["beside_default"][key]) for key in BESIDE]
        table.add_row(each["label"], *cells)
    return table if report["features"] else Text("")


def _beside(found: Rung) -> str:
    low, high = found["ratio_ci95"]
    return f"{duration(found['ns'])}  {_three(found['ratio'])} ({_three(low)}-{_three(high)})"


def _growth(report: Report) -> RenderableType:
    table = Table(
        title="How the cost grows from the smaller to the larger size",
        title_style="bold",
        header_style="bold",
    )
    table.add_column("feature", min_width=34)
    if not report["features"]:
        return Text("")
    for key, heading in _GROWTH.items():
        found = report["features"][0]["growth"][key]
        less, more = found["sizes"]
        bound = f"{less:,} to {more:,}: at most {found['most']:g} times"
        table.add_column(f"{heading}\n{bound}", justify="right")
    for each in report["features"]:
        found = [each["growth"][key] for key in _GROWTH]
        cells = [
            Text(_three(it["ratio"]), style="green" if it["holds"] else "bold red") for it in found
        ]
        table.add_row(each["label"], *cells)
    return table


def _targets(report: Report) -> RenderableType:
    table = Table(title="Targets", title_style="bold", header_style="bold")
    for name in ("target", "rung", "has to be", "must be", "verdict"):
        table.add_column(name)
    judged = [rung for rung in report["rungs"] if rung["target"]]
    for rung in sorted(judged, key=lambda rung: str(rung["target"])):
        name, _, limits = rung["target"].partition(": ")
        what = verdict(rung)
        label = f"{LEVELS[rung['level']].partition(',')[0]}: {rung['label']}"
        table.add_row(name, label, limits, rung["must"], Text(what, style=_STYLES[what]))
    return table if judged else Text("")


def _controls(report: Report) -> Text:
    text = Text("Each thing beside itself; the interval has to contain 1.00:\n", style="bold")
    for control in report["controls"]:
        low, high = control["ratio_ci95"]
        good = control["contains_one"]
        text.append(
            f"  {control['name']}: {control['ratio']:.3f} ({low:.3f}-{high:.3f})"
            f"{'' if good else ': noisy, read this level with care'}\n",
            style="not bold" if good else "not bold yellow",
        )
    return text
