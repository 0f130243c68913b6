"""Asks a recorded server's requests again, of a core with another configuration.

The requests come when they came. A granted request runs as long as it ran, and reports the same
totals, counted from its grant. The only assumption about the engine is that it is as fast as it
was. A request that did not run in the recording runs like its tenant's median. A caller that left
while it waited leaves as long after its arrival, unless it has its grant by then. Pools that
streams offered are offered at the same times. The engine's telemetry is left out, because it
describes a load that no longer exists.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from statistics import median
from typing import NamedTuple

from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc._core import COMPLETED, GRANTED, CallerError, Decision, Scheduler, Session
from schedsvc.config import Config, configure
from schedsvc_lab.sim.replay.asks import Ask, Collector, End, PoolEvent, Report
from schedsvc_lab.sim.scenario import POLICIES as SIMULATED

__all__ = ["POLICIES", "Fate", "WhatIf"]

#: A recording has no engine, and its requests show no oracle how long they become.
POLICIES = tuple(sorted(SIMULATED.keys() - {"engine", "vtc-oracle"}))

# Number of renewals of a lease in each TTL.
_RENEWALS = 3


class Fate(NamedTuple):
    """Holds the fate of a request; `outcome` 0: it waited to the end of the recording.

    `assumed` is set if it runs here and did not in the recording.
    """

    outcome: int
    waited_ns: int
    assumed: bool


class _Typical(NamedTuple):
    """Holds the median run of a tenant: its tokens of input are the request's own."""

    run_ns: int
    output_tokens: int


class _Lease(NamedTuple):
    """A run under way, with its remaining reports in order."""

    lease_id: int
    epoch: int
    principal: int
    granted_ns: int
    steps: Iterator[Report | End]


class WhatIf:
    """Runs recorded requests through another core."""

    def __init__(
        self, recorded: Collector, asks: Sequence[Ask], config: Config, policy: str | None = None
    ) -> None:
        """Make the core as the configuration says, under its policy or another of POLICIES."""
        starts = [ask.arrival_ns for ask in asks[:1]] + [pool.at_ns for pool in recorded.pools[:1]]
        self._now_ns = min(starts, default=0)
        # Its streams only offer pools: they give no sign of life, and replay nothing.
        options = config.core_options() | {"sign_of_life_ns": 0}
        self.core = Scheduler(**options | {"policy": policy or config.scheduler.policy})
        configure(self.core, config, self._now_ns)
        self._asks = asks
        self._recorded = recorded
        self._renew_ns = config.scheduler.lease_ttl_ms * 1_000_000 // _RENEWALS
        self._fates: dict[int, Fate] = {}
        self._waiting: dict[int, int] = {}  # handle to request
        self._sessions: dict[int, tuple[Session, int]] = {}  # with the last seq
        #: At, order in the recording, order here, what.
        self._due: list[tuple[int, int, int, Callable[[], None]]] = []
        self._typical = _typical_runs(asks)
        self._events = 0

    def run(self, watch: Callable[[int], None] | None = None) -> list[Fate]:
        """Serve all requests; `watch` hears how many have arrived. O(events log n)."""
        recorded = self._recorded
        for pool in recorded.pools:
            self._at(pool.at_ns, lambda pool=pool: self._pool(pool))  # type: ignore[misc]
        if recorded.drain_ns is not None:
            self._at(recorded.drain_ns, lambda: self.core.drain(self._now_ns))
        if recorded.evict_ns is not None:
            self._at(recorded.evict_ns, self._evict)
        for number, ask in enumerate(self._asks):
            self._until(ask.arrival_ns)
            self._arrive(number, ask)
            self._poll()
            if watch is not None:
                watch(number + 1)
        self._until(None)
        self.core.check()
        return [
            self._fates.get(number, Fate(0, 0, assumed=False)) for number in range(len(self._asks))
        ]

    def _at(self, at_ns: int, act: Callable[[], None], order: int = 0) -> None:
        self._events += 1
        heappush(self._due, (at_ns, order, self._events, act))

    def _until(self, end_ns: int | None) -> None:
        """Let everything happen that is due by `end_ns` (None: everything)."""
        while True:
            deadline_ns = self.core.next_deadline()
            due_ns = self._due[0][0] if self._due else -1
            nexts = [at_ns for at_ns in (deadline_ns, due_ns) if at_ns >= 0]
            if not nexts or (end_ns is not None and min(nexts) > end_ns):
                break
            # A deadline that has passed is handled at once, not in the past.
            self._now_ns = max(self._now_ns, min(nexts))
            if due_ns == min(nexts):
                heappop(self._due)[3]()
            self._poll()
        if end_ns is not None:
            self._now_ns = max(self._now_ns, end_ns)

    def _arrive(self, number: int, ask: Ask) -> None:
        try:
            answer = self.core.admit_wire(self._now_ns, ask.principal, ask.data, ask.queue_ttl_ns)
        except CallerError:
            return  # wrong under this configuration, or its id is in use: it has no verdict
        if isinstance(answer, bytes):
            response = pb.AdmitResponse.FromString(answer)
            grant = response.grant
            self._decide(number, response.outcome, 0, grant.lease_id, grant.pool_epoch)
            return
        self._waiting[answer] = number
        if ask.withdrawn_ns is not None:
            patience_ns = ask.withdrawn_ns - ask.arrival_ns
            self._at(self._now_ns + patience_ns, lambda: self._leave(answer))

    def _leave(self, handle: int) -> None:
        if handle in self._waiting:
            self.core.cancel(self._now_ns, handle)

    def _evict(self) -> None:
        self.core.evict_queued(self._now_ns)

    def _poll(self) -> None:
        for decision in self.core.poll(self._now_ns):
            number = self._waiting.pop(decision.handle, None)
            if number is not None:
                self._decided(number, decision)
        self.core.ready()

    def _decided(self, number: int, decision: Decision) -> None:
        self._decide(
            number, decision.outcome, decision.waited_ns, decision.lease_id, decision.pool_epoch
        )

    def _decide(self, number: int, outcome: int, waited_ns: int, lease_id: int, epoch: int) -> None:
        ask = self._asks[number]
        granted = outcome == GRANTED
        self._fates[number] = Fate(outcome, waited_ns, granted and not ask.lease_id)
        if granted:
            steps = self._steps(ask)
            lease = _Lease(lease_id, epoch, ask.principal, self._now_ns, steps)
            self._next(lease)

    def _steps(self, ask: Ask) -> Iterator[Report | End]:
        """Yield the events of a run: as recorded, else like the median; plus its renewals."""
        if not ask.lease_id:
            typical = self._typical[ask.tenant]
            tokens = sum(pb.AdmitRequest.FromString(ask.data).input_tokens)
            end = End(typical.run_ns, COMPLETED, tokens, -1, typical.output_tokens)
            yield from self._renewals(0, end.after_ns)
            yield end
            return
        told_ns = 0
        for report in ask.reports:
            yield from self._renewals(told_ns, report.after_ns)
            yield report
            told_ns = report.after_ns
        if ask.end is not None:
            yield from self._renewals(told_ns, ask.end.after_ns)
            yield ask.end

    def _renewals(self, from_ns: int, to_ns: int) -> Iterator[Report]:
        for at_ns in range(from_ns + self._renew_ns, to_ns, self._renew_ns):
            yield Report(at_ns, -1, -1, -1)

    def _next(self, lease: _Lease) -> None:
        """Put the next step of a run on the list."""
        step = next(lease.steps, None)
        if step is not None:
            at_ns = lease.granted_ns + step.after_ns
            self._at(at_ns, lambda: self._tell(lease, step), step.order)

    def _tell(self, lease: _Lease, step: Report | End) -> None:
        key = (lease.lease_id, lease.epoch)
        # A total that was refused then is refused now.
        with suppress(CallerError):
            if isinstance(step, End):
                outcome = step.outcome or COMPLETED
                self.core.complete(self._now_ns, *key, outcome, *step[2:5], lease.principal)
            else:
                self.core.progress(self._now_ns, *key, *step[1:4], lease.principal)
        self._next(lease)

    def _pool(self, event: PoolEvent) -> None:
        """Offer a pool on a stream, or end that."""
        if not event.data:
            if event.owner in self._sessions:
                self._sessions.pop(event.owner)[0].close(self._now_ns)
            return
        offer = pool_pb2.PoolRegistration.FromString(event.data)
        offer.gates = 0
        events = [pb.SessionEvent(pool=offer)]
        if event.owner not in self._sessions:
            self._sessions[event.owner] = (self.core.open_session(event.principal), 0)
            hello = pb.SessionHello(client_id=f"stream-{event.owner}", incarnation=1)
            events.insert(0, pb.SessionEvent(hello=hello))
        session, seq = self._sessions[event.owner]
        self._sessions[event.owner] = (session, seq + 1)
        session.receive(
            self._now_ns, pb.SessionRequest(seq=seq + 1, events=events).SerializeToString()
        )
        while session.take(self._now_ns) is not None:
            pass


def _typical_runs(asks: Sequence[Ask]) -> dict[str, _Typical]:
    """Take the median of each tenant's complete runs; of all runs, if a tenant has none."""
    runs: dict[str, list[End]] = defaultdict(list)
    for ask in asks:
        if ask.end is not None and ask.end.outcome in (0, COMPLETED):
            runs[ask.tenant].append(ask.end)
    every = _median([end for ends in runs.values() for end in ends])
    return defaultdict(
        lambda: every, {tenant: _median(ends) for tenant, ends in runs.items() if ends}
    )


def _median(ends: list[End]) -> _Typical:
    if not ends:
        return _Typical(1_000_000_000, 1)
    outputs = [max(end.output_tokens, 0) for end in ends]
    return _Typical(round(median(end.after_ns for end in ends)), round(median(outputs)))
