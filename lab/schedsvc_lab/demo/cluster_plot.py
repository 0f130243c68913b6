"""The picture of the cluster demo: shares, answers and exchanges on one time axis."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from schedsvc_lab.demo.plot import GRID, INK, clean

TENANT_COLORS = {"gold": "#edae49", "free": "#00798c"}
MEMBER_COLORS = ("#4a4e69", "#2a9d8f", "#d1495b", "#8d6a9f")
_AWAY = "#d1495b"
_BIN_S = 1.0


class Answered(Protocol):
    """An answer, as far as the picture needs it."""

    @property
    def tenant(self) -> str:
        """The tenant that asked."""

    @property
    def end_s(self) -> float:
        """Seconds in the run at which the answer came."""

    @property
    def error(self) -> str:
        """The reason of a failure; empty for an answer."""


def draw(
    answers: Sequence[Answered],
    seen: Mapping[str, Sequence[tuple[float, float]]],
    report: dict[str, Any],
    path: Path,
) -> None:
    """Draw one run. `seen`: time, and seconds since the last exchange, of each member."""
    figure = Figure(figsize=(12, 8), dpi=130, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr, call-arg]
    rows = figure.subplots(3, 1, sharex=True, height_ratios=(1.5, 1, 1))
    end_s = report["windows"]["after"]["until_s"]
    _shares(rows[0], answers, report, end_s)
    _answers(rows[1], answers, end_s)
    _exchanges(rows[2], seen)
    killed_s, back_s = report["store_killed_s"], report["store_back_s"]
    for axes in rows:
        axes.axvspan(killed_s, back_s, color=_AWAY, alpha=0.1, linewidth=0)
        axes.axvline(killed_s, color=_AWAY, linewidth=1.6)
        axes.grid(visible=True, axis="y", color=GRID)
        clean(axes)
    rows[0].annotate(
        "the store is killed", (killed_s, 0.02), (6, 0), xycoords=("data", "axes fraction"),
        textcoords="offset points", color=_AWAY, fontsize=9, va="bottom",
    )  # fmt: skip
    rows[0].annotate(
        "and is back", (back_s, 0.02), (6, 0), xycoords=("data", "axes fraction"),
        textcoords="offset points", color=_AWAY, fontsize=9, va="bottom",
    )  # fmt: skip
    rows[2].set_xlabel("time in the run (s)")
    rows[2].set_xlim(0, end_s)
    figure.suptitle(
        "Four schedulers share one fairness, and lose their store",
        fontsize=16, fontweight="bold", color=INK,
    )  # fmt: skip
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
    _legend(axes)


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
    _legend(axes)


def _exchanges(axes: Axes, seen: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    for (name, points), color in zip(seen.items(), MEMBER_COLORS, strict=True):
        axes.plot(
            [at_s for at_s, _ in points], [unsynced_s for _, unsynced_s in points],
            color=color, linewidth=1.6, label=name,
        )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_title("seconds since the last exchange with the store", fontsize=11, loc="left")
    _legend(axes)


def _legend(axes: Axes) -> None:
    """Put the legend on the line of the title, beside it, so that it hides no point."""
    axes.legend(
        frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=4,
        borderaxespad=0.0,
    )  # fmt: skip
