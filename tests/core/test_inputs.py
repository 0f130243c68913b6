"""Tests wrong input of callers: the error names the field, and nothing changes."""

from collections.abc import Callable
from typing import Any

import pytest

from schedsvc import _core as core

from .support import admit, grant, is_drained, make

Call = Callable[[core.Scheduler], object]
FAR = 1 << 27


def wrong(field: str, call: Call, code: int = 3) -> Any:
    return pytest.param(call, field, code, id=f"{field}-{code}")


def ask(**changes: Any) -> Call:
    given: dict[str, Any] = {
        "flow": 0,
        "request_id": b"r",
        "input_tokens": 10,
        "max_output_tokens": 10,
    } | changes
    return lambda s: s.admit(0, **given)


def replay(**changes: Any) -> Call:
    given: dict[str, Any] = {
        "flow": 0,
        "request_id": b"r",
        "lease_id": 5,
        "pool": 0,
        "pool_epoch": 1,
        "reserved_tokens": 20,
        "prompt_tokens": 10,
        "max_output_tokens": 10,
    } | changes
    return lambda s: s.replay(0, **given)


def pool(**changes: Any) -> Call:
    given: dict[str, Any] = {
        "name": b"q",
        "epoch": 1,
        "capacity_tokens": 100,
        "block_size_tokens": 1,
    } | changes
    return lambda s: s.set_pool(0, **given)


WRONG = [
    wrong("flow", ask(flow=1)),
    wrong("flow", ask(flow=-1)),
    wrong("request_id", ask(request_id=b"")),
    wrong("request_id", ask(request_id=b"x" * 129)),
    wrong("input_tokens", ask(input_tokens=0)),
    wrong("input_tokens", ask(input_tokens=-5)),
    wrong("input_tokens", ask(input_tokens=FAR + 1)),
    wrong("input_tokens", ask(input_tokens=1 << 62)),
    wrong("input_tokens", ask(input_tokens=3, sequences=4)),
    wrong("max_output_tokens", ask(max_output_tokens=0)),
    wrong("max_output_tokens", ask(max_output_tokens=(1 << 24) + 1)),
    wrong("max_output_tokens", ask(input_tokens=64, max_output_tokens=1 << 24, sequences=64)),
    wrong("max_output_tokens", ask(input_tokens=FAR, max_output_tokens=1)),
    wrong("sequences", ask(sequences=0)),
    wrong("sequences", ask(input_tokens=FAR // 2, sequences=1025)),
    wrong("n", ask(n=0)),
    wrong("n", ask(n=2)),
    wrong("n", ask(sequences=3, n=2)),
    wrong("queue_ttl_ns", ask(queue_ttl_ns=-1)),
    wrong("deadline_ns", ask(deadline_ns=-1)),
    wrong("pool", ask(pool=1)),
    wrong("pool", ask(pool=-2)),
    wrong("flow", replay(flow=7)),
    wrong("request_id", replay(request_id=b"")),
    wrong("reserved_tokens", replay(reserved_tokens=-1)),
    wrong("reserved_tokens", replay(reserved_tokens=FAR + 1)),
    wrong("prompt_tokens", replay(prompt_tokens=0)),
    wrong("max_output_tokens", replay(max_output_tokens=0)),
    wrong("sequences", replay(sequences=0)),
    wrong("pool", replay(pool=-1)),
    wrong("pool", replay(pool=1)),
    wrong("input_tokens", replay(input_tokens=FAR + 1)),
    wrong("output_tokens", replay(output_tokens=-2)),
    wrong("input_tokens", lambda s: s.progress(0, 1, 1, -2)),
    wrong("cached_input_tokens", lambda s: s.progress(0, 1, 1, 1, FAR + 1)),
    wrong("output_tokens", lambda s: s.progress(0, 1, 1, 1, 1, 1 << 60)),
    wrong("output_tokens", lambda s: s.complete(0, 1, 1, output_tokens=-7)),
    wrong("pool", pool(name=b"")),
    wrong("pool", pool(name=b"x" * 129)),
    wrong("epoch", pool(epoch=-1)),
    wrong("epoch", lambda s: s.set_pool(0, b"p", 0, 100, 1), 9),
    wrong("capacity_tokens", pool(capacity_tokens=0)),
    wrong("capacity_tokens", pool(capacity_tokens=15, block_size_tokens=16)),
    wrong("capacity_tokens", pool(capacity_tokens=(1 << 40) + 1)),
    wrong("block_size_tokens", pool(block_size_tokens=0)),
    wrong("block_size_tokens", pool(block_size_tokens=65_537)),
    wrong("max_running", pool(max_running=-1)),
    wrong("max_model_tokens", pool(max_model_tokens=-1)),
    wrong("pool", lambda s: s.telemetry(0, 1, 1, 0, 0, 0, 0)),
    wrong("waiting", lambda s: s.telemetry(0, 0, 1, 0, -1, 0, 0)),
    wrong("used_tokens", lambda s: s.telemetry(0, 0, 1, 0, 0, (1 << 63) - 1, 0)),
    wrong("preemptions", lambda s: s.telemetry(0, 0, 1, 0, 0, 0, (1 << 50) + 1)),
    wrong("pool", lambda s: s.pool_name(1)),
    wrong("pool", lambda s: s.pool_name(-1)),
    wrong("flow", lambda s: s.flow_stats(0, 1)),
    wrong("flow", lambda s: s.set_unknown(1)),
    wrong("flow", lambda s: s.set_key(b"k" * 32, -1)),
    wrong("api_key_sha256", lambda s: s.set_key(b"k" * 31, 0)),
    wrong("tenant", lambda s: s.set_flow(b"", 1000)),
    wrong("tenant", lambda s: s.set_flow(b"x" * 257, 1000)),
    wrong("weight", lambda s: s.set_flow(b"w", 0)),
    wrong("weight", lambda s: s.set_flow(b"w", 10**9 + 1)),
]


@pytest.mark.parametrize(("call", "field", "code"), WRONG)
def test_the_field_at_fault_is_named_and_nothing_changes(call: Call, field: str, code: int) -> None:
    s = make()
    before = s.stats(0)
    with pytest.raises(core.CallerError) as caught:
        call(s)
    assert (caught.value.code, caught.value.field) == (code, field)
    assert caught.value.description
    assert s.stats(0) == before
    assert is_drained(s, 0)


def test_the_outcome_of_complete_is_checked_before_anything_else() -> None:
    s = make()
    d = grant(s, 0, "r")
    for outcome in (1, 2, 50, -1):
        with pytest.raises(core.CallerError, match="outcome"):
            s.complete(0, d.lease_id, 1, outcome, 1, 1, 1)
    assert s.flow_stats(0, 0)["output_tokens"] == 0
    assert s.complete(0, d.lease_id, 1, 0) == core.Ended(core.COMPLETED, 10, 0, 0, False)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("queue_ttl_ns", (0, -1, (1 << 60) + 1)),
        ("lease_ttl_ns", (0,)),
        ("lease_grace_ns", (-1,)),
        ("flow_queue_max", (0,)),
        ("queue_max", (0, (1 << 24) + 1)),
        ("leases_max", (0,)),
        ("answers_max", (-1,)),
        ("answer_ttl_ns", (0,)),
        ("input_price_micro", (-1, 10_000_001)),
        ("output_price_micro", (-1, 10_000_001)),
        ("cached_price_ppm", (-1, 1_000_001)),
        ("kv_price_micro", (-1, 10_001)),
        ("headroom_ppm", (-1, 900_001)),
        ("quantile_ppm", (0, 1_000_001)),
        ("samples_min", (0,)),
        ("session_open_max", (0,)),
        ("sessions_max", (0,)),
        ("work_max", (0,)),
        ("lease_id_base", (0, (1 << 62) + 1)),
        ("policy", ("vtcs", "")),
        ("hash_key", (b"", b"x" * 15, b"x" * 17)),
        ("no_such_setting", (1,)),
    ],
)
def test_settings_are_checked(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(core.CallerError) as caught:
            core.Scheduler(**{name: value})
        assert caught.value.field == name


def test_the_least_and_the_greatest_settings_work() -> None:
    least: dict[str, Any] = {
        "queue_ttl_ns": 1,
        "lease_ttl_ns": 1,
        "lease_grace_ns": 0,
        "flow_queue_max": 1,
        "queue_max": 1,
        "leases_max": 1,
        "answers_max": 0,
        "answer_ttl_ns": 1,
        "input_price_micro": 0,
        "output_price_micro": 0,
        "work_max": 1,
        "samples_min": 1,
    }
    s = make(**least)
    d = grant(s, 0, "r")
    s.complete(0, d.lease_id, 1)
    s.poll(1)
    assert is_drained(s, 1)
    far = 1 << 60
    s = make(queue_ttl_ns=far, lease_ttl_ns=far, lease_grace_ns=far, answer_ttl_ns=far)
    grant(s, far, "r")
    assert s.next_deadline() == 2 * far
    s.poll(3 * far)
    assert is_drained(s, 3 * far)


def test_a_message_says_what_is_wrong_and_what_is_allowed() -> None:
    with pytest.raises(core.CallerError) as caught:
        admit(make(), 0, "r", prompt=FAR + 1)
    assert str(caught.value) == "input_tokens: must be from 1 to 134,217,728, not 134,217,729"


@pytest.mark.parametrize("value", [1 << 63, -(1 << 63) - 1, 1 << 200])
def test_numbers_beyond_64_bits_are_python_errors(value: int) -> None:
    s = make()
    with pytest.raises(OverflowError):
        s.admit(0, 0, b"r", value, 10)
    assert is_drained(s, 0)


def test_unknown_handles_and_leases_are_no_errors() -> None:
    s = make()
    handle = admit(s, 0, "r")
    for unknown in (0, -1, 1, 1 << 62, handle + 1, handle + (1 << 32), -(1 << 63)):
        assert s.cancel(0, unknown) is False
        assert s.complete(0, unknown, 1) is None
        assert s.progress(0, unknown, 1) == core.LEASE_UNKNOWN
    assert s.cancel(0, handle) is True


def test_encode_checks_what_it_is_given() -> None:
    s = make()
    d = grant(s, 0, "r")
    assert s.encode(d)
    for field, wrong_one in (("pool", d._replace(pool=9)), ("outcome", d._replace(outcome=7))):
        with pytest.raises(core.CallerError) as caught:
            s.encode(wrong_one)
        assert caught.value.field == field


def test_pools_are_bounded() -> None:
    s = make()
    for i in range(63):
        s.set_pool(0, b"pool%d" % i, 1, 100, 1)
    with pytest.raises(core.CallerError) as caught:
        s.set_pool(0, b"one-more", 1, 100, 1)
    assert (caught.value.code, caught.value.field) == (8, "pool")
    s.set_pool(0, b"pool62", 1, 200, 1)  # known ones may change
    assert grant(s, 0, "last", pool=63).pool == 63
    for i in range(200):
        admit(s, 0, f"r{i}", 50, 50)
    assert len(s.poll(0)) == 1_000 // 100 + 62 + 1
    s.check()


def test_queues_are_bounded_by_flow_and_in_all() -> None:
    s = make(("a", 1000), ("b", 1000), capacity=20, flow_queue_max=3, queue_max=5)
    grant(s, 0, "runs")
    got = [admit(s, 0, f"a{i}") for i in range(4)]
    assert [h > 0 for h in got] == [True] * 3 + [False]
    assert got[3] == -core.REJECTED_FLOW_QUEUE_FULL
    got = [admit(s, 0, f"b{i}", flow=1) for i in range(3)]
    assert got[2] == -core.REJECTED_QUEUE_FULL
    refusals = s.flow_stats(0, 0)["refusals"]
    assert refusals == {core.REJECTED_FLOW_QUEUE_FULL: 1}
    s.check()


def test_draining_refuses_what_is_new_and_serves_what_waits() -> None:
    s = make(capacity=20)
    grant(s, 0, "runs")
    waits = admit(s, 0, "waits")
    s.drain(0)
    assert s.stats(0)["draining"]
    assert admit(s, 0, "new") == -core.REJECTED_DRAINING
    assert admit(s, 0, "waits") == waits  # a repeat is not new
    s.complete(1, 1, 1)
    assert [d.handle for d in s.poll(1)] == [waits]
    admit(s, 1, "waits")
    assert s.evict_queued(1) == 0


def test_evict_queued_goes_by_arrival() -> None:
    s = make(("a", 1000), ("b", 1000), capacity=20)
    grant(s, 0, "runs")
    first = [admit(s, 0, f"r{i}", flow=i % 2) for i in range(6)]
    for handle in first[::2]:
        s.cancel(0, handle)
    s.poll(0)
    later = [admit(s, 0, f"s{i}", flow=i % 2) for i in range(6)]
    assert s.evict_queued(1) == 9
    decisions = s.poll(1)
    assert [d.handle for d in decisions] == first[1::2] + later
    assert {d.outcome for d in decisions} == {core.EVICTED_DRAINING}
