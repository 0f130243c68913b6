"""Draws the failover demo: first tokens, grants and leases on one time axis."""

import itertools
import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from schedsvc_lab.demo.members import Member
from schedsvc_lab.demo.plot import (
    INK,
    legend_beside_title,
    mark_kill,
    seconds,
    three_rows,
    write_beside,
)
from schedsvc_lab.load.generator import RunResult
from schedsvc_lab.load.report import by_tenant

TENANT_COLORS = {"chat": "#00798c", "batch": "#edae49"}
MEMBER_COLORS = ("#4a4e69", "#2a9d8f")
_BIN_S = 0.5


def draw(
    result: RunResult, members: list[Member], kill_s: float, takeover_s: float | None, path: Path
) -> None:
    """Draw one run, with the kill and the takeover marked."""
    figure, rows = three_rows("The leader of two schedulers is killed under load")
    _first_tokens(rows[0], result)
    _grants(rows[1], members)
    _leases(rows[2], members)
    end_s = None if takeover_s is None else kill_s + takeover_s
    mark_kill(rows, kill_s, end_s)
    write_beside(rows[0], "kill -9 of the leader", (kill_s, 1.0), (-6, -4), ha="right", va="top")
    if end_s is not None:
        text = f"the standby grants\nafter {takeover_s:.2f} s"
        write_beside(rows[0], text, (end_s, 1.0), (6, -4), va="top")
    rows[2].set_xlim(0, max(result.wall_s, kill_s))
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
    legend_beside_title(axes)


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
    legend_beside_title(axes)


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
    legend_beside_title(axes)
