"""Draws over time: service, its differences, throughput, response times, the KV cache."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from schedsvc_lab.sim.figures.style import (
    COLORS,
    INK,
    LINES_MAX,
    NS,
    PALE,
    clean,
    columns,
    legend,
    say_hidden,
    say_nothing,
    shown_clients,
)
from schedsvc_lab.sim.metrics import (
    WINDOW_S,
    Floats,
    accumulated,
    points,
    served,
    service_difference,
    throughput,
)
from schedsvc_lab.sim.report import service_of
from schedsvc_lab.sim.requests import NEVER
from schedsvc_lab.sim.scenario import Run

POINTS_MAX = 4_000
"""More points than this show nothing more and take memory: every n-th is drawn."""
_BINS = 60


def draw_service(runs: Sequence[Run], path: Path, span_s: float) -> Path:
    """Draw the service of each client in windows of a minute."""
    at_s, half_s = points(span_s), WINDOW_S / 2

    def rates(run: Run) -> Floats:
        service = service_of(run)
        return np.array([served(service, t - half_s, t + half_s) / WINDOW_S for t in at_s])

    return _lines(runs, path, at_s, [rates(run) for run in runs], "service per second")


def draw_accumulated(runs: Sequence[Run], path: Path, span_s: float) -> Path:
    """Draw the service of each client since the warm-up."""
    sums = [accumulated(service_of(run), span_s) for run in runs]
    return _lines(runs, path, points(span_s), sums, "service so far")


def _lines(runs: Sequence[Run], path: Path, at_s: Floats, values: list[Floats], label: str) -> Path:
    """Draw a column for each run and a line for each client; `values[run][point, client]`."""
    figure, axes = columns(runs)
    for each, run, lines in zip(axes, runs, values, strict=True):
        for place, client in enumerate(shown_clients(run)):
            name = run.requests.clients[client]
            each.plot(at_s, lines[:, client], color=COLORS[place], label=name)
        if not lines.any():
            say_nothing(each, f"no service by {at_s[-1]:.3g} s")
        each.set_xlabel("time (s)")
        each.set_ylim(bottom=0)
        each.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if not any(lines.any() for lines in values):
        axes[0].set_yticks([0])  # they share it
    axes[0].set_ylabel(label)
    legend(figure, axes[0])
    say_hidden(figure, runs[0], LINES_MAX)
    figure.savefig(path)
    return path


def draw_difference(runs: Sequence[Run], path: Path, span_s: float) -> Path:
    """Draw the service difference and the accumulated gap of all policies."""
    figure = Figure(figsize=(11, 4.2), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    at_s = points(span_s)
    for place, run in enumerate(runs):
        service = service_of(run)
        color = COLORS[place % len(COLORS)]
        left.plot(at_s, service_difference(service, span_s).values, color=color, label=run.policy)
        sums = accumulated(service, span_s)
        right.plot(at_s, sums.max(axis=1) - sums.min(axis=1), color=color, label=run.policy)
    for axes, title in (
        (left, "service difference (per second)"),
        (right, "greatest gap of accumulated service"),
    ):
        _titled(axes, title)
        if not any(np.any(line.get_ydata()) for line in axes.get_lines()):
            axes.set_yticks([0])
            say_nothing(axes, "no difference")
    figure.savefig(path)
    return path


def draw_throughput(runs: Sequence[Run], path: Path) -> Path:
    """Draw the tokens per second of all policies to the last end."""
    figure = Figure(figsize=(8, 4.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    width_s = max(run.end_ns for run in runs) / NS / _BINS
    for place, run in enumerate(runs):
        edges = np.arange(0.0, run.end_ns / NS + width_s, width_s)
        rates = throughput(run_tokens(run), *run_times(run), edges)
        color = COLORS[place % len(COLORS)]
        axes.stairs(rates, edges, color=color, label=run.policy, linewidth=1.6)
    _titled(axes, "throughput (input and output tokens per second)")
    figure.savefig(path)
    return path


def run_tokens(run: Run) -> Floats:
    """Return the tokens of each request, input and output."""
    requests = run.requests
    return np.array(requests.prompt_tokens) + np.array(requests.output_tokens, dtype=np.float64)


def run_times(run: Run) -> tuple[Floats, Floats]:
    """Return the times of each request's first token and end in s; NaN: never."""
    service = service_of(run)
    return service.first_s, service.end_s


def draw_response(runs: Sequence[Run], path: Path) -> Path:
    """Draw the response time of each request at its arrival."""
    figure, axes = columns(runs)
    for each, run in zip(axes, runs, strict=True):
        _response(each, run)
        each.set_xlabel("time of arrival (s)")
        each.set_yscale("log")
    axes[0].set_ylabel("response time (s)")
    legend(figure, axes[0])
    say_hidden(figure, runs[0], LINES_MAX)
    figure.savefig(path)
    return path


def _response(axes: Axes, run: Run) -> None:
    arrival = np.array(run.requests.arrival_ns) / NS
    end = np.array(run.outcomes.end_ns)
    client = np.array(run.requests.client)
    for place, at in enumerate(shown_clients(run)):
        mine = np.flatnonzero((client == at) & (end != NEVER))
        mine = mine[:: _stride(len(mine))]
        axes.plot(
            arrival[mine],
            end[mine] / NS - arrival[mine],
            ".",
            markersize=3,
            color=COLORS[place],
            label=run.requests.clients[at],
        )


def draw_occupancy(runs: Sequence[Run], path: Path) -> Path:
    """Draw the KV cache in use, and what is reserved beyond it."""
    figure, axes = columns(runs)
    named = axes[0]
    greatest = 1.0  # promises may exceed the capacity
    for each, run in zip(axes, runs, strict=True):
        samples = run.occupancy[:: _stride(len(run.occupancy))]
        at_s = [sample.at_ns / NS for sample in samples]
        used = np.array([sample.used for sample in samples]) / run.capacity_tokens
        if samples and samples[0].reserved is not None:
            named = each
            reserved = np.array([sample.reserved for sample in samples], dtype=np.float64)
            top = np.maximum(used, reserved / run.capacity_tokens)
            greatest = max(greatest, float(top.max()))
            each.fill_between(at_s, used, top, color=PALE, label="reserved", linewidth=0)
        each.fill_between(at_s, 0, used, color=COLORS[1], label="used", linewidth=0)
        each.set_xlabel("time (s)")
        each.yaxis.set_major_formatter(StrMethodFormatter("{x:.0%}"))
    axes[0].set_ylim(0, 1.05 * greatest)  # they share it
    axes[0].set_ylabel("part of the KV cache")
    legend(figure, named)
    figure.savefig(path)
    return path


def _titled(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", color=INK)
    axes.set_xlabel("time (s)")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.legend(frameon=False)
    clean(axes)


def _stride(count: int) -> int:
    return -(-count // POINTS_MAX) or 1
