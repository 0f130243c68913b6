"""Keeps rows between the core and the file: what is not written yet, and the age of the rest."""

from collections.abc import Iterable

__all__ = ["Backlog", "ChangedRow", "SavedRow", "aged"]

#: Key, value, and when it was saved by the wall clock, in ns.
SavedRow = tuple[bytes, bytes, int]
#: The same, with None for a value if the row is to be deleted.
ChangedRow = tuple[bytes, bytes | None, int]

#: Older rows count as this old: all buckets are full by then.
_AGE_MAX_NS = 86_400 * 10**9


class Backlog:
    """Holds rows that are not in the file yet; bounded by the rows that there are."""

    def __init__(self) -> None:
        self._rows: dict[bytes, ChangedRow] = {}

    def add(self, rows: Iterable[tuple[bytes, bytes | None]], at_ns: int) -> None:
        """Add rows that the core returned at that time of the wall clock. O(rows)."""
        for key, value in rows:
            self._rows[key] = (key, value, at_ns)

    def take(self) -> dict[bytes, ChangedRow]:
        """Take all out, to write them. O(1)."""
        taken, self._rows = self._rows, {}
        return taken

    def put_back(self, taken: dict[bytes, ChangedRow]) -> None:
        """Keep what could not be written, unless newer rows have come. O(rows)."""
        self._rows = taken | self._rows


def aged(rows: Iterable[SavedRow], present_ns: int) -> list[SavedRow]:
    """Return rows with their age instead of their time; a clock put back credits nothing."""
    return [
        (key, value, min(max(0, present_ns - at_ns), _AGE_MAX_NS)) for key, value, at_ns in rows
    ]
