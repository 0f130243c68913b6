"""Draws the ladder: each rung on one logarithmic axis of time."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from bench.report import LEVELS, Report, Rung
from bench.show import duration, verdict

__all__ = ["draw"]

_COLORS = {
    "inside": "#2b2d42",
    "core": "#00798c",
    "wire": "#30638e",
    "stream": "#edae49",
    "unary": "#d1495b",
}
_INK, _GRID, _PALE = "#2b2d42", "#e6e8ec", "#8d99ae"
_VERDICTS = {"met": "#2a9d5c", "missed": "#c77700", "MUST missed": "#c1121f", "": _INK}
_ROW_INCHES = 0.34


def draw(report: Report, path: Path) -> None:
    """Draw every rung's median, 99th percentile and reference. Writes a PNG."""
    rows: list[Rung | str] = []
    for level, title in LEVELS.items():
        rungs = [rung for rung in report["rungs"] if rung["level"] == level]
        rows += [title, *rungs] if rungs else []
    height = 1.9 + _ROW_INCHES * len(rows)
    figure = Figure(figsize=(14, height), dpi=130, facecolor="white")
    axes = figure.add_axes((0.26, 0.95 / height, 0.44, 1 - 1.75 / height))
    _prepare(axes, len(rows))
    for at, row in enumerate(rows):
        if isinstance(row, str):
            axes.text(
                -0.55,
                at,
                row,
                transform=axes.get_yaxis_transform(),
                va="center",
                fontweight="bold",
                color=_INK,
            )
        else:
            _draw_rung(axes, at, row)
    _title(figure, report, height)
    figure.savefig(path)


def _prepare(axes: Axes, rows: int) -> None:
    axes.set_xscale("log")
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_yticks([])
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    axes.grid(axis="x", color=_GRID, linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", which="both", colors=_INK, length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def _tick(ns: float, _: int) -> str:
    number, unit = duration(ns).split()
    return f"{float(number):g} {unit}"


def _draw_rung(axes: Axes, at: int, rung: Rung) -> None:
    color = _COLORS[rung["level"]]
    if rung["p99_ns"] is not None:
        axes.plot([rung["median_ns"], rung["p99_ns"]], [at, at], color=color, alpha=0.45, lw=3)
        axes.plot(rung["p99_ns"], at, "|", color=color, markersize=9, markeredgewidth=2)
    axes.plot(rung["median_ns"], at, "o", color=color, markersize=8)
    if rung["reference_ns"] is not None:
        axes.plot(rung["reference_ns"], at, "D", color=_PALE, markerfacecolor="white", zorder=1)
    side = axes.get_yaxis_transform()
    axes.text(-0.53, at, rung["label"], transform=side, va="center", fontsize=9, color=_INK)
    axes.text(
        1.02, at, duration(rung["median_ns"]), transform=side, va="center", fontsize=9, color=_INK
    )
    if rung["ratio"] is not None:
        text = f"{rung['ratio']:,.2f}" if rung["ratio"] < 100 else f"{rung['ratio']:,.0f}"
        axes.text(1.17, at, text, transform=side, va="center", fontsize=9, color=_INK)
    if rung["target"]:
        what = verdict(rung)
        text = f"{rung['target'].replace(' ns', '')}  {what}"
        axes.text(1.26, at, text, transform=side, va="center", fontsize=8, color=_VERDICTS[what])


def _title(figure: Figure, report: Report, height: float) -> None:
    machine = report["machine"]
    figure.text(
        0.02, 1 - 0.35 / height, "What an admission costs, rung by rung",
        fontsize=15, fontweight="bold", color=_INK, va="center",
    )  # fmt: skip
    about = f"{machine['cpu']}, {machine['cores']} cores · commit {report['commit']}"
    figure.text(0.02, 0.25 / height, about, fontsize=8, color=_PALE, va="center")
    axis = 1 - 0.62 / height
    for x, text in ((0.709, "median"), (0.775, "ratio"), (0.815, "target")):
        figure.text(x, axis, text, fontsize=9, color=_PALE, va="center")
    marks = {"median": "o", "p99": "|", "reference": "D"}
    handles = [
        Line2D(
            [], [], linestyle="", color=_INK, marker=mark, markersize=8, markeredgewidth=1.5,
            markerfacecolor="white" if mark == "D" else _INK, label=label,
        )
        for label, mark in marks.items()
    ]  # fmt: skip
    figure.legend(handles=handles, loc="lower right", ncols=3, frameon=False, fontsize=9)
