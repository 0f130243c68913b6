"""Tests LoRA adapters that are active in a pool: what they take of it, and their limit."""

import random
from typing import Any

import pytest

from schedsvc import _core as core
from tests.seeds import fresh

from .support import SECOND, admit, grant, is_drained, make, outcomes, pool

FLOWS = tuple((name, 1000) for name in "abcdefgh")


def loras(capacity: int = 1_000, *, dispatch: str = "strict", **limits: int) -> core.Scheduler:
    s = make(*FLOWS, capacity=capacity, dispatch=dispatch, bypass_max=3, queue_ttl_ns=900 * SECOND)
    s.set_pool_limits(0, **limits)
    return s


def shown(s: core.Scheduler, now_ns: int = 0) -> tuple[int, int, int]:
    row = pool(s, now_ns)
    return row["active_adapters"], row["adapter_tokens"], row["load_tokens"]


def test_an_adapter_takes_its_part_once_and_while_a_lease_runs_with_it() -> None:
    s = loras(adapter_tokens=100)
    first = grant(s, 0, "x1", 10, 10, adapter=b"x")
    assert shown(s) == (1, 100, 120)
    second = grant(s, 0, "x2", 10, 10, adapter=b"x")
    grant(s, 0, "base", 10, 10)
    assert shown(s) == (1, 100, 160)
    grant(s, 0, "y", 10, 10, adapter=b"y")
    assert shown(s) == (2, 200, 280)
    s.check()
    s.complete(1, first.lease_id, 1)
    assert shown(s, 1) == (2, 200, 260)
    s.complete(1, second.lease_id, 1)
    assert shown(s, 1) == (1, 100, 140)
    s.check()


def test_a_lease_whose_engine_restarted_keeps_none_active() -> None:
    s = loras(adapter_tokens=100)
    grant(s, 0, "x", adapter=b"x")
    s.set_pool(1, b"p", 2, 1_000, 1)
    assert shown(s, 1) == (0, 0, 0)
    s.check()


def test_adapter_tokens_count_when_a_request_is_let_in() -> None:
    s = loras(300, adapter_tokens=100)
    grant(s, 0, "x", 50, 50, adapter=b"x")
    admit(s, 0, "y", 1, 1, adapter=b"y")
    admit(s, 0, "z", 1, 1, adapter=b"z", flow=1)
    assert s.poll(0) == []  # 200 + 2 + 100 of 300
    assert pool(s, 0)["wait_reason"] == "KV"
    s.complete(1, 1, 1)
    assert len(s.poll(1)) == 2  # 102 each
    admit(s, 1, "again", 40, 40, adapter=b"y")
    assert len(s.poll(1)) == 1  # 80 more, and no adapter
    s.check()


def test_a_request_that_does_not_fit_beside_its_adapter_is_refused() -> None:
    s = loras(200, adapter_tokens=100)
    assert admit(s, 0, "x", 90, 11, adapter=b"x") == -core.REJECTED_TOO_LARGE
    assert admit(s, 0, "fits", 90, 10, adapter=b"x") > 0
    assert admit(s, 0, "base", 190, 10) > 0


def test_a_single_adapter_has_its_own_figure_also_while_it_is_active() -> None:
    s = loras(adapter_tokens=100)
    s.set_adapter(0, b"x", 7)
    grant(s, 0, "x", 1, 1, adapter=b"x")
    grant(s, 0, "y", 1, 1, adapter=b"y")
    assert shown(s)[1] == 107
    s.set_adapter(0, b"x", -1)
    s.set_adapter(0, b"y", 0)
    assert shown(s)[1] == 100
    s.check()
    s.set_pool_limits(0, adapter_tokens=5)
    assert shown(s)[1] == 5
    s.check()
    s.complete(1, 1, 1)
    s.complete(1, 2, 1)
    assert shown(s, 1) == (0, 0, 0)
    s.check()


def test_active_adapters_are_limited() -> None:
    s = loras(max_loras=1)
    grant(s, 0, "x", adapter=b"x")
    admit(s, 0, "y", adapter=b"y")
    assert s.poll(0) == []
    assert pool(s, 0)["wait_reason"] == "ADAPTERS"
    s.complete(1, 1, 1)
    assert outcomes(s.poll(1)) == [core.GRANTED]


def test_a_limit_below_what_is_active_holds_back_no_active_one() -> None:
    s = loras(max_loras=3)
    for name in (b"x", b"y", b"z"):
        grant(s, 0, name.decode(), adapter=name)
    s.set_pool_limits(0, max_loras=1)
    grant(s, 0, "y again", adapter=b"y")
    admit(s, 0, "new", adapter=b"new")
    assert s.poll(0) == []
    s.check()


@pytest.mark.parametrize(("adapter", "passes"), [(b"x", True), (b"", True), (b"z", False)])
def test_request_without_a_new_adapter_passes(adapter: bytes, passes: bool) -> None:
    s = loras(max_loras=1, dispatch="backfill")
    grant(s, 0, "x", adapter=b"x")
    admit(s, 0, "y", adapter=b"y", flow=1)
    admit(s, 0, "behind", adapter=adapter, flow=2)
    assert len(s.poll(0)) == passes


def test_passing_request_leaves_the_head_its_room() -> None:
    weights = (("a", 1000), ("b", 100_000), ("c", 1000), ("d", 1000))  # b is never above its share
    s = make(*weights, capacity=300, dispatch="backfill")
    s.set_pool_limits(0, max_loras=1, adapter_tokens=50)
    grant(s, 0, "x", 20, 30, adapter=b"x")
    admit(s, 0, "y", 60, 40, adapter=b"y", flow=1)  # 100 + 150 of 300: 50 are spare
    admit(s, 0, "too long", 1, 50, flow=2)
    admit(s, 0, "fits", 10, 40, flow=3)
    assert [d.flow for d in s.poll(0)] == [3]


def test_a_head_that_waits_for_an_adapter_is_passed_within_its_charge() -> None:
    # It will be charged 10 and twice 10 while no output is known, and so will each that passes.
    s = loras(max_loras=1, dispatch="backfill")
    grant(s, 0, "x", adapter=b"x")
    head = admit(s, 0, "y", adapter=b"y", flow=1)
    passed = 0
    for i in range(10):
        admit(s, i, f"x{i}", 10, 1, adapter=b"x", flow=2)
        for d in s.poll(i):
            passed += 1
            s.complete(i, d.lease_id, 1)
    assert passed == 4  # ahead by 0, 10, 20 and 30
    s.complete(20, 1, 1)
    assert head in [d.handle for d in s.poll(20)]


@pytest.mark.parametrize("seed", fresh(3))
def test_whatever_adapter_is_asked_for_its_turn_comes(seed: int) -> None:
    """The messages have to show it: never too many active, and a head's turn comes within its
    bypasses and the longest lease."""
    rnd = random.Random(seed)
    s = loras(2_000, max_loras=2, adapter_tokens=30, dispatch="backfill")
    names = (b"", b"x", b"y", b"z", b"w")
    adapters: dict[int, bytes] = {}  # by handle
    running: dict[int, tuple[int, bytes]] = {}  # lease: when it ends, adapter
    longest_ns = 0
    for step in range(1_500):
        now_ns = step * SECOND // 10
        for lease_id in [k for k, (ends, _) in running.items() if ends <= step]:
            s.complete(now_ns, lease_id, 1, output_tokens=5)
            del running[lease_id]
        if rnd.random() < 0.6:
            # Most ask for the adapter that is mostly active.
            name = rnd.choice(names + (b"x",) * 8)
            flow = rnd.randrange(len(FLOWS))
            handle = admit(s, now_ns, f"r{step}", 20, 20, flow=flow, adapter=name)
            adapters[handle] = name
        for d in s.poll(now_ns):
            assert d.outcome == core.GRANTED
            running[d.lease_id] = step + rnd.randrange(1, 12), adapters[d.handle]
            longest_ns = max(longest_ns, d.waited_ns)
        active = {name for _, name in running.values() if name}
        assert len(active) <= 2
        assert shown(s, now_ns)[:2] == (len(active), 30 * len(active))
        if step % 100 == 0:
            s.check()
    assert 0 < longest_ns < 20 * SECOND


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (("set_pool_limits", {"max_loras": -1}), "max_loras"),
        (("set_pool_limits", {"adapter_tokens": 1 << 28}), "adapter_tokens"),
        (("set_adapter", {"name": b"", "tokens": 1}), "adapter"),
        (("set_adapter", {"name": b"x" * 257, "tokens": 1}), "adapter"),
        (("set_adapter", {"name": b"x", "tokens": -2}), "tokens"),
    ],
)
def test_a_wrong_figure_is_named(call: tuple[str, dict[str, Any]], field: str) -> None:
    method, arguments = call
    with pytest.raises(core.CallerError) as error:
        getattr(loras(), method)(0, **arguments)
    assert error.value.field == field


def test_a_replayed_lease_keeps_its_adapter_active_and_nothing_is_left_at_the_end() -> None:
    s = make(lease_id_base=100, lease_grace_ns=0)
    s.set_pool_limits(0, adapter_tokens=50)
    assert s.replay(0, 0, b"r", 7, 0, 1, 20, 10, 10, adapter=b"x") == core.LEASE_LIVE
    assert shown(s) == (1, 50, 70)
    s.poll(10 * SECOND)  # it was not renewed
    assert shown(s, 10 * SECOND) == (0, 0, 0)
    s.poll(400 * SECOND)
    assert is_drained(s, 400 * SECOND)
