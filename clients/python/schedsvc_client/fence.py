"""Keeps the highest leadership that a process has seen; an answer under a lower one is void.

A paused leader does not know that another one leads meanwhile, so its clients have to compare.

The term is compared first. A higher term is noted, and obeyed from then on. An equal term of
another leader, and a lower term, are not obeyed. An answer that states no leadership counts as term
0 if the client has several targets. A client with one target obeys it: no other scheduler can
contradict it.
"""

from __future__ import annotations

import threading
from typing import NamedTuple, Protocol

from schedsvc_client.errors import SchedulerUnavailable, unavailable
from schedsvc_client.v1 import leader_pb2

FENCES_MAX = 1_024
"""Target lists whose fence a process keeps; past it the oldest is forgotten."""
TERM_KEY = "schedsvc-term"


class Rank(NamedTuple):
    """Names a leadership: its term, and which life of which member leads under it."""

    term: int = 0
    leader: str = ""

    def __str__(self) -> str:
        return f"term {self.term} ({self.leader})" if self.term else "no term"


class Shared(Protocol):
    """Keeps the highest leadership of several processes; see FenceFile."""

    def read(self) -> Rank:
        """Return the highest one."""

    def raise_to(self, rank: Rank) -> Rank:
        """Write one if it is higher than the one there; return what is there then."""


def rank_of(leadership: leader_pb2.Leadership) -> Rank:
    """Return the rank that a message states. Term 0 is no leadership, whatever the name."""
    return Rank(leadership.term, leadership.leader) if leadership.term else Rank()


class Fence:
    """Keeps the highest leadership of a process. Threads may share it.

    `strict`: a message without a leadership counts as one of term 0.
    """

    def __init__(self, *, strict: bool = True, shared: Shared | None = None) -> None:
        self._strict = strict
        self._shared = shared
        self._highest = Rank()
        self._lock = threading.Lock()

    @property
    def highest(self) -> Rank:
        """Return the highest leadership that this process, or one with the same fence, has seen."""
        if self._shared is not None:
            shared = self._shared.read()
            if shared.term > self._highest.term:
                self._note(shared)
        return self._highest

    def obeys(self, rank: Rank) -> bool:
        """Compare a leadership, and note it if it is higher; return whether it takes effect. O(1).

        Raises OSError if it is higher and cannot be written to the shared fence: another process
        of the engine could still obey the former leader.
        """
        highest = self.highest
        if rank.term > highest.term:
            if self._shared is not None:
                rank, asked = self._shared.raise_to(rank), rank
                self._note(rank)
                return rank == asked
            self._note(rank)
            return self._highest == rank
        return rank == highest or (not rank.term and not self._strict)

    def check(self, rank: Rank, target: str = "") -> SchedulerUnavailable | None:
        """Return why the answer does not take effect; None if it does."""
        try:
            if self.obeys(rank):
                return None
        except OSError as error:
            return unavailable(f"cannot write the fence file (SCHEDSVC_FENCE): {error}")
        place = f"the scheduler at {target}" if target else "the scheduler"
        return unavailable(f"{place} answers under {rank}, but {self._highest} is known")

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a unary call: the highest term, if there is one."""
        term = self.highest.term
        return ((TERM_KEY, str(term)),) if term else ()

    def _note(self, rank: Rank) -> None:
        with self._lock:
            if rank.term > self._highest.term:
                self._highest = rank


_fences: dict[frozenset[str], Fence] = {}
_fences_lock = threading.Lock()


def fence_of(targets: tuple[str, ...]) -> Fence:
    """Return this process's fence for the schedulers of a target list, in whatever order."""
    key = frozenset(targets)
    with _fences_lock:
        fence = _fences.pop(key, None) or Fence(strict=len(targets) > 1)
        _fences[key] = fence
        while len(_fences) > FENCES_MAX:
            del _fences[next(iter(_fences))]
        return fence
