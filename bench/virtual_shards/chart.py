"""Draws a run: share errors, members that lag, and the load of the store on one time axis."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.virtual_shards.plan import Plan

__all__ = ["draw"]

_INK, _GRID, _AWAY = "#2b2d42", "#e6e8ec", "#d1495b"
_SHARED, _PALE, _APART, _STORE = "#00798c", "#8ecae6", "#c77700", "#4a4e69"


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the result of a run. Writes a PNG."""
    plan, series, apart = found["plan"], found["series"], found["apart"]["series"]
    figure = Figure(figsize=(12, 9), dpi=130, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr, call-arg]
    rows = figure.subplots(3, 1, sharex=True, height_ratios=(1.4, 1.2, 1))
    _errors(rows[0], series, apart)
    _kinds(rows[1], series, apart)
    _load(rows[2], series)
    for axes in rows:
        for outage in Plan(seconds=plan["seconds"]).outages:
            axes.axvspan(outage.from_s, outage.until_s, color=_AWAY, alpha=0.12, linewidth=0)
        axes.grid(visible=True, axis="y", color=_GRID)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    for outage in Plan(seconds=plan["seconds"]).outages:
        rows[0].annotate(
            f"store away\n{outage.name}", (outage.from_s, 1.0), (4, -4), color=_AWAY, fontsize=9,
            xycoords=("data", "axes fraction"), textcoords="offset points", va="top",
        )  # fmt: skip
    rows[2].set_xlabel("virtual time (s)")
    rows[2].set_xlim(0, plan["seconds"])
    figure.suptitle(
        f"{plan['members']} schedulers, {plan['tenants']:,} tenants at two of them each",
        fontsize=16, fontweight="bold", color=_INK,
    )  # fmt: skip
    figure.savefig(path)


def _errors(axes: Axes, series: dict[str, list[float]], apart: dict[str, list[float]]) -> None:
    axes.plot(apart["at_s"], apart["p99"], "--", color=_APART, label="without a store, p99")
    axes.plot(series["at_s"], series["p99"], color=_SHARED, linewidth=2, label="p99")
    axes.plot(series["at_s"], series["median"], color=_PALE, linewidth=2, label="median")
    axes.set_ylim(0, 2.2 * max(series["p99"]))
    _title(axes, "ahead of the fair part or behind it, in seconds of that part")


def _kinds(axes: Axes, series: dict[str, list[float]], apart: dict[str, list[float]]) -> None:
    for kind, color, text in (
        ("full", _SHARED, "much demand at both shards"),
        ("thin", _STORE, "little demand at one"),
    ):
        axes.plot(apart["at_s"], apart[kind], "--", color=color, linewidth=1)
        axes.plot(series["at_s"], series[kind], color=color, linewidth=2, label=text)
    axes.axhline(1.0, color=_INK, linewidth=1, linestyle=":", label="fair")
    axes.plot([], [], "--", color=_INK, linewidth=1, label="without a store")
    _title(axes, "service of the last 5 s over the fair part")


def _load(axes: Axes, series: dict[str, list[float]]) -> None:
    at_s = range(1, len(series["core"]) + 1)
    axes.bar(at_s, [100 * part for part in series["core"]], 1.0, color=_STORE, label="store")
    axes.set_ylabel("% of a core", color=_STORE)
    right = axes.twinx()
    right.plot(at_s, series["unsynced"], color=_AWAY, linewidth=1.4)
    right.set_ylabel("s", color=_AWAY)
    right.set_ylim(bottom=0)
    right.spines["top"].set_visible(False)
    axes.set_title(
        "estimated load of the store, and longest time since a member's last exchange (red)",
        fontsize=11, loc="left",
    )  # fmt: skip


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, fontsize=11, loc="left")
    axes.legend(
        frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=4,
        borderaxespad=0.0,
    )  # fmt: skip
