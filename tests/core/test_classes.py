"""Tests priority classes: strict order, ageing, and an exempt class that is never locked out."""

import random
from itertools import pairwise
from typing import Any

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core
from tests.seeds import fresh

from .support import SECOND, admit, admit_message, grant, is_drained, make, pool, vtc

HIGH, LOW, PROBE = b"high", b"low", b"probe"
AGEING = 2 * SECOND


def classed(*flows: tuple[str, int], **more: Any) -> core.Scheduler:
    """Return a scheduler with classes around the default one, which all tenants may name; tenant 0
    may name the exempt one, too."""
    s = make(*flows, **more)
    high, low = s.set_class(HIGH, -5), s.set_class(LOW, 5, AGEING)
    probe = s.set_class(PROBE, 0, SECOND, True)
    for flow in range(max(1, len(flows))):
        s.set_flow_class(flow, 0, (high, low) if flow else (high, low, probe))
    return s


def ask(s: core.Scheduler, name: str, cls: bytes = b"", flow: int = 0, **more: Any) -> int:
    return admit(s, more.pop("now_ns", 0), name, 10, 10, flow, request_class=cls, **more)


def served(s: core.Scheduler, count: int, now_ns: int = 1, step_ns: int = 1) -> list[int]:
    """Return tags of the next grants; each lease ends before the next poll."""
    tags = []
    for k in range(count):
        for d in s.poll(now_ns + k * step_ns):
            if d.outcome == core.GRANTED:
                tags.append(d.tag)
                s.complete(now_ns + k * step_ns, d.lease_id, 1, output_tokens=1)
    return tags


def rows(s: core.Scheduler, now_ns: int = 0) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in s.stats(now_ns)["classes"]}


def test_the_best_class_goes_first_whatever_its_counters_and_arrival() -> None:
    s = classed(("a", 1000), ("b", 1000), capacity=20, credit_max_micro=0)
    d = grant(s, 0, "before", 10, 10, 0, request_class=HIGH)  # its counter is ahead of all
    s.complete(0, d.lease_id, 1, output_tokens=10)
    for tag, (cls, flow) in enumerate(
        ((LOW, 1), (b"", 1), (HIGH, 0), (LOW, 0), (b"default", 0), (PROBE, 0), (HIGH, 1)), 1
    ):
        ask(s, f"r{tag}", cls, flow, tag=tag)
    # In a class by counter: high's second flow was lifted to the first, and came after it.
    assert served(s, 7) == [6, 3, 7, 2, 5, 1, 4]
    assert is_drained(s, 400 * SECOND) or s.poll(400 * SECOND) == []


def test_one_class_is_all_there_is_unless_others_are_configured() -> None:
    s = make()
    d = grant(s, 0, "r")
    assert d.engine_priority == 0
    [row] = s.stats(0)["classes"]
    assert (row["name"], row["rank"], row["granted"], row["exempt"]) == ("default", 0, 1, False)
    assert s.flow_stats(0, 0)["request_class"] == "default"
    with pytest.raises(core.CallerError, match="unknown class") as wrong:
        ask(s, "x", HIGH)
    assert (wrong.value.code, wrong.value.field) == (3, "request_class")


def test_a_class_is_named_by_the_request_else_by_its_tenant() -> None:
    s = classed(("a", 1000), ("b", 1000))
    s.set_flow_class(1, 1)
    for cls in (LOW, PROBE, b"default"):  # by default it has its own class only
        with pytest.raises(core.CallerError, match="may not name") as wrong:
            ask(s, "no", cls, 1)
        assert (wrong.value.code, wrong.value.field) == (3, "request_class")
    s.set_flow_class(1, 1, (0, 2))
    assert grant(s, 0, "own", flow=1).engine_priority == -5
    assert grant(s, 0, "named", flow=1, request_class=LOW).engine_priority == 5
    assert grant(s, 0, "plain", flow=1, request_class=b"default").engine_priority == 0
    with pytest.raises(core.CallerError, match="may not name"):
        ask(s, "no", PROBE, 1)
    assert grant(s, 0, "probe", request_class=PROBE).engine_priority < -1_000
    s.set_flow_class(1, 0, (2,))
    with pytest.raises(core.CallerError, match="may not name"):
        ask(s, "not listed", HIGH, 1)
    assert [s.flow_stats(0, i)["request_class"] for i in s.flow_indices(b"b")] == [
        "default", "high", "low",
    ]  # fmt: skip
    assert s.flow_indices(b"nobody") == []


def test_a_flow_is_one_tenant_in_one_class_and_its_id_is_the_tenants() -> None:
    s = classed()
    first = ask(s, "same", HIGH)
    assert ask(s, "same", HIGH) == first
    with pytest.raises(core.CallerError, match="another request") as wrong:
        ask(s, "same", LOW)
    assert wrong.value.code == 6
    high = s.flow_indices(b"f")[1]
    for wrong_use in (
        lambda: admit(s, 0, "by its other flow", flow=high),
        lambda: s.set_flow_quota(0, high, requests=1),
        lambda: s.set_flow_class(high),
    ):
        with pytest.raises(core.CallerError, match="another one of the tenant 0"):
            wrong_use()


def test_counters_of_a_class_are_lifted_among_themselves() -> None:
    # A flow of a class that is held up keeps a low counter. Were newcomers of a better class lifted
    # to that, they would have the pool for themselves until they have caught up.
    s = classed(("old", 1000), ("starved", 1000), ("new", 1000), capacity=20, credit_max_micro=0)
    ask(s, "waits", LOW, 1)
    s.cancel(0, ask(s, "gone", HIGH, 1))
    for i in range(20):
        d = grant(s, i, f"old{i}", 10, 10, 0, request_class=HIGH)
        s.complete(i, d.lease_id, 1, output_tokens=10)
        if i == 0:
            ask(s, "waits, too", LOW, 1, now_ns=i)
    ask(s, "old", HIGH, 0, now_ns=30, tag=1)
    ask(s, "new", HIGH, 2, now_ns=30, tag=2)
    flows = s.stats(30)["flows"]
    counters = {f["tenant"]: f["vtc_micro"] for f in flows if f["request_class"] == "high"}
    assert counters["new"] == counters["old"] > 0


@pytest.mark.parametrize("seed", fresh(4))
def test_a_class_that_waits_is_served_within_its_ageing_time(seed: int) -> None:
    """Endless better work is queued: the class gets its turn, and takes no more than that."""
    rnd = random.Random(seed)
    step_ns = (SECOND // 20, SECOND // 2, SECOND, 3 * SECOND)[seed % 4]
    s = classed(("a", 1000), ("b", 3000), capacity=20, queue_ttl_ns=1 << 50, ledger="peak",
                lease_ttl_ns=1 << 50, dispatch=rnd.choice(("strict", "backfill")))  # fmt: skip
    handles: dict[int, bytes] = {}
    turns: list[tuple[int, bytes]] = []
    for k in range(max(200, 40 * SECOND // step_ns)):
        now_ns = k * step_ns
        for cls, most in ((HIGH, 5), (LOW, 3)):
            while sum(c == cls for c in handles.values()) < most:
                name = f"{k}-{len(handles)}-{cls.decode()}"
                handles[ask(s, name, cls, rnd.randrange(2), now_ns=now_ns)] = cls
        for d in s.poll(now_ns):
            turns.append((now_ns, handles.pop(d.handle)))
            s.complete(now_ns, d.lease_id, 1, output_tokens=rnd.randint(1, 10))
        if k % 50 == 0:
            s.check()
    low = [0, *(now_ns for now_ns, cls in turns if cls == LOW)]
    waits = [b - a for a, b in pairwise(low)]
    # Turns are rarer than its ageing time: every second one, the soonest possible.
    assert max(waits) <= max(AGEING + step_ns, 2 * step_ns)
    assert min(waits[1:]) >= min(AGEING, 2 * step_ns)
    assert not any(a[1] == b[1] == LOW for a, b in pairwise(turns))
    assert rows(s)["low"]["brought_forward"] == len(low) - 1 > 5
    assert rows(s)["high"]["granted"] == len(turns) - len(low) + 1


def test_ageing_brings_forward_the_class_that_has_been_due_longest() -> None:
    s = classed(("a", 1000), capacity=20, queue_ttl_ns=1 << 50)
    slow = s.set_class(b"slow", 9, 6 * SECOND)
    s.set_flow_class(0, 0, (0, 1, 2, 3, slow))
    for i in range(12):
        ask(s, f"h{i}", HIGH, tag=1)
    ask(s, "slow", b"slow", tag=3)
    ask(s, "low", LOW, tag=2)
    assert served(s, 2, 0) == [1, 1]
    # Both are due; each precedes a better one, but never two in a row.
    assert served(s, 5, 9 * SECOND) == [2, 1, 3, 1, 1]


def test_aged_request_is_as_urgent_to_the_engine_as_others() -> None:
    s = classed(capacity=20)
    ask(s, "low", LOW)
    ask(s, "high", HIGH)
    [first] = s.poll(3 * SECOND)
    assert (first.engine_priority, rows(s)["low"]["brought_forward"]) == (-5, 1)
    answer = pb.AdmitResponse.FromString(s.encode(first))
    assert answer.grant.engine_priority == -5
    s.complete(3 * SECOND, first.lease_id, 1)
    [second] = s.poll(3 * SECOND)
    assert second.engine_priority == -5
    assert not rows(s)["high"]["brought_forward"]


def test_an_exempt_class_comes_before_one_that_is_due() -> None:
    s = classed(capacity=20)
    ask(s, "low", LOW, tag=1)
    ask(s, "high", HIGH, tag=2)
    ask(s, "probe", PROBE, tag=3, now_ns=5 * SECOND)
    assert served(s, 3, 5 * SECOND) == [3, 1, 2]


def test_nothing_that_is_configured_locks_an_exempt_class_out() -> None:
    s = classed(capacity=100, flow_queue_max=1, queue_max=1, leases_max=1, headroom_ppm=900_000,
                headroom_max_ppm=900_000)  # fmt: skip
    everything = {"requests": 1, "total_tokens": 20, "concurrency": 1}
    group = s.set_quota(0, b"group", **everything)
    s.set_flow_quota(0, 0, group, refuse=True, **everything)
    s.set_pool_quota(0, b"p", s.set_quota(0, b"model", **everything))
    grant(s, 0, "takes all there is")
    assert ask(s, "refused") == -core.REJECTED_QUOTA
    s.set_flow_quota(0, 0, group, **everything)
    assert ask(s, "waits") > 0
    assert ask(s, "full") == -core.REJECTED_FLOW_QUEUE_FULL
    d = grant(s, 0, "probe", 30, 10, request_class=PROBE)
    assert s.flow_stats(0, d.flow)["quotas"] == []
    s.check()
    # Its own leases and places are limited like those of all others together.
    assert ask(s, "its own limit", PROBE) > 0
    assert ask(s, "its own queue", PROBE) == -core.REJECTED_FLOW_QUEUE_FULL
    assert s.poll(0) == []
    s.complete(0, d.lease_id, 1, output_tokens=1)
    assert [d.outcome for d in s.poll(0)] == [core.GRANTED]
    assert is_drained(s, 0) or s.stats(0)["totals"]["queued"] == 1
    s.check()


def test_none_passes_an_exempt_head_and_it_waits_only_for_room() -> None:
    s = classed(("a", 1000), ("b", 1000), capacity=100, dispatch="backfill", bypass_max=9)
    long = grant(s, 0, "runs", 50, 30)
    assert ask(s, "probe", PROBE, tag=1) > 0
    admit(s, 0, "large", 50, 30, request_class=PROBE, tag=2)
    admit(s, 0, "small", 1, 1, 1, tag=3)
    assert [d.tag for d in s.poll(0)] == [1]
    assert pool(s, 0)["wait_reason"] == "KV"
    s.complete(1, long.lease_id, 1)
    assert [d.tag for d in s.poll(1)] == [2]


def test_a_light_request_of_a_lower_class_does_not_pass() -> None:
    def passed(cls: bytes) -> bool:
        s = classed(("hog", 1000), ("light", 1000), capacity=100, dispatch="backfill")
        for i in range(4):
            grant(s, 0, f"runs{i}", 10, 10, 0, request_class=HIGH, reports_progress=True)
        admit(s, 0, "head", 15, 80, 0, request_class=HIGH)
        handle = admit(s, 0, "light", 10, 10, 1, request_class=cls)
        return handle in [d.handle for d in s.poll(0)]

    assert passed(HIGH)
    assert not passed(LOW)


def test_a_quota_is_shared_by_class_and_none_is_starved_there() -> None:
    s = classed(("a", 1000), ("b", 1000), queue_ttl_ns=1 << 50, lease_ttl_ns=1 << 50)
    group = s.set_quota(0, b"group", requests=60)
    for flow in (0, 1):
        s.set_flow_quota(0, flow, group)
    turns = []
    for k in range(130):
        for cls, flow in ((LOW, 0), (HIGH, 1)):
            ask(s, f"{k}{cls.decode()}", cls, flow, now_ns=k * SECOND // 2, tag=cls == LOW)
        for d in s.poll(k * SECOND // 2):
            turns.append((k, d.tag))
            s.complete(k * SECOND // 2, d.lease_id, 1, output_tokens=1)
    assert len(turns) >= 120  # the bucket was full: 60 at once, then one a second
    later = [tag for k, tag in turns if k > 65]
    # One a second, and an ageing time of two: the third of every three.
    assert 0.25 < sum(later) / len(later) < 0.4
    s.check()


def test_a_class_that_is_due_at_a_quota_wakes_the_scheduler() -> None:
    # The better one needs a minute; the lower one needs little, which is there when it is due.
    s = classed(("a", 1000), queue_ttl_ns=1 << 50)
    group = s.set_quota(0, b"group", total_tokens=600)
    s.set_flow_quota(0, 0, group)
    grant(s, 0, "takes", 280, 280)
    admit(s, 0, "large", 300, 290, request_class=HIGH)
    admit(s, 0, "small", 5, 5, request_class=LOW)
    assert s.poll(0) == []
    assert s.next_deadline() <= AGEING
    [d] = [d for d in s.poll(AGEING) if d.outcome == core.GRANTED]
    assert d.engine_priority == 5
    s.check()


def test_a_class_that_gets_another_ageing_time_wakes_the_scheduler_by_that() -> None:
    s = classed(("a", 1000), queue_ttl_ns=1 << 50)
    group = s.set_quota(0, b"group", total_tokens=600)
    s.set_flow_quota(0, 0, group)
    grant(s, 0, "takes", 280, 280)
    admit(s, 0, "large", 300, 290, request_class=HIGH)
    admit(s, 0, "small", 5, 5, request_class=LOW)
    assert s.poll(0) == []
    s.set_class(LOW, 5, SECOND)
    assert s.poll(1) == []
    assert s.next_deadline() == SECOND
    s.set_class(LOW, -9)  # it is the best now, and its quota is there
    assert [d.engine_priority for d in s.poll(2)] == [-9]


def test_requests_of_a_class_that_is_gone_are_served_and_no_new_ones_taken() -> None:
    s = classed(capacity=20)
    ask(s, "waits", LOW, tag=1)
    s.set_class_gone(LOW)
    with pytest.raises(core.CallerError, match="unknown class"):
        ask(s, "late", LOW)
    assert "low" in rows(s)
    assert served(s, 1) == [1]
    assert "low" not in rows(s)
    assert s.set_class(b"new", 7) == 2  # in its place
    assert s.set_class(PROBE, 0, SECOND, True) == 3
    s.set_class_gone(PROBE)
    assert s.set_class(PROBE, 1) == 4  # another one of that name
    s.set_class_gone(b"default")  # always there
    assert grant(s, 9, "r").engine_priority == 0


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ((b"", 1), "classes"),
        ((b"x" * 257, 1), "classes"),
        ((b"x", 1_001), "rank"),
        ((b"x", -1_001), "rank"),
        ((b"x", 1, 0), "ageing_ns"),
        ((b"default", 0, 1, True), "exempt"),
    ],
)
def test_wrong_classes_are_named(args: tuple[Any, ...], field: str) -> None:
    s = make()
    with pytest.raises(core.CallerError) as wrong:
        s.set_class(*args)
    assert wrong.value.field == field
    with pytest.raises(core.CallerError, match="no class has the index 1"):
        s.set_flow_class(0, 1)


def test_there_are_as_many_classes_as_fit() -> None:
    s = make()
    for i in range(15):
        s.set_class(b"c%d" % i, i + 1)
    with pytest.raises(core.CallerError, match="at most 16"):
        s.set_class(b"more", 99)
    s.check()


def test_weight_mode_and_quota_of_a_tenant_hold_in_all_its_classes() -> None:
    s = classed(capacity=1_000)
    grant(s, 0, "first", request_class=HIGH)
    s.set_flow(b"f", 4000)
    s.set_flow_quota(0, 0, concurrency=2)
    s.set_flow_mode(0, 0, True)
    grant(s, 0, "second", request_class=LOW)
    for flow in s.flow_indices(b"f"):
        row = s.flow_stats(0, flow)
        assert (row["weight_milli"], row["audit"]) == (4000, True)
        assert [q["kind"] for q in row["quotas"]] == [7]
    s.set_flow_mode(0, 0, False)
    grant(s, 0, "third")
    ask(s, "one too many", HIGH)
    assert s.poll(0) == []


def test_a_replayed_lease_is_of_its_class() -> None:
    s = classed()
    replayed = (b"r", 77, 0, 1, 20, 10, 10)
    assert s.replay(0, 0, *replayed, request_class=LOW) == core.LEASE_LIVE
    assert rows(s)["low"]["live_leases"] == 1
    assert s.replay(0, 0, b"x", 78, 0, 1, 20, 10, 10, request_class=b"gone") == core.LEASE_LIVE
    assert rows(s)["default"]["live_leases"] == 1
    s.check()


def test_a_message_names_the_class_and_refusals_show_its_queue() -> None:
    s = classed(capacity=20, flow_queue_max=1)
    grant(s, 0, "runs")
    for i, cls in enumerate(("low", "high")):
        message = admit_message(f"r{i}", request_class=cls).SerializeToString()
        assert isinstance(s.admit_wire(0, 0, message), int)
    refused = s.admit_wire(0, 0, admit_message("r2", request_class="low").SerializeToString())
    assert isinstance(refused, bytes)
    answer = pb.AdmitResponse.FromString(refused)
    assert answer.outcome == core.REJECTED_FLOW_QUEUE_FULL
    assert answer.refusal.queue_position == 1
    with pytest.raises(core.CallerError) as wrong:
        s.admit_wire(0, 0, admit_message("r3", request_class="nope").SerializeToString())
    assert wrong.value.field == "request_class"


def test_learning_again_forgets_the_turn() -> None:
    def decided(s: core.Scheduler, start_ns: int) -> list[int]:
        s.reset_learned()
        for i in range(6):
            ask(s, f"{start_ns}h{i}", HIGH, now_ns=start_ns, tag=1)
            ask(s, f"{start_ns}l{i}", LOW, now_ns=start_ns, tag=2)
        found = served(s, 12, start_ns + 3 * SECOND, 3 * SECOND)
        assert vtc(s, start_ns + 99 * SECOND) == 0
        return found

    s = classed(capacity=20, queue_ttl_ns=1 << 50)
    first = decided(s, 0)
    assert first[:4] == [2, 1, 2, 1]
    assert decided(s, 1_000 * SECOND) == first
