"""Finds why the twin's requests wait: each reason from the start after every event."""

from collections import Counter
from typing import TYPE_CHECKING

from .twin_types import Request

if TYPE_CHECKING:
    from .twin_state import State


class Why:
    """Holds the reason of each queued request's wait, and how long it waited for each."""

    def __init__(self, state: "State") -> None:
        self.state = state
        self.named: list[tuple[int, Request, str]] = []  # pools that wait, in the order of serving
        self.spent: dict[int, Counter[str]] = {}  # by seq
        self.now: dict[int, tuple[str, int]] = {}  # by seq: the reason, and since when

    def waits_for(self, r: Request) -> str:
        """Return the reason of a queued request's wait at this time."""
        first = self.state.order.queue(r.flow, r.target)[0]
        return self._of_head(r) if first is r else "QUEUE"

    def _of_head(self, r: Request) -> str:
        quotas = self.state.quotas
        if r.seq in quotas.shares.holds and quotas.chain_of(r.flow):
            return "SHARE"
        if not quotas.is_candidate(r):
            return "QUOTA"
        found = self.by_pool(r)
        return found[1] if found else "TURN"

    def by_pool(self, r: Request) -> tuple[int, str] | None:
        """Return the first of the pools whose next it was at the last dispatch, and its reason."""
        for pool, other, reason in self.named:
            if other is r:
                return pool, "MODEL_QUOTA" if reason == "QUOTA" else reason
        return None

    def note(self) -> None:
        """Look at all queued requests, before time goes on."""
        now_ns, heads = self.state.now_ns, {id(r) for r in self.state.order.heads()}
        for r in self.state.queued():
            before, since_ns = self.now.setdefault(r.seq, ("QUEUE", r.arrival_ns))
            kind = self._of_head(r) if id(r) in heads else "QUEUE"
            if kind in ("QUEUE", "SHARE", "QUOTA"):  # a pool that named it does so no more
                self.named = [entry for entry in self.named if entry[1] is not r]
            if kind != before:
                self.spent.setdefault(r.seq, Counter())[before] += now_ns - since_ns
                self.now[r.seq] = kind, now_ns
