"""Draws the cost of each feature: bars beside the default policies, one panel a quantity."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.report import Report, Rung
from bench.show import BESIDE, duration

__all__ = ["draw"]

_INK, _GRID, _PALE, _BAR, _DEFAULT = "#2b2d42", "#e6e8ec", "#8d99ae", "#30638e", "#edae49"
_ROW_INCHES = 0.34
_TICKS = (1, 2, 5, 10, 20, 50, 100)


def draw(report: Report, path: Path) -> None:
    """Draw the ratio of each feature to the default policies, with its interval. Writes a PNG."""
    features = report["features"]
    height = 1.7 + _ROW_INCHES * len(features)
    figure = Figure(figsize=(14, height), dpi=130, facecolor="white")
    panels = figure.subplots(1, len(BESIDE), sharey=True)
    figure.subplots_adjust(
        left=0.22, right=0.98, bottom=0.75 / height, top=1 - 1.05 / height, wspace=0.08
    )
    for axes, (key, heading) in zip(panels, BESIDE.items(), strict=True):
        _panel(axes, [each["beside_default"][key] for each in features])
        axes.set_title(heading, fontsize=11, color=_INK, loc="left")
    panels[0].set_yticks(range(len(features)), [each["label"] for each in features])
    panels[0].set_ylim(len(features) - 0.4, -0.6)
    machine = report["machine"]
    figure.text(
        0.02, 1 - 0.35 / height, "What each feature adds, as a ratio to the default policies",
        fontsize=15, fontweight="bold", color=_INK, va="center",
    )  # fmt: skip
    about = f"{machine['cpu']}, {machine['cores']} cores · commit {report['commit']}"
    figure.text(0.02, 0.25 / height, about, fontsize=8, color=_PALE, va="center")
    figure.savefig(path)


def _panel(axes: Axes, found: list[Rung]) -> None:
    """Draw a bar for each from 1 on a logarithmic axis, its interval, and its time."""
    least = min(0.8, *(each["ratio_ci95"][0] for each in found))
    widest = max(each["ratio_ci95"][1] for each in found)
    for at, each in enumerate(found):
        low, high = each["ratio_ci95"]
        color = _DEFAULT if at == 0 else _BAR
        axes.barh(at, each["ratio"] - 1, left=1, height=0.62, color=color)
        axes.plot([low, high], [at, at], color=_INK, linewidth=1.2)
        text = f"{each['ratio']:.2f}   {duration(each['ns'])}"
        axes.text(max(high, 1) * 1.06, at, text, va="center", fontsize=9, color=_INK)
    axes.axvline(1.0, color=_INK, linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(least * 0.95, max(2.0, widest) ** 1.5)
    ticks = [tick for tick in _TICKS if tick <= max(2.0, widest)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="x", color=_GRID, linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
