"""Tests that freed memory never grows: records, verdicts, sessions, whole schedulers."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import pytest

from schedsvc import _core as core

from .stream import Stream, asking, completing
from .support import admit, grant, make

STATM = Path("/proc/self/statm")
PAGES_OF_SLACK = 1_024  # 4 MiB; a leak would be several times that

pytestmark = pytest.mark.skipif(not STATM.exists(), reason="needs /proc/self/statm")


def resident_pages() -> int:
    gc.collect()
    # Otherwise the allocator decides how much of the freed memory still counts.
    ctypes.CDLL(None).malloc_trim(0)
    return int(STATM.read_text().split()[1])


def growth(work: Callable[[], None]) -> int:
    work()  # tables and free lists reach their size
    before = resident_pages()
    work()
    return resident_pages() - before


def test_schedulers_with_open_sessions_are_freed() -> None:
    def work() -> None:
        for _ in range(150):
            s = make(samples_min=1, quantile_ppm=500_000)
            stream = Stream(s)
            lease_id = stream.grant(0, 1, "r")
            stream.push(0, asking(2, "untaken"), completing(lease_id, output_tokens=3))
            for i in range(50):
                admit(s, 0, f"q{i}", 50, 50)

    assert growth(work) < PAGES_OF_SLACK


def test_a_busy_scheduler_stays_as_large_as_it_is() -> None:
    s = make(("a", 1000), ("b", 1000), capacity=10_000, answers_max=100)
    serial = 0

    def work() -> None:
        nonlocal serial
        for _ in range(15_000):
            serial += 1
            adapter = b"a%d" % (serial % 40)
            d = grant(s, serial, f"r{serial}", flow=serial % 2, adapter=adapter)
            s.complete(serial, d.lease_id, 1, output_tokens=serial % 300)
            admit(s, serial, f"big{serial}", 9_990, 20)

    assert growth(work) < PAGES_OF_SLACK


def test_streams_that_come_and_go_leave_nothing() -> None:
    s = make(capacity=10_000)
    serial = 0

    def work() -> None:
        nonlocal serial
        for _ in range(2_000):
            serial += 1
            stream = Stream(s)
            stream.push(0, *(asking(i + 1, f"r{serial}-{i}") for i in range(5)))
            stream.session.close(0)

    assert growth(work) < PAGES_OF_SLACK
    assert s.stats(0)["totals"]["open_sessions"] == 0


def test_errors_leave_nothing() -> None:
    s = make()
    stream = Stream(s)

    def work() -> None:
        for _ in range(30_000):
            with pytest.raises(core.CallerError):
                s.admit_wire(0, 0, b"\x0a\x05abc")
            with pytest.raises(core.CallerError):
                s.admit(0, 9, b"x" * 200, 1, 1)
        stream.send(0, *(asking(0, "r") for _ in range(4_000)))

    assert growth(work) < PAGES_OF_SLACK


def test_a_refused_flood_leaves_nothing() -> None:
    s = make(flow_queue_max=10)
    grant(s, 0, "runs", 900, 100)
    serial = 0

    def work() -> None:
        nonlocal serial
        for _ in range(60_000):
            serial += 1
            admit(s, serial * 10**6, f"r{serial}", 900, 100)

    assert growth(work) < PAGES_OF_SLACK


def test_a_request_takes_168_bytes_of_each_queue() -> None:
    """A million queued requests have room in 400 MB (T10), most of them with no more."""
    assert core.REQUEST_BYTES <= 168
