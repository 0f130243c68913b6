"""Tests when a store that refuses writes again and again counts as back."""

import pytest

from schedsvc.cluster import outage
from schedsvc.cluster.errors import StoreError, WritesRefusedError
from schedsvc.cluster.outage import Outage

SECOND_NS = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now_ns = 10 * SECOND_NS

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(outage, "boot_ns", clock)
    return clock


def refusal(size: int = 1) -> WritesRefusedError:
    error = WritesRefusedError("OOM")
    error.words = ("FCALL", b"x" * size)
    return error


def returned_after_s(found: Outage, clock: Clock) -> float:
    """Let the store answer each 0.25 s until it is back; return the time that this took."""
    begun_ns = clock.now_ns
    while not found.answered():
        clock.now_ns += SECOND_NS // 4
    return (clock.now_ns - begun_ns) / SECOND_NS


def test_a_first_answer_is_enough_once_and_then_the_wait_doubles(clock: Clock) -> None:
    found = Outage()
    assert found.answered()
    waits = []
    for _ in range(8):
        assert found.failed(refusal(), "OOM")
        assert not found.failed(refusal(), "OOM")
        waits.append(returned_after_s(found, clock))
        clock.now_ns += SECOND_NS
    assert waits == [0, 1, 2, 4, 8, 16, 32, 32]
    clock.now_ns += 60 * SECOND_NS
    found.failed(refusal(), "OOM")
    assert returned_after_s(found, clock) == 0


def test_an_answer_among_refusals_does_not_count(clock: Clock) -> None:
    found = Outage()
    found.failed(refusal(), "OOM")
    assert found.answered()
    found.failed(refusal(), "OOM")
    for _ in range(10):
        assert not found.answered()
        clock.now_ns += SECOND_NS * 3 // 4
        assert not found.failed(refusal(), "OOM")
    assert returned_after_s(found, clock) == 1


def test_a_store_that_restarts_twice_is_back_at_once(clock: Clock) -> None:
    found = Outage()
    for _ in range(3):
        assert found.failed(StoreError("cannot connect"), "cannot connect")
        assert returned_after_s(found, clock) == 0


def test_the_largest_refused_call_is_kept_over_relapses(clock: Clock) -> None:
    found = Outage()
    for size in (5, 9, 7):
        found.failed(refusal(size), "OOM")
    assert found.refused == ("FCALL", b"x" * 9)
    assert returned_after_s(found, clock) == 0
    found.failed(refusal(2), "OOM")
    assert found.refused == ("FCALL", b"x" * 9)
    returned_after_s(found, clock)
    clock.now_ns += 61 * SECOND_NS
    found.failed(refusal(2), "OOM")
    assert found.refused == ("FCALL", b"x" * 2)
