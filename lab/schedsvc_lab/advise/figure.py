"""Draws an advice: each tenant's first tokens and refusals, today and with the draft."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from schedsvc_lab.advise.report import goal_cell
from schedsvc_lab.sim.figures.style import COLORS, GRID, INK, PALE, ROWS_MAX, clean

__all__ = ["draw_advice"]

_SIDES = (("today", "#9aa1ad", -0.17), ("draft", COLORS[1], 0.17))
_ROW_HEIGHT = 0.3
_SHORTEST_S = 1e-2
#: Letters of a tenant's name.
NAME_SHOWN = 40


def _short(name: str) -> str:
    """Cut a name that would leave no room for the picture."""
    return name if len(name) <= NAME_SHOWN else f"{name[: NAME_SHOWN - 1]}…"


def draw_advice(report: Mapping[str, Any], path: Path) -> Path:
    """Draw first tokens (median to 99th percentile), refusals, and the share of service."""
    every = report["tenants"]
    busiest = sorted(every, key=lambda name: -every[name]["today"]["requests"])[:ROWS_MAX]
    names = [name for name in every if name in busiest]
    head = 0.24 * len(report["goals"])
    height = 1.7 + head + _ROW_HEIGHT * len(names)
    figure = Figure(figsize=(12, height), dpi=110, layout="constrained", facecolor="white")
    axes = figure.subplots(1, 3, sharey=True, width_ratios=(2, 1, 1))
    rows = [every[name] for name in names]
    _first_tokens(axes[0], rows)
    _bars(axes[1], rows, "refused", "refused (% of requests)")
    _bars(axes[2], rows, "share", "share of service (%)")
    axes[0].set_yticks(range(len(names)), [_short(name) for name in names])
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    for each in axes:
        clean(each, grid="x")
        each.tick_params(axis="y", length=0)
        for row in range(len(names)):
            each.axhline(row + 0.5, color=GRID, linewidth=0.5, zorder=0)
    lines = [
        f"{goal['goal']}:  {goal_cell(goal, 'today')}  →  {goal_cell(goal, 'draft')}"
        for goal in report["goals"]
    ]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=11, color=INK)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    if len(every) > len(names):
        axes[0].set_title(
            f"the {len(names)} tenants with most requests, of {len(every)}",
            loc="left", fontsize=9, color=INK,
        )  # fmt: skip
    figure.savefig(path)
    return path


def _first_tokens(axes: Axes, rows: list[Mapping[str, Any]]) -> None:
    for side, color, shift in _SIDES:
        places, medians, tails = [], [], []
        for at, row in enumerate(rows):
            median, tail = (row[side][f"first_token_p{percent}_s"] for percent in (50, 99))
            if median is not None:
                places.append(at + shift)
                medians.append(max(median, _SHORTEST_S))
                tails.append(max(tail, _SHORTEST_S))
        axes.hlines(places, medians, tails, color=color, linewidth=2)
        axes.plot(tails, places, "|", color=color, markersize=7)
        axes.plot(medians, places, "o", color=color, markersize=5, label=side)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("time to first token (s): median to 99th percentile", color=INK)


def _bars(axes: Axes, rows: list[Mapping[str, Any]], key: str, label: str) -> None:
    for side, color, shift in _SIDES:
        values = [100 * (row[side][key] or 0.0) for row in rows]
        axes.barh([at + shift for at in range(len(rows))], values, height=0.3, color=color)
    if not any(row[side][key] for row in rows for side, _, _ in _SIDES):
        axes.set_xlim(0, 100)
        axes.text(50, (len(rows) - 1) / 2, "none", color=PALE, ha="center")
    axes.set_xlabel(label, color=INK)
