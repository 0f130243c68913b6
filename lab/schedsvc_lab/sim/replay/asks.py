"""Collects the requests of a recording: the verdict on each, and its run."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from google.protobuf.message import DecodeError
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc._core import CANCELLED, EVICTED_CANCELLED, EXPIRED, GRANTED, Decision
from schedsvc.config import UNKNOWN_TENANT
from schedsvc.records.recording.form import Event, Kind
from schedsvc_lab.sim.replay.exact import Watcher
from schedsvc_lab.sim.replay.reader import Recording

__all__ = ["Ask", "Collector", "End", "PoolEvent", "Report"]

# A verdict is taken soon after the poll in which it fell.
_POLLS_KEPT = 32


class Report(NamedTuple):
    """Holds totals that were reported `after_ns` after the grant; -1: absent.

    `order` numbers reports and ends in order of arrival, for those at the same time.
    """

    after_ns: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    order: int = 0


class End(NamedTuple):
    """Says how a run ended, `after_ns` after the grant; totals that are absent are -1."""

    after_ns: int
    outcome: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    order: int = 0


@dataclass(slots=True)
class Ask:
    """Describes one recorded request. Times are in ns; `lease_id` is 0 if it was not granted.

    `withdrawn_ns` is the time at which its caller left, if it waited then. If `end` is None, its
    holder never ended the run.
    """

    arrival_ns: int
    principal: int
    tenant: str
    data: bytes
    queue_ttl_ns: int = 0
    outcome: int = 0
    waited_ns: int = 0
    lease_id: int = 0
    withdrawn_ns: int | None = None
    reports: list[Report] = field(default_factory=list)
    end: End | None = None

    @property
    def granted_ns(self) -> int:
        """Return when it was granted, where it was."""
        return self.arrival_ns + self.waited_ns


class PoolEvent(NamedTuple):
    """Records that a stream offered a pool, or (`data` empty) ended."""

    at_ns: int
    owner: int
    principal: int
    data: bytes


class Collector(Watcher):
    """Watches an exact replay and gathers its requests, in order of arrival.

    A repeated call of a request that is known is counted in `repeats` and left out. Memory: some
    hundred bytes for each request and each report.
    """

    def __init__(self, recording: Recording) -> None:
        self.asks: list[Ask] = []
        self.pools: list[PoolEvent] = []
        self.repeats = 0
        #: When the server began to drain, and when it evicted what was queued; None: never.
        self.drain_ns: int | None = None
        self.evict_ns: int | None = None
        self._tenants = _key_tenants(recording)
        self._handles: dict[int, Ask] = {}
        self._tags: dict[tuple[int, int], Ask] = {}
        self._leases: dict[int, Ask] = {}
        self._principals: dict[int, int] = {}
        self._handles_seen: set[int] = set()
        self._polls_ns: deque[int] = deque(maxlen=_POLLS_KEPT)
        self._order = 0  # number of the latest report or end

    # Callbacks of the replay.

    def admitted(
        self, now_ns: int, principal: int, data: bytes, queue_ttl_ns: int, answer: int | bytes
    ) -> None:
        """Record a unary Admit, and its verdict if there is one."""
        ask = Ask(now_ns, principal, self._tenant(data), data, queue_ttl_ns)
        if isinstance(answer, bytes):
            self._verdict(ask, pb.AdmitResponse.FromString(answer))
        elif answer in self._handles_seen:
            self.repeats += 1
        else:
            self._handles_seen.add(answer)
            self._handles[answer] = ask
            self.asks.append(ask)

    def decided(self, now_ns: int, decision: Decision) -> None:
        """Note the verdict on a unary Admit."""
        ask = self._handles.get(decision.handle)
        if ask is None or decision.outcome == EXPIRED:
            return
        ask.outcome, ask.waited_ns = decision.outcome, decision.waited_ns
        if decision.outcome == GRANTED:
            ask.lease_id = decision.lease_id
            self._leases[decision.lease_id] = ask

    def opened(self, owner: int, principal: int) -> None:
        """Note a new stream."""
        self._principals[owner] = principal

    def received(self, now_ns: int, owner: int, data: bytes) -> None:
        """Note the events of a SessionRequest."""
        try:
            events = pb.SessionRequest.FromString(data).events
        except DecodeError:
            return  # the core refuses it, too
        for event in events:
            kind = event.WhichOneof("event")
            if kind == "admit":
                request = event.admit.request.SerializeToString()
                ask = Ask(now_ns, self._principals[owner], self._tenant(request), request)
                self._tags[owner, event.admit.tag] = ask
            elif kind == "progress":
                self._progress(now_ns, event.progress)
            elif kind == "complete":
                self._complete(now_ns, event.complete)
            elif kind == "cancel":
                self._withdraw(now_ns, self._tags.get((owner, event.cancel.tag)))
            elif kind == "pool":
                pool = event.pool.SerializeToString()
                self.pools.append(PoolEvent(now_ns, owner, self._principals[owner], pool))

    def taken(self, now_ns: int, owner: int, data: bytes) -> None:
        """Record the verdicts of a SessionResponse; faults are no requests."""
        response = pb.SessionResponse.FromString(data)
        for fault in response.faults:
            self._tags.pop((owner, fault.tag), None)
            if not fault.tag and fault.field.startswith("pool"):
                self._forget_offer(owner)
        for verdict in response.verdicts:
            ask = self._tags.pop((owner, verdict.tag), None)
            if ask is not None:
                self._verdict(ask, verdict.response)

    def _forget_offer(self, owner: int) -> None:
        """Leave out the last pool that a stream offered: it was refused. O(pools)."""
        for at in range(len(self.pools) - 1, -1, -1):
            if self.pools[at].owner == owner and self.pools[at].data:
                del self.pools[at]
                return

    def event(self, event: Event) -> None:
        """Note the reports of unary calls, and the end of a stream or of the server."""
        now_ns = event.fields[0]
        if event.kind == Kind.POLL:
            self._polls_ns.append(now_ns)
        elif event.kind == Kind.PROGRESS:
            _, lease_id, _, *totals, _ = event.fields
            self._report(now_ns, lease_id, (totals[0], totals[1], totals[2]))
        elif event.kind == Kind.COMPLETE:
            _, lease_id, _, outcome, *totals, _ = event.fields
            self._end(now_ns, lease_id, outcome, (totals[0], totals[1], totals[2]))
        elif event.kind == Kind.CANCEL:
            self._withdraw(now_ns, self._handles.get(event.fields[1]))
        elif event.kind == Kind.CLOSE:
            self._hang_up(now_ns, event.fields[1])
        elif event.kind == Kind.DRAIN and self.drain_ns is None:
            self.drain_ns = now_ns
        elif event.kind == Kind.EVICT and self.evict_ns is None:
            self.evict_ns = now_ns

    def finish(self) -> list[Ask]:
        """Return the requests in order of arrival. Those that still waited have no outcome."""
        self.asks.extend(self._tags.values())
        self._tags.clear()
        self.asks.sort(key=lambda ask: ask.arrival_ns)
        return self.asks

    # Interpretation of the events.

    def _verdict(self, ask: Ask, response: pb.AdmitResponse) -> None:
        lease_id = response.grant.lease_id
        if lease_id in self._leases:
            self.repeats += 1
            return
        ask.outcome = response.outcome
        ask.waited_ns = self._exact_ns(ask, response.queue_duration_us)
        if lease_id:
            ask.lease_id = lease_id
            self._leases[lease_id] = ask
        self.asks.append(ask)

    def _exact_ns(self, ask: Ask, waited_us: int) -> int:
        """Refine a wait, which messages give in whole microseconds: it ended at a poll."""
        for now_ns in reversed(self._polls_ns):
            if (now_ns - ask.arrival_ns) // 1_000 == waited_us:
                return now_ns - ask.arrival_ns
        return waited_us * 1_000

    def _progress(self, now_ns: int, report: pb.LeaseProgress) -> None:
        self._report(now_ns, report.lease_id, _totals(report))

    def _complete(self, now_ns: int, request: pb.CompleteRequest) -> None:
        self._end(now_ns, request.lease_id, request.outcome, _totals(request))

    def _report(self, now_ns: int, lease_id: int, totals: tuple[int, int, int]) -> None:
        ask = self._leases.get(lease_id)
        if ask is not None and ask.end is None:
            self._order += 1
            ask.reports.append(Report(now_ns - ask.granted_ns, *totals, self._order))

    def _end(self, now_ns: int, lease_id: int, outcome: int, totals: tuple[int, int, int]) -> None:
        ask = self._leases.get(lease_id)
        if ask is not None and ask.end is None:
            self._order += 1
            ask.end = End(now_ns - ask.granted_ns, outcome, *totals, self._order)

    def _withdraw(self, now_ns: int, ask: Ask | None) -> None:
        if ask is None:
            return
        if ask.lease_id:
            self._end(now_ns, ask.lease_id, CANCELLED, (0, 0, 0))
        elif ask.withdrawn_ns is None:
            ask.withdrawn_ns = now_ns

    def _hang_up(self, now_ns: int, owner: int) -> None:
        """End a stream: its waiting requests are withdrawn."""
        for key in [key for key in self._tags if key[0] == owner]:
            ask = self._tags.pop(key)
            ask.withdrawn_ns = now_ns
            ask.outcome, ask.waited_ns = EVICTED_CANCELLED, now_ns - ask.arrival_ns
            self.asks.append(ask)
        self.pools.append(PoolEvent(now_ns, owner, self._principals.pop(owner), b""))

    def _tenant(self, data: bytes) -> str:
        request = pb.AdmitRequest.FromString(data)
        return request.tenant or self._tenants.get(request.api_key_sha256, UNKNOWN_TENANT)


def _totals(message: pb.LeaseProgress | pb.CompleteRequest) -> tuple[int, int, int]:
    return (
        message.input_tokens if message.HasField("input_tokens") else -1,
        message.cached_input_tokens if message.HasField("cached_input_tokens") else -1,
        message.output_tokens if message.HasField("output_tokens") else -1,
    )


def _key_tenants(recording: Recording) -> dict[bytes, str]:
    """Map each API key's hash to its tenant."""
    names: list[str] = []
    keys = {}
    for call, args, _ in recording.header["setup"]:
        if call == "set_flow" and args[0].decode() not in names:
            names.append(args[0].decode())
        elif call == "set_key":
            keys[args[0]] = names[args[1]]
    return keys
