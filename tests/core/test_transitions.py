"""Tests every order of events in a request's life by the table in `_core/lifecycle/lease.pxi`.

The table is the documentation, and the test reads it from there: it alone states the outcome. So
the model has no code of its own that could be as wrong as the core's.
"""

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core
from tests.other_core import CORE

from .stream import HELLO, Stream, asking, cancelling, completing, replaying, reporting
from .support import SECOND, make

SOURCE = CORE / "lifecycle" / "lease.pxi"
T = 5 * SECOND
OTHER, UNTOLD = 900, 901  # leases: the one that fills the pool, and one that was never granted
TOLD = {
    "none": core.LEASE_UNKNOWN,
    "QUEUED": core.LEASE_UNKNOWN,
    "VOID": core.LEASE_VOID,
    "VOID_SUSPECT": core.LEASE_VOID,
    "ENDED": core.LEASE_ENDED,
}


def read_table() -> dict[str, dict[str, str]]:
    """Return event: state: state after it."""
    rows: dict[str, dict[str, str]] = {}
    states: list[str] = []
    for line in SOURCE.read_text().splitlines():
        words = line.removeprefix("#").split()
        if line.startswith("#   event "):
            states = words[1:]
        elif states and line.startswith("#   "):
            rows[words[0]] = dict(zip(states, words[1:], strict=True))
        elif states:
            break
    return rows


TABLE = read_table()
EVENTS = tuple(TABLE)


class Life:
    """Holds one request on a stream, and its state by the table."""

    def __init__(self, *, full: bool) -> None:
        self.core = make(
            capacity=40, queue_ttl_ns=T, lease_ttl_ns=T, lease_grace_ns=T, answer_ttl_ns=10**15
        )
        self.now_ns = 0
        self.now_epoch = 1
        self.state = "none"
        self.full = self.other_lives = full
        self.others_ended = 0
        self.stream = Stream(self.core)
        self.tag = 0
        self.lease_id, self.lease_epoch = UNTOLD, 1
        if full:
            other = replaying(OTHER, "other", reserved_tokens=40)
            assert not self.stream.send(0, other).leases

    def play(self, event: str) -> None:
        """Let an event happen, in the core and in the table."""
        act: Callable[[], pb.SessionResponse] = getattr(self, event)
        before = self.state
        # No lease of before a restart is awaited any more: an unknown one stays unknown.
        is_late = event == "replay" and before == "none" and self.now_ns >= 2 * T
        self._hear(event, before, act(), restored=event == "replay" and not is_late)
        self.state = before if is_late else TABLE[event][before]
        if self.state == "QUEUED" and not self.full:
            self.state = "LIVE"  # there is room
        self._check(event)

    # The events.

    def admit(self) -> pb.SessionResponse:
        said = self.stream.send(self.now_ns, asking(self.tag + 1, "r", pools=["p"]))
        if self.state == "QUEUED":
            (fault,) = said.faults
            assert (fault.tag, fault.code) == (self.tag + 1, 6), "it is open on this stream"
            return pb.SessionResponse()
        self.tag += 1
        return said

    def room(self) -> pb.SessionResponse:
        if not self.other_lives:
            return pb.SessionResponse()
        self.other_lives = self.full = False
        self.others_ended = 1
        return self.stream.send(self.now_ns, completing(OTHER))

    def cancel(self) -> pb.SessionResponse:
        return self.stream.send(self.now_ns, cancelling(self.tag))

    def progress(self) -> pb.SessionResponse:
        report = reporting(self.lease_id, self.lease_epoch, input_tokens=10, output_tokens=3)
        return self.stream.send(self.now_ns, report)

    def complete(self) -> pb.SessionResponse:
        end = completing(self.lease_id, self.lease_epoch, input_tokens=10, output_tokens=5)
        return self.stream.send(self.now_ns, end)

    def time(self) -> pb.SessionResponse:
        self.now_ns += T - 1
        if self.other_lives:
            self.stream.send(self.now_ns, reporting(OTHER))
        self.now_ns += 1
        self.core.poll(self.now_ns)
        return self.stream.pull(self.now_ns)

    def epoch(self) -> pb.SessionResponse:
        self.now_epoch += 1
        self.full = False  # the lease that filled the pool is void, too
        self.core.set_pool(self.now_ns, b"p", self.now_epoch, 40, 1)
        self.core.poll(self.now_ns)
        return self.stream.pull(self.now_ns)

    def revoke(self) -> pb.SessionResponse:
        was = self.core.revoke(self.now_ns, self.lease_id)
        assert was == TOLD.get(self.state, core.LEASE_LIVE)
        self.core.poll(self.now_ns)
        return self.stream.pull(self.now_ns)

    def disconnect(self) -> pb.SessionResponse:
        self.stream.session.close(self.now_ns)
        self.core.poll(self.now_ns)
        self.stream = Stream(self.core, greets=False)
        return self.stream.send(self.now_ns, HELLO)

    def replay(self) -> pb.SessionResponse:
        if self.state in ("none", "QUEUED"):
            self.lease_id, self.lease_epoch = UNTOLD, self.now_epoch
        told = replaying(self.lease_id, "r", pool_epoch=self.lease_epoch)
        return self.stream.send(self.now_ns, told)

    # The answers.

    def _hear(self, event: str, before: str, said: pb.SessionResponse, *, restored: bool) -> None:
        assert not said.faults
        for verdict in said.verdicts:
            grant = verdict.response.grant
            if verdict.response.outcome == core.GRANTED:
                if before not in ("none", "QUEUED"):
                    assert grant.lease_id == self.lease_id, "the same request, another answer"
                self.lease_id, self.lease_epoch = grant.lease_id, grant.pool_epoch
        if event in ("progress", "replay"):
            restored = restored and before == "none"
            wanted = [] if before not in TOLD or restored else [TOLD[before]]
            assert [n.state for n in said.leases if n.lease_id == self.lease_id] == wanted

    def _check(self, event: str) -> None:
        stats = self.core.stats(self.now_ns)
        totals, pool = stats["totals"], stats["pools"][0]
        holds = self.state in ("LIVE", "SUSPECT")
        seen = {
            "queued": totals["queued"],
            "lives": totals["live_leases"] - self.other_lives,
            "holds": pool["live_leases"] - self.full,
            "suspect": pool["suspect_leases"],
            "promised": totals["promised_tokens"] - 40 * self.full,
            "answers": totals["stored_answers"] - self.others_ended,
        }
        assert seen == {
            "queued": self.state == "QUEUED",
            "lives": holds or self.state in ("VOID", "VOID_SUSPECT"),
            "holds": holds,
            "suspect": self.state == "SUSPECT",
            "promised": 20 * holds,
            "answers": self.state == "ENDED",
        }, f"{event} should have led to {self.state}"

    def finish(self) -> None:
        """Let everything run out: nothing is left."""
        for _ in range(4):
            self.now_ns += T
            self.core.poll(self.now_ns)
        self.core.check()
        totals = self.core.stats(self.now_ns)["totals"]
        assert [totals[k] for k in ("queued", "live_leases", "promised_tokens")] == [0, 0, 0]


def play(events: tuple[str, ...], *, full: bool) -> None:
    life = Life(full=full)
    for event in events:
        life.play(event)
    life.finish()


def test_the_table_is_whole() -> None:
    states = list(TABLE["admit"])
    assert states == ["none", "QUEUED", "LIVE", "SUSPECT", "VOID", "VOID_SUSPECT", "ENDED"]
    assert len(EVENTS) == 10
    for event, row in TABLE.items():
        assert list(row) == states, event
        assert set(row.values()) <= set(states), event
        assert row["ENDED"] == "ENDED", "a lease ends once"


def test_every_cell_is_reached() -> None:
    """Each event is sent in each state, by the shortest way."""
    ways: dict[tuple[str, bool], tuple[str, ...]] = {("none", True): ()}
    for _ in range(6):
        for (state, full), way in list(ways.items()):
            for event in EVENTS:
                room = full and event not in ("room", "epoch")
                after = TABLE[event][state]
                after = "LIVE" if after == "QUEUED" and not room else after
                ways.setdefault((after, room), (*way, event))
    assert {state for state, _ in ways} == set(TABLE["admit"])
    for (_, full), way in ways.items():
        assert full == ("room" not in way and "epoch" not in way)
        for event in EVENTS:
            play((*way, event), full=True)


@pytest.mark.parametrize("full", [False, True])
def test_every_order_of_three_events(full: bool) -> None:
    for events in product(EVENTS, repeat=3):
        play(events, full=full)


@settings(max_examples=400)
@given(events=st.lists(st.sampled_from(EVENTS), min_size=4, max_size=8), full=st.booleans())
def test_some_orders_of_more_events(events: list[str], full: bool) -> None:
    play(tuple(events), full=full)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("length", "full"), [(5, True), (4, False)])
@pytest.mark.parametrize("first", EVENTS)
def test_every_order_of_five_events(first: str, length: int, full: bool) -> None:
    for rest in product(EVENTS, repeat=length - 1):
        play((first, *rest), full=full)


@pytest.mark.parametrize(
    ("event", "state", "wrong"),
    [
        ("progress", "SUSPECT", "SUSPECT"),
        ("epoch", "LIVE", "LIVE"),
        ("complete", "VOID", "VOID"),
        ("time", "QUEUED", "QUEUED"),
    ],
)
def test_a_wrong_table_is_found(
    event: str, state: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TABLE[event], state, wrong)
    failures = 0
    for events in product(EVENTS, repeat=3):
        try:
            play(events, full=event == "time")
        except AssertionError:
            failures += 1
    assert failures
