"""Tests chunks of quotas' buckets that a cluster's store keeps, as events of the core."""

import random
from typing import Any

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core
from tests.seeds import fresh

from .support import SECOND, admit, admit_message, make, outcomes

MINUTE = 60 * SECOND
NONE = (0, 0, 0, 0)


def held(s: core.Scheduler, *keys: bytes) -> list[Any]:
    """Return how many requests are held under each key."""
    return [row and row[1][0] for row in s.escrow_levels(list(keys))]


def grant(
    s: core.Scheduler, now_ns: int, key: bytes, requests: int, *, due: int = 0, left: int = 0
) -> int:
    ends = now_ns + 3 * SECOND
    rows = [(key, (requests, 0, 0, 0), (due, 0, 0, 0), (left, 0, 0, 0), ends)]
    [applied] = s.set_escrow_grants(now_ns, rows)
    return applied[0]


def escrowed(requests: int = 10, **limits: Any) -> core.Scheduler:
    s = make(queue_ttl_ns=10 * MINUTE)
    s.set_flow_quota(0, 0, requests=requests, **limits)
    s.set_escrow(0)
    return s


def tags(s: core.Scheduler, now_ns: int) -> list[int]:
    """Return the tags of what is granted now."""
    return [d.tag for d in s.poll(now_ns) if d.outcome == core.GRANTED]


def key_of(s: core.Scheduler) -> bytes:
    [name] = s.escrow_drawn(1)
    return name


def test_a_request_waits_for_a_chunk_and_takes_it() -> None:
    s = escrowed()
    key = key_of(s)
    admit(s, 0, "r", 10, 5, tag=1)
    assert not s.poll(0)
    assert s.next_deadline() > 0
    assert s.escrow_is_wanted()
    assert s.escrow_wants() == [(key, [(key, (1, 0, 0, 0), (1, 0, 0, 0))])]
    assert not s.escrow_is_wanted()
    assert not s.poll(MINUTE)  # no time fills it
    assert grant(s, MINUTE, key, 3) == 3
    assert [d.tag for d in s.poll(MINUTE)] == [1]
    assert held(s, key) == [2]
    assert s.escrow_drawn(10) == [key]
    assert s.escrow_wants() == []
    s.check()


def test_a_chunk_ends_when_it_is_used_too_late() -> None:
    s = escrowed()
    key = key_of(s)
    grant(s, 0, key, 3)
    admit(s, 3 * SECOND - 1, "r", 10, 5)
    assert outcomes(s.poll(3 * SECOND - 1)) == [core.GRANTED]
    admit(s, 3 * SECOND, "s", 10, 5)
    assert not s.poll(3 * SECOND)
    assert held(s, key) == [0]


def test_a_return_takes_what_is_held_at_most() -> None:
    s = escrowed()
    key = key_of(s)
    assert grant(s, 0, key, 4) == 4
    assert grant(s, 0, key, -3) == -3
    assert grant(s, 0, key, -3) == -1
    assert grant(s, 0, b"tnobody", 5) == 0
    assert held(s, key, b"tnobody") == [0, None]


def test_the_whole_path_is_wanted_at_once() -> None:
    s = make()
    group = s.set_quota(0, b"group:g", total_tokens=1_000)
    s.set_flow_quota(0, 0, group, requests=10)
    s.set_escrow(0)
    own, shared = sorted(s.escrow_drawn(9), reverse=True)
    for n in range(3):
        admit(s, 0, f"r{n}", 10, 5)
    s.poll(0)
    [(waits_at, path)] = s.escrow_wants()
    assert waits_at == own
    assert [part[0] for part in path] == [own, shared]
    (_, requests, most), (_, tokens, tokens_most) = path
    assert (requests, most) == ((1, 0, 0, 0), (3, 0, 0, 0))
    assert tokens[:3] == (0, 0, 0)
    assert 10 < tokens[3] <= 15
    assert tokens_most[3] == 3 * tokens[3]
    s.set_escrow_grants(0, [(own, (1, 0, 0, 0), NONE, NONE, SECOND)])
    assert not s.poll(0)
    [(waits_at, path)] = s.escrow_wants()
    assert waits_at == shared
    assert path[0] == (own, NONE, (2, 0, 0, 0))
    s.set_escrow_grants(0, [(shared, tokens, NONE, NONE, SECOND)])
    assert outcomes(s.poll(0)) == [core.GRANTED]
    s.check()


def test_the_retry_time_is_what_the_store_says() -> None:
    s = escrowed()
    key = key_of(s)
    s.set_flow_quota(0, 0, -1, True, requests=10)
    grant(s, 0, key, 0, due=7 * SECOND)
    asked = admit_message("r").SerializeToString()
    answer = s.admit_wire(0, 0, asked)
    assert isinstance(answer, bytes)
    assert 7_000 <= pb.AdmitResponse.FromString(answer).refusal.retry_after_ms <= 7_700


def remaining(s: core.Scheduler, now_ns: int) -> dict[str, Any]:
    """Return the rest of each limit, as Stats shows it."""
    [flow] = s.stats(now_ns)["flows"]
    return {row["kind"]: row["remaining"] for row in flow["quotas"]}


def test_an_unused_quota_is_left_whole() -> None:
    s = escrowed(requests=3, total_tokens=1_000)
    assert set(remaining(s, 0).values()) == {3, 1_000}


def test_remaining_quota_is_the_part_that_could_be_used() -> None:
    s = escrowed(requests=6)
    key = key_of(s)
    admit(s, 0, "r", 10, 5)
    grant(s, 0, key, 2, left=1)
    assert outcomes(s.poll(0)) == [core.GRANTED]
    assert set(remaining(s, 0).values()) == {2}  # the other one, and that of the store
    assert set(remaining(s, 11 * SECOND).values()) == {2}  # the chunk is over; one was added
    assert set(remaining(s, 9 * MINUTE).values()) == {6}
    grant(s, 9 * MINUTE, key, 0)
    assert set(remaining(s, 9 * MINUTE).values()) == {0}
    s.check()


def test_a_refusing_tenant_waits_for_the_store_only() -> None:
    """Before the store has said that the quota is spent, a request waits instead."""
    s = escrowed()
    key = key_of(s)
    s.set_flow_quota(0, 0, -1, True, requests=10)
    for n in range(3):
        admit(s, 0, f"r{n}", 10, 5, tag=n)
    assert not s.poll(0)
    grant(s, 0, key, 2, due=6 * SECOND)
    assert [d.tag for d in s.poll(0)] == [0, 1]
    assert held(s, key) == [0]
    s.check()


def test_use_without_a_chunk_is_owed() -> None:
    s = escrowed()
    key = key_of(s)
    s.set_flow_mode(0, 0, True)
    for n in range(2):
        admit(s, 0, f"r{n}", 10, 5)
    assert outcomes(s.poll(0)) == [core.GRANTED] * 2
    assert held(s, key) == [-2]
    assert grant(s, 0, key, 2) == 2
    assert held(s, key) == [0]
    s.check()


def test_unused_tokens_are_held_again() -> None:
    s = make()
    s.set_flow_quota(0, 0, total_tokens=1_000)
    s.set_escrow(0)
    key = key_of(s)
    admit(s, 0, "r", 10, 500)
    s.poll(0)
    [(_, [(_, least, _)])] = s.escrow_wants()
    s.set_escrow_grants(0, [(key, least, NONE, NONE, SECOND)])
    [granted] = s.poll(0)
    s.complete(0, granted.lease_id, 1, input_tokens=10, output_tokens=200)
    assert s.escrow_levels([key]) == [((0, 0, 0, 1_000), (0, 0, 0, least[3] - 210))]
    s.check()


def test_without_the_store_time_fills_a_part() -> None:
    s = escrowed(requests=12)
    key = key_of(s)
    grant(s, 0, key, 2)
    s.set_escrow(0, 4)
    assert s.escrow_levels([key]) == [None]
    for n in range(8):
        admit(s, 0, f"r{n}", 1, 1, tag=n)
    granted = tags(s, 0)
    for second in range(1, 61):
        granted += tags(s, second * SECOND)
    assert granted == [0, 1, 2, 3, 4]  # its held units, and three in a minute
    s.set_escrow(60 * SECOND)
    assert held(s, key) == [0]
    assert not tags(s, 61 * SECOND)


def test_the_store_gives_what_a_share_cannot_hold() -> None:
    """A request that is larger than the part takes it whole, and the bucket owes the rest."""
    s = escrowed(requests=2)
    s.set_escrow(0, 4)
    admit(s, 0, "r", 1, 1)
    assert not s.poll(59 * SECOND)
    assert outcomes(s.poll(60 * SECOND)) == [core.GRANTED]
    admit(s, 60 * SECOND, "s", 1, 1, tag=2)
    assert not tags(s, 179 * SECOND)
    assert tags(s, 180 * SECOND) == [2]


def test_limits_of_models_stay_local() -> None:
    s = make()
    s.set_quota(0, b"model:m", requests=3)
    s.set_escrow(0)
    assert s.escrow_levels([b"qmodel:m"]) == [None]


def test_a_new_limit_leaves_what_is_held() -> None:
    s = escrowed(requests=10)
    key = key_of(s)
    grant(s, 0, key, 4)
    s.set_flow_quota(0, 0, requests=20)
    assert s.escrow_levels([key]) == [((20, 0, 0, 0), (4, 0, 0, 0))]
    s.set_flow_quota(0, 0, requests=2, total_tokens=50)
    assert s.escrow_levels([key]) == [((2, 0, 0, 50), (2, 0, 0, 0))]
    s.check()


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (("k", NONE, NONE, NONE, 0), "rows"),
        ((b"k", NONE[:3], NONE, NONE, 0), "rows"),
        ((b"k", (1 << 62, 0, 0, 0), NONE, NONE, 0), "amount"),
        ((b"k", NONE, (-1, 0, 0, 0), NONE, 0), "due_ns"),
        ((b"k", NONE, NONE, (-1, 0, 0, 0), 0), "left"),
        ((b"k", NONE, NONE, NONE, -1), "ends_ns"),
    ],
)
def test_a_malformed_grant_changes_nothing(row: Any, field: str) -> None:
    s = escrowed()
    key = key_of(s)
    good = (key, (1, 0, 0, 0), NONE, NONE, SECOND)
    with pytest.raises(core.CallerError, match=field):
        s.set_escrow_grants(0, [good, row])
    assert held(s, key) == [0]


def test_grants_are_part_of_the_digest() -> None:
    digests = set()
    for amount in (0, 1, 2):
        s = escrowed()
        grant(s, 0, key_of(s), amount)
        digests.add(s.digest())
    assert len(digests) == 3


@pytest.mark.parametrize("seed", fresh(6))
def test_granted_quota_equals_spent_plus_held(seed: int) -> None:
    """Random requests, chunks, returns and ends against the sum."""
    rng = random.Random(seed)
    s = escrowed(requests=50)
    key, now = key_of(s), 0
    drawn = granted = lost = 0
    ends = 0
    for n in range(300):
        now += rng.choice([0, SECOND // 10, SECOND])
        before = held(s, key)[0]
        s.poll(now)
        if now >= ends:
            [after] = held(s, key)
            lost += before if after == 0 and before > 0 else 0
        action = rng.random()
        if action < 0.5:
            admit(s, now, f"r{n}", 1, 1)
            granted += sum(d.outcome == core.GRANTED for d in s.poll(now))
        else:
            drawn += grant(s, now, key, rng.randint(-4, 4))
            ends = now + 3 * SECOND
            granted += sum(d.outcome == core.GRANTED for d in s.poll(now))
        assert granted + lost + held(s, key)[0] == drawn, f"seed {seed}, step {n}"
        s.check()
