"""Tests sessions of agents: the last level of the tree, and the cap on what they hold."""

import random
from collections import Counter
from typing import Any

import pytest

from schedsvc import _core as core
from tests.seeds import fresh

from .random_walk import RandomWalk
from .session_histories import SessionHistory
from .support import SECOND, admit, grant, is_drained, make, outcomes, pool

ACTIVE = 60 * SECOND


def one_by_one(**options: Any) -> core.Scheduler:
    """Return a scheduler that runs one request at a time, each of 10 and 10 tokens."""
    return make(capacity=20, credit_max_micro=0, **options)


def turn(s: core.Scheduler, now_ns: int, request_id: str, session: str, **more: Any) -> int:
    return admit(s, now_ns, request_id, session=session.encode(), **more)


def serve(s: core.Scheduler, now_ns: int, names: dict[int, str], count: int) -> list[str]:
    """Return sessions in the order of their requests' grants, one after the other."""
    found: list[str] = []
    while len(found) < count:
        (d,) = s.poll(now_ns)
        assert d.outcome == core.GRANTED
        found.append(names[d.handle])
        s.complete(now_ns, d.lease_id, 1, output_tokens=10)
        s.check()
    return found


def capped(most: int, **options: Any) -> core.Scheduler:
    s = make(("a", 1000), ("b", 1000), capacity=10_000, **options)
    s.set_pool_limits(0, sessions_max_tokens=most)
    return s


def run_turn(s: core.Scheduler, now_ns: int, name: str, serial: int, flow: int = 0) -> None:
    """Run a whole turn of 60 and 40 tokens, which is granted at once."""
    d = grant(s, now_ns, f"{name}-{serial}", 60, 40, flow, session=name.encode())
    s.complete(now_ns, d.lease_id, 1, input_tokens=60, output_tokens=40)


class SessionWalk(RandomWalk):
    """Walks at random with requests that name sessions, in pools with a cap that changes."""

    capped = 0

    def session_of(self, ask: random.Random) -> bytes:
        return ask.choice((b"", b"s%d" % ask.randrange(6), b"t%d" % ask.randrange(3_000)))

    def restart(self) -> None:
        super().restart()
        most = self.random.choice((0, 500, 1_500, 3_000))
        self.core.set_pool_limits(self.now_ns, sessions_max_tokens=most)
        if self.random.random() < 0.3:
            order = self.random.choice(("arrival", "deadline"))
            self.core.set_options(self.now_ns, flow_order=order)
        if self.random.random() < 0.2:
            policy = self.random.choice(("vtc", "fcfs", "dlpm", "lcf", "sif"))
            self.core.set_options(self.now_ns, policy=policy)

    def poll(self) -> None:
        super().poll()
        self.capped += any(row["sessions_waiting"] for row in self.core.stats(self.now_ns)["pools"])


# The level in the tree.


def test_sessions_of_a_tenant_take_turns_however_many_requests_each_has() -> None:
    s = one_by_one()
    names = {turn(s, 0, f"busy{k}", "busy"): "busy" for k in range(8)}
    names |= {turn(s, 0, f"calm{k}", "calm"): "calm" for k in range(4)}
    assert serve(s, 0, names, 8) == ["busy", "calm"] * 4
    assert serve(s, 0, names, 4) == ["busy"] * 4
    assert is_drained(s, 0) or s.next_deadline() > 0


def test_a_tenant_with_many_sessions_has_one_share() -> None:
    s = make(("many", 1000), ("one", 1000), capacity=20, credit_max_micro=0)
    names = {turn(s, 0, f"m{k}", f"session{k}", flow=0): "many" for k in range(40)}
    names |= {admit(s, 0, f"o{k}", flow=1): "one" for k in range(20)}
    assert Counter(serve(s, 0, names, 40)) == {"many": 20, "one": 20}


def test_requests_without_a_session_are_together_one_of_them() -> None:
    s = one_by_one()
    names = {admit(s, 0, f"plain{k}"): "plain" for k in range(6)}
    names |= {turn(s, 0, f"a{k}", "a"): "a" for k in range(3)}
    names |= {turn(s, 0, f"b{k}", "b"): "b" for k in range(3)}
    assert Counter(serve(s, 0, names, 9)) == {"plain": 3, "a": 3, "b": 3}


def test_without_sessions_nothing_changes() -> None:
    """The decisions are the same with a session in one of the tenants or in none."""
    digests = []
    for session in (b"", b"only"):
        s = make(("a", 1000), ("b", 2000), capacity=50)
        rnd = random.Random(3)
        for k in range(300):
            admit(s, k, f"r{k}", rnd.randint(1, 9), 10, k % 2, session=session)
            for d in s.poll(k):
                if d.outcome == core.GRANTED:
                    s.complete(k, d.lease_id, 1, output_tokens=rnd.randint(1, 10))
        s.check()
        digests.append(s.digest())
    assert digests[0] == digests[1]


def test_a_session_that_returns_is_not_paid_for_its_absence() -> None:
    s = one_by_one()
    names = {turn(s, 0, "early", "late"): "late"}
    serve(s, 0, names, 1)
    names |= {turn(s, 1, f"busy{k}", "busy"): "busy" for k in range(20)}
    serve(s, 1, names, 10)
    names |= {turn(s, 2, f"late{k}", "late"): "late" for k in range(10)}
    assert Counter(serve(s, 2, names, 10)) == {"busy": 5, "late": 5}


def test_a_session_lifted_at_one_target_yields_at_the_other() -> None:
    s = one_by_one()
    s.set_pool(0, b"small", 1, 1, 1)  # with several pools each target has a separate level
    names = {turn(s, 0, f"{n}{k}", n): n for n in ("x", "y") for k in range(4)}
    serve(s, 0, names, 8)  # the line for any pool has a level now
    names = {turn(s, 1, f"{n}-p", n, pool=0): n for n in ("a", "b")}
    names[turn(s, 1, "a-any", "a")] = "a"  # lifted to that level
    assert serve(s, 1, names, 3) == ["b", "a", "a"]


@pytest.mark.parametrize("first", ["names the pool", "names none"])
def test_sessions_take_turns_whether_they_name_the_pool_or_not(first: str) -> None:
    s = one_by_one()
    targets = {"names the pool": 0, "names none": -1}
    second = next(name for name in targets if name != first)
    names = {turn(s, 0, f"f{k}", first, pool=targets[first]): first for k in range(6)}
    names |= {turn(s, 0, f"s{k}", second, pool=targets[second]): second for k in range(6)}
    assert serve(s, 0, names, 12) == [first, second] * 6


def test_requests_without_a_session_or_pool_take_turns_with_sessions_of_a_pool() -> None:
    s = one_by_one()
    names = {turn(s, 0, f"early{k}", "early", pool=0): "early" for k in range(5)}
    serve(s, 0, names, 4)
    names |= {admit(s, 0, f"plain{k}"): "plain" for k in range(4)}
    names |= {turn(s, 0, f"late{k}", "late", pool=0): "late" for k in range(4)}
    names |= {turn(s, 0, f"more{k}", "early", pool=0): "early" for k in range(3)}
    assert Counter(serve(s, 0, names, 12)) == {"early": 4, "plain": 4, "late": 4}


def test_a_session_that_names_the_pool_begins_no_lower_than_those_that_wait() -> None:
    s = one_by_one()
    names = {turn(s, 0, f"w{k}", "waits"): "waits" for k in range(20)}
    serve(s, 0, names, 10)
    names |= {turn(s, 0, f"n{k}", "new", pool=0): "new" for k in range(10)}
    assert serve(s, 0, names, 10) == ["waits", "new"] * 5


def test_with_several_pools_a_session_of_a_slow_one_holds_back_none_of_a_quick_one() -> None:
    """A session that waits for either pool was served less, and leaves the other one its turns."""
    s = one_by_one()
    s.set_pool(0, b"slow", 1, 20, 1)
    names = {turn(s, 0, f"q{k}", "quick", pool=0): "quick" for k in range(30)}
    serve(s, 0, names, 20)
    names |= {turn(s, 0, f"e{k}", "either"): "either" for k in range(30)}
    granted: list[str] = []  # in the quick one; the slow one is still busy with its first
    while len(granted) < 10:
        for d in s.poll(0):
            if d.pool == 0:
                granted.append(names[d.handle])
                s.complete(0, d.lease_id, 1, output_tokens=10)
    assert granted == ["quick"] * 10
    s.check()


def test_a_withdrawn_request_may_make_another_session_the_next() -> None:
    """The withdrawn request is the last to arrive, the next of its session is the first."""
    s = one_by_one(flow_order="deadline")
    names = {turn(s, 0, "a1", "a"): "a", turn(s, 0, "b1", "b"): "b"}
    urgent = turn(s, 0, "a2", "a", queue_ttl_ns=5 * SECOND)
    s.check()
    s.cancel(0, urgent)
    s.check()
    granted = [d for d in s.poll(0) if d.outcome == core.GRANTED]
    assert [names[d.handle] for d in granted] == ["a"]


def test_sessions_of_a_tenant_with_a_counter_are_limited() -> None:
    s = make(capacity=10_000_000, flow_queue_max=10_000)
    for k in range(1_100):
        turn(s, 0, f"r{k}", f"s{k}")
    row = s.flow_stats(0, 0)
    assert (row["sessions"], row["sessions_sharing"]) == (1_100, 76)
    s.check()


def test_a_session_is_forgotten_when_that_earns_it_nothing() -> None:
    s = one_by_one()
    names = {turn(s, 0, f"{n}{k}", n): n for n in ("a", "b") for k in range(2)}
    serve(s, 0, names, 4)
    assert s.flow_stats(0, 0)["sessions"] == 2
    s.poll(ACTIVE - 1)
    assert s.flow_stats(0, 0)["sessions"] == 2
    assert s.next_deadline() <= ACTIVE
    s.poll(ACTIVE)
    assert s.flow_stats(0, 0)["sessions"] == 0
    s.check()


def test_a_session_ahead_of_others_is_not_forgotten_before_they_are_even() -> None:
    s = make(capacity=2_000, max_running=1, credit_max_micro=0, queue_ttl_ns=600 * SECOND)
    rich = grant(s, 0, "rich", 10, 900, session=b"rich")
    names = {turn(s, 0, f"poor{k}", "poor"): "poor" for k in range(20)}
    s.complete(0, rich.lease_id, 1, output_tokens=900)
    later = ACTIVE + 1
    (poor,) = s.poll(later)
    assert s.flow_stats(later, 0)["sessions"] == 2
    names[turn(s, later, "back", "rich")] = "rich"
    s.complete(later, poor.lease_id, 1, output_tokens=10)
    assert serve(s, later, names, 20) == ["poor"] * 19 + ["rich"]


def test_another_session_of_an_id_is_another_request() -> None:
    s = make()
    turn(s, 0, "r", "a")
    with pytest.raises(core.CallerError, match="request_id"):
        turn(s, 0, "r", "b")
    with pytest.raises(core.CallerError, match="session"):
        turn(s, 0, "q", "x" * 257)


# The cap.


def test_a_session_above_the_cap_waits_until_another_pauses() -> None:
    s = capped(250)
    run_turn(s, 0, "a", 0)
    run_turn(s, 0, "b", 0)
    turn(s, 0, "c-0", "c", prompt=60, output=40)
    assert s.poll(0) == []
    row = pool(s, 0)
    assert (row["wait_reason"], row["sessions_active"]) == ("SESSION_CAP", 2)
    assert (row["sessions_tokens"], row["sessions_waiting"]) == (200, 1)
    assert s.flow_stats(0, 0)["held_by_session_cap"] == 1
    s.check()
    (story,) = s.explain(0, b"c-0")
    assert core.WAITS[story["place"]["reason"]] == "SESSION_CAP"


def test_active_sessions_and_others_go_on_beside_one_that_waits() -> None:
    s = capped(250)
    for name in "ab":
        run_turn(s, 0, name, 0)
    turn(s, 0, "c-0", "c", prompt=60, output=40)
    run_turn(s, 1, "a", 1)
    grant(s, 1, "plain")
    s.check()


def test_the_next_session_begins_in_any_case_after_a_while() -> None:
    s = capped(250, queue_ttl_ns=200 * SECOND)
    for name in "ab":
        run_turn(s, 0, name, 0)
    turn(s, SECOND, "c-0", "c", prompt=60, output=40)
    assert s.poll(SECOND) == []
    for k in range(1, 7):  # the others never pause
        for name in "ab":
            run_turn(s, k * 10 * SECOND, name, k)
    assert s.poll(60 * SECOND) == []
    due = s.next_deadline()
    assert due == 61 * SECOND
    assert outcomes(s.poll(due)) == [core.GRANTED]
    assert pool(s, due)["sessions_active"] == 2
    turn(s, due, "a-9", "a", prompt=60, output=40)  # the one that has been active longest
    assert s.poll(due) == []
    s.check()


def test_the_wait_ends_before_half_of_the_queue_ttl() -> None:
    s = capped(250)  # the TTL is 30 s
    for name in "ab":
        run_turn(s, 0, name, 0)
    turn(s, 0, "c-0", "c", prompt=60, output=40)
    s.poll(0)
    assert outcomes(s.poll(15 * SECOND)) == [core.GRANTED]


def test_a_session_that_is_refused_and_returns_keeps_its_time() -> None:
    s = capped(250)
    for name in "ab":
        run_turn(s, 0, name, 0)
    handle = turn(s, 0, "c-0", "c", prompt=60, output=40)
    s.poll(0)
    s.cancel(10 * SECOND, handle)
    s.poll(10 * SECOND)
    turn(s, 11 * SECOND, "c-1", "c", prompt=60, output=40)
    assert outcomes(s.poll(15 * SECOND)) == [core.GRANTED]


def test_a_session_larger_than_the_cap_begins_when_none_is_active() -> None:
    s = capped(250, queue_ttl_ns=600 * SECOND)
    run_turn(s, 0, "a", 0)
    turn(s, 0, "huge", "huge", prompt=500, output=40)
    assert s.poll(0) == []
    assert s.poll(ACTIVE - 1) == []
    assert outcomes(s.poll(ACTIVE)) == [core.GRANTED]
    s.check()


def test_the_tenant_that_holds_least_begins_first() -> None:
    s = capped(450)
    for k in range(4):
        run_turn(s, 0, f"a{k}", 0, flow=0)
    for k in range(3):
        turn(s, 1, f"wait-a{k}", f"more{k}", prompt=60, output=40, flow=0)
    turn(s, 2, "wait-b", "b", prompt=60, output=40, flow=1)
    assert s.poll(2) == []
    s.set_pool_limits(3, sessions_max_tokens=550)
    (d,) = s.poll(3)
    assert d.flow == 1
    s.check()


def test_each_pool_says_that_sessions_wait_for_its_cap() -> None:
    """A pool that was not looked at since a session began to wait has to show the wait."""
    s = capped(150)
    s.set_pool(0, b"q", 1, 10_000, 1)
    turn(s, 0, "r0", "s0", prompt=60, output=40, pool=1)
    assert len(s.poll(0)) == 1
    assert pool(s, 0, 1)["wait_reason"] == "NONE"
    turn(s, 1, "r1", "s1", prompt=60, output=40, pool=1)
    assert s.poll(1) == []
    assert pool(s, 1, 1)["wait_reason"] == "SESSION_CAP"
    s.check()


def test_a_cap_that_ends_lets_all_begin() -> None:
    s = capped(150)
    for k in range(4):
        turn(s, 0, f"r{k}", f"s{k}", prompt=60, output=40)
    assert len(s.poll(0)) == 1
    s.set_no_pool_limits(1)
    assert len(s.poll(1)) == 3
    s.check()


def test_a_pool_that_drains_holds_no_session_back() -> None:
    s = capped(150)
    for k in range(3):
        turn(s, 0, f"r{k}", f"s{k}", prompt=60, output=40)
    assert len(s.poll(0)) == 1
    s.set_draining(1, b"p", True)
    assert outcomes(s.poll(1)) == [core.EVICTED_DRAINING] * 2
    s.check()


def test_requests_that_wait_for_the_cap_take_places_in_the_queue() -> None:
    s = capped(150, flow_queue_max=3)
    answers = [turn(s, 0, f"r{k}", f"s{k}", prompt=60, output=40) for k in range(6)]
    assert len(s.poll(0)) == 1
    assert (
        answers[4:] == [-core.REJECTED_FLOW_QUEUE_FULL] * 2
        or answers[3:] == [-core.REJECTED_FLOW_QUEUE_FULL] * 3
    )
    s.check()


def test_the_cache_of_a_restarted_engine_holds_no_session() -> None:
    s = capped(150)
    run_turn(s, 0, "a", 0)
    turn(s, 0, "b-0", "b", prompt=60, output=40)
    assert s.poll(0) == []
    s.set_pool(1, b"p", 2, 10_000, 1)
    assert outcomes(s.poll(1)) == [core.GRANTED]
    s.check()


def test_a_replayed_lease_is_a_turn_of_its_session() -> None:
    s = capped(150)
    assert s.replay(0, 0, b"r", 7, 0, 1, 100, 60, 40, session=b"a") == core.LEASE_LIVE
    assert pool(s, 0)["sessions_active"] == 1
    turn(s, 0, "b-0", "b", prompt=60, output=40)
    assert s.poll(0) == []
    s.check()


@pytest.mark.parametrize("pools", [1, 3])
@pytest.mark.parametrize("seed", fresh(20))
def test_random_histories_follow_the_model(seed: int, pools: int) -> None:
    SessionHistory(seed, pools).play()


# Below groups with a weight.

USERS = {"small": 1, "middle": 10, "large": 100}
SESSIONS = 3


def organisations(s: core.Scheduler) -> dict[int, str]:
    """Make organisations 1:2:4 with these user counts; return each user's flow and organisation."""
    flows = {}
    for k, (org, count) in enumerate(USERS.items()):
        group = s.set_quota(0, b"group:" + org.encode(), -1, weight_milli=1000 << k)
        for user in range(count):
            flow = s.set_flow(f"{org}-{user}".encode(), 1_000)
            s.set_flow_quota(0, flow, group)
            flows[flow] = org
    return flows


@pytest.mark.parametrize("each", [60, pytest.param(1_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_organisations_users_and_their_sessions_share_alike(each: int) -> None:
    """`each` is the number of requests that every user is granted at least."""
    s = one_by_one()
    flows = organisations(s)
    asked: dict[int, tuple[int, int]] = {}
    served: Counter[tuple[int, int]] = Counter()
    serial = 0

    def ask(flow: int, session: int) -> None:
        nonlocal serial
        serial += 1
        asked[turn(s, 0, f"r{serial}", f"s{session}", flow=flow)] = flow, session

    for flow in flows:
        for session in range(SESSIONS):
            ask(flow, session)
            ask(flow, session)
    while min(sum(served[flow, k] for k in range(SESSIONS)) for flow in flows) < each:
        for _ in range(700):
            (d,) = s.poll(0)
            key = asked.pop(d.handle)
            served[key] += 1
            s.complete(0, d.lease_id, 1, output_tokens=10)
            ask(*key)
    s.check()
    users: Counter[int] = Counter()
    for (flow, _), count in served.items():
        users[flow] += count
    orgs: Counter[str] = Counter()
    for flow, count in users.items():
        orgs[flows[flow]] += count
    whole = orgs.total()
    assert [orgs[org] / whole for org in USERS] == pytest.approx([1 / 7, 2 / 7, 4 / 7], rel=0.01)
    for org in USERS:
        counts = [count for flow, count in users.items() if flows[flow] == org]
        assert min(counts) >= 0.98 * max(counts) - 1
    for flow in flows:
        counts = [served[flow, k] for k in range(SESSIONS)]
        assert min(counts) >= 0.98 * max(counts) - 1


@pytest.mark.parametrize("pools", [1, 3])
@pytest.mark.parametrize("seed", fresh(20))
def test_random_histories_with_a_cap_grant_all(seed: int, pools: int) -> None:
    SessionHistory(seed, pools, capped=True).play()


def test_walk_with_sessions_balances_its_books() -> None:
    walk = SessionWalk(5)
    walk.run(events=30_000, check_every=500)
    counts = walk.core.stats(walk.now_ns)["totals"]
    assert min(counts[k] for k in ("granted", "completed", "cancelled", "expired", "evicted")) > 100
    assert walk.capped > 100
    walk.drain()
    assert is_drained(walk.core, walk.now_ns) or walk.core.next_deadline() > walk.now_ns
