"""Draws by client how long each waited, and how often it was refused."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from schedsvc._core import GRANTED
from schedsvc_lab.sim.details import Floats, waits_s
from schedsvc_lab.sim.figures.style import (
    COLORS,
    GRID,
    INK,
    ROWS_MAX,
    clean,
    columns,
    legend,
    say_hidden,
    say_nothing,
    shown_clients,
)
from schedsvc_lab.sim.scenario import Run
from schedsvc_lab.sim.scheduler_adapter import outcome_name

_ROW_HEIGHT = 0.22
# Shorter waits are drawn as this, and immediate grants not at all: the axis has no zero.
_SHORTEST_S = 1e-3


def draw_first_token(runs: Sequence[Run], path: Path) -> Path:
    """Draw each client's time to first token, from the median to the 99th percentile.

    The part of the median that was spent in the scheduler's queue is marked.
    """
    clients = shown_clients(runs[0], ROWS_MAX)
    figure, axes = columns(runs, height=1.6 + _ROW_HEIGHT * len(clients))
    for each, run in zip(axes, runs, strict=True):
        first, queued = waits_s(run)
        _first_token(each, run, clients, first, queued)
    legend(figure, axes[-1])
    say_hidden(figure, runs[0], ROWS_MAX)
    figure.savefig(path)
    return path


def _first_token(axes: Axes, run: Run, clients: list[int], first: Floats, queued: Floats) -> None:
    owner = np.array(run.requests.client)
    rows, medians, tails = [], [], []
    queued_rows, queues = [], []
    for row, client in enumerate(clients):
        mine = first[(owner == client) & ~np.isnan(first)]
        if len(mine):
            rows.append(row)
            medians.append(max(_SHORTEST_S, float(np.median(mine))))
            tails.append(max(_SHORTEST_S, float(np.percentile(mine, 99))))
            waited = queued[(owner == client) & ~np.isnan(queued)]
            if np.median(waited) >= _SHORTEST_S:
                queued_rows.append(row)
                queues.append(float(np.median(waited)))
    axes.hlines(rows, medians, tails, color=COLORS[1], linewidth=2)
    axes.plot(tails, rows, "|", color=COLORS[1], markersize=7, label="99th percentile")
    axes.plot(medians, rows, "o", color=COLORS[1], markersize=5, label="median")
    axes.plot(
        queues, queued_rows, "o", color="none", markeredgecolor=COLORS[0], markersize=8,
        label="in the queue, median",
    )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlabel("time to first token (s)")
    _rows(axes, run, clients)


def draw_refusals(runs: Sequence[Run], path: Path) -> Path:
    """Draw what part of each client's requests was refused, by reason."""
    clients = shown_clients(runs[0], ROWS_MAX)
    figure, axes = columns(runs, height=1.6 + _ROW_HEIGHT * len(clients))
    reasons = sorted(
        {outcome for run in runs for outcome in run.outcomes.outcome if outcome != GRANTED}
    )
    for each, run in zip(axes, runs, strict=True):
        _refusals(each, run, clients, reasons)
    legend(figure, axes[0])
    say_hidden(figure, runs[0], ROWS_MAX)
    figure.savefig(path)
    return path


def _refusals(axes: Axes, run: Run, clients: list[int], reasons: list[int]) -> None:
    pairs = Counter(zip(run.requests.client, run.outcomes.outcome, strict=True))
    asked = Counter(run.requests.client)
    left = np.zeros(len(clients))
    for place, reason in enumerate(reasons):
        parts = np.array([100 * pairs[client, reason] / asked[client] for client in clients])
        label = outcome_name(reason).lower().replace("_", " ")
        color = COLORS[place % len(COLORS)]
        axes.barh(range(len(clients)), parts, left=left, color=color, label=label, height=0.7)
        left += parts
    axes.set_xlim(0, 100)
    axes.set_xlabel("refused (% of requests)")
    if not left.any():
        say_nothing(axes, "no request was refused")
    _rows(axes, run, clients)


def _rows(axes: Axes, run: Run, clients: list[int]) -> None:
    axes.set_yticks(range(len(clients)), [run.requests.clients[client] for client in clients])
    axes.set_ylim(len(clients) - 0.4, -0.6)
    clean(axes, grid="x")
    for row in range(len(clients)):
        axes.axhline(row, color=GRID, linewidth=0.5, zorder=0)
    axes.tick_params(axis="y", length=0, colors=INK)
