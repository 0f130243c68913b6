"""Tests a Session's two ends with a network between them, in any order of events.

Whatever happens: no request gets two verdicts, and once the network is quiet every lease that the
client ended is ended at the scheduler with the totals the client gave, and no lease lives that the
client does not hold.
"""

from __future__ import annotations

import random
from collections import deque

import hypothesis.strategies as st
from hypothesis import given, settings
from schedsvc_client import Outcome
from schedsvc_client.requests import Asked, admit_request
from schedsvc_client.session_limits import SessionLimits
from schedsvc_client.session_notices import (
    Faulted,
    LeaseLost,
    Verdict,
    Welcomed,
)
from schedsvc_client.session_protocol import SessionProtocol
from schedsvc_client.testing import grant
from schedsvc_client.v1 import scheduler_pb2 as pb

MS = 1_000_000


def ask(request_id: str) -> Asked:
    return admit_request(request_id=request_id, input_tokens=4, max_output_tokens=8)


class Wire:
    """Answers, delays, or loses the stream at any point between messages, as a scheduler may."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_ns = 0
        limits = SessionLimits(message_bytes_max=1_024, events_max=5, progress_delay_ns=10 * MS)
        self.client = SessionProtocol("s", 1, limits)
        self.up = False
        self.requests = 0
        # The client's view.
        self.open: dict[int, str] = {}
        self.held: set[int] = set()
        self.judged: set[int] = set()
        self.ended: dict[int, int] = {}
        self.told: dict[int, int] = {}
        # The scheduler's.
        self.to_server: deque[bytes] = deque()
        self.to_client: deque[pb.SessionResponse] = deque()
        self.queued: dict[int, str] = {}
        self.leases: dict[str, int] = {}
        self.live: set[int] = set()
        self.final: dict[int, int] = {}
        self.totals: dict[int, int] = {}

    # The client.

    def admit(self) -> None:
        self.requests += 1
        name = f"r{self.requests}".ljust(self.random.choice((1, 400)), "x")
        self.open[self.client.admit(ask(name))] = name

    def cancel(self) -> None:
        tag = self.random.choice(sorted(self.open))
        self.client.cancel(tag)
        del self.open[tag]

    def progress(self) -> None:
        tokens = self.random.randrange(50)
        lease = self.random.choice(sorted(self.held))
        self.told[lease] = max(self.told.get(lease, 0), tokens)
        self.client.progress(self.now_ns, lease, (None, None, tokens))

    def complete(self) -> None:
        lease = self.random.choice(sorted(self.held))
        self.held.discard(lease)
        self.ended[lease] = self.told.get(lease, 0) + 1
        totals = (None, None, self.ended[lease])
        assert self.client.complete(self.now_ns, lease, Outcome.COMPLETED, totals)

    def wait(self) -> None:
        self.now_ns += self.random.choice((1, 15, 3_000)) * MS

    # The network.

    def send(self) -> None:
        data = self.client.data_to_send(self.now_ns)
        if data is not None:
            assert len(data) <= 1_024
            self.to_server.append(data)

    def deliver(self) -> None:
        message = pb.SessionRequest.FromString(self.to_server.popleft())
        self.seq += 1
        assert message.seq == self.seq
        answer = pb.SessionResponse(ack_seq=self.seq)
        for event in message.events:
            self.serve(event, answer)
        self.to_client.append(answer)

    def answer(self) -> None:
        for notice in self.client.receive(self.now_ns, self.to_client.popleft()):
            if isinstance(notice, Verdict):
                assert notice.tag not in self.judged
                self.judged.add(notice.tag)
                assert notice.lease is not None
                del self.open[notice.tag]
                self.held.add(notice.lease.lease_id)
            else:
                assert isinstance(notice, Welcomed | LeaseLost | Faulted), notice
                assert not isinstance(notice, Faulted) or notice.tag == 0
                assert not isinstance(notice, LeaseLost) or notice.lease_id not in self.held

    def lose(self) -> None:
        self.up = False
        self.client.disconnected()
        self.to_server.clear()
        self.to_client.clear()
        self.queued.clear()

    def connect(self) -> None:
        self.up = True
        self.seq = 0
        self.client.connected(self.now_ns)

    def restart(self) -> None:
        """The scheduler forgets everything except the billed leases."""
        self.leases.clear()
        self.live.clear()

    # The scheduler.

    def give(self) -> None:
        tag = self.random.choice(sorted(self.queued))
        lease = self.requests * 1_000 + len(self.leases) + len(self.final) + 1
        while lease in self.live or lease in self.final or lease in self.leases.values():
            lease += 1
        self.leases[self.queued.pop(tag)] = lease
        self.live.add(lease)
        self.verdict(tag, lease)

    def verdict(self, tag: int, lease: int) -> None:
        verdict = pb.SessionVerdict(tag=tag, response=grant(lease))
        self.to_client.append(pb.SessionResponse(verdicts=[verdict]))

    def serve(self, event: pb.SessionEvent, answer: pb.SessionResponse) -> None:
        kind = event.WhichOneof("event")
        if kind == "hello":
            answer.welcome.incarnation = 1
        elif kind == "replay":
            if event.replay.lease_id in self.final:
                answer.leases.add(lease_id=event.replay.lease_id, state=pb.LEASE_STATE_ENDED)
            else:
                self.leases[event.replay.request_id] = event.replay.lease_id
                self.live.add(event.replay.lease_id)
        elif kind == "admit":
            lease = self.leases.get(event.admit.request.request_id)
            if lease is not None:
                self.verdict(event.admit.tag, lease)
            else:
                assert event.admit.tag not in self.queued
                self.queued[event.admit.tag] = event.admit.request.request_id
        elif kind == "cancel":
            if self.queued.pop(event.cancel.tag, None) is not None:
                evicted = pb.AdmitResponse(outcome=pb.OUTCOME_EVICTED_CANCELLED)
                verdict = pb.SessionVerdict(tag=event.cancel.tag, response=evicted)
                self.to_client.append(pb.SessionResponse(verdicts=[verdict]))
            else:
                answer.faults.add(tag=event.cancel.tag, code=5, description="no such request")
        elif kind == "progress":
            assert event.progress.lease_id in self.live
        elif kind == "complete":
            lease = event.complete.lease_id
            self.live.discard(lease)
            assert self.final.setdefault(lease, event.complete.output_tokens) == (
                event.complete.output_tokens
            )

    def step(self) -> None:
        """Do one of the possible acts, the ordinary ones more often."""
        likely = {
            self.admit: 4,
            self.cancel: 1 if self.open else 0,
            self.progress: 2 if self.held else 0,
            self.complete: 2 if self.held else 0,
            self.wait: 2,
            self.send: 6 if self.up else 0,
            self.deliver: 6 if self.to_server else 0,
            self.answer: 5 if self.to_client else 0,
            self.give: 4 if self.queued else 0,
            self.lose: 1 if self.up else 0,
            self.connect: 3 if not self.up else 0,
            self.restart: 1 if not self.up else 0,
        }
        self.random.choices(list(likely), list(likely.values()))[0]()
        deadline_ns = self.client.next_deadline_ns()
        assert deadline_ns is None or self.client.open_leases > 0

    def settle(self) -> None:
        """Let the network settle, and look at the books."""
        if not self.up:
            self.connect()
        quiet = 0
        while quiet < 3:
            self.now_ns += 20 * MS
            before = len(self.to_server)
            self.send()
            busy = len(self.to_server) > before or self.to_server or self.to_client
            quiet = 0 if busy else quiet + 1
            if self.to_server:
                self.deliver()
            if self.to_client:
                self.answer()
        assert self.live == self.held
        assert set(self.queued) == set(self.open)
        assert self.client.unacknowledged == 0
        for lease, tokens in self.ended.items():
            assert self.final[lease] == tokens
        # Leases that the client never saw are returned with no usage.
        for lease in set(self.final) - set(self.ended):
            assert self.final[lease] == 0


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_any_order_of_events_ends_with_balanced_books(seed: int) -> None:
    wire = Wire(seed)
    wire.connect()
    for _ in range(150):
        wire.step()
    wire.settle()
