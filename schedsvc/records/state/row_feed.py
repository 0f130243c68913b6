"""Feeds the rows of a state file to those that follow it: numbered by change, each key once.

A reader says up to which number it has read and gets what changed since, so a slow reader holds up
neither the writer nor other readers. At most all rows can wait for a reader.
"""

import time
from collections.abc import Callable, Iterable, Reversible
from typing import NamedTuple, Protocol, TypeVar

__all__ = ["FeedRow", "RowFeed", "changed_since"]


class Changed(Protocol):
    """Describes a record of a feed."""

    @property
    def number(self) -> int:
        """Return the number of its last change."""


C = TypeVar("C", bound=Changed)


def changed_since(records: Reversible[C], number: int) -> list[C]:
    """Return records that changed after a number, of records in the order of their last changes.

    O(records returned).
    """
    found = []
    for record in reversed(records):
        if record.number <= number:
            break
        found.append(record)
    found.reverse()
    return found


class FeedRow(NamedTuple):
    """Holds a row as it changed last."""

    number: int
    key: bytes
    #: None: it was deleted.
    value: bytes | None
    #: A time of the wall clock.
    at_ns: int


class RowFeed:
    """Keeps rows that a core returned, in the order of their last changes.

    Empty until `begin()`.
    """

    def __init__(self, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self.wall_ns = wall_ns
        self.is_on = False
        #: The number of the last change.
        self.number = 0
        self._rows: dict[bytes, FeedRow] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def begin(self) -> None:
        """Keep rows from now on; the caller brings all rows. O(1)."""
        self.is_on = True

    def add(self, rows: Iterable[tuple[bytes, bytes | None]], at_ns: int) -> None:
        """Add rows that the core returned at that time of the wall clock. O(rows)."""
        if not self.is_on:
            return
        for key, value in rows:
            self.number += 1
            self._rows.pop(key, None)
            self._rows[key] = FeedRow(self.number, key, value, at_ns)

    def since(self, number: int) -> list[FeedRow]:
        """Return rows that changed after a number, in order. O(rows returned)."""
        return changed_since(self._rows.values(), number)
