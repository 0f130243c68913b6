"""Tests the peak form, headroom that adapts, and what is kept for flows below their share."""

import random
from typing import Any

import pytest

from schedsvc import _core as core

from .support import SECOND, admit, grant, is_drained, make, outcomes, pool

MS = 10**6


def peak(capacity: int, *flows: tuple[str, int], **more: Any) -> core.Scheduler:
    return make(*flows, capacity=capacity, ledger="peak", **more)


def tell(s: core.Scheduler, now_ns: int, used: int, preemptions: int = 0, epoch: int = 1) -> None:
    s.telemetry(now_ns, 0, epoch, 1, 0, used, preemptions)


def test_early_end_makes_room_for_a_late_end() -> None:
    # Block 1. a: 10 in, 10 out; b: 10 in, 50 out. When a ends both hold 20: 40 in all; when b ends
    # it holds 60. The sum form would promise 20 + 60 = 80.
    s = peak(60)
    grant(s, 0, "a", 10, 10, reports_progress=True)
    grant(s, 0, "b", 10, 50, reports_progress=True)
    assert pool(s, 0)["load_tokens"] == 60
    assert pool(s, 0)["promised_tokens"] == 80
    # Another one like a would make 60 when both end, which is no more than b alone at its end.
    grant(s, 0, "c", 10, 10, reports_progress=True)
    assert pool(s, 0)["load_tokens"] == 60
    admit(s, 0, "d", 10, 10, reports_progress=True)
    assert s.poll(0) == []
    assert pool(s, 0)["wait_reason"] == "KV"
    # When b has made 45 more, a and c have ended and little of b is to come.
    for lease_id in (1, 3):
        s.complete(1, lease_id, 1, output_tokens=10)
    s.progress(1, 2, 1, 10, output_tokens=45)
    assert outcomes(s.poll(1)) == []  # 60 at b's end, and 10 + 5 of d
    assert pool(s, 1)["load_tokens"] == 60


def test_the_peak_is_the_largest_of_all_moments() -> None:
    s = peak(1_000)
    for i, (prompt, output) in enumerate(((100, 10), (50, 30), (10, 100), (5, 100))):
        grant(s, 0, f"r{i}", prompt, output, reports_progress=True)
    # at 100: 110 + 105; at 30: 40 + 35 + 80; at 10: 20 + 15 + 60 + 110
    assert pool(s, 0)["load_tokens"] == 215
    s.progress(1, 3, 1, 10, output_tokens=60)
    s.progress(1, 4, 1, 5, output_tokens=60)
    # at 40: 110 + 105; at 30: 100 + 95 + 80; at 10: 80 + 75 + 60 + 110
    assert pool(s, 1)["load_tokens"] == 325
    s.check()


def test_lease_without_reports_or_silent_counts_in_full() -> None:
    s = peak(200, lease_ttl_ns=SECOND, lease_grace_ns=SECOND)
    grant(s, 0, "told", 10, 40, reports_progress=True)
    grant(s, 0, "untold", 10, 60)
    assert pool(s, 0)["load_tokens"] == 120
    s.progress(0, 1, 1, 10, output_tokens=39)
    assert pool(s, 0)["load_tokens"] == 120
    grant(s, 0, "short", 10, 1, reports_progress=True)
    assert pool(s, 0)["load_tokens"] == 49 + 70 + 12  # when both make their last token: 50 + 11
    assert s.poll(SECOND) == []  # all are SUSPECT now
    assert pool(s, SECOND)["load_tokens"] == 50 + 70 + 11
    s.progress(SECOND, 1, 1)
    s.check()


def test_blocks_are_counted_as_they_are_begun() -> None:
    s = peak(1_600, block=16)
    grant(s, 0, "tight", 10, 6, reports_progress=True)  # one block to the last token
    assert pool(s, 0)["load_tokens"] == 16
    grant(s, 0, "loose", 10, 7, reports_progress=True)  # begins its second when the first has ended
    assert pool(s, 0)["load_tokens"] == 32
    assert pool(s, 0)["promised_tokens"] == 48


def test_sequences_that_began_together_begin_blocks_together() -> None:
    s = peak(1_600, block=16)
    for i in range(3):
        grant(s, 0, f"r{i}", 16, 2, reports_progress=True)
    assert pool(s, 0)["load_tokens"] == 3 * 32  # half a block for each would make 3 * (18 + 7)
    s.progress(0, 1, 1, 16, output_tokens=1)
    # It ends first, at 18 tokens, when the others have 17.
    assert pool(s, 0)["load_tokens"] == 3 * 32
    s.check()


@pytest.mark.parametrize("block", [1, 7, 16, 128, 129, 1_000])
def test_the_peak_counts_as_many_blocks_as_an_engine_that_runs_them(block: int) -> None:
    """It may count one too many for each block of more than 128 tokens, never too few."""
    draws = random.Random(block)
    for _ in range(50):
        s = peak(1_000_000 * block, block=block)
        leases = [
            (draws.randint(1, 5 * block), draws.randint(1, 5 * block))
            for _ in range(draws.randint(1, 12))
        ]
        for i, (prompt, output) in enumerate(leases):
            grant(s, 0, f"r{i}", prompt, output, reports_progress=True)
        counts = [
            sum(-(-(prompt + made) // block) for prompt, output in leases if output >= made)
            for made in range(5 * block + 1)
        ]
        load = pool(s, 0)["load_tokens"] // block
        assert max(counts) <= load <= max(counts) + (len(leases) if block > 128 else 0)


def test_engines_excess_over_promises_counts_while_known() -> None:
    s = peak(100)
    grant(s, 0, "a", 10, 10)
    tell(s, 0, used=90)  # no lease here explains 70 of it
    assert pool(s, 0)["load_tokens"] == 90
    admit(s, 0, "b", 10, 10)
    assert s.poll(0) == []
    assert s.poll(5 * SECOND) == []
    assert outcomes(s.poll(5 * SECOND + 1)) == [core.GRANTED]
    tell(s, 6 * SECOND, used=101)
    assert pool(s, 6 * SECOND)["overdrawn"]
    tell(s, 7 * SECOND, used=40)
    assert pool(s, 7 * SECOND)["load_tokens"] == 40


def adaptive(capacity: int = 10_000, **more: Any) -> core.Scheduler:
    limits = {"headroom_ppm": 20_000, "headroom_min_ppm": -200_000, "headroom_max_ppm": 100_000}
    limits |= {"samples_min": 1_000}  # more lengths than are ever known
    return peak(capacity, **(limits | more))


def test_headroom_rises_at_once_with_preemptions_and_falls_slowly_while_cache_is_wanted() -> None:
    s = adaptive(1_000_000)
    for small in range(70):
        grant(s, 0, f"small {small}", 10, 10)
    grant(s, 0, "a", 10, 900_000)
    admit(s, 0, "b", 10, 900_000)
    tell(s, 0, used=100)
    headroom = []
    for second in range(1, 4):
        s.poll(second * SECOND)
        tell(s, second * SECOND, used=100)
        headroom.append(pool(s, second * SECOND)["headroom_tokens"])
    assert headroom == [15_000, 10_000, 5_000]  # 0.5 % of the pool a second
    tell(s, 4 * SECOND, used=100, preemptions=1)
    assert pool(s, 4 * SECOND)["headroom_tokens"] == 5_000 + 22_000
    served, falls, last = 0, [], 27_000
    for second, ends in enumerate((0, 1, 3, 60, 2, 0), 5):
        for lease_id in range(served + 1, served + ends + 1):
            s.complete(second * SECOND, lease_id, 1, output_tokens=1)
        served += ends
        s.poll(second * SECOND)
        tell(s, second * SECOND, used=100, preemptions=1)
        falls.append(last - pool(s, second * SECOND)["headroom_tokens"])
        last -= falls[-1]
    # 0.001 % for each that was served, and 0.05 % a second at most, from now on.
    assert falls == [0, 10, 30, 500, 20, 0]
    tell(s, 11 * SECOND, used=100, preemptions=1_000)
    assert pool(s, 11 * SECOND)["headroom_tokens"] == last + 40_000
    tell(s, 12 * SECOND, used=100, preemptions=2_000)
    assert pool(s, 12 * SECOND)["headroom_tokens"] == 100_000  # headroom_max


def test_only_what_was_completed_earns_less_headroom() -> None:
    s = adaptive(1_000_000)
    for small in range(3):
        grant(s, 0, f"small {small}", 10, 10)
    grant(s, 0, "a", 10, 900_000)
    admit(s, 0, "b", 10, 900_000)
    tell(s, 0, used=100)
    tell(s, 1, used=100, preemptions=1)
    s.poll(SECOND)
    assert pool(s, SECOND)["headroom_tokens"] == 42_000
    s.complete(SECOND, 1, 1, core.CANCELLED)
    s.complete(SECOND, 2, 1, output_tokens=1)
    s.complete(SECOND, 2, 1, output_tokens=1)  # a repeat
    s.poll(SECOND)
    tell(s, SECOND, used=100, preemptions=1)
    assert pool(s, SECOND)["headroom_tokens"] == 42_000 - 10


def test_headroom_stays_where_nothing_waits_or_the_cache_is_full() -> None:
    s = adaptive()
    grant(s, 0, "a", 10, 8_000)
    for second in range(5):
        s.poll(second * SECOND)
        tell(s, second * SECOND, used=100)
    assert pool(s, 4 * SECOND)["headroom_tokens"] == 200
    admit(s, 5 * SECOND, "b", 10, 8_000)
    for second in range(5, 9):
        s.poll(second * SECOND)
        tell(s, second * SECOND, used=9_600)
    assert pool(s, 8 * SECOND)["headroom_tokens"] == 200


def test_below_zero_more_is_promised_than_there_is() -> None:
    s = adaptive(headroom_ppm=0, headroom_min_ppm=-100_000)
    grant(s, 0, "a", 10, 5_490)
    admit(s, 0, "b", 10, 5_490, queue_ttl_ns=25 * SECOND)
    tell(s, 0, used=100)
    granted_s = None
    for second in range(1, 25):
        if s.poll(second * SECOND):
            granted_s = second
            break
        tell(s, second * SECOND, used=100)
        s.progress(second * SECOND, 1, 1)
    assert granted_s == 21  # after twenty times 0.5 %
    assert pool(s, 21 * SECOND)["load_tokens"] == 11_000
    assert not pool(s, 21 * SECOND)["overdrawn"]
    tell(s, 22 * SECOND, used=100, preemptions=5)
    assert pool(s, 22 * SECOND)["overdrawn"]


def test_no_more_is_reported_free_than_the_pool_has() -> None:
    """Also if headroom is below 0, and an idle pool may promise more than it holds."""
    s = adaptive(headroom_ppm=0, headroom_min_ppm=-100_000)
    grant(s, 0, "a", 10, 5_490)
    admit(s, 0, "b", 10, 5_490, queue_ttl_ns=25 * SECOND)
    for second in range(20):
        s.poll(second * SECOND)
        tell(s, second * SECOND, used=100)
        s.progress(second * SECOND, 1, 1)
    assert pool(s, 20 * SECOND)["headroom_tokens"] < -900
    s.complete(20 * SECOND, 1, 1)
    assert outcomes(s.poll(20 * SECOND)) == [core.GRANTED]
    s.complete(20 * SECOND, 2, 1)
    handle = admit(s, 20 * SECOND, "c", 10, 10)
    s.cancel(20 * SECOND, handle)
    (told,) = s.poll(20 * SECOND)
    assert (told.pool_capacity_tokens, told.pool_free_tokens) == (10_000, 10_000)


def test_learning_starts_again_after_reset() -> None:
    s = adaptive()
    grant(s, 0, "a", 10, 10)
    tell(s, 0, used=0)
    tell(s, 1, used=0, preemptions=4)
    assert pool(s, 1)["headroom_tokens"] > 200
    s.complete(2, 1, 1)
    s.reset_learned()
    assert pool(s, 2)["headroom_tokens"] == 200


TWO = (("hog", 1000), ("quiet", 1000))


def fill(s: core.Scheduler, now_ns: int, name: str, each: int = 100) -> int:
    """Let the hog take all it is given; return the amount."""
    for i in range(60):
        admit(s, now_ns, f"{name}{i}", each - 10, 10, flow=0, reports_progress=True)
    s.poll(now_ns)
    return int(s.flow_stats(now_ns, 0)["promised_tokens"])


def test_a_flow_above_its_share_leaves_what_the_others_took_lately() -> None:
    s = peak(4_000, *TWO, dispatch="backfill")
    for i in range(3):  # the quiet one comes first, with three requests of 50 in half a second
        d = grant(s, i * 100 * MS, f"q{i}", 40, 10, flow=1)
        s.complete(i * 100 * MS, d.lease_id, 1, output_tokens=10)
        grant(s, i * 100 * MS, f"h{i}", 10, 10, flow=0)
    assert fill(s, 400 * MS, "hog") == 3_760  # not 3_860: 160 of 4,000 are left
    # Two of the quiet one's (it was alone at the first), three of the hog's while it was small.
    assert pool(s, 400 * MS)["kept_tokens"] == 2 * 50 + 3 * 20
    assert pool(s, 400 * MS)["wait_reason"] == "HEADROOM"
    grant(s, 450 * MS, "q", 40, 10, flow=1)


@pytest.mark.parametrize("elsewhere", [0, 1_000_000])
def test_shares_of_a_pool_ignore_all_other_pools(elsewhere: int) -> None:
    """A caller with a large pool must not get what is kept for others in their pool."""
    s = peak(4_000, *TWO, dispatch="backfill")
    if elsewhere:
        s.set_pool(0, b"other", 1, elsewhere, 1)
    for i in range(3):
        d = grant(s, i * 100 * MS, f"q{i}", 40, 10, flow=1, pool=0)
        s.complete(i * 100 * MS, d.lease_id, 1, output_tokens=10)
        grant(s, i * 100 * MS, f"h{i}", 10, 10, flow=0, pool=0)
    for i in range(50):
        admit(s, 400 * MS, f"hog{i}", 90, 10, flow=0, pool=0)
    s.poll(400 * MS)
    assert pool(s, 400 * MS)["promised_tokens"] == 3_760
    grant(s, 450 * MS, "q", 40, 10, flow=1, pool=0)
    s.check()


def test_kept_part_fades_and_a_flow_alone_takes_all() -> None:
    s = peak(4_000, *TWO, queue_ttl_ns=600 * SECOND, lease_ttl_ns=600 * SECOND)
    d = grant(s, 0, "h", 10, 10, flow=0)
    q = grant(s, 0, "q", 400, 10, flow=1)
    s.complete(1, q.lease_id, 1, output_tokens=10)
    kept = [pool(s, t * 500 * MS)["kept_tokens"] for t in (0, 1, 2, 3, 17, 64)]
    assert kept == [410, 410, 384, 360, 145, 0]
    assert fill(s, 2 * SECOND, "hog") <= 3_700
    s.complete(3 * SECOND, d.lease_id, 1, output_tokens=10)
    assert fill(s, 12 * SECOND, "more") == 4_000  # the quiet one has not been seen for 10 s


def test_a_request_larger_than_the_kept_part_keeps_nothing() -> None:
    s = peak(4_000, *TWO, dispatch="backfill")
    for i, (size, kept) in enumerate(((501, 0), (500, 500))):  # an eighth of the pool at most
        grant(s, i, f"h{i}", 10, 10, flow=0)
        q = grant(s, i, f"q{i}", size - 10, 10, flow=1)
        s.complete(i, q.lease_id, 1, output_tokens=10)
        assert pool(s, i)["kept_tokens"] == kept


def test_two_flows_that_wait_both_leave_each_other_nothing() -> None:
    s = peak(4_000, *TWO, queue_ttl_ns=60 * SECOND, lease_ttl_ns=60 * SECOND)
    for i in range(60):
        for flow in (0, 1):
            admit(s, 0, f"{flow}.{i}", 90, 10, flow=flow)
    assert len(s.poll(0)) == 40
    assert pool(s, 0)["kept_tokens"] == 0


def test_a_drained_pool_holds_no_load() -> None:
    s = peak(500, answer_ttl_ns=SECOND)
    for i in range(9):
        admit(s, 0, f"r{i}", 10, 20 + i, reports_progress=i % 3 > 0)
    leases = [d.lease_id for d in s.poll(0)]
    for lease_id in leases:
        s.progress(1, lease_id, 1, output_tokens=lease_id)
        s.check()
    for lease_id in leases[::2] + leases[1::2]:
        s.complete(2, lease_id, 1)
        s.check()
    s.poll(2 * SECOND)
    assert pool(s, 2 * SECOND)["load_tokens"] == 0
    assert is_drained(s, 2 * SECOND)
