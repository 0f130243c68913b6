"""Draws the demo."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from schedsvc_lab.load.generator import RunResult
from schedsvc_lab.load.report import by_tenant, percentile
from schedsvc_lab.load.samples import Fate, Sample

Report = dict[str, Any]

COLORS = {"hog": "#d1495b", "steady": "#edae49", "quiet": "#00798c"}
ARMS = {"alone": "#c3c9d1", "without": "#4a4e69", "with": "#2a9d8f"}
INK, GRID, KILL = "#2b2d42", "#e6e8ec", "#d1495b"
_WINDOW_S = 1.0


def draw(report: Report, runs: dict[str, RunResult], path: Path) -> None:
    """Draw every request's TTFT over time without and with the scheduler, and the sums."""
    figure = canvas("One tenant floods a shared LLM server")
    grid = figure.add_gridspec(2, 6, height_ratios=(1.5, 1))
    left = figure.add_subplot(grid[0, :3])
    right = figure.add_subplot(grid[0, 3:], sharex=left, sharey=left)
    _scatter(left, runs["without"], "Without: the engine's own queue")
    _scatter(right, runs["with"], "With schedsvc in front")
    left.set_ylabel("time to first token")
    right.tick_params(labelleft=False)
    _latency_bars(figure.add_subplot(grid[1, :2]), report)
    _throughput_bars(figure.add_subplot(grid[1, 2:4]), report)
    _preemption_bars(figure.add_subplot(grid[1, 4:]), report)
    figure.legend(handles=_legend(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path)


def canvas(title: str) -> Figure:
    """Make the empty picture of a demo."""
    figure = Figure(figsize=(12, 8), dpi=130, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr, call-arg]
    figure.suptitle(title, fontsize=16, fontweight="bold", color=INK)
    return figure


def three_rows(title: str) -> tuple[Figure, list[Axes]]:
    """Make the empty picture of a run: three rows over one time axis."""
    figure = canvas(title)
    rows = list(figure.subplots(3, 1, sharex=True, height_ratios=(1.5, 1, 1)))
    rows[2].set_xlabel("time in the run (s)")
    return figure, rows


def mark_kill(rows: Iterable[Axes], at_s: float, until_s: float | None) -> None:
    """Mark a kill in every row, and the time until a replacement serves."""
    for axes in rows:
        axes.axvline(at_s, color=KILL, linewidth=1.6)
        if until_s is not None:
            axes.axvspan(at_s, until_s, color=KILL, alpha=0.1, linewidth=0)
        axes.grid(visible=True, axis="y", color=GRID)
        clean(axes)


def write_beside(
    axes: Axes, text: str, at: tuple[float, float], by: tuple[float, float], **places: Any
) -> None:
    """Write beside a time and a part of the height, some points away."""
    axes.annotate(
        text, at, by, xycoords=("data", "axes fraction"), textcoords="offset points", color=KILL,
        fontsize=9, **places,
    )  # fmt: skip


def legend_beside_title(axes: Axes) -> None:
    """Put the legend on the line of the title, so that it hides no point."""
    axes.legend(
        frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=4,
        borderaxespad=0.0,
    )  # fmt: skip


def _legend() -> list[Line2D]:
    tenants = [
        Line2D([], [], color=color, marker="o", linewidth=2, markersize=5, label=name)
        for name, color in COLORS.items()
    ]
    refused = Line2D(
        [],
        [],
        color=INK,
        marker="x",
        linestyle="",
        markersize=6,
        label="refused, with Retry-After",
    )
    line = Line2D([], [], color=INK, linewidth=2, label="line: running median")
    return [*tenants, refused, line]


def _scatter(axes: Axes, result: RunResult, title: str) -> None:
    """Draw one dot for each request at the time of its sending, and the running median."""
    for name, samples in by_tenant(result).items():
        color = COLORS.get(name, INK)
        answered = [sample for sample in samples if not math.isnan(sample.ttft_ms)]
        axes.scatter(
            [sample.intended_s for sample in answered],
            [sample.ttft_ms / 1e3 for sample in answered],
            s=16,
            color=color,
            alpha=0.45,
            linewidths=0,
        )
        refused = [sample for sample in samples if sample.fate is Fate.REFUSED]
        axes.scatter(
            [sample.intended_s for sample in refused],
            [sample.e2e_ms / 1e3 for sample in refused],
            s=22,
            color=color,
            marker="x",
            linewidths=1,
        )
        axes.plot(*_running_median(answered), color=color, linewidth=2.2)
    axes.set_yscale("log")
    axes.set_title(title, fontsize=12, color=INK, loc="left")
    axes.set_xlabel("sent at (s)")
    axes.yaxis.set_major_formatter(FuncFormatter(seconds))
    clean(axes)
    axes.grid(visible=True, axis="y", color=GRID)


def _running_median(samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Median TTFT in seconds of the requests sent within _WINDOW_S of each request."""
    times = [sample.intended_s for sample in samples]
    medians = []
    for at_s in times:
        near = (s.ttft_ms / 1e3 for s in samples if abs(s.intended_s - at_s) <= _WINDOW_S)
        medians.append(percentile(near, 50) or math.nan)
    return times, medians


def _latency_bars(axes: Axes, report: Report) -> None:
    width = 0.26
    shown: list[float] = []
    for at, (arm, color) in enumerate(ARMS.items()):
        ttft = report[arm]["tenants"]["quiet"]["ttft_ms"]
        values = [(ttft[point] or math.nan) / 1e3 for point in ("p50", "p99")]
        bars = axes.bar(
            [x + (at - 1) * width for x in range(2)], values, width * 0.92, color=color, label=arm
        )
        axes.bar_label(bars, [seconds(value, 0) for value in values], fontsize=8, padding=2)
        shown += [value for value in values if not math.isnan(value)]
    axes.set_yscale("log")
    axes.set_xticks([0, 1], ["p50", "p99"])
    axes.set_title("quiet's time to first token", fontsize=11, color=INK, loc="left")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.set_ylim(min(shown, default=0.01) / 2, max(shown, default=1.0) * 8)
    axes.yaxis.set_major_formatter(FuncFormatter(seconds))
    clean(axes)


def _throughput_bars(axes: Axes, report: Report) -> None:
    arms = ("without", "with")
    values = [report[arm]["output_tokens_per_s"] for arm in arms]
    bars = axes.bar(arms, values, 0.55, color=[ARMS[arm] for arm in arms])
    axes.bar_label(bars, [f"{value:,.0f}" for value in values], fontsize=9, padding=2)
    axes.set_title("output tokens/s under load", fontsize=11, color=INK, loc="left")
    axes.set_ylim(0, max(1.0, *values) * 1.18)
    clean(axes)


def _preemption_bars(axes: Axes, report: Report) -> None:
    arms = ("without", "with")
    values = [report[arm]["preemptions"] for arm in arms]
    bars = axes.bar(arms, values, 0.55, color=[ARMS[arm] for arm in arms])
    axes.bar_label(bars, [str(value) for value in values], fontsize=9, padding=2)
    axes.set_title("preemptions in the engine", fontsize=11, color=INK, loc="left")
    axes.set_ylim(0, max(1, *values) * 1.18)
    clean(axes)


def seconds(value: float, _position: int) -> str:
    """Write a tick of a time axis."""
    if math.isnan(value):
        return "none"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.3g} s"


def clean(axes: Axes) -> None:
    """Remove the frame, and colour the rest."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8bec7")
    axes.tick_params(colors=INK, labelsize=9, which="both")
    axes.tick_params(which="minor", labelleft=False)
    axes.set_axisbelow(True)
