"""Draws a comparison."""

from collections.abc import Sequence
from pathlib import Path

from schedsvc_lab.sim.figures.clients import draw_first_token, draw_refusals
from schedsvc_lab.sim.figures.overtime import (
    draw_accumulated,
    draw_difference,
    draw_occupancy,
    draw_response,
    draw_service,
    draw_throughput,
)
from schedsvc_lab.sim.report import span_of
from schedsvc_lab.sim.scenario import Run

__all__ = ["draw_all"]


def draw_all(runs: Sequence[Run], folder: Path, span_s: float | None = None) -> list[Path]:
    """Draw every picture of the runs, one for each policy. Returns the files."""
    span_s = max(span_of(run) for run in runs) if span_s is None else span_s
    return [
        draw_service(runs, folder / "service.png", span_s),
        draw_accumulated(runs, folder / "accumulated_service.png", span_s),
        draw_difference(runs, folder / "service_difference.png", span_s),
        draw_throughput(runs, folder / "throughput.png"),
        draw_response(runs, folder / "response_time.png"),
        draw_first_token(runs, folder / "first_token.png"),
        draw_occupancy(runs, folder / "kv_occupancy.png"),
        draw_refusals(runs, folder / "refusals.png"),
    ]
