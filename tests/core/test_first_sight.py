"""Tests tenants that nothing lists: a proved name gets its own flow by the first rule."""

import random
from typing import Any

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import tenants_pb2

from schedsvc import _core as core
from tests.seeds import fresh

from .differential import Differential
from .stream import Stream
from .support import SECOND, admit_message

TOKEN = tenants_pb2.TENANT_PROOF_TOKEN
NAMES = [b"acme/%d" % i for i in range(6)] + [b"solo%d" % i for i in range(6)]


def scheduler(own: bool = True, **limits: Any) -> core.Scheduler:
    s = core.Scheduler(**limits)
    s.set_unknown(s.set_flow(b"unknown", 100), own=own)
    s.set_pool(0, b"p", 1, 100_000, 16)
    return s


def ask(s: core.Scheduler, request_id: str, now_ns: int = 0, **fields: Any) -> int | bytes:
    return s.admit_wire(now_ns, 0, admit_message(request_id, **fields).SerializeToString())


def tenants(s: core.Scheduler) -> dict[str, int]:
    """Return the weight of each flow."""
    return {row["tenant"]: row["weight_milli"] for row in s.stats(0)["flows"]}


@pytest.mark.parametrize("proof", range(1, 5))
def test_a_proved_name_gets_a_flow_of_weight_1(proof: int) -> None:
    s = scheduler()
    ask(s, "r", tenant="new", tenant_proof=proof)
    assert tenants(s) == {"unknown": 100, "new": 1000}
    assert s.flow_stats(0, s.flow_index(b"new"))["received"] == 1
    assert s.stats(0)["tenants"]["first_sight"] == 1
    s.check()


@pytest.mark.parametrize(
    ("own", "fields"),
    [
        (True, {"tenant": "new"}),
        (False, {"tenant": "new", "tenant_proof": TOKEN}),
        (True, {"tenant": "unknown", "tenant_proof": TOKEN}),
        (True, {"tenant": "other", "tenant_proof": TOKEN}),
        (True, {"tenant": "", "api_key_sha256": b"k" * 32, "tenant_proof": TOKEN}),
    ],
)
def test_any_other_name_shares_the_unknown_flow(own: bool, fields: dict[str, Any]) -> None:
    s = scheduler(own)
    ask(s, "r", **fields)
    assert tenants(s) == {"unknown": 100}
    assert s.flow_stats(0, 0)["received"] == 1
    assert s.stats(0)["tenants"]["first_sight"] == 0


def test_the_first_rule_that_fits_says_what_a_name_gets() -> None:
    s = scheduler()
    low = s.set_class(b"low", 5)
    group = s.set_quota(0, b"group:acme", requests=100)
    s.set_tenant_rule(0, b"acme/vip*", 3_000)
    s.set_tenant_rule(0, b"acme/*", 2_000, low, (low,), parent=group, total_tokens=500)
    for name in ("acme/vip1", "acme/x", "solo"):
        ask(s, name, tenant=name, tenant_proof=TOKEN)
    assert tenants(s) == {"unknown": 100, "acme/vip1": 3000, "acme/x": 2000, "solo": 1000}
    limits = s.flow_stats(0, s.flow_index(b"acme/x"))["quotas"]
    assert {row["kind"]: row["limit"] for row in limits} == {3: 100, 6: 500}
    (story,) = s.explain(0, b"acme/x", b"acme/x")
    assert story["request_class"] == "low"
    with pytest.raises(core.CallerError, match="may not name") as error:
        ask(s, "y", tenant="acme/y", tenant_proof=TOKEN, request_class="default")
    assert error.value.field == "request_class"
    s.check()


def test_rules_that_change_reach_the_flows_that_exist() -> None:
    s = scheduler()
    s.set_tenant_rule(0, b"*", 2_000, requests=5)
    ask(s, "r", tenant="new", tenant_proof=TOKEN)
    s.set_no_tenant_rules(0)
    s.set_tenant_rule(0, b"n*", 500)
    s.set_rules_followed(0)
    flow = s.flow_index(b"new")
    assert tenants(s)["new"] == 500
    assert s.flow_stats(0, flow)["quotas"] == []
    s.set_unknown(0)
    s.set_rules_followed(0)
    ask(s, "s", tenant="new", tenant_proof=TOKEN)
    assert s.flow_stats(0, 0)["received"] == 1
    s.set_unknown(0, own=True)
    ask(s, "t", tenant="new", tenant_proof=TOKEN)
    assert s.flow_stats(0, flow)["received"] == 2
    s.check()


def test_a_tenant_that_gets_listed_keeps_its_flow() -> None:
    s = scheduler()
    ask(s, "r", tenant="new", tenant_proof=TOKEN)
    flow = s.flow_index(b"new")
    assert s.set_flow(b"new", 7_000) == flow
    s.set_no_tenant_rules(0)
    s.set_rules_followed(0)
    assert tenants(s)["new"] == 7_000
    assert s.stats(0)["tenants"]["first_sight"] == 0
    again = pb.AdmitResponse.FromString(ask(s, "r", tenant="new"))  # type: ignore[arg-type]
    assert (again.outcome, s.stats(0)["totals"]["granted"]) == (core.GRANTED, 1)


def test_beyond_flows_max_new_names_share_and_are_counted() -> None:
    s = scheduler(flows_max=3)
    for i in range(5):
        ask(s, f"r{i}", tenant=f"t{i}", tenant_proof=TOKEN)
    row = {"first_sight": 2, "flows_max": 3, "shared_requests": 3, "forgotten": 0}
    assert s.stats(0)["tenants"] == row
    assert s.flow_stats(0, 0)["received"] == 3
    s.check()


def ask_as(
    s: core.Scheduler, principal: int, tenant: str, now_ns: int = 0, **more: Any
) -> pb.AdmitResponse:
    """Ask under a proved name; the pool has room."""
    message = admit_message(f"{tenant}{now_ns}", tenant=tenant, tenant_proof=TOKEN, **more)
    answer = s.admit_wire(now_ns, principal, message.SerializeToString())
    assert isinstance(answer, bytes)
    return pb.AdmitResponse.FromString(answer)


def shared(share_ppm: int, flows_max: int, **limits: Any) -> core.Scheduler:
    """Principals 7 and 8 have a share of the part of `flows_max` that `unknown` leaves."""
    s = scheduler(flows_max=flows_max, **limits)
    for number in (7, 8):
        s.set_principal(0, number, b"gate%d" % number, share_ppm=share_ppm)
    return s


def test_names_beyond_a_share_spare_the_flows_of_others() -> None:
    s = shared(500_000, flows_max=5)
    for i in range(4):
        ask_as(s, 7, f"t{i}")
    for i in range(3):
        ask_as(s, 8, f"u{i}")
    assert set(tenants(s)) == {"unknown", "t0", "t1", "u0", "u1"}
    assert s.stats(0)["tenants"]["shared_requests"] == 3
    s.check()


def test_flows_of_many_classes_leave_others_their_share() -> None:
    s = shared(500_000, flows_max=5)
    named = tuple(s.set_class(b"c%d" % i, i + 1) for i in range(4))
    s.set_tenant_rule(0, b"*", named=named)
    for i in range(2):
        for cls in range(4):
            ask_as(s, 7, f"t{i}", 4 * i + cls, request_class=f"c{cls}")
    ask_as(s, 8, "u0", 9)
    assert s.flow_index(b"u0") > 0
    assert s.stats(9)["tenants"]["shared_requests"] == 0
    s.check()


def test_a_full_share_takes_flows_of_its_own_tenants_only() -> None:
    lasting = dict.fromkeys(("queue_ttl_ns", "lease_ttl_ns"), 100 * SECOND)
    learning = {"credit_max_micro": 0, "samples_min": 10}
    s = shared(500_000, flows_max=5, answers_max=0, **learning, **lasting)
    for principal, name in ((8, "u0"), (7, "t0"), *[(7, "t1")] * 3):
        now_ns = s.stats(0)["totals"]["received"]
        grant = ask_as(s, principal, name, now_ns).grant
        s.complete(now_ns, grant.lease_id, grant.pool_epoch, principal=principal)
    for i in range(2):  # so newcomers begin at t1's counter
        s.admit(9, s.flow_index(b"t1"), b"q%d" % i, 10, 50)
    s.poll(9)
    ask_as(s, 7, "t2", 60 * SECOND)
    assert set(tenants(s)) == {"unknown", "u0", "t1", "t2"}
    ask_as(s, 7, "t3", 60 * SECOND)
    assert set(tenants(s)) == {"unknown", "u0", "t1", "t2"}
    s.check()


def test_a_share_counts_the_flows_that_were_made_before_it() -> None:
    s = scheduler(flows_max=5)
    for i in range(3):
        ask_as(s, 7, f"t{i}")
    s.set_principal(0, 7, b"gate", share_ppm=500_000)
    ask_as(s, 7, "t3")
    assert set(tenants(s)) == {"unknown", "t0", "t1", "t2"}
    s.set_flow(b"t0", 1_000)
    s.set_flow(b"t1", 1_000)
    s.check()


def test_a_principal_makes_no_flow_of_a_name_it_may_not_use() -> None:
    s = scheduler()
    s.set_principal(0, 7, b"gate", tenants=[b"acme/*"])
    message = admit_message("r", tenant="rival", tenant_proof=TOKEN).SerializeToString()
    with pytest.raises(core.CallerError, match="not granted"):
        s.admit_wire(0, 7, message)
    assert tenants(s) == {"unknown": 100}


def test_a_replayed_lease_of_a_proved_name_gets_its_flow() -> None:
    s = scheduler()
    replay = pb.LeaseReplay(
        lease_id=5, request_id="r", tenant="new", pool="p", pool_epoch=1, reserved_tokens=100,
        prompt_tokens=10, max_output_tokens=10, tenant_proof=TOKEN,
    )  # fmt: skip
    Stream(s).send(0, pb.SessionEvent(replay=replay))
    assert s.flow_stats(0, s.flow_index(b"new"))["live_leases"] == 1
    again = ask(s, "r", tenant="new", tenant_proof=TOKEN, max_output_tokens=10)
    assert pb.AdmitResponse.FromString(again).grant.lease_id == 5  # type: ignore[arg-type]


def test_tenants_at_first_sight_survive_a_restart() -> None:
    s = scheduler()
    s.set_tenant_rule(0, b"*", 2_000, total_tokens=1_000)
    for i in range(3):
        ask(s, f"r{i}", tenant="new", tenant_proof=TOKEN)
    rows = [(key, value, 0) for key, value in s.save(0, 100)]
    restarted = scheduler()
    restarted.set_tenant_rule(0, b"*", 2_000, total_tokens=1_000)
    restarted.set_saved(0, rows[::-1])
    flow = restarted.flow_index(b"new")
    for key in ("vtc_micro", "quotas", "weight_milli"):
        assert restarted.flow_stats(0, flow)[key] == s.flow_stats(0, s.flow_index(b"new"))[key]
    assert restarted.stats(0)["tenants"]["first_sight"] == 1
    restarted.check()
    for strict in (scheduler(own=False), scheduler(flows_max=1)):
        strict.set_saved(0, rows)
        assert tenants(strict) == {"unknown": 100}


def pair_of(seed: int, policy: str) -> tuple[Differential, random.Random]:
    rnd = random.Random(seed)
    limits = {"flow_queue_max": 4, "queue_max": 12, "flows_max": 9}
    pair = Differential(policy, {}, **limits)
    pair.flow(b"unknown", 100)
    pair.flow(b"listed", 1000)
    for name, capacity in ((b"big", 128), (b"small", 48))[: rnd.randint(1, 2)]:
        pair.both("set_pool", name, 1, capacity, 8)
    pair.classes((b"low", 5, 2 * SECOND, False))
    pair.both("set_quota", b"group:acme", requests=30, total_tokens=2_000)
    return pair, rnd


def change_rules(pair: Differential, rnd: random.Random) -> None:
    for whom in (pair.core, pair.twin):
        whom.set_unknown(0, own=True)
    pair.both("set_no_tenant_rules", rnd.random() < 0.1)
    for pattern in rnd.sample((b"acme/*", b"*2", b"solo*", b"*"), 2):
        pair.both(
            "set_tenant_rule", pattern, rnd.choice((500, 1000, 3000)), rnd.choice((0, 0, 1)),
            rnd.choice(((), (0, 1))), rnd.random() < 0.1, rnd.choice((-1, -1, 0)),
            rnd.random() < 0.2, requests=rnd.choice((0, 0, 12)),
            total_tokens=rnd.choice((0, 0, 900)),
        )  # fmt: skip
    pair.both("set_rules_followed")


@pytest.mark.parametrize("policy", ["vtc", "fcfs", "dlpm"])
@pytest.mark.parametrize("seed", fresh(1))
def test_core_and_twin_agree_about_first_sight(seed: int, policy: str) -> None:
    pair, rnd = pair_of(seed, policy)
    change_rules(pair, rnd)
    for step in range(200):
        kind = rnd.random()
        if kind < 0.5:
            flow = pair.both("first_sight", rnd.choice(NAMES))
            flow = flow or 1  # an id of an unknown tenant is found by wire messages alone
            pair.both(
                "admit", flow, b"id%d" % step, rnd.randint(1, 40), rnd.randint(1, 30),
                request_class=rnd.choice((b"", b"", b"low", b"default")),
            )  # fmt: skip
        elif kind < 0.75 and pair.leases:
            lease = rnd.choice(pair.leases[-8:])
            pair.both("complete", *lease, output_tokens=rnd.randint(0, 30))
        elif kind < 0.78:
            change_rules(pair, rnd)
        elif kind < 0.8:
            pair.flow(rnd.choice(NAMES[:2]), 4_000) if len(pair.twin.flows) < 9 else None
        elif kind < 0.82:
            pair.both("set_gone", b"listed")  # which the next request undoes, at first sight
            pair.both("first_sight", b"listed")
        pair.now_ns += rnd.choice((0, 10**7, SECOND // 3, 2 * SECOND))
        pair.poll()
        pair.compare()
    assert pair.twin.tenants.shared_requests
    assert len(pair.twin.tenants.born) > 1
    pair.drain()
