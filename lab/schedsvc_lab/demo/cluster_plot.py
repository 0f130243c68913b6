"""Draws the cluster demo: shares, answers and exchanges on one time axis."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from matplotlib.axes import Axes

from schedsvc_lab.demo.plot import INK, legend_beside_title, mark_kill, three_rows, write_beside

TENANT_COLORS = {"gold": "#edae49", "free": "#00798c"}
MEMBER_COLORS = ("#4a4e69", "#2a9d8f", "#d1495b", "#8d6a9f")
_BIN_S = 1.0


class Answered(Protocol):
    """Holds an answer, as far as the picture needs it."""

    @property
    def tenant(self) -> str:
        """Return the tenant that asked."""

    @property
    def end_s(self) -> float:
        """Return the seconds in the run at which the answer came."""

    @property
    def error(self) -> str:
        """Return the reason of a failure; empty for an answer."""


def draw(
    answers: Sequence[Answered],
    seen: Mapping[str, Sequence[tuple[float, float]]],
    report: dict[str, Any],
    path: Path,
) -> None:
    """Draw one run. `seen`: time, and seconds since the last exchange, of each member."""
    figure, rows = three_rows("Four schedulers share one fairness, and lose their store")
    end_s = report["windows"]["after"]["until_s"]
    _shares(rows[0], answers, report, end_s)
    _answers(rows[1], answers, end_s)
    _exchanges(rows[2], seen)
    killed_s, back_s = report["store_killed_s"], report["store_back_s"]
    mark_kill(rows, killed_s, back_s)
    places = {"va": "bottom"}
    write_beside(rows[0], "the store is killed", (killed_s, 0.02), (6, 0), **places)
    write_beside(rows[0], "and is back", (back_s, 0.02), (6, 0), **places)
    rows[2].set_xlim(0, end_s)
    figure.savefig(path)


def _counts(answers: Sequence[Answered], tenant: str, end_s: float) -> list[int]:
    counts = [0] * int(end_s / _BIN_S)
    for answer in answers:
        at = int(answer.end_s / _BIN_S)
        if answer.tenant == tenant and not answer.error and at < len(counts):
            counts[at] += 1
    return counts


def _shares(axes: Axes, answers: Sequence[Answered], report: dict[str, Any], end_s: float) -> None:
    gold, free = (_counts(answers, tenant, end_s) for tenant in ("gold", "free"))
    points = [
        ((at + 0.5) * _BIN_S, of_gold / (of_gold + of_free))
        for at, (of_gold, of_free) in enumerate(zip(gold, free, strict=True))
        if of_gold + of_free
    ]
    axes.plot(*zip(*points, strict=True), ".", color=INK, alpha=0.4, label="each second")
    for name, part in report["windows"].items():
        if part["share"] is not None:
            axes.hlines(
                part["share"], part["from_s"], part["until_s"], color=TENANT_COLORS["gold"],
                linewidth=3, label="each part" if name == "before" else "",
            )  # fmt: skip
            axes.annotate(
                f"{part['share']:.3f}", ((part["from_s"] + part["until_s"]) / 2, part["share"]),
                (0, 8), textcoords="offset points", ha="center", fontsize=10, color=INK,
                bbox={"facecolor": "white", "linewidth": 0, "pad": 1, "alpha": 0.8},
            )  # fmt: skip
    axes.axhline(report["fair"], color=INK, linewidth=1, linestyle=":", label="fair")
    axes.set_ylim(0.6, 1.0)
    axes.set_title("share of gold (weight 4 of 5) in what is served", fontsize=11, loc="left")
    legend_beside_title(axes)


def _answers(axes: Axes, answers: Sequence[Answered], end_s: float) -> None:
    bottom = [0] * int(end_s / _BIN_S)
    for tenant, color in TENANT_COLORS.items():
        counts = _counts(answers, tenant, end_s)
        axes.bar(
            [at * _BIN_S for at in range(len(counts))], counts, _BIN_S * 0.92, bottom,
            align="edge", color=color, label=tenant,
        )  # fmt: skip
        bottom = [below + count for below, count in zip(bottom, counts, strict=True)]
    axes.set_title("answers per second", fontsize=11, loc="left")
    legend_beside_title(axes)


def _exchanges(axes: Axes, seen: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    for (name, points), color in zip(seen.items(), MEMBER_COLORS, strict=True):
        axes.plot(
            [at_s for at_s, _ in points], [unsynced_s for _, unsynced_s in points],
            color=color, linewidth=1.6, label=name,
        )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_title("seconds since the last exchange with the store", fontsize=11, loc="left")
    legend_beside_title(axes)
