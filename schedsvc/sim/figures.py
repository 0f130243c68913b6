"""The pictures of a comparison, one column for each policy."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from schedsvc.sim.metrics import WINDOW_S, accumulated, points, served, service_difference
from schedsvc.sim.report import service_of, span_of
from schedsvc.sim.requests import NEVER
from schedsvc.sim.scenario import Run

CLIENTS_MAX = 8
POINTS_MAX = 4_000
"""More points than this show nothing more and take memory: every n-th is drawn."""
_COLORS = (
    "#d1495b", "#00798c", "#edae49", "#4a4e69", "#2a9d8f", "#9c6644", "#8ab17d", "#b56576",
)  # fmt: skip
_INK, _GRID, _RESERVED = "#2b2d42", "#e6e8ec", "#c3c9d1"
_NS = 1e9


def draw_all(runs: Sequence[Run], folder: Path, span_s: float | None = None) -> list[Path]:
    """Draw every picture of the runs, one for each policy. Returns the files."""
    span_s = max(span_of(run) for run in runs) if span_s is None else span_s
    return [
        _columns(runs, folder / "service.png", "service per second", _service(span_s)),
        _difference(runs, folder / "service_difference.png", span_s),
        _columns(runs, folder / "response_time.png", "response time (s)", _response, log=True),
        _columns(runs, folder / "kv_occupancy.png", "part of the KV cache", _occupancy),
    ]


def shown_clients(run: Run) -> list[int]:
    """Return the clients that a picture has room for: those that ask for most."""
    service = service_of(run)
    asked = np.bincount(service.client, weights=service.cost, minlength=service.clients)
    most = sorted(range(service.clients), key=lambda at: -asked[at])[:CLIENTS_MAX]
    return sorted(most)


def _columns(
    runs: Sequence[Run],
    path: Path,
    label: str,
    draw: Callable[[Axes, Run], None],
    *,
    log: bool = False,
) -> Path:
    """Draw one picture with a column for each run, all on the same scale."""
    figure = Figure(figsize=(5.2 * len(runs), 4.2), dpi=110, layout="constrained")
    axes = figure.subplots(1, len(runs), sharex=True, sharey=True, squeeze=False)[0]
    for at, run in enumerate(runs):
        draw(axes[at], run)
        axes[at].set_title(run.policy, loc="left", color=_INK)
        axes[at].set_xlabel("time (s)")
        if log:
            axes[at].set_yscale("log")
        _clean(axes[at])
    axes[0].set_ylabel(label)
    figure.legend(
        *axes[0 if draw is not _occupancy else -1].get_legend_handles_labels(),
        loc="outside right upper",
        frameon=False,
        fontsize=8,
    )
    hidden = len(runs[0].requests.clients) - CLIENTS_MAX
    if hidden > 0 and draw is not _occupancy:
        figure.supxlabel(f"the {CLIENTS_MAX} clients that ask for most, of {hidden + CLIENTS_MAX}")
    figure.savefig(path)
    return path


def _service(span_s: float) -> Callable[[Axes, Run], None]:
    """Service of each client in windows of a minute."""

    def draw(axes: Axes, run: Run) -> None:
        service = service_of(run)
        at_s = points(span_s)
        half_s = WINDOW_S / 2
        rates = np.array([served(service, t - half_s, t + half_s) / WINDOW_S for t in at_s])
        for place, client in enumerate(shown_clients(run)):
            name = run.requests.clients[client]
            axes.plot(at_s, rates[:, client], color=_COLORS[place], label=name)

    return draw


def _difference(runs: Sequence[Run], path: Path, span_s: float) -> Path:
    """Draw the service difference and the accumulated gap of all policies over time."""
    figure = Figure(figsize=(11, 4.2), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    at_s = points(span_s)
    for place, run in enumerate(runs):
        service = service_of(run)
        color = _COLORS[place % len(_COLORS)]
        left.plot(at_s, service_difference(service, span_s).values, color=color, label=run.policy)
        sums = accumulated(service, span_s)
        right.plot(at_s, sums.max(axis=1) - sums.min(axis=1), color=color, label=run.policy)
    for axes, title in (
        (left, "service difference (per second)"),
        (right, "greatest gap of accumulated service"),
    ):
        axes.set_title(title, loc="left", color=_INK)
        axes.set_xlabel("time (s)")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
        _clean(axes)
    figure.savefig(path)
    return path


def _response(axes: Axes, run: Run) -> None:
    """Response time of each request at its arrival."""
    arrival = np.array(run.requests.arrival_ns) / _NS
    end = np.array(run.outcomes.end_ns)
    client = np.array(run.requests.client)
    for place, at in enumerate(shown_clients(run)):
        mine = np.flatnonzero((client == at) & (end != NEVER))
        mine = mine[:: _stride(len(mine))]
        axes.plot(
            arrival[mine],
            end[mine] / _NS - arrival[mine],
            ".",
            markersize=3,
            color=_COLORS[place],
            label=run.requests.clients[at],
        )


def _occupancy(axes: Axes, run: Run) -> None:
    """KV cache in use, and what is reserved beyond it."""
    samples = run.occupancy[:: _stride(len(run.occupancy))]
    at_s = [sample.at_ns / _NS for sample in samples]
    used = np.array([sample.used for sample in samples]) / run.capacity_tokens
    if samples and samples[0].reserved is not None:
        reserved = np.array([sample.reserved for sample in samples], dtype=float)
        top = np.maximum(used, reserved / run.capacity_tokens)
        axes.fill_between(at_s, used, top, color=_RESERVED, label="reserved", linewidth=0)
    axes.fill_between(at_s, 0, used, color=_COLORS[1], label="used", linewidth=0)
    axes.set_ylim(0, 1.05)


def _stride(count: int) -> int:
    return -(-count // POINTS_MAX) or 1


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, axis="y", color=_GRID)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.set_axisbelow(True)
