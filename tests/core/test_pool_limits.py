"""Tests an operator's limits on a pool beside those of its engine, as S-LoRA's queue has."""

import random
from typing import Any

import pytest

from schedsvc import _core as core
from tests.seeds import fresh

from .support import SECOND, admit, grant, make, outcomes, pool

MS = 10**6


def limited(capacity: int = 600, max_model: int = 0, **limits: int) -> core.Scheduler:
    s = make(("a", 1000), ("b", 1000), capacity=capacity, max_model=max_model)
    s.set_pool_limits(0, **limits)
    return s


def ask(s: core.Scheduler, now_ns: int, request_id: str, prompt: int, **more: Any) -> int:
    """Admit one that reports its progress, for one token of output."""
    return admit(s, now_ns, request_id, prompt, 1, reports_progress=True, **more)


def granted(s: core.Scheduler, now_ns: int) -> list[int]:
    return [d.lease_id for d in s.poll(now_ns) if d.outcome == core.GRANTED]


def test_a_round_holds_so_much_input_and_the_rest_waits_for_it() -> None:
    s = limited(batch_max_tokens=100)
    for i, prompt in enumerate((40, 60, 1)):
        ask(s, 0, f"r{i}", prompt)
    assert granted(s, 0) == [1, 2]
    row = pool(s, 0)
    assert (row["wait_reason"], row["round_tokens"], row["round_max_tokens"]) == ("ROUND", 100, 100)
    s.check()


def full_round(s: core.Scheduler) -> None:
    """One lease of 100 fills the round, another waits for it."""
    ask(s, 0, "first", 100)
    ask(s, 0, "next", 50)
    assert granted(s, 0) == [1]
    assert granted(s, SECOND - 1) == []
    assert pool(s, SECOND - 1)["wait_reason"] == "ROUND"


@pytest.mark.parametrize(
    ("totals", "ends"),
    [
        ({"output_tokens": 1}, True),
        ({"input_tokens": 100}, True),
        ({"input_tokens": 99}, False),
        ({"cached_input_tokens": 100}, False),
        ({}, False),
    ],
)
def test_the_first_tokens_that_are_reported_take_a_request_out_of_the_round(
    totals: dict[str, int], ends: bool
) -> None:
    s = limited(batch_max_tokens=100)
    full_round(s)
    s.progress(SECOND - 1, 1, 1, **totals)
    assert granted(s, SECOND - 1) == ([2] if ends else [])
    s.check()


@pytest.mark.parametrize("how", ["complete", "cancel", "restart"])
def test_ended_request_leaves_the_round(how: str) -> None:
    s = limited(batch_max_tokens=100)
    handle = ask(s, 0, "first", 100)
    ask(s, 0, "next", 50)
    assert granted(s, 0) == [1]
    if how == "complete":
        s.complete(1, 1, 1, core.CANCELLED)
    elif how == "cancel":
        s.cancel(1, handle)
    else:
        s.set_pool(1, b"p", 2, 600, 1)
    s.check()
    assert granted(s, 1) == [2]


def test_the_engine_has_begun_after_a_second_whatever_is_reported() -> None:
    s = limited(batch_max_tokens=100)
    full_round(s)
    assert s.next_deadline() == SECOND  # exactly: there is no tick
    assert granted(s, SECOND) == [2]
    assert pool(s, SECOND)["round_tokens"] == 50
    assert pool(s, 2 * SECOND)["round_tokens"] == 0
    s.check()


def test_an_audited_request_counts_by_whether_its_caller_reports() -> None:
    s = limited(batch_max_tokens=100)
    s.set_flow_mode(0, 1, True)
    ask(s, 0, "first", 100)
    assert granted(s, 0) == [1]
    admit(s, 0, "silent", 50, 1, flow=1)
    s.poll(0)
    assert s.flow_stats(0, 1)["audited_waits"] == 0
    ask(s, 0, "reports", 50, flow=1)
    assert s.flow_stats(0, 1)["audited_waits"] == 1


def test_one_that_is_larger_than_a_round_is_alone_in_it() -> None:
    s = limited(batch_max_tokens=100)
    ask(s, 0, "huge", 300)
    ask(s, 0, "tiny", 1)
    assert granted(s, 0) == [1]
    s.progress(1, 1, 1, output_tokens=1)
    ask(s, 1, "another", 290)
    assert granted(s, 1) == [2]  # behind the tiny one that runs now it is not alone
    s.progress(2, 2, 1, output_tokens=1)
    assert granted(s, 2) == [3]


def test_request_without_reports_is_in_no_round() -> None:
    s = limited(batch_max_tokens=100)
    for i in range(3):
        admit(s, 0, f"silent{i}", 90, 1)
    ask(s, 0, "r", 100)
    assert len(granted(s, 0)) == 4
    assert pool(s, 0)["round_tokens"] == 100
    admit(s, 0, "silent", 90, 1)
    assert len(granted(s, 0)) == 1


@pytest.mark.parametrize(
    ("max_model", "limits", "expected"),
    [
        (0, {}, 0),
        (50, {"batch_max_tokens": -1}, 100),  # a sixth of 600
        (200, {"batch_max_tokens": -1}, 200),
        (200, {"batch_max_tokens": -1, "max_request_total_tokens": 150}, 150),
        (200, {"batch_max_tokens": -1, "max_request_input_tokens": 120}, 120),
        (50, {"batch_max_tokens": -1, "max_total_tokens": 360}, 60),
        (0, {"batch_max_tokens": -1}, 600),  # its longest request fills it
        (50, {"batch_max_tokens": 7}, 7),
    ],
)
def test_a_round_is_by_itself_a_sixth_of_the_pool_or_its_longest_request(
    max_model: int, limits: dict[str, int], expected: int
) -> None:
    assert pool(limited(max_model=max_model, **limits), 0)["round_max_tokens"] == expected


def test_a_pool_may_hold_less_than_its_engine() -> None:
    s = limited(max_total_tokens=200)
    row = pool(s, 0)
    assert (row["capacity_tokens"], row["engine_capacity_tokens"]) == (200, 600)
    assert admit(s, 0, "too large", 200, 1) == -core.REJECTED_TOO_LARGE
    grant(s, 0, "r", 100, 20)
    admit(s, 0, "waits", 80, 1)
    assert s.poll(0) == []
    assert pool(s, 0)["wait_reason"] == "MAX_TOTAL"
    s.set_pool_limits(0, max_total_tokens=600)  # as much as the capacity: no limit
    assert outcomes(s.poll(0)) == [core.GRANTED]
    admit(s, 0, "beyond", 590, 1)
    assert s.poll(0) == []
    assert pool(s, 0)["wait_reason"] == "KV"


def test_fitting_request_passes_also_below_a_limit() -> None:
    s = make(("a", 1000), ("b", 1000), capacity=600, dispatch="backfill", ledger="peak")
    s.set_pool_limits(0, max_total_tokens=200)
    grant(s, 0, "runs", 10, 50, reports_progress=True)
    admit(s, 0, "head", 190, 5, flow=1)
    admit(s, 0, "brief", 20, 1, flow=0, reports_progress=True)
    assert outcomes(s.poll(0)) == [core.GRANTED]


def test_a_pool_may_run_less_than_its_engine() -> None:
    s = limited(max_running=2)
    for i in range(3):
        admit(s, 0, f"r{i}", 1, 1)
    assert len(granted(s, 0)) == 2
    assert pool(s, 0)["wait_reason"] == "MAX_RUNNING"
    assert pool(s, 0)["max_running"] == 2
    assert admit(s, 0, "three at once", 3, 1, sequences=3) == -core.REJECTED_TOO_LARGE
    s.set_pool(0, b"p", 1, 600, 1, max_running=1)  # the engine can run less still
    assert pool(s, 0)["max_running"] == 1


@pytest.mark.parametrize(
    ("limits", "shape", "taken"),
    [
        ({"max_request_input_tokens": 50}, {"prompt": 50}, True),
        ({"max_request_input_tokens": 50}, {"prompt": 51}, False),
        ({"max_request_input_tokens": 50}, {"prompt": 52, "sequences": 2}, False),
        ({"max_request_total_tokens": 60}, {"prompt": 40, "output": 20}, True),
        ({"max_request_total_tokens": 60}, {"prompt": 40, "output": 21}, False),
        ({"max_request_total_tokens": 60}, {"prompt": 40, "output": 10, "sequences": 2}, True),
        ({"max_request_total_tokens": 60}, {"prompt": 40, "output": 11, "sequences": 2}, False),
        ({"max_request_total_tokens": 60}, {"prompt": 40, "output": 11, "n": 2, "sequences": 2},
         False),
    ],
)  # fmt: skip
def test_a_request_has_a_size(limits: dict[str, int], shape: dict[str, int], taken: bool) -> None:
    s = limited(**limits)
    answer = admit(s, 0, "r", **({"output": 1} | shape))
    assert (answer > 0) == taken
    assert taken or answer == -core.REJECTED_TOO_LARGE


def test_one_pool_that_allows_it_is_enough() -> None:
    s = limited(max_request_input_tokens=50)
    s.set_pool(0, b"q", 1, 600, 1)
    s.set_pool_limits(0, b"q", max_request_input_tokens=100)
    assert admit(s, 0, "here", 60, 1, pool=0) == -core.REJECTED_TOO_LARGE
    admit(s, 0, "anywhere", 60, 1)
    assert [d.pool for d in s.poll(0)] == [1]


def test_a_pool_has_its_own_limits_or_those_of_all_others_also_a_later_one() -> None:
    s = limited(max_running=5)
    s.set_pool_limits(0, b"q", max_running=3)
    s.set_pool(0, b"q", 1, 600, 1)
    s.set_pool(0, b"r", 1, 600, 1)
    assert [row["max_running"] for row in s.stats(0)["pools"]] == [5, 3, 5]
    s.set_pool_limits(0, max_running=6)
    assert [row["max_running"] for row in s.stats(0)["pools"]] == [6, 3, 6]
    s.set_no_pool_limits(0)
    assert [row["max_running"] for row in s.stats(0)["pools"]] == [0, 0, 0]


def test_lower_limits_end_no_lease_and_evict_what_no_pool_can_hold_any_more() -> None:
    s = limited()
    d = grant(s, 0, "runs", 400, 50)
    admit(s, 0, "waits", 300, 1)
    assert s.poll(0) == []
    s.set_pool_limits(1, max_total_tokens=200)
    assert outcomes(s.poll(1)) == [core.EVICTED_TOO_LARGE]
    admit(s, 1, "small", 1, 1)
    assert s.poll(1) == []
    assert pool(s, 1)["wait_reason"] == "OVERDRAWN"
    assert s.complete(2, d.lease_id, 1, output_tokens=50)
    assert outcomes(s.poll(2)) == [core.GRANTED]
    s.check()


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"batch_max_tokens": -2}, "batch_max_tokens"),
        ({"max_total_tokens": -1}, "max_total_tokens"),
        ({"max_running": 1 << 25}, "max_running"),
        ({"max_request_total_tokens": 1 << 28}, "max_request_total_tokens"),
        ({"max_request_input_tokens": -1}, "max_request_input_tokens"),
        ({"pool": b"x" * 129}, "pool"),
    ],
)
def test_a_wrong_limit_is_named_and_changes_nothing(limits: dict[str, Any], field: str) -> None:
    s = limited(max_running=5)
    with pytest.raises(core.CallerError) as error:
        s.set_pool_limits(0, **limits)
    assert error.value.field == field
    assert pool(s, 0)["max_running"] == 5


@pytest.mark.parametrize("seed", fresh(4))
def test_no_round_is_ever_larger_than_allowed(seed: int) -> None:
    """The messages alone have to show it: grants, and reported tokens."""
    rnd = random.Random(seed)
    limit = rnd.choice((64, 200))
    s = limited(10_000, batch_max_tokens=limit)
    prompts: dict[int, int] = {}  # by handle
    pending: dict[int, tuple[int, int]] = {}  # lease: granted, prompt
    now_ns = held_back = 0
    for i in range(3_000):
        now_ns += rnd.choice((0, MS, 20 * MS, 300 * MS))
        prompt = rnd.choice((1, 30, 64, 150))
        prompts[ask(s, now_ns, f"r{i}", prompt, flow=rnd.randrange(2))] = prompt
        for lease_id in rnd.sample(sorted(pending), rnd.randrange(len(pending) + 1)):
            s.progress(now_ns, lease_id, 1, output_tokens=1)
            s.complete(now_ns, lease_id, 1)
            del pending[lease_id]
        pending = {k: v for k, v in pending.items() if now_ns < v[0] + SECOND}
        for d in s.poll(now_ns):
            if d.outcome == core.GRANTED:
                size = sum(prompt for _, prompt in pending.values())
                assert size == 0 or size + prompts[d.handle] <= limit
                pending[d.lease_id] = now_ns, prompts[d.handle]
        if pool(s, now_ns)["wait_reason"] == "ROUND":
            held_back += 1
            assert now_ns < s.next_deadline() <= now_ns + SECOND
        if i % 500 == 0:
            s.check()
    assert held_back > 100
