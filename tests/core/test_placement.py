"""Tests where a request for any pool runs: the emptiest, or one with its adapter."""

import random
from typing import Any

import pytest

from schedsvc import _core as core
from tests.seeds import fresh

from .support import SECOND, admit, make

FLOWS = (("a", 1000), ("b", 1000))


def two(capacity: int = 1_000, **more: int) -> core.Scheduler:
    """Return pools 0 and 1, alike."""
    s = make(*FLOWS, capacity=capacity, **more)
    s.set_pool(0, b"q", 1, capacity, 1)
    return s


def put(
    s: core.Scheduler, now_ns: int, request_id: str, prompt: int = 10, **more: Any
) -> core.Decision:
    """Ask for a request that is granted at once."""
    admit(s, now_ns, request_id, prompt, 10, **more)
    [decision] = s.poll(now_ns)
    assert decision.outcome == core.GRANTED
    return decision


def place(s: core.Scheduler, now_ns: int, request_id: str, prompt: int = 10, **more: Any) -> int:
    return put(s, now_ns, request_id, prompt, **more).pool


def test_a_request_goes_to_the_pool_with_the_least_promised() -> None:
    s = two()
    assert [place(s, 0, f"r{i}", size) for i, size in enumerate((100, 10, 10, 200))] == [0, 1, 1, 1]
    assert place(s, 0, "next") == 0


def test_it_goes_where_its_adapter_is_active_up_to_so_much_fuller() -> None:
    s = two(adapter_affinity_ppm=200_000)
    assert place(s, 0, "x", 140, adapter=b"x") == 0  # 15 % of the pool
    assert place(s, 0, "x again", adapter=b"x") == 0
    assert place(s, 0, "y", adapter=b"y") == 1
    assert place(s, 0, "base") == 1
    assert place(s, 0, "fills", 80, adapter=b"x") == 0  # 26 %, beside 4 %
    assert place(s, 0, "moves on", adapter=b"x") == 1


def test_without_affinity_adapters_do_not_matter() -> None:
    s = two(adapter_affinity_ppm=0)
    assert place(s, 0, "x", adapter=b"x") == 0
    assert place(s, 0, "x again", adapter=b"x") == 1


def test_it_does_not_wait_for_its_adapter() -> None:
    s = two(adapter_affinity_ppm=1_000_000)
    assert place(s, 0, "x", 900, adapter=b"x") == 0
    assert place(s, 0, "too large beside it", 400, adapter=b"x") == 1


def test_no_request_is_passed_where_its_adapter_is() -> None:
    s = two(adapter_affinity_ppm=1_000_000)
    assert place(s, 0, "x", adapter=b"x", pool=0) == 0
    # The first in pool 0 is older, and waits for room in vain: the one behind it goes elsewhere.
    admit(s, 1, "older", 985, 5, pool=0)
    admit(s, 1, "younger", 10, 10, flow=0, adapter=b"x")
    assert [d.pool for d in s.poll(1)] == [1]


def test_a_request_that_names_its_pool_runs_there() -> None:
    s = two(adapter_affinity_ppm=1_000_000)
    assert place(s, 0, "x", adapter=b"x", pool=0) == 0
    assert place(s, 0, "x there", adapter=b"x", pool=1) == 1


def loads(affinity_ppm: int, seed: int) -> int:
    """How often an adapter becomes active somewhere, of two adapters that take turns."""
    rnd = random.Random(seed)
    s = two(100_000, adapter_affinity_ppm=affinity_ppm)
    running: list[tuple[int, int]] = []  # when it ends, lease
    loaded = 0

    def active(now_ns: int) -> list[int]:
        return [row["active_adapters"] for row in s.stats(now_ns)["pools"]]

    for step in range(600):
        now_ns = step * SECOND // 10
        for entry in [entry for entry in running if entry[0] <= step]:
            s.complete(now_ns, entry[1], 1, output_tokens=5)
            running.remove(entry)
        before = active(now_ns)
        d = put(s, now_ns, f"r{step}", adapter=rnd.choice((b"x", b"y")))
        loaded += active(now_ns)[d.pool] > before[d.pool]
        running.append((step + rnd.randrange(3, 9), d.lease_id))
    s.check()
    return loaded


@pytest.mark.parametrize("seed", fresh(2))
def test_adapters_stay_where_they_are_loaded(seed: int) -> None:
    assert loads(100_000, seed) * 3 < loads(0, seed)
