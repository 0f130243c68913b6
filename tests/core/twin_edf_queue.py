"""Orders the requests in a flow of the twin: queues are sorted at each look."""

from operator import attrgetter
from typing import TYPE_CHECKING

from .twin_types import QUEUED, Request, Target

if TYPE_CHECKING:
    from .twin_state import State

_BY_ARRIVAL = attrgetter("seq")


class Order:
    """Orders by arrival, or earliest deadline first; a request that states none stands behind."""

    def __init__(self, state: "State", by_deadline: bool) -> None:
        self.state = state
        self.by_deadline = by_deadline

    def place(self, r: Request) -> tuple[bool, int, int]:
        if self.by_deadline and r.stated_ns is not None:
            return False, r.stated_ns, r.seq
        return True, 0, r.seq

    def sorted(self, queued: list[Request]) -> list[Request]:
        return sorted(queued, key=self.place if self.by_deadline else _BY_ARRIVAL)

    def queue(self, flow: int, target: Target) -> list[Request]:
        return self.sorted(
            [r for r in self.state.queued() if r.flow == flow and r.target == target]
        )

    def heads(self) -> list[Request]:
        """Return the first request of each queue, by arrival."""
        from_last = reversed(self.sorted(self.state.queued()))
        found = {(r.flow, r.target): r for r in from_last}
        return sorted(found.values(), key=_BY_ARRIVAL)

    def ahead(self, r: Request) -> int:
        """Return how many are before it; by arrival those that were withdrawn since still count."""
        queue = self.queue(r.flow, r.target)
        return queue.index(r) if self.by_deadline else r.ordinal - queue[0].ordinal

    def join(self, r: Request) -> list[Request]:
        """Queue it; returns the heads that there were before."""
        before = self.heads()
        self._reuse(r)
        self.state.requests.append(r)
        r.ordinal = self.state.arrivals[r.flow, r.target]
        self.state.arrivals[r.flow, r.target] += 1
        return before

    def _reuse(self, r: Request) -> None:
        """Let a set that is new to a flow take the latest empty queue that it had for another."""
        arrivals, key = self.state.arrivals, (r.flow, r.target)
        if not isinstance(r.target, tuple) or key in arrivals:
            return
        for old in reversed(list(arrivals)):
            if old[0] == r.flow and isinstance(old[1], tuple) and not self.queue(*old):
                kept = {key if each == old else each: count for each, count in arrivals.items()}
                arrivals.clear()
                arrivals.update(kept)
                return

    def change(self, by_deadline: bool) -> None:
        place = list(self.state.arrivals).index  # the newest queue is sorted first
        before = sorted(self.heads(), key=lambda r: -place((r.flow, r.target)))
        if by_deadline != self.by_deadline:
            self.by_deadline = by_deadline
            self.note_displaced(before)
            for flow in {r.flow for r in before}:
                self.give_back(flow)

    def note_displaced(self, before: list[Request]) -> None:
        """Let those of these heads step back that are none any more."""
        after = {(r.flow, r.target): r for r in self.heads()}
        quotas = self.state.quotas
        for old in before:
            new = after.get((old.flow, old.target), old)
            if new is old or old.state != QUEUED:
                continue
            if quotas.is_candidate(new):
                new.lined_ns = old.lined_ns
            old.head_ns = old.lined_ns = None
            if self._takes_in_turn(old.flow):
                quotas.close(old, False)
            quotas.gone(old)
        self.state.classes.note()

    def _takes_in_turn(self, flow: int) -> bool:
        return flow not in self.state.quotas.refusing and flow not in self.state.audit.flows

    def give_back(self, flow: int) -> None:
        """Give quotas back, except those of heads, and those taken at an arrival."""
        if self.by_deadline and self._takes_in_turn(flow):
            heads = [id(r) for r in self.heads()]
            for r in self.state.queued(lambda r: r.flow == flow):
                if id(r) not in heads:
                    self.state.quotas.close(r, False)
