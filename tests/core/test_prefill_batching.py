"""Dispatch delay: work is held for a part of the last prefill, so that prefills batch."""

import random
from typing import Any

import pytest

from schedsvc import _core as core
from tests.seeds import fresh

from .support import SECOND, admit, grant, make, pool

MS = 10**6


def delaying(factor_milli: int = 500, **more: Any) -> core.Scheduler:
    """Run a lease whose prefill took 100 ms: the delay is 50 ms at a factor of a half."""
    s = make(("a", 1000), ("b", 1000), delay_factor_milli=factor_milli, **more)
    grant(s, 0, "runs", 10, 90, reports_progress=True)
    s.progress(100 * MS, 1, 1, output_tokens=1)
    assert pool(s, 100 * MS)["last_prefill_us"] == 100_000
    return s


def granted(s: core.Scheduler, now_ns: int) -> list[int]:
    return [d.handle for d in s.poll(now_ns) if d.outcome == core.GRANTED]


def test_off_it_holds_nothing() -> None:
    s = delaying(0)
    handle = admit(s, 200 * MS, "r")
    assert granted(s, 200 * MS) == [handle]


def test_arrivals_are_held_and_granted_with_later_ones() -> None:
    s = delaying()
    first = admit(s, 200 * MS, "first")
    assert granted(s, 200 * MS) == []
    assert pool(s, 200 * MS)["wait_reason"] == "DELAY"
    assert s.next_deadline() == 250 * MS  # exactly: there is no tick
    second = admit(s, 249 * MS, "second", flow=1)
    assert granted(s, 250 * MS - 1) == []
    third = admit(s, 250 * MS, "third")
    assert sorted(granted(s, 250 * MS)) == sorted([first, second, third])
    admit(s, 260 * MS, "next")
    assert granted(s, 260 * MS) == []  # held again
    assert s.next_deadline() == 310 * MS
    s.check()


def test_an_idle_pool_holds_nothing() -> None:
    s = delaying()
    s.complete(110 * MS, 1, 1, output_tokens=2)
    handle = admit(s, 200 * MS, "r")
    assert granted(s, 200 * MS) == [handle]


@pytest.mark.parametrize("limit", ["queue_ttl_ns", "deadline_ns"])
def test_nothing_is_held_into_its_deadline(limit: str) -> None:
    s = delaying()
    first = admit(s, 200 * MS, "first")
    assert granted(s, 200 * MS) == []
    urgent = admit(s, 210 * MS, "urgent", flow=1, **{limit: 40 * MS})
    assert sorted(granted(s, 210 * MS)) == sorted([first, urgent])


def test_old_work_is_not_held() -> None:
    s = delaying(capacity=120)
    first = admit(s, 200 * MS, "waits for room", 20, 10)
    assert granted(s, 400 * MS) == []
    assert pool(s, 400 * MS)["wait_reason"] == "KV"
    s.complete(400 * MS, 1, 1, output_tokens=2)
    small = admit(s, 400 * MS, "fresh", 1, 1)
    assert granted(s, 400 * MS) == [first, small]


def test_the_last_prefill_whose_first_tokens_were_reported_counts() -> None:
    s = make(delay_factor_milli=1_000)

    def prefill(begun_ns: int, ended_ns: int, **more: Any) -> int:
        d = grant(s, begun_ns, f"r{begun_ns}", **({"reports_progress": True} | more))
        s.progress(ended_ns, d.lease_id, 1, output_tokens=1)
        s.progress(ended_ns + 9 * MS, d.lease_id, 1, output_tokens=2)
        s.complete(ended_ns + 9 * MS, d.lease_id, 1)
        taken: int = pool(s, ended_ns + 9 * MS)["last_prefill_us"]
        return taken

    assert prefill(SECOND, SECOND + 300 * MS) == 300_000
    assert prefill(2 * SECOND, 2 * SECOND + 20 * MS) == 20_000
    assert prefill(3 * SECOND, 3 * SECOND + 70 * MS, reports_progress=False) == 20_000
    assert prefill(4 * SECOND, 5 * SECOND) == 20_000  # its arrival is unknown
    s.reset_learned()
    assert pool(s, 7 * SECOND)["last_prefill_us"] == 0


def test_work_that_is_held_makes_no_overload() -> None:
    s = delaying(10_000)
    admit(s, 200 * MS, "held")
    assert granted(s, 200 * MS) == []
    assert pool(s, 200 * MS)["overload_state"] == 1


def test_it_changes_while_everything_runs() -> None:
    s = delaying(0)
    s.set_options(150 * MS, delay_factor_milli=2_000)
    handle = admit(s, 200 * MS, "r")
    assert granted(s, 399 * MS) == []
    s.set_options(399 * MS, delay_factor_milli=500)
    assert granted(s, 399 * MS) == [handle]


@pytest.mark.parametrize("seed", fresh(3))
def test_none_waits_beyond_the_delay_and_prefills_batch(seed: int) -> None:
    """There is room for all, so requests wait only for the delay."""
    rnd = random.Random(seed)
    s = make(("a", 1000), ("b", 1000), capacity=1 << 20, delay_factor_milli=500)
    grant(s, 0, "runs", 1, 9_999, reports_progress=True)
    s.progress(80 * MS, 1, 1, output_tokens=1)
    delay_ns, now_ns, batches, alone = 40 * MS, 80 * MS, 0, 0
    asked = 0
    running: list[int] = []
    while asked < 600:
        now_ns += int(rnd.expovariate(1 / (10 * MS)))
        while 0 <= s.next_deadline() <= now_ns:
            at_ns = s.next_deadline()
            s.progress(at_ns, 1, 1)
            batch = [d for d in s.poll(at_ns) if d.outcome == core.GRANTED]
            if batch:
                assert max(d.waited_ns for d in batch) == delay_ns
                batches += 1
                alone += len(batch) == 1
                running += [d.lease_id for d in batch]
        admit(s, now_ns, f"r{asked}", flow=rnd.randrange(2))
        asked += 1
        assert s.poll(now_ns) == []
    s.check()
    assert asked / batches > 3
    assert alone < batches / 3
    assert len(running) > 570  # all but the last batch
