"""Measures the core's events alone, called and timed in C, and its pick beside the reference."""

import time
from typing import Any

import numpy as np
import pytest

from bench import inside
from bench.compare import abba, compare
from bench.cores import Overload, Picks, Running
from bench.messages import INPUT_TOKENS, OUTPUT_TOKENS, OUTPUT_TOKENS_MAX, tenant
from bench.record import Recorder
from bench.scan import DictScan
from bench.sizes import SIZES

_RUNNING_FLOWS = 1_000
_PICKS = 2_000


@pytest.fixture(scope="module")
def core() -> Any:
    """Compile the core with the loops, or take what is there."""
    return inside.load()


def _figures(took_ns: list[int]) -> dict[str, float]:
    median, high = np.quantile(took_ns, [0.5, 0.99])
    return {"median_ns": max(1.0, float(median)), "p99_ns": max(1.0, float(high))}


@pytest.mark.parametrize("flows", SIZES.admit_flows)
def test_admit(record: Recorder, core: Any, flows: int) -> None:
    """Measure one Admit decision while the queue is long; as many leases have ended before."""
    world = Overload(flows, SIZES.queued, SIZES.answers, core.Scheduler)
    took_ns: list[int] = []
    steps = SIZES.slice_steps
    for turn in range(SIZES.steps // steps + 1):
        for _ in range(steps):
            world.end_one()
        asks = [world.next_ask() for _ in range(steps)]
        took = core.time_asks(world.core, asks, INPUT_TOKENS, OUTPUT_TOKENS_MAX)
        took_ns += took if turn else []
    record.once(world.core.check)
    record.rung(
        "inside.admit",
        f"Admit, {flows:,} flows",
        {"flows": flows, "queued": SIZES.queued},
        figures=_figures(took_ns),
        digest=world.core.digest(),
    )


def test_pair(record: Recorder, core: Any) -> None:
    """Admit, grant and Complete of one request while nothing waits."""
    world = Running(_RUNNING_FLOWS, SIZES.answers, core.Scheduler)
    took_ns: list[int] = []
    steps = SIZES.slice_steps
    for turn in range(SIZES.steps // steps + 1):
        asks = [world.next_ask() for _ in range(steps)]
        usage = (INPUT_TOKENS, OUTPUT_TOKENS_MAX, OUTPUT_TOKENS)
        took = core.time_asks(world.core, asks, *usage)
        took_ns += took if turn else []
    record.once(world.core.check)
    record.rung(
        "inside.pair",
        "Admit, grant and Complete",
        {"flows": _RUNNING_FLOWS, "queued": 0, "answers": SIZES.answers},
        figures=_figures(took_ns),
        digest=world.core.digest(),
    )


@pytest.mark.parametrize("flows", SIZES.pick_flows)
def test_pick(record: Recorder, core: Any, flows: int) -> None:
    """Find the flow to serve next, and charge it: the core's heap, and the scan of a dict."""
    scan = DictScan([tenant(flow) for flow in range(flows)], INPUT_TOKENS)
    world = Picks(flows, core.Scheduler)

    def picked() -> list[float]:
        began_ns = time.perf_counter_ns()
        core.pick(world.core, _PICKS, INPUT_TOKENS)
        return [(time.perf_counter_ns() - began_ns) / _PICKS]

    record.once(picked)
    comparison = compare(abba(scan.slice, picked, SIZES.rounds)[:, :, 0])
    record.rung(
        "inside.pick",
        f"Pick, {flows:,} flows",
        {"flows": flows, "picks": _PICKS},
        figures={"median_ns": comparison.b},
        reference="dict scan",
        comparison=comparison,
        reference_ns=comparison.a,
    )
