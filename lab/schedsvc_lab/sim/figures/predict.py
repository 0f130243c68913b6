"""Draws a replay through the predictor: what was promised, what came, what held."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, StrMethodFormatter
from numpy.typing import NDArray

from schedsvc_lab.sim.figures.style import COLORS, INK, NS, PALE, clean
from schedsvc_lab.sim.predict.play import Columns, Played

__all__ = ["draw_predict"]

#: More points would not be visible.
POINTS_MAX = 4_000
#: Predictions in the window of the running coverage, or a tenth of them in a short trace.
WINDOW = 500
#: Half the width of the band around the quantile in which coverage should lie.
BAND = 0.02


def draw_predict(requests: Columns, played: Played, quantile: float, path: Path) -> Path:
    """Draw outputs with their promises, and below it the running coverage."""
    figure = Figure(figsize=(9.5, 6.2), dpi=110, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    at_s = requests.arrival_ns / NS
    step = -(-len(requests) // POINTS_MAX)
    _lengths(above, at_s[::step], requests.output_tokens[::step], played.promised[::step])
    _coverage(below, at_s, requests, played, quantile)
    figure.savefig(path)
    return path


def _lengths(
    axes: Axes, at_s: NDArray[np.float64], output: NDArray[np.int64], promised: NDArray[np.int64]
) -> None:
    held = output <= promised
    dots: dict[str, Any] = {"s": 5, "linewidths": 0}
    axes.scatter(at_s[held], np.maximum(output[held], 1), c=PALE, label="within it", **dots)
    axes.scatter(at_s[~held], output[~held], c=COLORS[0], label="longer", **dots)
    axes.scatter(at_s, promised, c=COLORS[1], label="promised at the grant", **dots)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_ylabel("output tokens", color=INK)
    clean(axes)
    axes.legend(
        loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=9, markerscale=2
    )


def _coverage(
    axes: Axes,
    at_s: NDArray[np.float64],
    requests: Columns,
    played: Played,
    quantile: float,
) -> None:
    of = played.predicted
    held = (requests.output_tokens <= played.promised)[of].astype(float)
    window = max(1, min(WINDOW, len(held) // 10))
    axes.axhspan(quantile - BAND, quantile + BAND, color=COLORS[4], alpha=0.18, linewidth=0)
    axes.axhline(quantile, color=COLORS[4], linewidth=1)
    if len(held):
        running = np.convolve(held, np.ones(window) / window, mode="valid")
        step = -(-len(running) // POINTS_MAX)
        at = at_s[of][window - 1 :]
        axes.plot(at[::step], running[::step], color=COLORS[3], linewidth=1.2)
        axes.set_ylim(min(quantile - 0.15, running.min() - 0.02), 1.005)
    axes.set_ylabel(f"held, of {window:,} predictions", color=INK)
    axes.set_xlabel("seconds after the trace's start", color=INK)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    clean(axes)
