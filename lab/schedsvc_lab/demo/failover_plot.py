"""The picture of the failover demo: first tokens, grants and leases on one time axis."""

import itertools
import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from schedsvc_lab.demo.members import Member
from schedsvc_lab.demo.plot import GRID, INK, clean, seconds
from schedsvc_lab.load.generator import RunResult
from schedsvc_lab.load.report import by_tenant

TENANT_COLORS = {"chat": "#00798c", "batch": "#edae49"}
MEMBER_COLORS = ("#4a4e69", "#2a9d8f")
_KILL = "#d1495b"
_BIN_S = 0.5


def draw(
    result: RunResult, members: list[Member], kill_s: float, takeover_s: float | None, path: Path
) -> None:
    """Draw one run, with the kill and the takeover marked."""
    figure = Figure(figsize=(12, 8), dpi=130, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr, call-arg]
    rows = figure.subplots(3, 1, sharex=True, height_ratios=(1.5, 1, 1))
    _first_tokens(rows[0], result)
    _grants(rows[1], members)
    _leases(rows[2], members)
    end_s = math.nan if takeover_s is None else kill_s + takeover_s
    for axes in rows:
        axes.axvline(kill_s, color=_KILL, linewidth=1.6)
        if takeover_s is not None:
            axes.axvspan(kill_s, end_s, color=_KILL, alpha=0.1, linewidth=0)
        axes.grid(visible=True, axis="y", color=GRID)
        clean(axes)
    rows[0].annotate(
        "kill -9 of the leader", (kill_s, 1.0), (-6, -4), xycoords=("data", "axes fraction"),
        textcoords="offset points", color=_KILL, fontsize=9, ha="right", va="top",
    )  # fmt: skip
    if takeover_s is not None:
        rows[0].annotate(
            f"the standby grants\nafter {takeover_s:.2f} s", (end_s, 1.0), (6, -4),
            xycoords=("data", "axes fraction"), textcoords="offset points", color=_KILL,
            fontsize=9, va="top",
        )  # fmt: skip
    rows[2].set_xlabel("time in the run (s)")
    rows[2].set_xlim(0, max(result.wall_s, kill_s))
    figure.suptitle(
        "The leader of two schedulers is killed under load",
        fontsize=16, fontweight="bold", color=INK,
    )  # fmt: skip
    figure.savefig(path)


def _first_tokens(axes: Axes, result: RunResult) -> None:
    """Draw a dot for each request at the time of its sending."""
    for name, samples in by_tenant(result).items():
        answered = [sample for sample in samples if not math.isnan(sample.ttft_ms)]
        axes.scatter(
            [sample.intended_s for sample in answered],
            [sample.ttft_ms / 1e3 for sample in answered],
            s=22, color=TENANT_COLORS.get(name, INK), alpha=0.7, linewidths=0, label=name,
        )  # fmt: skip
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(seconds))
    axes.set_title("time to first token, by the time of sending", fontsize=11, loc="left")
    _legend(axes)


def _grants(axes: Axes, members: list[Member]) -> None:
    """Draw the grants of each member in windows of _BIN_S."""
    for member, color in zip(members, MEMBER_COLORS, strict=True):
        counts: dict[int, int] = {}
        for before, after in itertools.pairwise(member.seen):
            if before.at_s >= 0.0:
                window = int(after.at_s / _BIN_S)
                counts[window] = counts.get(window, 0) + after.granted - before.granted
        axes.bar(
            [window * _BIN_S for window in counts], [count / _BIN_S for count in counts.values()],
            _BIN_S * 0.92, align="edge", color=color, label=f"by {member.name}",
        )  # fmt: skip
    axes.set_title("grants per second", fontsize=11, loc="left")
    _legend(axes)


def _leases(axes: Axes, members: list[Member]) -> None:
    """Draw the live leases of each member while it leads, and what is queued there."""
    for member, color in zip(members, MEMBER_COLORS, strict=True):
        seen = [one for one in member.seen if one.at_s >= 0.0 and one.leads]
        times_s = [one.at_s for one in seen]
        axes.plot(
            times_s, [one.live_leases for one in seen], color=color, linewidth=2,
            label=f"leases at {member.name}",
        )  # fmt: skip
        axes.plot(
            times_s, [one.queued for one in seen], color=color, linewidth=1.2, linestyle=":",
            label=f"queued at {member.name}",
        )  # fmt: skip
    axes.set_title("live leases and queued requests of the leader", fontsize=11, loc="left")
    axes.set_ylim(bottom=0)
    _legend(axes)


def _legend(axes: Axes) -> None:
    """Put the legend on the line of the title, beside it, so that it hides no point."""
    axes.legend(
        frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=4,
        borderaxespad=0.0,
    )  # fmt: skip
