"""Keeps what a member knows about shared buckets, and about losses of the store.

A member keeps what the store said last to be left of a bucket, for all members. If the store loses
the bucket, the members state this, so that it goes on from there (see escrow.lua).
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from schedsvc.cluster.escrow_store import KINDS, WRAP, Amounts, Answer, Stated

__all__ = ["Book", "Losses"]

_MINUTE_NS = 60_000_000_000
#: After these losses in a minute this member relies on the store no more, until one has passed.
_LOSSES_MAX = 3
_EACH = range(KINDS)


class _Known(NamedTuple):
    """Holds the content of the last answer about a bucket, and the time of its call."""

    at_ns: int
    call: int
    life: bytes
    born: bytes
    limits: Amounts
    #: For all members, with what they hold.
    left: Amounts
    #: The amounts that this member had spent then, since it began.
    spent: Amounts


@dataclass(slots=True)
class Book:
    """Keeps the books of this member on one bucket."""

    drawn: list[int]
    used_ns: int
    holds: bool = False
    #: When the store can have enough for what waits here, by the core's clock.
    due_ns: int = 0
    known: _Known | None = None

    def state(self, bucket: bytes, limits: Amounts, held: Amounts, now_ns: int) -> Stated:
        """Return what a call states of the bucket. O(1)."""
        known, drawn = self.known, tuple(self.drawn)
        if known is None or now_ns - known.at_ns >= _MINUTE_NS:
            return Stated(bucket, limits, drawn, held)
        elapsed_ns = now_ns - known.at_ns
        left, spent = [], []
        for k in _EACH:
            more = (drawn[k] - held[k] - known.spent[k]) % WRAP
            more = more if more < WRAP // 2 else 0
            full = (
                known.left[k] + limits[k] - known.limits[k] + elapsed_ns * limits[k] // _MINUTE_NS
            )
            left.append(max(-limits[k], min(full, limits[k]) - more))
            spent.append(more)
        return Stated(
            bucket, limits, drawn, held, tuple(left), tuple(spent), known.born, known.call
        )

    def learn(self, stated: Stated, answer: Answer, call: int, now_ns: int) -> bool:
        """Note an answer; return whether the store lost this bucket alone since the last one."""
        before, name = self.known, stated.bucket
        sums = zip(answer.left[name], answer.outstanding[name], strict=True)
        self.known = _Known(
            now_ns,
            call,
            answer.life,
            answer.born[name],
            stated.limits,
            tuple(n + m for n, m in sums),
            tuple((n - m) % WRAP for n, m in zip(stated.drawn, stated.held, strict=True)),
        )
        return stated.born not in (b"", self.known.born) and (
            before is not None and before.life == answer.life
        )


class Losses:
    """Counts when the store lost buckets."""

    def __init__(self) -> None:
        self._at_ns: deque[int] = deque(maxlen=_LOSSES_MAX)
        self._life = b""

    def is_new_life(self, life: bytes) -> bool:
        """Note the name of the store's data; return whether it has lost what it had before."""
        before, self._life = self._life, life
        return before not in (b"", life)

    def count(self, now_ns: int) -> None:
        """Note a loss."""
        self._at_ns.append(now_ns)

    def are_many(self, now_ns: int) -> bool:
        """Return whether the store loses buckets too often to rely on it."""
        return (
            len(self._at_ns) == _LOSSES_MAX
            and self._at_ns[-1] - self._at_ns[0] < _MINUTE_NS
            and now_ns - self._at_ns[-1] < _MINUTE_NS
        )
