"""Keys of a store, of which some expire by the store's wall clock."""

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["Keyspace"]

V = TypeVar("V")
_NEVER_MS = 1 << 62
_EMPTY: dict[bytes, Any] = {}  # no one writes into it


class Keyspace:
    """The keys of a server. Hashes and sorted sets that become empty are gone, as in a server."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self.now_ms = now_ms
        self._values: dict[bytes, Any] = {}
        self._due_ms: dict[bytes, int] = {}
        #: No key expires before; one may have been given more time since.
        self._next_ms = _NEVER_MS
        #: By sorted set: no member has a score below.
        self._least: dict[bytes, int] = {}

    def get(self, key: bytes) -> Any:
        """Return the value of a key, or None. O(1)."""
        return self._values.get(key)

    def forget_expired(self) -> None:
        """Remove keys whose time is over, before each command. O(keys that expire), mostly O(1)."""
        now_ms = self.now_ms()
        if now_ms < self._next_ms:
            return
        for key in [key for key, due_ms in self._due_ms.items() if due_ms <= now_ms]:
            self.delete(key)
        self._next_ms = min(self._due_ms.values(), default=_NEVER_MS)

    def set(self, key: bytes, value: Any, ttl_ms: int | None = None) -> None:
        """Replace a value, which then expires after `ttl_ms` or never. O(1)."""
        self._values[key] = value
        self._due_ms.pop(key, None)
        if ttl_ms is not None:
            self._expire(key, ttl_ms)

    def _expire(self, key: bytes, ttl_ms: int) -> None:
        self._due_ms[key] = due_ms = self.now_ms() + ttl_ms
        self._next_ms = min(self._next_ms, due_ms)

    def table(self, key: bytes) -> dict[bytes, Any]:
        """Return a hash or sorted set to read from. O(1)."""
        found: dict[bytes, Any] = self._values.get(key, _EMPTY)
        return found

    def put(self, key: bytes, field: bytes, value: Any) -> None:
        """Set a field of a hash, or the score of a member. O(1)."""
        found = self._values.get(key)
        if found is None:
            found = self._values[key] = {}
        found[field] = value

    def put_scored(self, key: bytes, field: bytes, score: int) -> None:
        """Set the score of a member of a set that `scored()` reads. O(1)."""
        self.put(key, field, score)
        if score < self._least.get(key, score + 1):
            self._least[key] = score

    def scored(self, key: bytes, upto: int) -> list[tuple[int, bytes]]:
        """Return members with a score up to one, in their order, of a set of `put_scored()`.

        O(1) if there is none, mostly; else O(n).
        """
        if upto < self._least.get(key, upto + 1):
            return []
        table = self.table(key)
        self._least[key] = min(table.values(), default=_NEVER_MS)
        return sorted((score, name) for name, score in table.items() if score <= upto)

    def put_last(self, key: bytes, field: bytes, score: int) -> None:
        """Set a score that no member's exceeds, in a set that only `first()` reads. O(1)."""
        found = self._values.get(key)
        if found is None:
            found = self._values[key] = {}
        found.pop(field, None)
        found[field] = score

    def first(self, key: bytes, count: int) -> list[bytes]:
        """Return `count` (1 or more) members with the least scores of a set of `put_last()`.

        O(count + members with the last score * log of both).
        """
        found: list[tuple[int, bytes]] = []
        for name, score in self.table(key).items():
            if len(found) >= count and score != found[-1][0]:
                break
            found.append((score, name))
        return [name for _, name in sorted(found)[:count]]

    def drop(self, key: bytes, field: bytes) -> None:
        """Remove a field of a hash, or a member. O(1)."""
        found = self.get(key)
        if found is not None:
            found.pop(field, None)
            if not found:
                self.delete(key)

    def delete(self, key: bytes) -> None:
        """Remove a key. O(1)."""
        self._values.pop(key, None)
        self._due_ms.pop(key, None)
        self._least.pop(key, None)

    def expire(self, key: bytes, ttl_ms: int) -> None:
        """Let a key expire after a while, if it exists. O(1)."""
        if self.get(key) is not None:
            self._expire(key, ttl_ms)

    def left_ms(self, key: bytes) -> int:
        """Return the time until a key expires; below 0 if it does not. O(1)."""
        due_ms = self._due_ms.get(key)
        return -1 if due_ms is None else due_ms - self.now_ms()

    def copy(self) -> "Keyspace":
        """Return what a replica or a file holds now. O(fields)."""
        other = Keyspace(self.now_ms)
        other._values = {k: dict(v) if isinstance(v, dict) else v for k, v in self._values.items()}
        other._due_ms, other._next_ms = dict(self._due_ms), self._next_ms
        other._least = dict(self._least)
        return other
