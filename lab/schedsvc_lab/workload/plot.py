"""Draws a trace and its users."""

from itertools import accumulate
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from schedsvc_lab.workload import zipf
from schedsvc_lab.workload.powerlaw import hurwitz
from schedsvc_lab.workload.statistics import WINDOWS_S, Description
from schedsvc_lab.workload.users import Users

_INK, _GRID = "#2b2d42", "#e6e8ec"
_COLORS = {"input": "#00798c", "output": "#d1495b"}


def draw(described: Description, title: str, path: Path) -> None:
    """Draw rate over time, lengths, tenants' shares, burstiness and sharing into a PNG file.

    Without block hashes there is no panel of sharing.
    """
    figure = Figure(figsize=(12, 8), dpi=130, facecolor="white", layout="constrained")
    panels = figure.subplot_mosaic("AAABBB;CCDDEE" if described.sharing else "AABB;CCDD")
    _rate(panels["A"], described)
    _lengths(panels["B"], described)
    _shares(panels["C"], described)
    _burstiness(panels["D"], described)
    if described.sharing:
        _sharing(panels["E"], described)
    figure.suptitle(title, fontsize=15, fontweight="bold", color=_INK)
    figure.savefig(path)


def _style(axes: Axes, title: str, across: str, up: str) -> None:
    axes.set_title(title, loc="left", color=_INK)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(color=_GRID)
    axes.spines[["top", "right"]].set_visible(False)


def _nothing(axes: Axes, what: str) -> None:
    axes.text(0.5, 0.5, what, ha="center", va="center", transform=axes.transAxes, color=_INK)


def _rate(axes: Axes, described: Description) -> None:
    if described.per_second:
        window_s, rate = described.rate()
        edges = [at * window_s for at in range(len(rate) + 1)]
        axes.stairs(rate, edges, fill=True, color=_COLORS["input"], alpha=0.8)
        _style(axes, f"Arrivals, windows of {window_s} s", "seconds", "requests per second")
    else:
        _style(axes, "Arrivals", "seconds", "requests per second")
        _nothing(axes, "the trace has no times")


def _lengths(axes: Axes, described: Description) -> None:
    for name, lengths in described.lengths.items():
        ordered = sorted(lengths.counts.items())
        if ordered:
            total = lengths.counts.total()
            shares = [count / total for count in accumulate(count for _, count in ordered)]
            tokens = [length for length, _ in ordered]
            axes.step(tokens, shares, where="post", color=_COLORS[name], label=name)
    _style(axes, "Lengths", "tokens", "share of requests up to this length")
    if any(lengths.counts for lengths in described.lengths.values()):
        axes.set_xscale("log")
        axes.legend(frameon=False)
    else:
        _nothing(axes, "the trace has no token counts")


def _shares(axes: Axes, described: Description) -> None:
    counts = [share.requests for _, share in described.shares()]
    _style(axes, "Tenants", "rank", "requests")
    if len(counts) < 2:
        _nothing(axes, "the trace has one tenant")
        return
    axes.plot(range(1, len(counts) + 1), counts, "o-", color=_COLORS["input"], markersize=3)
    axes.set_xscale("log")
    axes.set_yscale("log")


def _burstiness(axes: Axes, described: Description) -> None:
    known = [
        (window, value)
        for window in WINDOWS_S
        if (value := described.dispersion(window)) is not None
    ]
    _style(axes, "Burstiness", "window, seconds", "index of dispersion")
    if not known:
        _nothing(axes, "too short, or without times")
        return
    axes.plot(*zip(*known, strict=True), "o-", color=_COLORS["output"], label="the trace")
    axes.axhline(1, color=_INK, linestyle="--", label="Poisson")
    axes.set_xscale("log")
    axes.set_xticks(WINDOWS_S, [str(window) for window in WINDOWS_S])
    axes.legend(frameon=False)


def _sharing(axes: Axes, described: Description) -> None:
    for sharing in described.sharing.values():
        total = sharing.percents.total()
        ordered = sorted(sharing.percents.items())
        shares = [count / total for count in accumulate(count for _, count in ordered)]
        axes.step(
            [percent for percent, _ in ordered],
            shares,
            where="post",
            color=_COLORS["input"],
            label=f"blocks of {sharing.block_tokens} tokens",
        )
    _style(axes, "Prefix sharing", "shared % of a prompt", "share of requests up to this")
    axes.set_ylim(0, 1.05)
    axes.legend(frameon=False)


def draw_users(users: Users, title: str, path: Path) -> None:
    """Draw requests by rank, the distribution of requests per user, and the Lorenz curve."""
    figure = Figure(figsize=(13, 4.4), dpi=130, facecolor="white", layout="constrained")
    ranks, tail, lorenz = figure.subplots(1, 3)
    counts = users.counts
    places = np.arange(1, len(counts) + 1)
    ranks.plot(places, counts, "o", color=_COLORS["input"], markersize=3, label="the trace")
    law = zipf.shares(len(counts), users.zipf.exponent) * counts.sum()
    ranks.plot(places, law, color=_COLORS["output"], label=f"Zipf, {users.zipf.exponent:.2f}")
    _style(ranks, "Requests by rank", "rank of the user", "requests")
    values = np.unique(counts)
    above = [(counts >= value).mean() for value in values]
    tail.plot(values, above, "o", color=_COLORS["input"], markersize=3, label="the trace")
    fitted = users.power_law
    reached = values[values >= fitted.least]
    share = (counts >= fitted.least).mean() / hurwitz(fitted.alpha, fitted.least)
    model = [share * hurwitz(fitted.alpha, float(value)) for value in reached]
    label = f"power law, {fitted.alpha:.2f}, from {fitted.least}"
    tail.plot(reached, model, color=_COLORS["output"], label=label)
    _style(tail, "Requests per user", "requests", "share of users with at least as many")
    for axes in (ranks, tail):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.legend(frameon=False)
    ascending = np.concatenate(([0], np.cumsum(counts[::-1]))) / counts.sum()
    across = np.linspace(0, 100, len(ascending))
    lorenz.plot(across, 100 * ascending, color=_COLORS["input"], label="the trace")
    lorenz.plot((0, 100), (0, 100), color=_INK, linestyle="--", label="all alike")
    _style(lorenz, f"Concentration, Gini {users.gini:.2f}", "% of users", "% of requests")
    lorenz.legend(frameon=False)
    figure.suptitle(title, fontsize=14, fontweight="bold", color=_INK)
    figure.savefig(path)
