"""Draws a run."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from schedsvc_lab.load.generator import RunResult
from schedsvc_lab.load.report import by_tenant
from schedsvc_lab.load.samples import Fate, Sample

_INK, _GRID, _OTHER = "#2b2d42", "#e6e8ec", "#b8bec7"
_COLORS = ("#00798c", "#d1495b", "#edae49", "#66a182", "#2e4057", "#8d96a3")
_TENANTS_NAMED = len(_COLORS)
_POINTS_MAX = 5_000
_BINS = 120


def draw(run: RunResult, result: dict[str, Any], path: Path) -> None:
    """Draw TTFT over time and as a distribution, rates, and the tenants' service, into a PNG.

    The tenants with the most requests have colours of their own; the others share grey.
    """
    figure = Figure(figsize=(12, 8), dpi=130, facecolor="white", layout="constrained")
    panels = figure.subplot_mosaic("AAB;CCD")
    tenants = by_tenant(run)
    largest = sorted(tenants, key=lambda name: (-len(tenants[name]), name))[:_TENANTS_NAMED]
    colors = dict(zip(largest, _COLORS, strict=False))
    _over_time(panels["A"], run.recorder.samples, colors)
    _distribution(panels["B"], tenants, colors)
    _rates(panels["C"], run)
    _service(panels["D"], result["fairness"]["service"], result["fairness"]["demand"], colors)
    mark = ", interrupted" if run.interrupted else ""
    mark += "" if result["generator"]["kept_up"] else ", the generator could not keep up"
    title = f"{result['completed']:,} of {result['sent']:,} requests completed{mark}"
    figure.suptitle(title, fontsize=15, fontweight="bold", color=_INK)
    figure.savefig(path)


def _style(axes: Axes, title: str, across: str, up: str) -> None:
    axes.set_title(title, loc="left", color=_INK)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(color=_GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _nothing(axes: Axes, what: str) -> None:
    axes.text(0.5, 0.5, what, ha="center", va="center", transform=axes.transAxes, color=_INK)


def _over_time(axes: Axes, samples: Sequence[Sample], colors: dict[str, str]) -> None:
    """Draw a dot for each request, a cross for each refusal; a long run's are thinned out."""
    _style(axes, "Time to first token", "meant to be sent at (s)", "")
    shown = samples[:: -(-len(samples) // _POINTS_MAX) or 1]
    answered = [sample for sample in shown if not math.isnan(sample.ttft_ms)]
    refused = [sample for sample in shown if sample.fate is Fate.REFUSED]
    for part, values, marker in (
        (answered, [sample.ttft_ms for sample in answered], "o"),
        (refused, [sample.e2e_ms for sample in refused], "x"),
    ):
        axes.scatter(
            [sample.intended_s for sample in part],
            values,
            s=14,
            c=[colors.get(sample.tenant, _OTHER) for sample in part],
            marker=marker,
            alpha=0.6,
            linewidths=0 if marker == "o" else 1,
        )
    if refused:
        axes.scatter([], [], marker="x", color=_INK, label="refused, at its answer")
        axes.legend(frameon=False, fontsize=8)
    if not answered and not refused:
        _nothing(axes, "nothing was answered")
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(_duration))


def _distribution(axes: Axes, tenants: dict[str, list[Sample]], colors: dict[str, str]) -> None:
    _style(axes, "TTFT by tenant", "", "share of requests up to this")
    drawn = False
    for name in sorted(tenants, key=lambda name: name in colors):
        values = np.sort([s.ttft_ms for s in tenants[name] if not math.isnan(s.ttft_ms)])
        if not len(values):
            continue
        drawn = True
        named = name in colors
        axes.step(
            values,
            np.arange(1, len(values) + 1) / len(values),
            where="post",
            color=colors.get(name, _OTHER),
            linewidth=1.8 if named else 0.7,
            label=name if named else None,
        )
    if not drawn:
        _nothing(axes, "no first token")
        return
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(_duration))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda _value, _position: ""))
    axes.set_ylim(0, 1.03)
    if len(tenants) > len(colors):
        axes.plot([], [], color=_OTHER, label=f"{len(tenants) - len(colors)} others")
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def _rates(axes: Axes, run: RunResult) -> None:
    """Draw requests meant to be sent, and ended each way, per second."""
    _style(axes, "Requests per second", "seconds", "")
    samples = run.recorder.samples
    width_s = max(run.wall_s / _BINS, 0.5)
    edges = np.arange(0, run.wall_s + width_s, width_s)
    offered = np.histogram([sample.intended_s for sample in samples], edges)[0] / width_s
    axes.stairs(offered, edges, fill=True, color=_OTHER, alpha=0.5, label="offered")
    for fate, color in (
        (Fate.COMPLETED, _COLORS[0]),
        (Fate.REFUSED, _COLORS[2]),
        (Fate.ERROR, _COLORS[1]),
    ):
        ended = [sample.end_s for sample in samples if sample.fate is fate]
        if ended:
            rate = np.histogram(ended, edges)[0] / width_s
            axes.stairs(rate, edges, color=color, linewidth=1.6, label=fate.value)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)


def _service(
    axes: Axes, service: dict[str, float], demand: dict[str, float], colors: dict[str, str]
) -> None:
    """Draw what the tenants with the greatest demand asked for and got."""
    _style(axes, "Service: input + 2 x output tokens", "", "")
    names = sorted(demand, key=lambda name: -demand[name])[:12][::-1]
    places = np.arange(len(names))
    axes.barh(places, [demand[name] for name in names], 0.8, color=_GRID, label="asked")
    axes.barh(
        places,
        [service[name] for name in names],
        0.5,
        color=[colors.get(name, _OTHER) for name in names],
        label="got",
    )
    axes.set_yticks(places, [name if len(name) <= 16 else name[:15] + "…" for name in names])
    axes.xaxis.set_major_formatter(FuncFormatter(_tokens))
    axes.tick_params(axis="y", labelsize=8)
    if len(demand) > len(names):
        axes.set_xlabel(f"the {len(names)} largest of {len(demand)} tenants; grey: asked")
    else:
        axes.set_xlabel("grey: asked")


def _tokens(value: float, _position: int) -> str:
    return f"{value / 1e6:g} M" if value >= 1e6 else f"{value / 1e3:g} k" if value else "0"


def _duration(value_ms: float, _position: int) -> str:
    return f"{value_ms:g} ms" if value_ms < 1000 else f"{value_ms / 1000:g} s"
