"""Measures the core's events, called from Python, and its pick beside the reference."""

import pytest

from bench.compare import abba, compare
from bench.cores import Overload, Picks, Running
from bench.messages import INPUT_TOKENS, tenant
from bench.record import Recorder
from bench.scan import DictScan
from bench.sizes import SIZES

_RUNNING_FLOWS = 1_000


@pytest.mark.parametrize("flows", SIZES.admit_flows)
def test_admit(record: Recorder, flows: int) -> None:
    """Measure one Admit decision while the queue is long."""
    world = Overload(flows, SIZES.queued, SIZES.answers)

    def setup() -> tuple[int, int, bytes]:
        world.end_one()
        return world.next_ask()

    figures = record.steps(world.admit, setup, SIZES.steps)
    world.core.check()
    sizes = {"flows": flows, "queued": SIZES.queued}
    digest = world.core.digest()
    record.rung("core.admit", f"Admit, {flows:,} flows", sizes, figures=figures, digest=digest)


def test_admit_by_flows(record: Recorder) -> None:
    """Measure the same with many flows beside few, and with itself."""
    flows = SIZES.admit_flows[0], SIZES.admit_flows[-1]
    few, many = (Overload(n, SIZES.queued, SIZES.answers) for n in flows)
    steps, rounds = SIZES.slice_steps, SIZES.rounds
    record.once(lambda: few.slice_of_admits(steps))
    pairs = abba(*(lambda: few.slice_of_admits(steps),) * 2, rounds)
    record.control("core: Admit beside itself", compare(pairs[:, :, 0]))
    pairs = abba(lambda: many.slice_of_admits(steps), lambda: few.slice_of_admits(steps), rounds)
    comparison = compare(pairs[:, :, 0])
    record.rung(
        "core.admit_by_flows",
        f"Admit, {SIZES.admit_flows[-1]:,} flows, in a row",
        {"flows": SIZES.admit_flows[-1], "queued": SIZES.queued},
        figures={"median_ns": comparison.a},
        reference=f"{SIZES.admit_flows[0]:,} flows",
        comparison=comparison,
        reference_ns=comparison.b,
        digest=many.core.digest(),
    )


def test_complete(record: Recorder) -> None:
    """Measure one Complete; it makes room for another request, whose grant `poll()` brings."""
    world = Overload(SIZES.admit_flows[-1], SIZES.queued, SIZES.answers)

    def setup() -> tuple[int, int]:
        world.refill()
        return world.tick(), world.leases.popleft()

    figures = record.steps(world.complete_and_grant, setup, SIZES.steps)
    world.core.check()
    record.rung(
        "core.complete",
        "Complete, and the next grant",
        {"flows": SIZES.admit_flows[-1], "queued": SIZES.queued},
        figures=figures,
        digest=world.core.digest(),
    )


def test_pair(record: Recorder) -> None:
    """Admit, grant and Complete of one request while nothing waits."""
    world = Running(_RUNNING_FLOWS, SIZES.answers)
    figures = record.steps(world.pair, world.next_ask, SIZES.steps)
    world.core.check()
    record.rung(
        "core.pair",
        "Admit, grant and Complete",
        {"flows": _RUNNING_FLOWS, "queued": 0, "answers": SIZES.answers},
        figures=figures,
        digest=world.core.digest(),
    )


def test_progress(record: Recorder) -> None:
    """Measure one Progress of a lease: renewed, charged, its blocks posted."""
    world = Running(_RUNNING_FLOWS, SIZES.answers)
    figures = record.steps(world.progress, world.next_report, SIZES.steps)
    world.core.check()
    record.rung(
        "core.progress",
        "Progress",
        {"flows": _RUNNING_FLOWS, "leases": len(world.leases)},
        figures=figures,
        digest=world.core.digest(),
    )


@pytest.mark.parametrize("flows", SIZES.pick_flows)
def test_pick(record: Recorder, flows: int) -> None:
    """Find the flow to serve next: the core's heap compared with the scan of a dict."""
    rounds = SIZES.rounds
    scan = DictScan([tenant(flow) for flow in range(flows)], INPUT_TOKENS)
    # It takes long enough that the caches' state after the scan matters little.
    polls = 8
    world = Picks(flows)

    def picked() -> list[float]:
        return world.slice(polls)

    record.once(picked)
    comparison = compare(abba(scan.slice, picked, rounds)[:, :, 0])
    world.core.check()
    record.rung(
        "core.pick",
        f"Pick and grant, {flows:,} flows",
        {"flows": flows, "picks": Picks.AT_ONCE},
        figures={"median_ns": comparison.b},
        reference="dict scan",
        comparison=comparison,
        reference_ns=comparison.a,
        digest=world.core.digest(),
    )
