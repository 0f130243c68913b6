"""Draws a prefix analysis."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from numpy.typing import ArrayLike

from schedsvc_lab.workload.prefix.capacity import CachePoint
from schedsvc_lab.workload.prefix.sharing import Sharing

_INK, _GRID = "#2b2d42", "#e6e8ec"
_COLORS = ("#00798c", "#d1495b", "#edae49", "#66a182", "#5f4b8b", "#8d6a4f")
_POLICY_COLORS = {"belady": _INK, "lru": "#00798c", "lfu": "#edae49", "fifo": "#d1495b"}
_POLICY_NAMES = {"belady": "Belady (optimum)", "lru": "LRU", "lfu": "LFU", "fifo": "FIFO"}
_CDF_POINTS = 2_000

Analyses = Mapping[str, Mapping[int, Sharing]]
"""By name (as `multi_turn`), then by tokens of a block."""


def draw_sharing(found: Analyses, title: str, path: Path) -> None:
    """Draw sharing fractions, block hits, reuse gaps, and all names beside each other."""
    figure = Figure(figsize=(12, 8), dpi=130, facecolor="white", layout="constrained")
    panels = figure.subplot_mosaic("AB;CD")
    size = next(iter(next(iter(found.values()))))
    for color, (name, by_size) in zip(_COLORS, found.items(), strict=False):
        sharing = by_size[size]
        label = _spoken(name)
        _cdf(panels["A"], 100 * np.asarray(sharing.fractions), color, label)
        _hits(panels["B"], sharing, color, label)
        if sharing.timed and len(sharing.gaps_s):
            _cdf(panels["C"], sharing.gaps_s, color, label)
    about = f"blocks of {size} tokens"
    _style(panels["A"], f"Sharing fraction, {about}", "shared % of a prompt", "share of requests")
    _style(panels["B"], f"Block hits, {about}", "requests that use a block", "share of blocks")
    _style(panels["C"], f"Reuse gap, {about}", "seconds between two uses of a block", "share")
    panels["B"].set_xscale("log")
    panels["B"].set_yscale("log")
    if panels["C"].lines:
        panels["C"].set_xscale("symlog", linthresh=1)
        panels["C"].set_xlim(left=0)
    else:
        _nothing(panels["C"], "no block is used again, or the trace has no times")
    _sizes(panels["D"], found)
    for axes in panels.values():
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
    figure.suptitle(title, fontsize=15, fontweight="bold", color=_INK)
    figure.savefig(path)


def _sizes(axes: Axes, found: Analyses) -> None:
    """Draw bars: the shared tokens of each name by block size."""
    sizes = sorted(next(iter(found.values())))
    width = 0.8 / len(found)
    for at, (name, by_size) in enumerate(found.items()):
        shares = [100 * by_size[size].summary()["shared_tokens_share"] for size in sizes]
        places = np.arange(len(sizes)) + (at - (len(found) - 1) / 2) * width
        bars = axes.bar(places, shares, width * 0.92, color=_COLORS[at], label=_spoken(name))
        axes.bar_label(bars, fmt="%.1f", fontsize=8, color=_INK)
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    _style(axes, "Shared prompt tokens, cache without end", "tokens of a block", "%")
    axes.margins(y=0.18)


def draw_caches(points: Mapping[str, Sequence[CachePoint]], title: str, path: Path) -> None:
    """Draw miss-ratio curves, a panel for each name and block size, and hit rate by block size."""
    sizes = sorted({point.block_tokens for own in points.values() for point in own})
    several = len(sizes) > 1
    columns = len(sizes) + several
    figure = Figure(
        figsize=(max(4.2 * columns, 7), 4.2 * len(points)),
        dpi=130,
        facecolor="white",
        layout="constrained",
    )
    grid = figure.subplots(len(points), columns, squeeze=False)
    for row, (name, own) in zip(grid, points.items(), strict=True):
        for axes, size in zip(row, sizes, strict=False):
            _miss_ratios(axes, [point for point in own if point.block_tokens == size])
            _style(
                axes,
                f"{_spoken(name)}, blocks of {size}",
                "capacity, tokens",
                "miss ratio of tokens, %",
            )
            axes.legend(frameon=False)
        if several:
            _by_size(row[-1], own)
            row[-1].set_title(f"{_spoken(name)}, by block size", loc="left", color=_INK)
    figure.suptitle(title, fontsize=15, fontweight="bold", color=_INK)
    figure.savefig(path)


def _miss_ratios(axes: Axes, points: Sequence[CachePoint]) -> None:
    for policy in dict.fromkeys(point.policy for point in points):
        own = [point for point in points if point.policy == policy]
        axes.plot(
            [point.capacity_tokens for point in own],
            [100 * (1 - point.token_hit_rate) for point in own],
            ".--" if policy == "belady" else "o-",
            color=_POLICY_COLORS[policy],
            markersize=3,
            label=_POLICY_NAMES[policy],
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(_tokens))
    if len({point.capacity_tokens for point in points}) < 3:
        axes.xaxis.set_minor_formatter(FuncFormatter(_tokens))
    else:
        axes.xaxis.set_minor_formatter(NullFormatter())
    top = axes.get_ylim()[1]
    axes.set_ylim(0, min(105, max(top, 10)))


def _by_size(axes: Axes, points: Sequence[CachePoint]) -> None:
    """Draw the LRU hit rate by block size, a line for each share of the largest capacity."""
    policy = points[0].policy
    sizes = sorted({point.block_tokens for point in points})
    curves = [
        [p for p in points if p.block_tokens == size and p.policy == policy] for size in sizes
    ]
    for color, back in zip(_COLORS, (1, 2, 4, 6), strict=False):
        if back <= min(map(len, curves)):
            rates = [100 * own[-back].token_hit_rate for own in curves]
            label = "all blocks fit" if back == 1 else f"1/{1 << (back - 1)} of them"
            axes.plot(range(len(sizes)), rates, "o-", color=color, label=label)
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    _style(axes, "", "tokens of a block", f"{_POLICY_NAMES[policy]} hit rate of tokens, %")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _cdf(axes: Axes, values: ArrayLike, color: str, label: str) -> None:
    """Draw a cumulative distribution with a bounded number of points."""
    ordered = np.sort(np.asarray(values, np.float64))
    shares = np.linspace(0, 1, min(len(ordered), _CDF_POINTS))
    at = np.clip(np.ceil(shares * len(ordered)).astype(int) - 1, 0, None)
    axes.step(ordered[at], (at + 1) / len(ordered), where="post", color=color, label=label)
    axes.set_ylim(0, 1.03)


def _hits(axes: Axes, sharing: Sharing, color: str, label: str) -> None:
    counts = sorted(Counter(sharing.hits).items())
    if counts:
        shares = [count / len(sharing.hits) for _, count in counts]
        places = [hits for hits, _ in counts]
        axes.plot(places, shares, "o", color=color, markersize=3.5, alpha=0.75, label=label)


def _style(axes: Axes, title: str, across: str, up: str) -> None:
    if title:
        axes.set_title(title, loc="left", color=_INK)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(color=_GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _nothing(axes: Axes, what: str) -> None:
    axes.text(0.5, 0.5, what, ha="center", va="center", transform=axes.transAxes, color=_INK)


def _spoken(name: str) -> str:
    return (
        name.replace("_", " ")
        .replace("single turn", "single-turn")
        .replace("multi turn", "multi-turn")
    )


def _tokens(tokens: float, _: object = None) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return f"{tokens / size:.3g}{unit}"
    return f"{tokens:.0f}"
