"""Replays of a pool reserve no more than leases that were granted can have (replay.pxi)."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedsvc import _core as core

from .support import SECOND, make, totals

CAPACITY = 1_000
LIMITS: dict[str, Any] = {
    "ledger": "peak", "dispatch": "backfill", "flow_queue_max": 1_000, "samples_min": 1,
    "lease_ttl_ns": 1 << 50,
}  # fmt: skip

#: A request's prompt, most output, sequences.
Asked = tuple[int, int, int]
#: A request arrives, or a running lease (by its place) reports or ends.
Event = tuple[str, Asked, int, int]

asked = st.tuples(st.integers(3, 200), st.integers(1, 900), st.integers(1, 3))
events = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "report", "report", "end"]),
        asked,
        st.integers(0, 1_000),
        st.integers(1, 400),
    ),
    max_size=60,
)


class Holder:
    """Holds leases as an honest shim: it knows what was granted, and replays that."""

    def __init__(self, block: int, **limits: Any) -> None:
        self.given = {"capacity": CAPACITY, "block": block, **LIMITS, **limits}
        self.scheduler = make(**self.given)
        self.asked: dict[int, Asked] = {}
        self.running: dict[int, tuple[core.Decision, Asked, int]] = {}

    def play(self, event: Event) -> None:
        """Let one event happen, and grant requests that fit."""
        what, request, place, more = event
        if what == "ask":
            prompt, output, sequences = request
            number = len(self.asked)
            handle = self.scheduler.admit(
                0, 0, b"r%d" % number, prompt, output, sequences=sequences, reports_progress=True
            )
            self.asked[handle] = request
        elif self.running:
            lease, request, output = list(self.running.values())[place % len(self.running)]
            if what == "end":
                del self.running[lease.lease_id]
                self.scheduler.complete(0, lease.lease_id, 1, output_tokens=output)
            else:
                output = min(output + more, request[1] * request[2])
                self.scheduler.progress(0, lease.lease_id, 1, -1, -1, output)
                self.running[lease.lease_id] = lease, request, output
        for decision in self.scheduler.poll(0):
            if decision.outcome == core.GRANTED:
                request = self.asked[decision.handle]
                self.running[decision.lease_id] = decision, request, 0

    def reserved(self) -> int:
        """Return what was reserved at the grants of all that runs."""
        return sum(lease.reserved_tokens for lease, _, _ in self.running.values())

    def replay(self) -> tuple[core.Scheduler, list[int]]:
        """Replay all running leases to a scheduler that has lost everything; return its answers."""
        new = make(**self.given)
        states = []
        for number, (lease, (prompt, output, sequences), made) in enumerate(self.running.values()):
            states.append(
                new.replay(
                    0, 0, b"q%d" % number, lease.lease_id, 0, 1, lease.reserved_tokens, prompt,
                    output, output_tokens=made, sequences=sequences,
                )
            )  # fmt: skip
        new.check()
        return new, states


@settings(max_examples=200, deadline=None)
@given(events, st.sampled_from([1, 16]), st.sampled_from([0, -300_000]))
def test_replays_of_what_was_granted_are_all_accepted(
    history: list[Event], block: int, headroom: int
) -> None:
    holder, most = Holder(block, headroom_min_ppm=headroom), 0
    for event in history:
        holder.play(event)
        if holder.reserved() > most:
            most = holder.reserved()
            _, states = holder.replay()
            assert set(states) == {core.LEASE_LIVE}
    assert core.LEASE_UNKNOWN not in holder.replay()[1]


def test_granted_leases_reserve_five_times_the_pool_and_return() -> None:
    # The worst case of the proof: the k-th lease will hold a k-th of the pool.
    holder = Holder(1)
    for k in range(1, 200):
        holder.play(("ask", (1, CAPACITY // k - 1 or 1, 1), 0, 0))
    assert holder.reserved() > 4 * CAPACITY
    _, states = holder.replay()
    assert set(states) == {core.LEASE_LIVE}


def replayed(s: core.Scheduler, number: int, tokens: int, epoch: int = 1) -> int:
    name = b"%d-%d" % (epoch, number)
    return s.replay(0, 0, name, epoch * 10_000 + number, 0, epoch, tokens, 10, 10)


def test_replays_beyond_what_could_be_granted_are_refused() -> None:
    s = make(capacity=CAPACITY)
    states = [replayed(s, number, CAPACITY) for number in range(100)]
    accepted = states.count(core.LEASE_LIVE)
    # L (1 + H) with the binary digits of n - 1 instead of H: three pools for n = 3, and for n = 4.
    assert accepted == 3
    assert states == [core.LEASE_LIVE] * 3 + [core.LEASE_UNKNOWN] * 97
    assert totals(s, 0)["replays_refused"] == 100 - accepted
    assert totals(s, 0)["promised_tokens"] == accepted * CAPACITY
    [(event, pool, _, reason)] = s.take_notes()
    assert (event, pool) == ("replays_capped", b"p")
    assert "more than the 1000 tokens of the pool" in reason
    s.check()
    s.set_pool(0, b"p", 2, CAPACITY, 1)  # nothing of the earlier engine is left
    assert replayed(s, 0, CAPACITY, epoch=2) == core.LEASE_LIVE


@pytest.mark.parametrize("tokens", [1 << 27, 2 * CAPACITY])
def test_one_replay_reserves_no_more_than_the_pool(tokens: int) -> None:
    s = make(capacity=CAPACITY)
    assert replayed(s, 1, tokens) == core.LEASE_UNKNOWN
    assert replayed(s, 1, CAPACITY) == core.LEASE_LIVE


def test_debt_of_the_saved_state_is_accepted_beside() -> None:
    old = make(capacity=CAPACITY)
    for number in range(3):
        assert replayed(old, number, CAPACITY) == core.LEASE_LIVE
    rows: list[tuple[bytes, bytes, int]] = []
    while some := old.save(0, 1_000):
        rows += [(key, value, 0) for key, value in some if value is not None]
    new = make(capacity=CAPACITY // 4)  # the file has lowered it
    new.set_saved(0, rows)
    assert [replayed(new, n, CAPACITY) for n in range(3)] == [core.LEASE_LIVE] * 3


def test_audit_grants_without_room_so_its_replays_have_no_bound() -> None:
    s = make(capacity=CAPACITY)
    s.set_flow_mode(0, 0, True)
    assert {replayed(s, n, CAPACITY) for n in range(50)} == {core.LEASE_LIVE}
    assert totals(s, SECOND)["replays_refused"] == 0
