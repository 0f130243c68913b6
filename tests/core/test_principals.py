"""Tests the names that each principal may use, and its part of each bounded table."""

from typing import Any

import pytest
from schedsvc_client.v1 import pool_pb2, quota_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .stream import Stream, asking, completing, fates, faults, notices, offering, replaying
from .support import SECOND, admit, admit_message, gauges, grant, totals

LIMITED = 1


def scheduler(**grants: Any) -> core.Scheduler:
    """Return two tenants, two classes, one pool; principal 1 has these grants, others all."""
    s = core.Scheduler(headroom_ppm=0, leases_max=100, queue_max=20, adapters_max=4)
    for name in (b"acme", b"beta"):
        s.set_flow(name, 1_000)
    batch, ops = s.set_class(b"batch", -5), s.set_class(b"ops", 5)
    for flow in (0, 1):
        s.set_flow_class(flow, 0, (batch, ops))
    s.set_unknown(s.set_flow(b"unknown", 1_000))
    s.set_pool(0, b"p", 1, 1_000, 1)
    s.set_principal(0, LIMITED, b"gate", **grants)
    return s


def denied(s: core.Scheduler, **fields: Any) -> str:
    """Admit by the limited principal; return the field of the refusal, "" if there is none."""
    message = admit_message("r", (10,), **fields).SerializeToString()
    before = s.stats(0)
    try:
        s.admit_wire(0, LIMITED, message)
    except core.CallerError as caught:
        error = caught
    else:
        return ""
    assert (error.code, "gate" in error.description) == (7, True)
    assert s.stats(0) == before
    return error.field


@pytest.mark.parametrize(
    ("patterns", "tenant", "field"),
    [
        (None, "acme", ""),
        ([b"*"], "acme", ""),
        ([b"acme"], "acme", ""),
        ([b"acme"], "beta", "tenant"),
        ([b"acme"], "acme-2", "tenant"),
        ([b"team-*", b"b*a"], "beta", ""),
        ([b"a*e*"], "acme", ""),
        ([b"a*x"], "acme", "tenant"),
        ([b"?cme"], "acme", "tenant"),  # only * is special
        ([b"new-*"], "new-one", ""),  # the name of an unknown tenant counts, not its flow's
        ([b"unknown"], "new-one", "tenant"),
        ([b"acme"], "unknown", "tenant"),
        ([], "acme", "tenant"),
    ],
)
def test_principal_names_only_tenants_that_it_may_vouch_for(
    patterns: list[bytes] | None, tenant: str, field: str
) -> None:
    s = scheduler(tenants=patterns)
    for _ in range(2):  # the second answer is the stored one
        assert denied(s, tenant=tenant) == field
    s.check()


def test_api_key_counts_as_its_tenants_name() -> None:
    s = scheduler(tenants=[b"acme"])
    for byte, tenant in ((b"a", b"acme"), (b"b", b"beta")):
        s.set_key(byte * 32, s.flow_index(tenant))
    assert denied(s, tenant="", api_key_sha256=b"a" * 32) == ""
    assert denied(s, tenant="", api_key_sha256=b"b" * 32) == "api_key_sha256"
    assert denied(s, tenant="", api_key_sha256=b"c" * 32) == "api_key_sha256"


def test_principal_names_only_classes_that_it_may_name() -> None:
    s = scheduler(classes=[b"batch"])
    assert denied(s, tenant="acme", request_class="batch") == ""
    assert denied(s, tenant="acme", request_class="ops") == "request_class"
    assert denied(s, tenant="beta") == ""  # the tenant's own class needs no grant


def test_new_grants_replace_those_that_were_kept() -> None:
    s = scheduler(tenants=[b"acme"], classes=[b"batch"])
    assert denied(s, tenant="beta") == "tenant"
    assert denied(s, tenant="acme", request_class="ops") == "request_class"
    s.set_principal(0, LIMITED, b"gate", tenants=[b"beta"], classes=[b"ops"])
    assert denied(s, tenant="beta", request_class="ops") == ""
    assert denied(s, tenant="acme") == "tenant"
    s.set_principal(0, LIMITED, b"gate")
    assert denied(s, tenant="acme", request_class="batch") == ""


def test_refused_admit_leaves_the_stream_open() -> None:
    s = scheduler(tenants=[b"acme"])
    stream = Stream(s, LIMITED)
    answer = stream.send(0, asking(1, "r", tenant="beta"), asking(2, "q", tenant="acme"))
    assert faults(answer) == [(1, 7, "admit.request.tenant")]
    assert fates(answer) == [(2, core.GRANTED)]


def test_principal_offers_only_pools_that_it_may_offer() -> None:
    s = scheduler(pools=[b"gpu-1", b"gpu-1-*"])
    stream = Stream(s, LIMITED)
    offers = [offering(name) for name in ("gpu-1", "gpu-1-b", "gpu-10", "p")]
    assert faults(stream.send(0, *offers)) == [(0, 7, "pool.pool")] * 2
    names = [pool["name"] for pool in s.stats(0)["pools"]]
    assert names == ["p", "gpu-1", "gpu-1-b"]


@pytest.mark.parametrize(("pools", "allowed"), [([b"gpu-*"], False), ([b"p"], True)])
def test_configured_pool_hears_only_those_that_may_offer_it(
    pools: list[bytes], allowed: bool
) -> None:
    s = scheduler(pools=pools)
    stream = Stream(s, LIMITED)
    report = pool_pb2.EngineTelemetry(pool="p", epoch=1, used_tokens=900)
    answer = stream.send(0, pb.SessionEvent(telemetry=report), replaying(7, "r", tenant="acme"))
    assert faults(answer) == ([] if allowed else [(0, 9, "telemetry.pool")])
    assert notices(answer) == ([] if allowed else [(7, core.LEASE_UNKNOWN)])
    assert totals(s, 0)["live_leases"] == allowed
    assert totals(s, 0)["replays_refused"] == (not allowed)


def test_replay_under_a_revoked_name_goes_on_without_its_rights() -> None:
    s = scheduler(tenants=[b"beta"], classes=[b"batch"])
    s.set_class(b"urgent", 9, exempt=True)
    stream = Stream(s, LIMITED)
    assert notices(stream.send(0, replaying(7, "r", tenant="acme", request_class="ops"))) == []
    assert notices(stream.send(0, replaying(8, "q", tenant="beta", request_class="urgent"))) == []
    _, leases = s.list_leases(0, 0, 100, 100)
    rows = {row["lease_id"]: (row["tenant"], row["request_class"]) for row in leases}
    assert rows == {7: ("unknown", "default"), 8: ("beta", "default")}


def test_share_limits_queued_requests_leases_and_answers() -> None:
    s = scheduler(share_ppm=200_000)  # 4 of 20 places in the queue, 20 of 100 leases
    held = [grant(s, 0, f"l{i}", 5, 5, principal=LIMITED).lease_id for i in range(19)]
    more = [s.admit(0, 0, b"q%d" % i, 900, 5, principal=LIMITED) > 0 for i in range(3)]
    assert more == [True, False, False]  # 19 leases and one that waits: its 20 places
    assert s.admit(0, 1, b"other", 5, 5, principal=2) > 0
    for lease_id in held:
        assert s.complete(0, lease_id, 1, principal=LIMITED) is not None
    s.check()


def test_share_limits_queue_places_before_leases() -> None:
    s = scheduler(share_ppm=200_000)
    grant(s, 0, "fills", 900, 100)
    waits = [s.admit(0, 0, b"q%d" % i, 5, 5, principal=LIMITED) > 0 for i in range(6)]
    assert waits == [True] * 4 + [False] * 2
    assert gauges(s, 0)["queued"] == 4


def test_answers_beyond_the_share_push_out_no_other() -> None:
    s = core.Scheduler(headroom_ppm=0, answers_max=10)
    s.set_flow(b"acme", 1_000)
    s.set_pool(0, b"p", 1, 1_000, 1)
    s.set_principal(0, LIMITED, b"gate", share_ppm=200_000)
    other = grant(s, 0, "other").lease_id
    s.complete(0, other, 1)
    leases = [grant(s, 0, f"r{i}", principal=LIMITED).lease_id for i in range(30)]
    for lease_id in leases:
        assert s.complete(0, lease_id, 1, principal=LIMITED) is not None
    assert s.complete(0, other, 1) is not None
    kept = [s.complete(0, lease_id, 1, principal=LIMITED) is not None for lease_id in leases]
    assert kept == [True] * 2 + [False] * 28
    s.check()


def test_answers_beyond_the_share_spare_others_in_a_full_table() -> None:
    s = core.Scheduler(headroom_ppm=0, answers_max=10)
    s.set_flow(b"acme", 1_000)
    s.set_pool(0, b"p", 1, 1_000, 1)
    s.set_principal(0, LIMITED, b"gate", share_ppm=200_000)
    others = [grant(s, 0, f"other-{i}").lease_id for i in range(8)]
    for lease_id in others:
        s.complete(0, lease_id, 1)
    for lease_id in [grant(s, 0, f"r{i}", principal=LIMITED).lease_id for i in range(5)]:
        s.complete(0, lease_id, 1, principal=LIMITED)
    assert [s.complete(0, lease_id, 1) is not None for lease_id in others] == [True] * 8
    s.check()


def test_share_limits_replayed_leases() -> None:
    s = scheduler(share_ppm=50_000)  # 5 of 100 leases
    stream = Stream(s, LIMITED)
    stream.send(0, offering("g"))
    replays = [replaying(i, f"r{i}", tenant="acme", pool="g") for i in range(1, 9)]
    assert notices(stream.send(0, *replays)) == [(i, core.LEASE_UNKNOWN) for i in (6, 7, 8)]
    assert notices(stream.send(0, replays[0])) == []  # one that it has
    s.check()


def test_share_limits_queued_tokens() -> None:
    s = core.Scheduler(headroom_ppm=0, queue_tokens_max=1_000)
    s.set_flow(b"acme", 1_000)
    s.set_flow(b"beta", 1_000)
    s.set_pool(0, b"p", 1, 1_000, 1)
    s.set_principal(0, LIMITED, b"gate", share_ppm=300_000)
    filler = grant(s, 0, "fills", 900, 100)
    sizes = (200, 90, 20, 10)
    waits = [s.admit(0, 0, b"q%d" % n, n, 5, principal=LIMITED) for n in sizes]
    assert [handle > 0 for handle in waits] == [True, True, False, True]
    assert s.admit(0, 1, b"other", 690, 5) > 0
    s.cancel(0, waits[0])
    assert s.admit(0, 0, b"again", 200, 5, principal=LIMITED) > 0
    s.complete(0, filler.lease_id, 1)
    s.poll(0)
    s.evict_queued(0)
    fresh = s.admit(0, 0, b"large", 400, 5, principal=LIMITED)  # alone it may be larger
    assert fresh > 0
    s.check()


def test_share_limits_sessions_pools_and_adapters() -> None:
    s = core.Scheduler(headroom_ppm=0, sessions_max=4, adapters_max=4)
    s.set_flow(b"f", 1_000)
    s.set_pool(0, b"p", 1, 1_000, 1)
    s.set_principal(0, LIMITED, b"gate", share_ppm=500_000)  # 2 sessions, 32 pools, 2 adapters
    first, second = Stream(s, LIMITED), Stream(s, LIMITED)
    with pytest.raises(core.CallerError) as caught:
        s.open_session(LIMITED)
    assert caught.value.code == 8
    second.session.close(0)
    streams = [first, Stream(s, LIMITED), Stream(s, 2)]
    answers = [
        stream.send(0, *(offering(f"g{k}-{i}", capacity=10) for i in range(8)))
        for k, stream in enumerate(streams)
    ]
    assert [faults(answer) for answer in answers] == [[], [], []]
    asked = first.send(0, *(asking(i, f"r{i}", adapter=f"lora-{i}") for i in (1, 2, 3)))
    assert fates(asked) == [(3, core.REJECTED_LIMIT), (1, core.GRANTED), (2, core.GRANTED)]
    assert fates(first.send(0, asking(4, "again", adapter="lora-2"))) == [(4, core.GRANTED)]
    assert fates(streams[2].send(0, asking(5, "s", adapter="lora-4"))) == [(5, core.GRANTED)]
    s.check()


def test_pools_beyond_the_share_are_refused() -> None:
    s = core.Scheduler(headroom_ppm=0)
    s.set_principal(0, LIMITED, b"gate", share_ppm=1)  # at least one of each
    stream = Stream(s, LIMITED)
    answer = stream.send(0, offering("a"), offering("b"), offering("a", epoch=2))
    assert faults(answer) == [(0, 8, "pool.pool")]


def test_pools_beyond_the_share_are_refused_under_known_names() -> None:
    s = core.Scheduler(headroom_ppm=0)
    s.set_principal(0, LIMITED, b"gate", share_ppm=1)  # one
    for name in ("a", "b"):
        stream = Stream(s, LIMITED)
        assert faults(stream.send(0, offering(name), pb.SessionEvent(goodbye={}))) == []
        stream.session.close(0)
    answer = Stream(s, LIMITED).send(0, offering("a"), offering("b"), offering("a", epoch=2))
    assert faults(answer) == [(0, 8, "pool.pool")]


def test_full_table_of_pools_keeps_those_whose_owner_reconnects() -> None:
    s = core.Scheduler(headroom_ppm=0, lease_ttl_ns=SECOND, lease_grace_ns=SECOND)
    owner, others = Stream(s, 2), [Stream(s, 3) for _ in range(8)]
    owner.send(0, offering("mine"))
    for k, stream in enumerate(others):
        names = [f"g{k}-{i}" for i in range(8)][: 7 if k == 7 else 8]
        assert faults(stream.send(0, *map(offering, names))) == []
    owner.session.close(0)
    late = Stream(s, 4)
    assert faults(late.send(0, offering("new"), offering("mine"))) == [
        (0, 8, "pool.pool"), (0, 9, "pool.pool")
    ]  # fmt: skip
    assert faults(late.send(2 * SECOND, offering("new"))) == []  # in the place of the other
    s.check()


def test_places_are_counted_of_what_began_before_the_grants() -> None:
    s = core.Scheduler(headroom_ppm=0, queue_max=10)
    s.set_flow(b"f", 1_000)
    s.set_pool(0, b"p", 1, 10, 1)
    for i in range(6):
        assert s.admit(0, 0, b"r%d" % i, 5, 5, principal=3) > 0
    s.set_principal(0, 3, b"late", share_ppm=500_000)
    assert s.admit(0, 0, b"next", 5, 5, principal=3) == -core.REJECTED_LIMIT
    s.poll(0)  # one is granted, and five wait
    s.evict_queued(0)
    assert s.admit(0, 0, b"after", 5, 5, principal=3) > 0


def test_same_id_of_another_principal_is_another_request() -> None:
    s = scheduler()
    first = grant(s, 0, "r", principal=5)
    second = grant(s, 0, "r", principal=6)
    assert first.lease_id != second.lease_id
    assert admit(s, 0, "r", principal=5) == first.handle  # its own repeat
    assert admit(s, 0, "r", principal=6) == second.handle
    assert totals(s, 0)["granted"] == 2
    assert [len(s.explain(0, b"r", b"acme", who)) for who in (5, 6, 7, -1)] == [1, 1, 0, 1]
    s.set_principal(0, 6, b"known")
    assert len(s.explain(0, b"r", b"acme", -1)) == 2
    s.check()


def test_own_key_outlives_the_request_that_had_the_id_first() -> None:
    s = core.Scheduler(headroom_ppm=0, answers_max=1)
    s.set_flow(b"acme", 1_000)
    s.set_pool(0, b"p", 1, 1_000, 1)
    first, second = grant(s, 0, "r", principal=5), grant(s, 0, "r", principal=6)
    s.complete(0, first.lease_id, 1, principal=5)
    grant(s, 0, "x", principal=5)
    third = grant(s, 0, "y", principal=5)
    s.complete(0, third.lease_id, 1, principal=5)  # forgets the answer of r
    fourth = grant(s, 0, "r", principal=7)
    assert admit(s, 0, "r", principal=6) == second.handle
    assert admit(s, 0, "r", principal=7) == fourth.handle
    assert s.complete(0, second.lease_id, 1, principal=6) is not None
    s.check()


def test_completing_is_for_its_own_principal_after_grants() -> None:
    s = scheduler(tenants=[b"acme"])
    owner, other = Stream(s, LIMITED), Stream(s, 2)
    lease_id = owner.grant(0, 1, "r", tenant="acme")
    assert notices(other.send(0, completing(lease_id))) == [(lease_id, core.LEASE_UNKNOWN)]


@pytest.mark.parametrize(("number", "share_ppm"), [(-1, 1), (65_537, 1), (1, 0), (1, 1_000_001)])
def test_grants_out_of_range_are_refused(number: int, share_ppm: int) -> None:
    with pytest.raises(core.CallerError):
        core.Scheduler().set_principal(0, number, b"x", share_ppm=share_ppm)


def test_released_pool_can_be_taken_over_at_once() -> None:
    s = core.Scheduler(headroom_ppm=0)
    owner, other = Stream(s, principal=1), Stream(s, principal=2)
    owner.send(0, offering("gpu", capacity=100))
    with pytest.raises(core.CallerError, match="stop its gate first"):
        s.set_released(0, b"gpu")
    owner.session.close(0)
    assert faults(other.send(0, offering("gpu", epoch=2))) == [(0, 9, "pool.pool")]
    s.set_released(0, b"gpu")
    assert faults(other.send(0, offering("gpu", epoch=2))) == []
    s.check()


def test_pool_with_another_owner_starts_without_its_telemetry() -> None:
    """A report by the owner before would hold up all requests at its epoch for seconds."""
    s = core.Scheduler(headroom_ppm=0)
    s.set_flow(b"f", 1_000)
    before = Stream(s, 2)
    full = pool_pb2.EngineTelemetry(pool="g", epoch=1, used_tokens=1 << 40, preemptions=9)
    before.send(0, offering("g"), pb.SessionEvent(telemetry=full), pb.SessionEvent(goodbye={}))
    before.session.close(0)
    after = Stream(s, 3)
    after.send(0, offering("g"))
    assert s.stats(0)["pools"][0]["engine_used_tokens"] == 0
    assert fates(after.send(0, asking(1, "r", pools=["g"]))) == [(1, core.GRANTED)]
    s.check()


def pool_limits(s: core.Scheduler, principal: int) -> list[int]:
    """Return the pool's figures in the refusal of a request that is too large for every pool."""
    message = admit_message("r", (5_000,), tenant="acme", pools=["p"]).SerializeToString()
    data = s.admit_wire(0, principal, message)
    assert isinstance(data, bytes)
    answer = pb.AdmitResponse.FromString(data)
    assert answer.outcome == pb.OUTCOME_REJECTED_TOO_LARGE
    kind = quota_pb2.LIMIT_KIND_POOL_TOKENS
    return [limit.remaining for limit in answer.refusal.quota.limits if limit.kind == kind]


def test_refusal_states_free_tokens_only_to_those_that_may_see() -> None:
    assert pool_limits(scheduler(pools=[b"p*"]), LIMITED) == [1_000]
    assert pool_limits(scheduler(pools=[]), LIMITED) == []
    assert pool_limits(scheduler(pools=[]), 0) == [1_000]
    assert pool_limits(scheduler(pools=[], sees_all=True), LIMITED) == [1_000]


def test_flow_keys_hold_only_what_a_principal_may_see() -> None:
    s = scheduler(tenants=[b"acme"])
    first, keys = s.flow_keys(0, 2, LIMITED)
    assert (first, [-key[2] for key in keys]) == (2, [s.flow_index(b"acme")])
    assert s.flow_keys(first, 9, LIMITED) == (0, [])
    assert len(s.flow_keys(0, 9)[1]) == 3
