"""Sets the style that all pictures share: colours, axes, and the choice of clients that fit."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from schedsvc_lab.sim.report import service_of
from schedsvc_lab.sim.scenario import Run

#: Clients with a line of their own.
LINES_MAX = 8
#: Clients with a row of their own.
ROWS_MAX = 24
COLORS = (
    "#d1495b", "#00798c", "#edae49", "#4a4e69", "#2a9d8f", "#9c6644", "#8ab17d", "#b56576",
)  # fmt: skip
INK, GRID, PALE = "#2b2d42", "#e6e8ec", "#c3c9d1"
NS = 1e9


def shown_clients(run: Run, most: int = LINES_MAX) -> list[int]:
    """Return the clients that a picture has room for: those that ask for most."""
    service = service_of(run)
    asked = np.bincount(service.client, weights=service.cost, minlength=service.clients)
    first = sorted(range(service.clients), key=lambda at: -asked[at])[:most]
    return sorted(first)


def columns(
    runs: Sequence[Run], height: float = 4.2, *, share_y: bool = True
) -> tuple[Figure, list[Axes]]:
    """Begin a picture with a column for each run, named by its policy."""
    figure = Figure(figsize=(max(5.2 * len(runs), 6.5), height), dpi=110, layout="constrained")
    axes = figure.subplots(1, len(runs), sharex=True, sharey=share_y, squeeze=False)[0]
    for each, run in zip(axes, runs, strict=True):
        each.set_title(run.policy, loc="left", color=INK)
        clean(each)
    return figure, list(axes)


def say_hidden(figure: Figure, run: Run, shown: int) -> None:
    """Say which clients are not in the picture, where some are not."""
    count = len(run.requests.clients)
    if count > shown:
        figure.supxlabel(
            f"the {shown} clients that ask for most, of {count}", fontsize=9, color=INK
        )


def say_nothing(axes: Axes, text: str) -> None:
    """Say why a picture shows no values, instead of an empty grid."""
    axes.text(0.5, 0.5, text, color=INK, ha="center", va="center", transform=axes.transAxes)


def legend(figure: Figure, axes: Axes) -> None:
    """Put the names of the lines beside the picture."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)


def clean(axes: Axes, grid: str = "y") -> None:
    """Remove the parts that carry no figure."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=False)
    axes.grid(visible=True, axis="x" if grid == "x" else "y", color=GRID)
    axes.tick_params(colors=INK, labelsize=9)
    axes.set_axisbelow(True)
