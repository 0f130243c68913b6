"""Draws a sweep: one panel for each figure, the first setting along the axis."""

from collections.abc import Sequence
from math import ceil
from numbers import Real
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    NullFormatter,
    NullLocator,
    PercentFormatter,
    StrMethodFormatter,
)

from schedsvc_lab.sim.figures.style import COLORS, INK, clean
from schedsvc_lab.sim.sweep import FIGURES, Point

__all__ = ["draw_sweep"]

_COLUMNS = 3
_PLAIN = StrMethodFormatter("{x:,.10g}")
_MARKERS = "os^Dv"
# From this ratio of the greatest to the least value on, the axis is logarithmic.
_LOG_FROM = 16
_LINES_MAX = len(COLORS) * len(_MARKERS)
_PARTS = frozenset({"good_part", "kv_used_mean", "kv_reserved_mean", "miss_ratio"})


def draw_sweep(points: Sequence[Point], path: Path) -> Path:
    """Draw every figure that is known, and that is not the same everywhere by being 0."""
    shown = [name for name in FIGURES if any(point.figures[name] for point in points)]
    rows = ceil(len(shown) / _COLUMNS)
    figure = Figure(figsize=(12.5, 2.9 * rows + 0.6), dpi=110, layout="constrained")
    panels = figure.subplots(rows, _COLUMNS, squeeze=False).flatten()
    first = next(iter(points[0].settings))
    ticks = list(dict.fromkeys(point.settings[first] for point in points))
    for panel, name in zip(panels, shown, strict=False):
        _panel(panel, points, first, ticks, name)
    for panel in panels[len(shown) :]:
        panel.set_visible(False)
    lines = panels[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside upper left", frameon=False, fontsize=9, ncols=_COLUMNS)
    figure.savefig(path)
    return path


def _panel(axes: Axes, points: Sequence[Point], first: str, ticks: list[Any], name: str) -> None:
    numbers = all(isinstance(tick, Real) and not isinstance(tick, bool) for tick in ticks)
    lines: dict[str, list[tuple[Any, float]]] = {_label(point, first): [] for point in points}
    for point in points:
        value = point.figures[name]
        if value is not None:
            at = point.settings[first] if numbers else ticks.index(point.settings[first])
            lines[_label(point, first)].append((at, value))
    for place, (label, line) in enumerate(list(lines.items())[:_LINES_MAX]):
        axes.plot(
            [at for at, _ in sorted(line)],
            [value for _, value in sorted(line)],
            marker=_MARKERS[place // len(COLORS)],
            markersize=4,
            color=COLORS[place % len(COLORS)],
            label=label,
        )
    axes.set_title(FIGURES[name], loc="left", color=INK, fontsize=10)
    axes.set_xlabel(first, fontsize=9)
    greatest = max((value for line in lines.values() for _, value in line), default=0.0)
    axes.set_ylim(0, 1.05 * greatest)
    axes.yaxis.set_major_formatter(PercentFormatter(1) if name in _PARTS else _PLAIN)
    _axis(axes, ticks, numbers=numbers)
    clean(axes)


def _axis(axes: Axes, ticks: list[Any], *, numbers: bool) -> None:
    if not numbers:
        axes.set_xticks(range(len(ticks)), [str(tick) for tick in ticks])
        return
    if min(ticks) > 0 and max(ticks) / min(ticks) >= _LOG_FROM:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(sorted(ticks)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="x", labelrotation=30)
    axes.xaxis.set_major_formatter(_PLAIN)


def _label(point: Point, first: str) -> str:
    """Name a line by its policy and the settings other than the first."""
    others = (
        f"{name.partition('.')[2]}={value}"
        for name, value in point.settings.items()
        if name != first
    )
    return ", ".join([point.policy, *others])
