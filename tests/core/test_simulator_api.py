"""Calls in bulk for simulators give the same as the single calls."""

from array import array

import pytest

from schedsvc import _core as core

from .support import SECOND, admit, make

LEASES = 12


def running() -> tuple[core.Scheduler, list[core.Decision]]:
    """Make three flows with four leases each, of which some have been outgrown, and what waits."""
    scheduler = make(("a", 1_000), ("b", 2_000), ("c", 500), capacity=4_000, block=16)
    for number in range(LEASES + 9):
        admit(scheduler, 0, f"r{number}", 40, 200, flow=number % 3, reports_progress=True)
    granted = scheduler.poll(0)
    assert len(granted) >= LEASES
    return scheduler, granted[:LEASES]


def test_progress_in_bulk_is_that_of_single_reports() -> None:
    (one, granted), (all_, again) = running(), running()
    assert [d.lease_id for d in granted] == [d.lease_id for d in again]
    rows = array("q", [n for d in granted for n in (d.handle, d.pool_epoch, 40)]).tobytes()
    for step in range(1, 30):
        now_ns = step * SECOND
        outputs = [max(0, 5 * step - number) for number in range(LEASES)]
        for decision, output in zip(granted, outputs, strict=True):
            computed = 40 if output else -1
            one.progress(now_ns, decision.lease_id, decision.pool_epoch, computed, 0, output)
        bases = array("q", [output - step for output in outputs]).tobytes()
        core.progress_all(all_, now_ns, rows, bases, step)
        assert one.poll(now_ns) == all_.poll(now_ns)
        assert one.stats(now_ns) == all_.stats(now_ns)
        assert one.next_deadline() == all_.next_deadline()
    all_.check()
    assert one.digest() == all_.digest()


def test_input_is_reported_only_with_output() -> None:
    scheduler, granted = running()
    row = array("q", [granted[0].handle, 1, 40]).tobytes()
    core.progress_all(scheduler, 1, row, array("q", [0]).tobytes())
    assert scheduler.stats(1)["flows"][0]["input_tokens"] == 0
    core.progress_all(scheduler, 2, row, array("q", [1]).tobytes())
    assert scheduler.stats(2)["flows"][0]["input_tokens"] == 40


@pytest.mark.parametrize(("leases", "outputs"), [(3, 2), (2, 1), (0, 1), (3, 0)])
def test_sizes_that_do_not_agree_are_refused(leases: int, outputs: int) -> None:
    scheduler, _ = running()
    before = scheduler.stats(0)
    with pytest.raises(core.CallerError, match="three numbers"):
        core.progress_all(scheduler, 1, bytes(8 * leases), bytes(8 * outputs))
    with pytest.raises(core.CallerError, match="three numbers"):
        core.progress_all(scheduler, 1, bytes(24), bytes(7))
    assert scheduler.stats(0) == before


def test_a_total_too_large_is_refused_and_earlier_events_count() -> None:
    scheduler, granted = running()
    rows = array("q", [n for d in granted[:2] for n in (d.handle, 1, 40)]).tobytes()
    too_large = array("q", [3, core.TOTAL_TOKENS_MAX + 1]).tobytes()
    with pytest.raises(core.CallerError, match="output_tokens"):
        core.progress_all(scheduler, 1, rows, too_large)
    assert sum(flow["output_tokens"] for flow in scheduler.stats(1)["flows"]) == 3


def test_promised_tokens_are_those_of_all_pools() -> None:
    scheduler, _ = running()
    scheduler.set_pool(0, b"q", 1, 4_000, 32)
    scheduler.poll(0)
    promised = [pool["promised_tokens"] for pool in scheduler.stats(0)["pools"]]
    assert len(promised) == 2
    assert core.promised_tokens(scheduler) == sum(promised) > 0
