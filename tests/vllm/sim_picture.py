"""Draws first tokens of the real vLLM beside the simulator's, request by request.

    python -m tests.vllm.sim_picture out/vllm-sim docs/measure/real_first_tokens.png

Reads what tests.vllm.sim_compare has written to the folder: a panel for each workload and arm.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

ARMS = ("hog-quiet-plain", "lmsys-plain", "hog-quiet-gated", "lmsys-gated")
_SPAN_MS = (5.0, 90_000.0)
_TICKS = {10: "10 ms", 100: "100 ms", 1_000: "1 s", 10_000: "10 s"}
_INK, _GRID, _PALE, _POINT = "#2b2d42", "#e6e8ec", "#8d99ae", "#30638e"

Pairs = list[tuple[float, float]]
"""Milliseconds to the first token of one request: real, simulated."""


def pairs(report: dict[str, Any]) -> Pairs:
    """Match the requests that both worlds served, over all runs. O(requests * log n)."""
    made: Pairs = []
    for real, simulated in zip(report["real"], report["simulated"], strict=True):
        theirs = {(round(at_s, 4), tenant): ms for at_s, tenant, ms in real["first_tokens"]}
        for at_s, tenant, ms in simulated["first_tokens"]:
            if (found := theirs.get((round(at_s, 4), tenant))) is not None:
                made.append((found, ms))
    return made


def off(made: Pairs) -> float:
    """Return by what factor the middle request is off, in either direction; 1: not at all."""
    return median(max(real / ours, ours / real) for real, ours in made)


def draw(reports: dict[str, dict[str, Any]], file: Path) -> None:
    """Write the picture: real times to the right, simulated ones upwards."""
    figure = Figure(figsize=(11, 10.4), dpi=110, facecolor="white")
    panels: Sequence[Axes] = figure.subplots(2, 2, sharex=True, sharey=True).flat
    figure.subplots_adjust(left=0.09, right=0.98, bottom=0.07, top=0.89, wspace=0.05, hspace=0.12)
    for axes, name in zip(panels, ARMS, strict=True):
        _panel(axes, name, reports.get(name))
    figure.text(
        0.02, 0.955, "Each request's first token: the real vLLM and the simulator",
        fontsize=15, fontweight="bold", color=_INK,
    )  # fmt: skip
    figure.supxlabel("real", color=_INK, fontsize=11)
    figure.supylabel("simulated", color=_INK, fontsize=11)
    figure.savefig(file)


def _panel(axes: Axes, name: str, report: dict[str, Any] | None) -> None:
    workload, _, arm = name.rpartition("-")
    title = f"{workload}, {'with' if arm == 'gated' else 'without'} the scheduler"
    axes.set_title(title, fontsize=11, color=_INK, loc="left")
    axes.plot(_SPAN_MS, _SPAN_MS, color=_PALE, linewidth=1)
    said = "not measured"
    if report is not None:
        made = pairs(report)
        real, ours = zip(*made, strict=True)
        axes.scatter(real, ours, s=9, alpha=0.35, color=_POINT, linewidths=0)
        said = f"{len(made):,} requests\nhalf of them within a factor of {off(made):.2f}"
    axes.text(0.03, 0.97, said, transform=axes.transAxes, va="top", fontsize=9.5, color=_INK)
    axes.set(xscale="log", yscale="log", xlim=_SPAN_MS, ylim=_SPAN_MS)
    axes.set_xticks(list(_TICKS), list(_TICKS.values()))
    axes.set_yticks(list(_TICKS), list(_TICKS.values()))
    axes.minorticks_off()
    axes.grid(color=_GRID, linewidth=1)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main() -> None:
    """Read the reports, draw, say where."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.vllm.sim_picture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="what sim_compare --out named")
    parser.add_argument("picture", type=Path, help="the .png to write")
    options = parser.parse_args()
    files = {name: options.folder / f"{name}.json" for name in ARMS}
    reports = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    if not reports:
        parser.error(f"{options.folder}: has none of {', '.join(f.name for f in files.values())}")
    if any("first_tokens" not in run for r in reports.values() for run in r["simulated"]):
        parser.error(f"{options.folder}: of an earlier sim_compare; run it again")
    draw(reports, options.picture)
    print(options.picture)


if __name__ == "__main__":
    main()
