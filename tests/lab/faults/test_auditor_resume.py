"""Tests the auditor over a restart: what was saved, what is owed, and possible grants."""

from typing import Any

import pytest
from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc_lab.faults.auditor import (
    DEFAULT_CLASS,
    Classes,
    PoolLimits,
    PriorityClass,
    ViolationError,
)
from tests.lab.faults.test_auditor import TERMS, Desk, S
from tests.lab.faults.test_auditor_service import limited, serve

POOL = pool_pb2.PoolRegistration(pool="p", epoch=1, capacity_tokens=100, block_size_tokens=1)


def exact(**terms: Any) -> Desk:
    return Desk(reports=True, fair=False, work_conserving=False, **terms)


def reborn(desk: Desk, now_ns: int = 0, credit_ns: int = 0, epoch: int = 1) -> None:
    """Let another process continue with the saved state of the last one."""
    desk.auditor.restart(now_ns, desk.auditor.known(now_ns), credit_ns)
    desk.say(now_ns, pool=pool_pb2.PoolRegistration(pool="p", epoch=epoch,
        capacity_tokens=100, block_size_tokens=1))  # fmt: skip


def replay(desk: Desk, now_ns: int, lease_id: int, output: int = 0) -> None:
    told = pb.LeaseReplay(
        lease_id=lease_id, request_id=f"r{lease_id}", tenant="a", pool="p", pool_epoch=1,
        reserved_tokens=60, prompt_tokens=40, max_output_tokens=20, output_tokens=output,
    )  # fmt: skip
    desk.say(now_ns, replay=told)
    desk.auditor.settled(now_ns)


def running(desk: Desk) -> None:
    """Let a have 60 of the 100 tokens."""
    desk.grant(0, desk.ask(0, "r1", 40, output=20), 1, tokens=60)
    desk.auditor.settled(0)


def next_of_b(desk: Desk, now_ns: int) -> None:
    desk.grant(now_ns, desk.ask(now_ns, f"b{now_ns}", 40, "b", 10), 1_000 + now_ns, tokens=50)
    desk.auditor.settled(now_ns)


def test_blocks_of_leases_are_held_until_they_have_had_their_time() -> None:
    for now_ns in (0, 3 * S - 1):
        desk = exact()
        running(desk)
        reborn(desk)
        with pytest.raises(ViolationError, match="above the capacity: p, 110, 100"):
            next_of_b(desk, now_ns)
    desk = exact()
    running(desk)
    reborn(desk)
    next_of_b(desk, 3 * S)


def test_a_new_epoch_or_an_empty_file_holds_nothing() -> None:
    desk = exact()
    running(desk)
    reborn(desk, epoch=2)
    desk.grant(0, desk.ask(0, "b", 40, "b", 10), 9, tokens=50, pool_epoch=2)
    desk.auditor.settled(0)
    desk.auditor.restart(0)
    desk.say(0, pool=POOL)
    next_of_b(desk, 0)


def test_a_replayed_lease_is_held_once() -> None:
    desk = exact()
    running(desk)
    reborn(desk)
    replay(desk, 0, 1, output=5)
    pool = desk.auditor.books.pools["p"]
    assert (pool.low, pool.owed_low) == (60, 0)


def test_late_replay_of_an_unknown_lease_is_refused_and_counted() -> None:
    desk = exact()
    running(desk)
    reborn(desk)
    late_ns = TERMS.lease_ttl_ns + TERMS.lease_grace_ns
    told = pb.LeaseReplay(
        lease_id=7, request_id="r7", tenant="a", pool="p", pool_epoch=1, reserved_tokens=60,
        prompt_tokens=40, max_output_tokens=20,
    )  # fmt: skip
    desk.say(late_ns, replay=told)
    desk.hear(late_ns, leases=[pb.LeaseStatus(lease_id=7, state=pb.LEASE_STATE_UNKNOWN)])
    assert 7 not in desk.auditor.books.live
    assert desk.auditor.books.counts["replays_refused"] == 1


def test_buckets_are_credited_for_the_time_away_alone() -> None:
    desk = limited(requests=60)
    serve(desk, 60)
    reborn(desk, credit_ns=10 * S)
    serve(desk, 12, first=100)  # ten, and a head for each of two queues
    with pytest.raises(ViolationError, match="above the quota of tenant a"):
        serve(desk, 1, first=200)
    desk = limited(requests=60)
    serve(desk, 60)
    desk.auditor.restart(0)
    desk.say(0, pool=POOL)
    serve(desk, 60, first=100)


RUSH, OPS = PriorityClass("rush", -5, S), PriorityClass("ops", 3, S, exempt=True)
BATCH = PriorityClass("batch", 10, S)


def with_classes() -> Desk:
    known = {c.name: c for c in (DEFAULT_CLASS, RUSH, BATCH, OPS)}
    return Desk(classes=Classes(known, {"b": "ops"}), strict_classes=True, fair=False,
        work_conserving=False)  # fmt: skip


def ask_in(desk: Desk, now_ns: int, name: str, cls: str = "", tenant: str = "a") -> int:
    desk.tags += 1
    request = pb.AdmitRequest(
        request_id=name, tenant=tenant, input_tokens=[10], max_output_tokens=10, request_class=cls
    )
    desk.say(now_ns, admit=pb.SessionAdmit(tag=desk.tags, request=request))
    return desk.tags


def test_better_classes_go_first_but_for_ageing() -> None:
    for now_ns, what in ((S - 1, "before a better class: batch, before, rush"), (S, "")):
        desk = with_classes()
        batch = [ask_in(desk, 0, f"batch{k}", "batch") for k in range(2)]
        for k in range(2):
            ask_in(desk, 0, f"rush{k}", "rush")
        desk.auditor.settled(0)
        desk.grant(now_ns, batch[0], 1)
        if what:
            with pytest.raises(ViolationError, match=what):
                desk.auditor.settled(now_ns)
            continue
        desk.auditor.settled(now_ns)
        desk.grant(3 * S, batch[1], 2)
        with pytest.raises(ViolationError, match="two in a row"):
            desk.auditor.settled(3 * S)


def test_no_request_precedes_an_exempt_class() -> None:
    desk = with_classes()
    first = ask_in(desk, 0, "batch", "batch")
    ask_in(desk, 0, "ops", tenant="b")
    desk.auditor.settled(0)
    desk.grant(4 * S, first, 1)
    with pytest.raises(ViolationError, match="before an exempt class"):
        desk.auditor.settled(4 * S)


def with_adapters(desk: Desk, *names: str) -> None:
    for number, name in enumerate(names, 1):
        desk.tags += 1
        request = pb.AdmitRequest(
            request_id=f"r{number}", tenant="a", input_tokens=[10], max_output_tokens=10,
            adapter=name, reports_progress=True,
        )  # fmt: skip
        desk.say(0, admit=pb.SessionAdmit(tag=desk.tags, request=request))
        desk.grant(0, desk.tags, number)
    desk.auditor.settled(0)


def test_limits_of_pools_hold() -> None:
    with_adapters(Desk(limits=PoolLimits(max_loras=2)), "x", "y", "x", "")
    with pytest.raises(ViolationError, match="above max_loras: p, 3"):
        with_adapters(Desk(limits=PoolLimits(max_loras=2)), "x", "y", "z")
    with pytest.raises(ViolationError, match="above the capacity: p, 110, 100"):
        with_adapters(Desk(limits=PoolLimits(adapter_tokens=15)), "x", "y", "x", "")
    with_adapters(Desk(limits=PoolLimits(adapter_tokens=15), adapters={"x": 0}), "x", "y", "x", "")
    with_adapters(Desk(limits=PoolLimits(batch_max_tokens=20)), "", "")
    with pytest.raises(ViolationError, match="above batch_max_tokens: p, 30"):
        with_adapters(Desk(limits=PoolLimits(batch_max_tokens=20)), "", "", "")
    with pytest.raises(ViolationError, match="above the capacity: p, 80, 60"):
        with_adapters(Desk(limits=PoolLimits(max_total_tokens=60)), *[""] * 4)
