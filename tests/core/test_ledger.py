"""Tests the KV ledger: blocks promised and posted, and why a pool waits (invariants 1, 9)."""

import pytest

from schedsvc import _core as core

from .support import SECOND, admit, grant, is_drained, make, outcomes, pool, totals


@pytest.mark.parametrize(
    ("block", "prompt", "output", "sequences", "reserved"),
    [
        (1, 10, 10, 1, 20),
        (16, 10, 6, 1, 16),  # exactly one block
        (16, 10, 7, 1, 32),  # one token more
        (16, 1, 1, 1, 16),
        (16, 30, 10, 3, 96),  # 60 tokens, and each sequence may leave a block partly filled
        (7, 20, 5, 2, 42),
    ],
)
def test_reservations_are_whole_blocks(
    block: int, prompt: int, output: int, sequences: int, reserved: int
) -> None:
    s = make(capacity=1_000 * block, block=block)
    d = grant(s, 0, "r", prompt, output, sequences=sequences)
    assert d.reserved_tokens == reserved
    assert pool(s, 0)["promised_tokens"] == reserved
    assert s.flow_stats(0, 0)["promised_tokens"] == reserved == totals(s, 0)["promised_tokens"]


def test_capacity_is_whole_blocks_and_never_exceeded() -> None:
    s = make(capacity=103, block=10)
    assert pool(s, 0)["capacity_tokens"] == 100
    for i in range(12):
        admit(s, 0, f"r{i}", 5, 5)
    assert len(s.poll(0)) == 10
    assert pool(s, 0)["promised_tokens"] == 100
    assert pool(s, 0)["wait_reason"] == "KV"
    s.complete(1, 1, 1, output_tokens=1)
    assert len(s.poll(1)) == 1


def test_headroom_is_not_granted_from() -> None:
    s = make(capacity=100, headroom_ppm=200_000)
    assert pool(s, 0)["headroom_tokens"] == 20
    grant(s, 0, "a", 40, 1)
    grant(s, 0, "b", 30, 9)  # up to exactly 80
    admit(s, 0, "c", 1, 1)
    assert s.poll(0) == []
    assert pool(s, 0)["wait_reason"] == "HEADROOM"


def test_request_alone_in_the_pool_may_use_the_headroom() -> None:
    s = make(capacity=100, headroom_ppm=200_000)
    whole = grant(s, 0, "whole", 60, 40)
    assert whole.reserved_tokens == 100
    s.complete(1, whole.lease_id, 1)
    grant(s, 1, "small", 1, 1)
    handle = admit(s, 1, "whole2", 60, 40)
    assert s.poll(1) == []
    s.complete(2, 2, 1)
    assert [d.handle for d in s.poll(2)] == [handle]


def test_larger_than_the_pool_is_refused_at_once() -> None:
    s = make(capacity=100, block=10, max_model=90)
    assert admit(s, 0, "context", 50, 41) == -core.REJECTED_TOO_LARGE
    assert admit(s, 0, "pool", 40, 30, sequences=4) == -core.REJECTED_TOO_LARGE
    assert admit(s, 0, "blocks", 88, 4, sequences=4) == -core.REJECTED_TOO_LARGE  # 92 + 3 blocks
    assert admit(s, 0, "fits", 50, 40) > 0
    # The context limits one sequence: the longest prompt and its output.
    wide = make(capacity=1_000, max_model=90)
    assert admit(wide, 0, "wide", 100, 80, sequences=10) > 0
    assert admit(wide, 0, "long", 101, 80, sequences=10) == -core.REJECTED_TOO_LARGE


def test_sequences_beyond_max_running_wait_or_are_refused() -> None:
    s = make(capacity=1_000, max_running=4)
    assert admit(s, 0, "five", 5, 1, sequences=5) == -core.REJECTED_TOO_LARGE
    grant(s, 0, "three", 3, 1, sequences=3)
    admit(s, 0, "two", 2, 1, sequences=2)
    assert s.poll(0) == []
    assert pool(s, 0)["wait_reason"] == "MAX_RUNNING"
    s.complete(1, 1, 1)
    assert outcomes(s.poll(1)) == [core.GRANTED]


def test_leases_max_holds_over_all_pools() -> None:
    s = make(capacity=100, leases_max=2)
    s.set_pool(0, b"q", 1, 100, 1)
    for i in range(3):
        admit(s, 0, f"r{i}", 1, 1)
    assert len(s.poll(0)) == 2
    assert pool(s, 0)["wait_reason"] == "LIMIT"
    s.check()


def test_strict_a_head_that_does_not_fit_holds_those_behind_it() -> None:
    s = make(("a", 1000), ("b", 1000), capacity=100, policy="fcfs")
    grant(s, 0, "runs", 50, 10)
    big = admit(s, 0, "big", 60, 10, 0)
    small = admit(s, 0, "small", 1, 1, 1)
    assert s.poll(0) == []
    s.complete(1, 1, 1)
    assert [d.handle for d in s.poll(1)] == [big, small]


def test_posted_follows_progress_and_never_falls() -> None:
    s = make(capacity=1_000, block=10)
    d = grant(s, 0, "r", 25, 30, reports_progress=True)
    assert pool(s, 0)["posted_tokens"] == 0
    s.progress(1, d.lease_id, 1, 10)
    assert pool(s, 1)["posted_tokens"] == 10
    s.progress(2, d.lease_id, 1, 25, 0, 1)
    assert pool(s, 2)["posted_tokens"] == 30
    s.progress(3, d.lease_id, 1, 5, 0, 0)
    assert pool(s, 3)["posted_tokens"] == 30
    assert s.flow_stats(3, 0)["posted_tokens"] == 30
    s.complete(4, d.lease_id, 1)
    assert pool(s, 4)["posted_tokens"] == pool(s, 4)["promised_tokens"] == 0


def test_input_without_reports_is_posted_at_the_grant() -> None:
    s = make(capacity=1_000, block=10)
    d = grant(s, 0, "r", 25, 30)
    assert pool(s, 0)["posted_tokens"] == s.flow_stats(0, 0)["posted_tokens"] == 30
    s.progress(1, d.lease_id, 1, output_tokens=10)
    assert pool(s, 1)["posted_tokens"] == 40
    s.complete(2, d.lease_id, 1)
    assert pool(s, 2)["posted_tokens"] == 0
    s.check()


def test_input_of_a_whole_answer_is_posted_at_the_grant() -> None:
    s = make(capacity=1_000, block=10)
    d = grant(s, 0, "r", 25, 30, reports_progress=True, whole_answer=True)
    assert pool(s, 0)["posted_tokens"] == s.flow_stats(0, 0)["posted_tokens"] == 30
    s.progress(1, d.lease_id, 1)
    assert pool(s, 1)["posted_tokens"] == 30
    s.complete(2, d.lease_id, 1, input_tokens=25, output_tokens=30)
    assert pool(s, 2)["posted_tokens"] == 0
    s.check()


def test_a_restored_whole_answer_has_its_input_posted() -> None:
    s = make(capacity=1_000, block=10)
    s.replay(0, 0, b"streams", 7, 0, 1, 60, 25, 30)
    assert pool(s, 0)["posted_tokens"] == 0
    s.replay(0, 0, b"whole", 8, 0, 1, 60, 25, 30, whole_answer=True)
    assert pool(s, 0)["posted_tokens"] == 30
    s.check()


def test_output_means_that_the_input_is_in_the_cache() -> None:
    s = make(capacity=1_000)
    d = grant(s, 0, "r", 25, 30)
    s.progress(1, d.lease_id, 1, output_tokens=5)
    assert pool(s, 1)["posted_tokens"] == 30


def test_lease_holds_no_more_than_there_is_in_a_pool_that_shrank() -> None:
    s = make(capacity=100)
    d = grant(s, 0, "r", 30, 60)
    s.set_pool(0, b"p", 1, 50, 1)
    s.progress(1, d.lease_id, 1, 30, 0, 60)
    assert pool(s, 1)["posted_tokens"] == 50
    s.check()


def test_growth_beyond_the_promise_overdraws_and_nothing_is_granted() -> None:
    s = make(capacity=100, samples_min=1)
    for i in range(20):
        s.complete(0, grant(s, 0, f"short-{i}", 5, 10).lease_id, 1, output_tokens=5)
    d = grant(s, 0, "r", 30, 60)
    grant(s, 0, "other", 30, 10)
    s.progress(1, d.lease_id, 1, 30, 0, 60)  # far beyond its prediction
    assert pool(s, 1)["promised_tokens"] == 90 + 30 + 5
    assert pool(s, 1)["overdrawn"]
    admit(s, 1, "later", 1, 1)
    assert s.poll(1) == []
    assert pool(s, 1)["wait_reason"] == "OVERDRAWN"
    s.check()
    s.complete(2, d.lease_id, 1, output_tokens=60)
    assert outcomes(s.poll(2)) == [core.GRANTED]
    assert not pool(s, 2)["overdrawn"]


@pytest.mark.parametrize(("sequences", "n"), [(1, 1), (1_000, 1_000)])
def test_an_absurd_report_takes_at_most_the_pool(sequences: int, n: int) -> None:
    s = make(capacity=1 << 40)
    d = grant(s, 0, "r", 1_000, 10, sequences=sequences, n=n)
    s.progress(1, d.lease_id, 1, 1 << 27, 1 << 27, 1 << 27)
    s.check()
    assert pool(s, 1)["promised_tokens"] <= 1 << 30
    assert s.flow_stats(1, 0)["input_tokens"] == 1 << 27  # charged as reported
    s.complete(2, d.lease_id, 1)
    assert is_drained(s, 2)


def test_a_smaller_pool_keeps_its_leases_and_grants_nothing() -> None:
    s = make(capacity=100)
    leases = [grant(s, 0, f"r{i}", 10, 10).lease_id for i in range(5)]
    s.set_pool(1, b"p", 1, 60, 1)
    assert pool(s, 1)["overdrawn"]
    assert pool(s, 1)["live_leases"] == 5
    handle = admit(s, 1, "later", 10, 10)
    granted = []
    for i, lease_id in enumerate(leases):
        s.complete(2 + i, lease_id, 1)
        granted += s.poll(2 + i)
        assert pool(s, 2 + i)["promised_tokens"] <= 60 or not granted
    assert [d.handle for d in granted] == [handle]


def test_queued_request_that_fits_no_pool_any_more_is_evicted() -> None:
    s = make(capacity=100)
    grant(s, 0, "runs", 30, 10)
    pinned = admit(s, 0, "pinned", 60, 10, pool=0)
    free = [admit(s, 0, f"free{i}", 60, 10) for i in range(3)]
    small = admit(s, 0, "small", 5, 5)
    s.set_pool(1, b"p", 1, 50, 1)
    decisions = s.poll(1)
    assert sorted(d.handle for d in decisions if d.outcome == core.EVICTED_TOO_LARGE) == sorted(
        [pinned, *free]
    )
    assert [d.handle for d in decisions if d.outcome == core.GRANTED] == [small]
    assert all(d.retry_after_ms == 0 for d in decisions)  # a retry cannot help


def test_a_request_that_fits_no_pool_hides_none_behind_it() -> None:
    s = make(("a", 1000), ("b", 1000), ("c", 1000), capacity=100)
    runs = grant(s, 0, "runs", 80, 10, flow=0).lease_id
    admit(s, 0, "large", 60, 10, flow=1)
    free = admit(s, 0, "free", 30, 10, flow=2)
    admit(s, 0, "pinned", 30, 10, flow=2, pool=0)
    s.set_pool(1, b"p", 1, 50, 1)
    assert outcomes(s.poll(1)) == [core.EVICTED_TOO_LARGE]
    s.complete(2, runs, 1)
    assert [d.handle for d in s.poll(2)] == [free]  # before "pinned", which came later


def test_a_free_request_goes_to_the_emptiest_pool() -> None:
    s = make(capacity=100)
    s.set_pool(0, b"big", 1, 1_000, 1)
    assert grant(s, 0, "r0", 10, 10).pool == 0  # a tie: the first
    assert [grant(s, 0, f"b{i}", 50, 50).pool for i in range(2)] == [1, 1]
    assert grant(s, 0, "r1", 10, 10).pool == 0 or pool(s, 0, 1)["promised_tokens"] == 220


def test_a_pool_that_waits_is_tried_again_once_its_head_has_gone_elsewhere() -> None:
    s = make(capacity=10)
    s.set_pool(0, b"b", 1, 40, 1)
    grant(s, 0, "in-p", 4, 1, pool=0)
    grant(s, 0, "in-b", 29, 1, pool=1)
    admit(s, 0, "too-big-for-p", 5, 1)
    admit(s, 0, "fits-p", 4, 1)
    assert [d.pool for d in s.poll(0)] == [1, 0]
    assert pool(s, 0)["wait_reason"] == "NONE"


def test_a_head_that_only_another_pool_can_hold_is_a_named_reason() -> None:
    s = make(capacity=10)
    s.set_pool(0, b"b", 1, 100, 1)
    grant(s, 0, "in-b", 90, 5, pool=1)
    admit(s, 0, "for-b", 40, 5)
    admit(s, 0, "behind", 1, 1)
    assert s.poll(0) == []
    assert [p["wait_reason"] for p in s.stats(0)["pools"]] == ["STRICT", "KV"]


def test_pinned_requests_use_only_their_pool() -> None:
    s = make(capacity=20)
    s.set_pool(0, b"q", 1, 1_000, 1)
    handles = [admit(s, 0, f"r{i}", 10, 10, pool=0) for i in range(2)]
    assert [(d.handle, d.pool) for d in s.poll(0)] == [(handles[0], 0)]
    assert pool(s, 0)["queued"] == 1
    assert admit(s, 0, "big", 100, 10, pool=0) == -core.REJECTED_TOO_LARGE


def test_no_pool_at_all() -> None:
    s = core.Scheduler()
    s.set_flow(b"f", 1000)
    assert admit(s, 0, "r") == -core.REJECTED_NO_POOL
    assert s.poll(0) == []
    assert s.next_deadline() == -1


def test_a_new_epoch_voids_what_the_engine_lost() -> None:
    s = make(capacity=100, block=10)
    d = grant(s, 0, "r", 50, 20)
    s.progress(1, d.lease_id, 1, 50, 0, 5)
    s.set_pool(2, b"p", 2, 100, 4)  # with another block size
    assert pool(s, 2)["promised_tokens"] == pool(s, 2)["posted_tokens"] == 0
    assert s.flow_stats(2, 0)["promised_tokens"] == 0
    assert grant(s, 2, "fresh", 60, 30).pool_epoch == 2
    assert s.progress(3, d.lease_id, 1, 50, 0, 9) == core.LEASE_VOID
    assert s.flow_stats(3, 0)["output_tokens"] == 9  # charged, in no ledger
    ended = s.complete(4, d.lease_id, 1, output_tokens=11)
    assert ended is not None
    assert (ended.outcome, ended.output_tokens) == (core.COMPLETED, 11)
    s.check()


def test_an_older_epoch_and_another_block_size_are_refused() -> None:
    s = make(capacity=100, block=10)
    grant(s, 0, "r")
    for code, field, epoch, block in ((9, "epoch", 0, 10), (3, "block_size_tokens", 1, 5)):
        with pytest.raises(core.CallerError) as caught:
            s.set_pool(0, b"p", epoch, 100, block)
        assert (caught.value.code, caught.value.field) == (code, field)
    assert pool(s, 0)["block_size_tokens"] == 10
    s.check()


def test_a_replay_restores_also_where_that_overdraws() -> None:
    s = make(capacity=50, block=10)
    assert s.replay(0, 0, b"r1", 71, 0, 1, 40, 20, 20, 20, 0, 3) == core.LEASE_LIVE
    assert s.replay(0, 0, b"r2", 72, 0, 1, 35, 20, 15) == core.LEASE_LIVE
    assert pool(s, 0)["promised_tokens"] == 80
    assert pool(s, 0)["overdrawn"]
    assert s.flow_stats(0, 0)["output_tokens"] == 3
    admit(s, 0, "waits", 1, 1)
    assert s.poll(0) == []
    s.complete(1, 71, 1)
    (granted,) = s.poll(1)
    assert granted.lease_id > 72
    s.complete(2, granted.lease_id, 1)
    assert outcomes(s.poll(31 * SECOND)) == []  # no caller here holds the restored lease
    assert is_drained(s, 31 * SECOND)
