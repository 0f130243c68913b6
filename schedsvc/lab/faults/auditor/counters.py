"""Counters of service by the rules of the contract (arXiv 2401.00588, algorithm 2).

The auditor derives them from the messages alone. It can do so only if the messages show every
change of a counter: every request reports its progress, nothing waits for a quota, and each stream
reads all its verdicts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter

from schedsvc.lab.faults.auditor.records import CREDIT_AUTO, Request, Terms, require

_EVENT, _OTHER, _GRANT = range(3)
"""The cause of a change: a message, which gives its order; the scheduler by itself, in an order
that no message shows; a grant, in the order of the lease ids."""

_AVERAGED = 32
"""The average charge forgets a 32nd of itself with each request that ends."""

_ARRIVE, _LEAVE, _START, _CHARGE, _END = range(5)

_cause_and_lease = itemgetter(0, 1)


@dataclass(frozen=True)
class CounterState:
    """Counters as they outlive a process."""

    counters: dict[str, int]
    active: frozenset[str]
    last: frozenset[str]
    owed: dict[str, int]  # what they carry for open leases
    level: int = 0
    average_charge: int = 0


class Counters:
    """The counter that each flow must have.

    Changes are noted as they are heard, and made at the end of a round: only then is known which
    arrivals were refused at once, and in which order was granted. O(flows) for each change.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self.restart()

    def restart(self) -> None:
        """Start again, with nothing queued and nothing in flight."""
        self.known = self._terms.counts_exactly
        self._counters: dict[str, int] = {}
        self._queued: dict[str, int] = {}
        self._live: dict[str, int] = {}
        self._active: set[str] = set()
        self._last: set[str] = set()  # one of these was active last
        self._log: list[tuple[int, int, int, str, int, Request | None]] = []
        self._ended: list[tuple[int, str]] = []  # by a decision of this round
        self.is_deciding = False  # what is noted now was caused by the scheduler, not by a message
        self.owed: dict[str, int] = {}  # what is charged for leases of an earlier process
        self._returning: set[str] = set()  # active before, and so until a time
        self._returning_until_ns = 0
        self._level = 0  # the most that the least active counter has been at a grant or a lift
        self._average = 0  # charge of a request that has ended
        self._gone: set[str] = set()  # ceased to be active at an unknown point of this round
        self._expired: set[int] = set()  # charges that ended at an unknown point of this round

    def resume(self, state: CounterState | None, returning_until_ns: int) -> None:
        """Continue from the state of an earlier process; None: that state is unknown."""
        if state is None:
            self.known = False
            return
        self._counters = dict(state.counters)
        self._active, self._returning = set(state.active), set(state.active)
        self._last = set(state.last)
        self.owed = dict(state.owed)
        self._returning_until_ns = returning_until_ns
        self._level, self._average = state.level, state.average_charge

    def state(self, now_ns: int, owed: dict[str, int]) -> CounterState | None:
        """Return what would outlive the process; `owed`: what is charged for open leases."""
        if not self.known or self._log or (self._returning and now_ns >= self._returning_until_ns):
            return None
        active, last = frozenset(self._active), frozenset(self._last)
        return CounterState(dict(self._counters), active, last, owed, self._level, self._average)

    def of(self, flow: str) -> int:
        """Return the counter of a flow, in weighted micro-tokens."""
        return self._counters.get(flow, 0)

    # Notes.

    def _note(self, lease_id: int, kind: int, flow: str, value: int, r: Request | None) -> None:
        if self.known:
            cause = _GRANT if lease_id else _OTHER if self.is_deciding else _EVENT
            self._log.append((cause, lease_id, kind, flow, value, r))

    def arrived(self, r: Request) -> None:
        """Note a request that waits, unless it turns out to be refused at once."""
        self._note(0, _ARRIVE, r.flow, 0, r)

    def left(self, r: Request, granted_as: int = 0) -> None:
        """Note that a request waits no more; `granted_as`: the lease that it became."""
        self._note(granted_as, _LEAVE, r.flow, granted_as, r)

    def restored(self, r: Request) -> None:
        """Note a lease of an earlier process."""
        self._note(0, _START, r.flow, 0, r)

    def charged(self, flow: str, weighted: int, granted_as: int = 0) -> None:
        """Note service; negative: a refund."""
        if weighted:
            self._note(granted_as, _CHARGE, flow, weighted, None)

    def ended(self, flow: str, charge: int = 0) -> None:
        """Note the end of a lease; `charge`: what counts for the average."""
        self._note(0, _END, flow, charge, None)

    def told_of(self, flow: str, charged: int) -> None:
        """Let a replayed lease's charge replace its flow's charge from an earlier process."""
        paid = min(self.owed.get(flow, 0), charged)
        if paid:
            self.owed[flow] -= paid
            self.charged(flow, -paid)

    def close_stream(self) -> None:
        """Note that the withdrawals that follow come in an order that no message shows."""
        self.is_deciding = True

    # The end of a round.

    def settle(self, now_ns: int, heads: Callable[[], list[Request]]) -> None:
        """Apply the changes of a round; `heads` returns the requests that still wait at its end."""
        log, self._log = self._log, []
        self.is_deciding = False
        if self._returning and now_ns >= self._returning_until_ns:
            self._end_returns()
        if not log or not self.known:
            return
        log.sort(key=_cause_and_lease)  # what ties, keeps its order
        waiting: list[Request] = []
        if self._terms.serves_in_order and log[-1][0] == _GRANT:  # grants are last: _GRANT is most
            granted = [note[5] for note in log if note[0] == _GRANT and note[5] is not None]
            if granted and all(note[0] != _OTHER for note in log):
                waiting = heads() + granted
        for cause, _, kind, flow, value, r in log:
            if kind == _ARRIVE and r is not None and not r.refused_at_once:
                self._activate(flow, queues=True)
                self._queued[flow] = self._queued.get(flow, 0) + 1
            elif kind == _LEAVE and r is not None and not r.refused_at_once:
                if value:
                    self._raise_level()
                if value and waiting and self.known:  # no more, after some arrivals
                    self._check_turn(r, waiting)
                    waiting.remove(r)
                self._queued[flow] -= 1
                if value:
                    self._live[flow] = self._live.get(flow, 0) + 1
                self._may_rest(cause, flow)
            elif kind == _START:
                self._activate(flow, queues=False)
                self._live[flow] = self._live.get(flow, 0) + 1
            elif kind == _CHARGE:
                self._counters[flow] = max(0, self.of(flow) + value)
            elif kind == _END:
                self._live[flow] -= 1
                self._learn_charge(cause, value)
                self._may_rest(cause, flow)
        self._settle_last()
        self._gone, self._expired = set(), set()

    def _check_turn(self, r: Request, waiting: list[Request]) -> None:
        """Check that the served flow is the one that was served least (invariant 8)."""
        first = min(waiting, key=lambda other: (self.of(other.flow), other.seq))
        require(
            first is r, "served before its turn", *r.key, self.of(r.flow), *first.key,
            self.of(first.flow),
        )  # fmt: skip

    def _activate(self, flow: str, *, queues: bool) -> None:
        if flow in self._active or (self._terms.lift_queued and not queues):
            return
        if self._terms.lifts and self._terms.lift_queued:
            self._raise_level()
            self._counters[flow] = max(self.of(flow), self._level - self._credit)
        elif self._terms.lifts:
            among = self._active or self._last
            levels = {self.of(other) for other in among} or {0}
            least = min(levels)
            if not self._active and max(levels) > max(least, self.of(flow)):
                self.known = False  # whichever of them it was
            self._counters[flow] = max(self.of(flow), least)
        self._active.add(flow)

    @property
    def _credit(self) -> int:
        """How far below the level a flow may begin."""
        most = self._terms.credit_max
        return self._average if most == CREDIT_AUTO else most

    def _raise_level(self) -> None:
        """Let the level follow the least active counter; it never falls."""

        def level_among(flows: set[str]) -> int:
            return max([self._level, *([min(map(self.of, flows))] if flows else [])])

        if self._gone and level_among(self._active) != level_among(self._active | self._gone):
            self.known = False  # who has gone was there, or was not
        self._level = level_among(self._active)

    def _learn_charge(self, cause: int, charge: int) -> None:
        if cause != _EVENT and self._terms.credit_max == CREDIT_AUTO:
            self._expired.add(charge)
            if len(self._expired) > 1:
                self.known = False  # in whichever order
        known = self._average
        self._average = known - known // _AVERAGED + charge // _AVERAGED if known else charge

    def _may_rest(self, cause: int, flow: str) -> None:
        if self._queued.get(flow, 0) or flow not in self._active or flow in self._returning:
            return
        if self._live.get(flow, 0) == 0 or self._terms.lift_queued:
            self._active.discard(flow)
            if cause == _OTHER:
                self._gone.add(flow)
            if cause == _EVENT:
                self._last = {flow}
            else:
                self._ended.append((cause, flow))

    def _end_returns(self) -> None:
        """End the activity of flows that have not returned in time."""
        back, self._returning = self._returning, set()
        gone = {
            flow
            for flow in back
            if not self._queued.get(flow, 0)
            and (self._terms.lift_queued or not self._live.get(flow, 0))
        }
        self._active -= gone
        self._last = gone or self._last

    def _settle_last(self) -> None:
        ended, self._ended = self._ended, []
        if not ended:
            return
        by_grants = all(cause == _GRANT for cause, _ in ended)
        self._last = {ended[-1][1]} if by_grants else {flow for _, flow in ended}
