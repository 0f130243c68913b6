"""An operator's handles: pools that are drained, leases that are listed and revoked."""

from typing import Any

import pytest
from schedsvc_client.v1 import operator_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .stream import Stream, asking, fates, reporting
from .support import SECOND, admit, grant, is_drained, make, outcomes, pool, totals, vtc
from .test_restart import FLOWS, reborn


def two_pools(**more: Any) -> core.Scheduler:
    """Return pools `p` of 100 and `q` of 40 tokens."""
    s = make(("a", 1000), ("b", 1000), capacity=100, **more)
    s.set_pool(0, b"q", 1, 40, 1)
    return s


def all_leases(s: core.Scheduler, now_ns: int, size: int = 10, **meant: Any) -> list[int]:
    """Return ids of what is listed, page by page."""
    found, start, first = [], 0, True
    while start or first:
        start, rows = s.list_leases(now_ns, start, 2 * size, size, **meant)
        assert len(rows) <= size
        found += [row["lease_id"] for row in rows]
        first = False
    return found


# Drains.


def test_a_drained_pool_grants_nothing_and_what_runs_goes_on() -> None:
    s = two_pools()
    runs = grant(s, 0, "runs", pool=0)
    s.set_draining(0, b"p", True)
    assert admit(s, 0, "new", pool=0) == -core.REJECTED_DRAINING
    assert s.progress(0, runs.lease_id, 1, output_tokens=3) == core.LEASE_LIVE
    assert grant(s, 0, "elsewhere").pool == 1
    assert (pool(s, 0)["draining"], pool(s, 0, 1)["draining"]) == (True, False)
    s.set_draining(0, b"p", False)
    assert grant(s, 0, "again", pool=0).pool == 0
    s.check()


def test_movable_requests_stay_and_the_rest_get_a_retry_time() -> None:
    s = two_pools()
    for target, size in ((0, 90), (1, 30)):
        grant(s, 0, f"fills{target}", size, 10, pool=target)
    kept = admit(s, 0, "small", 20, 10)
    own = admit(s, 0, "own", 20, 10, pool=0)
    large = admit(s, 0, "large", 60, 10)
    assert s.poll(0) == []
    s.set_draining(SECOND, b"p", True)
    told = {d.handle: d for d in s.poll(SECOND)}
    assert set(told) == {own, large}
    for d in told.values():
        assert d.outcome == core.EVICTED_DRAINING
        assert 4_500 <= d.retry_after_ms <= 5_500
    assert totals(s, SECOND)["queued"] == 1
    assert pool(s, SECOND)["wait_reason"] == "DRAINING"
    s.complete(SECOND, 2, 1)
    assert [d.handle for d in s.poll(SECOND)] == [kept]
    assert admit(s, SECOND, "too large for q", 60, 10) == -core.REJECTED_DRAINING
    assert admit(s, SECOND, "for both", 200, 10) == -core.REJECTED_TOO_LARGE
    s.check()


def test_a_drain_of_all_evicts_the_whole_queue() -> None:
    s = two_pools()
    runs = grant(s, 0, "runs", 90, 10)
    queued = [admit(s, 0, f"q{i}", 90, 10, flow=i % 2) for i in range(5)]
    assert s.poll(0) == []
    s.set_draining(1, b"", True)
    decisions = s.poll(1)
    assert {d.handle for d in decisions} == set(queued)
    assert set(outcomes(decisions)) == {core.EVICTED_DRAINING}
    assert admit(s, 1, "new") == -core.REJECTED_DRAINING
    s.complete(2, runs.lease_id, 1)
    assert totals(s, 2)["live_leases"] == totals(s, 2)["queued"] == 0
    s.set_draining(3, b"", False)
    assert not s.stats(3)["draining"]
    grant(s, 3, "again")
    s.check()


def test_evictions_are_bounded_in_each_poll() -> None:
    s = two_pools(work_max=3)
    grant(s, 0, "runs", 90, 10)
    for i in range(10):
        admit(s, 0, f"q{i}", 90, 10, pool=0)
    s.set_draining(0, b"p", True)
    told = []
    while s.next_deadline() == 0:
        told.append(len(s.poll(0)))
    assert sum(told) == 10
    assert max(told) == 3
    s.check()


def test_a_drain_holds_in_audit_too() -> None:
    s = two_pools()
    s.set_flow_mode(0, 0, True)
    s.set_draining(0, b"p", True)
    assert admit(s, 0, "r", pool=0) == -core.REJECTED_DRAINING
    assert grant(s, 0, "elsewhere").pool == 1
    s.set_draining(0, b"", True)
    assert admit(s, 0, "all") == -core.REJECTED_DRAINING


def test_a_drain_outlives_the_engine_and_the_stream() -> None:
    s = two_pools()
    s.set_draining(0, b"p", True)
    s.set_pool(1, b"p", 2, 100, 1)
    assert pool(s, 1)["draining"]
    assert admit(s, 1, "r", pool=0) == -core.REJECTED_DRAINING


def test_an_unknown_pool_cannot_be_drained() -> None:
    s = make()
    with pytest.raises(core.CallerError, match="pool: no pool of that name") as caught:
        s.set_draining(0, b"other", True)
    assert caught.value.code == 5
    grant(s, 0, "r")


# Leases.


def test_rows_have_the_names_of_the_contract() -> None:
    s = make(("a", 1000), capacity=100, block=8)
    s.set_flow_class(0, 0, (s.set_class(b"fast", -1),))
    stream = Stream(s)
    ask = asking(1, "r", 10, tenant="a", adapter="x", request_class="fast")
    assert fates(stream.send(SECOND, ask)) == [(1, core.GRANTED)]
    s.progress(2 * SECOND, 1, 1, output_tokens=4)
    [row] = s.list_leases(4 * SECOND, 0, 10, 10)[1]
    names = set(operator_pb2.Lease.DESCRIPTOR.fields_by_name)
    assert set(row) == names
    told = operator_pb2.Lease(**{**row, "principal": ""})
    assert (told.lease_id, told.tenant, told.request_class, told.pool) == (1, "a", "fast", "p")
    assert (told.age_ms, told.queued_ms, told.due_ms) == (3_000, 0, 8_000)
    assert (told.reserved_tokens, told.posted_tokens) == (24, 16)
    assert (told.prompt_tokens, told.output_tokens, told.max_output_tokens) == (10, 4, 10)
    assert (told.adapter, told.state, told.suspect) == ("x", pb.LEASE_STATE_LIVE, False)
    assert told.client_id


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_lasting_lease_is_on_exactly_one_page(size: int) -> None:
    s = make(capacity=1_000, answers_max=5)
    kept = [grant(s, 0, f"k{i}", 1, 1).lease_id for i in range(20)]
    gone = [grant(s, 0, f"g{i}", 1, 1).lease_id for i in range(20)]
    found, start, first = [], 0, True
    while start or first:
        start, rows = s.list_leases(0, start, 3, size)
        found += [row["lease_id"] for row in rows]
        first = False
        if gone:
            s.complete(0, gone.pop(), 1)
            grant(s, 0, f"n{len(gone)}", 1, 1)
    assert len(found) == len(set(found))
    assert set(kept) <= set(found)


def test_filters_hold_together() -> None:
    s = two_pools()
    s.set_flow_class(0, 0, (s.set_class(b"fast", -1),))
    stream = Stream(s)
    old = grant(s, 0, "old", pool=0).lease_id
    fast = grant(s, SECOND, "fast", pool=0, request_class=b"fast").lease_id
    other = grant(s, SECOND, "other", flow=1, pool=1).lease_id
    now = 3 * SECOND
    assert set(all_leases(s, now)) == {old, fast, other}
    assert set(all_leases(s, now, tenant=b"a")) == {old, fast}  # in all its classes
    assert all_leases(s, now, pool=b"q") == [other]
    assert all_leases(s, now, age_min_ns=3 * SECOND) == [old]
    assert all_leases(s, now, tenant=b"b", pool=b"p") == []
    s.set_pool(now, b"q", 2, 40, 1)
    assert all_leases(s, now, pool_epoch=1, pool=b"q") == [other]
    assert all_leases(s, now, pool_epoch=2) == []
    assert all_leases(s, now, client_id=b"shim") == []
    held = stream.grant(now, 1, "r", 10, tenant="b")
    assert all_leases(s, now, client_id=b"shim") == [held]


def test_leases_are_listed_by_their_principal() -> None:
    s = make()
    ids = {p: grant(s, 0, f"r{p}", principal=p).lease_id for p in (0, 1, 2)}
    for principal, lease_id in ids.items():
        assert all_leases(s, 0, principal=principal) == [lease_id]
    assert set(all_leases(s, 0)) == set(ids.values())


@pytest.mark.parametrize(
    ("meant", "field"),
    [({"tenant": b"z"}, "tenant"), ({"pool": b"z"}, "pool"), ({"client_id": b"z"}, "client_id")],
)
def test_an_unknown_filter_is_named(meant: dict[str, bytes], field: str) -> None:
    s = make()
    with pytest.raises(core.CallerError) as caught:
        s.list_leases(0, 0, 10, 10, **meant)
    assert (caught.value.code, caught.value.field) == (5, field)


def test_a_revoked_lease_holds_nothing_and_is_charged_at_its_end() -> None:
    s = make(capacity=20)
    runs = grant(s, 0, "runs")
    waits = admit(s, 0, "waits")
    assert s.poll(0) == []
    assert s.revoke(1, runs.lease_id) == core.LEASE_LIVE
    assert [d.handle for d in s.poll(1)] == [waits]
    assert pool(s, 1)["promised_tokens"] == 20
    s.check()
    assert s.progress(2, runs.lease_id, 1, output_tokens=4) == core.LEASE_VOID
    ended = s.complete(2, runs.lease_id, 1, core.CANCELLED, 10, 0, 5)
    assert ended == (core.CANCELLED, 10, 0, 5, False)
    assert s.flow_stats(2, 0)["output_tokens"] == 5
    s.check()


@pytest.mark.parametrize(("epoch", "charged"), [(1, 250), (2, 240)])
def test_after_a_restart_it_is_charged_once(epoch: int, charged: int) -> None:
    """An engine that is gone leaves nothing to take over: the known charge remains."""
    s = make(*FLOWS, capacity=1_000)
    d = grant(s, 0, "r", 200, 50)
    s.progress(0, d.lease_id, 1, 200, 0, 20)
    s.revoke(0, d.lease_id)
    new = reborn(s, 0, capacity=1_000)
    new.set_pool(0, b"p", epoch, 1_000, 1)
    told = new.replay(0, 0, b"r", d.lease_id, 0, 1, d.reserved_tokens, 200, 50, 200, 0, 20)
    assert told == (core.LEASE_LIVE if epoch == 1 else core.LEASE_VOID)
    assert (new.complete(0, d.lease_id, 1, output_tokens=25) is None) is (epoch == 2)
    assert (vtc(new, 0), pool(new, 0)["promised_tokens"]) == (charged * 1_000_000, 0)
    new.check()


def test_its_shim_gets_a_notice_at_once() -> None:
    s = make(capacity=20)
    stream = Stream(s)
    stream.send(0, asking(1, "r", 10))
    s.revoke(1, 1)
    s.poll(1)
    assert [(n.lease_id, n.state) for n in stream.pull(1).leases] == [(1, pb.LEASE_STATE_VOID)]
    assert stream.send(2, reporting(1)).leases[0].state == pb.LEASE_STATE_VOID


def test_revoking_again_or_what_is_not_there_changes_nothing() -> None:
    s = make(lease_grace_ns=SECOND)
    held, ended = grant(s, 0, "held"), grant(s, 0, "ended")
    s.complete(0, ended.lease_id, 1)
    assert s.revoke(0, held.lease_id) == core.LEASE_LIVE
    before = s.digest()
    assert s.revoke(0, held.lease_id) == core.LEASE_VOID
    assert s.revoke(0, ended.lease_id) == core.LEASE_ENDED
    assert s.revoke(0, 99) == s.revoke(0, 0) == s.revoke(0, -1) == core.LEASE_UNKNOWN
    assert s.digest() == before
    # A lease whose holder is gone ends at its TTL and grace.
    s.poll(10 * SECOND)
    assert outcomes(s.poll(11 * SECOND)) == [core.EXPIRED]
    assert totals(s, 11 * SECOND)["live_leases"] == 0


def test_a_suspect_lease_can_be_revoked() -> None:
    s = make(lease_grace_ns=SECOND, answer_ttl_ns=SECOND)
    lease = grant(s, 0, "r").lease_id
    s.poll(10 * SECOND)
    assert s.list_leases(10 * SECOND, 0, 9, 9)[1][0]["suspect"]
    assert s.revoke(10 * SECOND, lease) == core.LEASE_LIVE
    assert pool(s, 10 * SECOND)["suspect_leases"] == 0
    assert outcomes(s.poll(11 * SECOND)) == [core.EXPIRED]
    s.poll(12 * SECOND)
    assert is_drained(s, 12 * SECOND)
