"""Counts service by the rules of the contract (arXiv 2401.00588, algorithm 2).

The auditor derives them from the messages alone. It can do so only if the messages show every
change of a counter: every request reports its progress, nothing waits for a quota, and each stream
reads all its verdicts.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter

from schedsvc_lab.faults.auditor.records import CREDIT_AUTO, Request, Terms, require

_EVENT, _OTHER, _GRANT = range(3)
"""The cause of a change: a message, which gives its order; the scheduler by itself, in an order
that no message shows; a grant, in the order of the lease ids."""

_AVERAGED = 32
"""The average charge forgets a 32nd of itself with each request that ends."""

_ARRIVE, _LEAVE, _CHARGE, _LEARN = range(4)

_cause_and_lease = itemgetter(0, 1)


@dataclass(frozen=True)
class CounterState:
    """Holds counters as they outlive a process."""

    counters: dict[str, int]
    active: frozenset[str]
    owed: dict[str, int]  # the charge for open leases
    level: int = 0
    average_charge: int = 0


class Counters:
    """The counter that each flow must have.

    Changes are noted as they are read, and made at the end of a round: only then are the refused
    arrivals and the order of grants known. O(flows) for each change.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self.restart()

    def restart(self) -> None:
        """Start again, with empty queues and no leases."""
        self.known = self._terms.counts_exactly
        self._counters: dict[str, int] = {}
        self._queued: dict[str, int] = {}
        self._active: set[str] = set()
        self._log: list[tuple[int, int, int, str, int, Request | None]] = []
        self.is_deciding = False  # changes noted now are caused by the scheduler, not by a message
        self.owed: dict[str, int] = {}  # charges for leases of an earlier process
        self._returning: set[str] = set()  # active before, and so until a time
        self._returning_until_ns = 0
        # For the children of each group ("": the root), the most that the least active counter has
        # been at a grant or a lift.
        self._levels: dict[str, int] = {}
        # Charge of an ended request, by the number of charged groups above.
        self._averages: dict[int, int] = {}
        self._gone: set[str] = set()  # ceased to be active at an unknown point of this round
        # Depths and charges that ended at an unknown point of this round.
        self._expired: set[tuple[int, int]] = set()

    def resume(self, state: CounterState | None, returning_until_ns: int) -> None:
        """Continue from the state of an earlier process; None: that state is unknown."""
        if state is None:
            self.known = False
            return
        self._counters = dict(state.counters)
        self._active, self._returning = set(state.active), set(state.active)
        self.owed = dict(state.owed)
        self._returning_until_ns = returning_until_ns
        self._levels, self._averages = {"": state.level}, {0: state.average_charge}

    def state(self, now_ns: int, owed: dict[str, int]) -> CounterState | None:
        """Return what would outlive the process; `owed`: what is charged for open leases."""
        if not self.known or self._log or (self._returning and now_ns >= self._returning_until_ns):
            return None
        active = frozenset(self._active)
        level, average = self._levels.get("", 0), self._averages.get(0, 0)
        return CounterState(dict(self._counters), active, owed, level, average)

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

    def charged(self, flow: str, weighted: int, granted_as: int = 0) -> None:
        """Note service; negative: a refund."""
        if weighted:
            self._note(granted_as, _CHARGE, flow, weighted, None)

    def ended(self, flow: str, charges: Iterable[int] = (0,)) -> None:
        """Note the end of a lease; `charges`: of its flow and the groups above, for the average."""
        for name, charge in zip(self._terms.tree.path(flow), charges, strict=True):
            self._note(0, _LEARN, name, charge, None)

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
        log.sort(key=_cause_and_lease)  # equal items keep their order
        waiting: list[Request] = []
        if self._terms.serves_in_order and log[-1][0] == _GRANT:  # grants are last: _GRANT is most
            granted = [note[5] for note in log if note[0] == _GRANT and note[5] is not None]
            if granted and all(note[0] != _OTHER for note in log):
                waiting = heads() + granted
        for cause, _, kind, flow, value, r in log:
            if kind == _ARRIVE and r is not None and not r.refused_at_once:
                self._activate(flow)
                self._queued[flow] = self._queued.get(flow, 0) + 1
            elif kind == _LEAVE and r is not None and not r.refused_at_once:
                if value:
                    for name in self._terms.tree.path(flow):
                        self._raise_level(self._terms.tree.parent(name))
                if value and waiting and self.known:  # no more, after some arrivals
                    self._check_turn(r, waiting)
                    waiting.remove(r)
                self._queued[flow] -= 1
                self._may_rest(cause, flow)
            elif kind == _CHARGE:
                self._counters[flow] = max(0, self.of(flow) + value)
            elif kind == _LEARN:
                self._learn_charge(cause, len(self._terms.tree.above(flow)), value)
        self._gone, self._expired = set(), set()

    def _check_turn(self, r: Request, waiting: list[Request]) -> None:
        """Check that the served flow is the one that was served least (invariant 8)."""
        first = self._first_of(waiting, 0)
        require(
            first is r, "served before its turn", *r.key, self.of(r.flow), *first.key,
            self.of(first.flow),
        )  # fmt: skip

    def _first_of(self, waiting: list[Request], depth: int) -> Request:
        """Return the one that is next, of requests below one group; `depth`: of its children.

        The child with the least counter is first; ties go by arrival. A group has the arrival of
        the request that is next in it for one pool, or for any.
        """
        of_child: dict[str, list[Request]] = {}
        for r in waiting:
            path = self._terms.tree.path(r.flow)
            of_child.setdefault(path[len(path) - 1 - depth], []).append(r)

        def place(child: str) -> tuple[int, int]:
            below = of_child[child]
            if child not in self._terms.tree.weights:
                return self.of(child), min(r.seq for r in below)
            targets = {r.ask.pool if r.ask else "" for r in below}
            lines = [[r for r in below if (r.ask.pool if r.ask else "") == t] for t in targets]
            return self.of(child), min(self._first_of(line, depth + 1).seq for line in lines)

        child = min(of_child, key=place)
        if child in self._terms.tree.weights:
            return self._first_of(of_child[child], depth + 1)
        return min(of_child[child], key=lambda r: r.seq)

    def _activate(self, flow: str) -> None:
        if flow in self._active:
            return
        if self._terms.lifts:
            self._lift(flow)
            for group in self._terms.tree.above(flow):
                if group in self._active:
                    break
                self._lift(group)
                self._active.add(group)
        self._active.add(flow)

    def _lift(self, name: str) -> None:
        """Lift a flow or a group to the level of its siblings less the credit."""
        tree, credit = self._terms.tree, self._terms.credit_max
        if credit == CREDIT_AUTO:
            credit = self._averages.get(len(tree.above(name)), 0)
        level = self._raise_level(tree.parent(name))
        self._counters[name] = max(self.of(name), level - credit)

    def _raise_level(self, above: str) -> int:
        """Let the level below a group follow the least active counter; it never falls."""
        parent, known = self._terms.tree.parent, self._levels.get(above, 0)

        def level_among(names: set[str]) -> int:
            return min((self.of(name) for name in names), default=known)

        active = {name for name in self._active if parent(name) == above}
        gone = {name for name in self._gone if parent(name) == above}
        level = max(known, level_among(active))
        if gone and level != max(known, level_among(active | gone)):
            self.known = False  # a flow that has left was active then, or was not
        self._levels[above] = level
        return level

    def _learn_charge(self, cause: int, depth: int, charge: int) -> None:
        if cause != _EVENT and self._terms.credit_max == CREDIT_AUTO:
            self._expired.add((depth, charge))
            if sum(at == depth for at, _ in self._expired) > 1:
                self.known = False  # in whichever order
        known = self._averages.get(depth, 0)
        learned = known - known // _AVERAGED + charge // _AVERAGED if known else charge
        self._averages[depth] = learned

    def _may_rest(self, cause: int, flow: str) -> None:
        if self._queued.get(flow, 0) or flow not in self._active or flow in self._returning:
            return
        self._active.discard(flow)
        if cause == _OTHER:
            self._gone.add(flow)
        self._rest_above(cause, flow)

    def _rest_above(self, cause: int, flow: str) -> None:
        """Let each group above a flow rest that has no active child any more."""
        parent = self._terms.tree.parent
        for group in self._terms.tree.above(flow):
            if any(parent(name) == group for name in self._active):
                return
            self._active.discard(group)
            if cause == _OTHER:
                self._gone.add(group)

    def _end_returns(self) -> None:
        """End the activity of flows that have not returned in time."""
        back, self._returning = self._returning, set()
        self._active -= {flow for flow in back if not self._queued.get(flow, 0)}
