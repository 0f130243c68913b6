"""Holds the keys of a store, and the commands on them that functions call."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

__all__ = ["WRITES", "Keyspace", "ServerError"]

V = TypeVar("V")
_NEVER_MS = 1 << 62
#: A command's answer: a text, a number, several values, or False for none.
Answer = bytes | int | tuple[Any, ...] | bool
_EVERYTHING = float("-inf"), float("inf")


class ServerError(Exception):
    """The server refuses a command; the message is its answer."""


class Scores:
    """Represents a sorted set."""

    def __init__(self, scores: dict[bytes, float] | None = None) -> None:
        self.scores = {} if scores is None else scores
        #: The members by score, in the order of scores; built when they are first needed.
        self._groups: dict[float, set[bytes]] | None = None
        self._order: list[float] = []

    def _grouped(self) -> dict[float, set[bytes]]:
        if self._groups is None:
            self._groups = {}
            for member, score in self.scores.items():
                self._groups.setdefault(score, set()).add(member)
            self._order = sorted(self._groups)
        return self._groups

    def add(self, member: bytes, score: float) -> bool:
        """Set a score; returns whether the member is new. Mostly O(1), O(scores) for a new one."""
        groups = self._grouped()
        if self.scores.get(member) == score:
            return False
        is_new = not self.remove(member)
        self.scores[member] = score
        if score not in groups:
            groups[score] = set()
            insort(self._order, score)
        groups[score].add(member)
        return is_new

    def remove(self, member: bytes) -> bool:
        """Remove a member; returns whether it was there. O(1), O(scores) for a score's last one."""
        groups = self._grouped()
        score = self.scores.pop(member, None)
        if score is None:
            return False
        groups[score].remove(member)
        if not groups[score]:
            del groups[score], self._order[bisect_left(self._order, score)]
        return True

    def between(
        self, low: float, high: float, *, is_above: bool = False
    ) -> Iterator[tuple[bytes, float]]:
        """Iterate over members in their order. With `is_above` the lowest score is excluded.

        O(n log n) for the members with the scores that are read.
        """
        groups = self._grouped()
        first = (bisect_right if is_above else bisect_left)(self._order, low)
        for score in self._order[first : bisect_right(self._order, high)]:
            for member in sorted(groups[score]):
                yield member, score

    def copy(self) -> Scores:
        """Return a set with the same members. O(members)."""
        return Scores(dict(self.scores))


class Keyspace:
    """Holds the keys of a server, some of which expire by its wall clock.

    Hashes and sorted sets that become empty are gone, as in a server.
    """

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self.now_ms = now_ms
        self._values: dict[bytes, Any] = {}
        self._due_ms: dict[bytes, int] = {}
        #: No key expires earlier; one may expire later now.
        self._next_ms = _NEVER_MS

    def command(self, name: str, args: list[bytes]) -> Answer:
        """Carry out a command. Raises ServerError."""
        if name not in _COMMANDS:
            raise ServerError("ERR Unknown Redis command called from script")
        return _COMMANDS[name](self, *args)

    def forget_expired(self) -> None:
        """Remove keys whose time is over, before each command. O(keys that expire), mostly O(1)."""
        now_ms = self.now_ms()
        if now_ms < self._next_ms:
            return
        for key in [key for key, due_ms in self._due_ms.items() if due_ms <= now_ms]:
            self._delete(key)
        self._next_ms = min(self._due_ms.values(), default=_NEVER_MS)

    def copy(self) -> Keyspace:
        """Return what a replica or a file holds now. O(fields)."""
        other = Keyspace(self.now_ms)
        other._values = {
            key: value if isinstance(value, bytes) else value.copy()
            for key, value in self._values.items()
        }
        other._due_ms, other._next_ms = dict(self._due_ms), self._next_ms
        return other

    def contents(self) -> dict[bytes, tuple[Any, int | None]]:
        """Return each key's value, and when it expires. O(fields)."""
        plain = {k: v.scores if isinstance(v, Scores) else v for k, v in self._values.items()}
        return {key: (value, self._due_ms.get(key)) for key, value in plain.items()}

    def _of(self, kind: type[V], key: bytes) -> V | None:
        found = self._values.get(key)
        if found is None or isinstance(found, kind):
            return found
        raise ServerError("WRONGTYPE Operation against a key holding the wrong kind of value")

    def _made(self, kind: type[V], key: bytes) -> V:
        found = self._of(kind, key)
        if found is None:
            found = self._values[key] = kind()
        return found

    def _delete(self, key: bytes) -> bool:
        self._due_ms.pop(key, None)
        return self._values.pop(key, None) is not None

    def _expire(self, key: bytes, ttl_ms: int) -> None:
        self._due_ms[key] = due_ms = self.now_ms() + ttl_ms
        self._next_ms = min(self._next_ms, due_ms)

    def _time(self) -> Answer:
        now_ms = self.now_ms()
        return b"%d" % (now_ms // 1_000), b"%d" % (now_ms % 1_000 * 1_000)

    def _del(self, *keys: bytes) -> Answer:
        return sum(map(self._delete, keys))

    def _get(self, key: bytes) -> Answer:
        found = self._of(bytes, key)
        return False if found is None else found

    def _set(self, key: bytes, value: bytes, *options: bytes) -> Answer:
        if options == (b"NX",):
            if key in self._values:
                return False
        elif options and options[0] != b"PX":
            raise ServerError("ERR syntax error")
        ttl_ms = _whole(options[1]) if len(options) > 1 else None
        self._values[key] = value
        self._due_ms.pop(key, None)
        if ttl_ms is not None:
            self._expire(key, ttl_ms)
        return b"OK"

    def _incr(self, key: bytes) -> Answer:
        found = self._of(bytes, key)
        number = 1 if found is None else _whole(found) + 1
        self._values[key] = b"%d" % number
        return number

    def _pexpire(self, key: bytes, ttl_ms: bytes) -> Answer:
        after_ms = _whole(ttl_ms)
        if key in self._values:
            self._expire(key, after_ms)
        return int(key in self._values)

    def _pttl(self, key: bytes) -> Answer:
        if key not in self._values:
            return -2
        return self._due_ms[key] - self.now_ms() if key in self._due_ms else -1

    def _hset(self, key: bytes, *words: bytes) -> Answer:
        if not words or len(words) % 2:
            raise ServerError("ERR wrong number of arguments for 'hset' command")
        table = self._made(dict, key)
        before = len(table)
        table.update(zip(words[::2], words[1::2], strict=True))
        return len(table) - before

    def _hsetnx(self, key: bytes, field: bytes, value: bytes) -> Answer:
        table = self._made(dict, key)
        is_new = field not in table
        table.setdefault(field, value)
        return int(is_new)

    def _hdel(self, key: bytes, *fields: bytes) -> Answer:
        table = self._of(dict, key) or {}
        found = sum(table.pop(field, None) is not None for field in fields)
        if found and not table:
            self._delete(key)
        return found

    def _hget(self, key: bytes, field: bytes) -> Answer:
        found: bytes | None = (self._of(dict, key) or {}).get(field)
        return False if found is None else found

    def _hmget(self, key: bytes, *fields: bytes) -> Answer:
        table = self._of(dict, key) or {}
        return tuple(table.get(field, False) for field in fields)

    def _hgetall(self, key: bytes) -> Answer:
        table = self._of(dict, key) or {}
        return tuple(word for pair in table.items() for word in pair)

    def _hlen(self, key: bytes) -> Answer:
        return len(self._of(dict, key) or ())

    def _zadd(self, key: bytes, *words: bytes) -> Answer:
        if not words or len(words) % 2:
            raise ServerError("ERR syntax error")
        scores = [_score(word) for word in words[::2]]
        made = self._made(Scores, key)
        return sum(map(made.add, words[1::2], scores))

    def _zrem(self, key: bytes, *members: bytes) -> Answer:
        found = self._of(Scores, key)
        if found is None:
            return 0
        count = sum(map(found.remove, members))
        if not found.scores:
            self._delete(key)
        return count

    def _zcard(self, key: bytes) -> Answer:
        found = self._of(Scores, key)
        return 0 if found is None else len(found.scores)

    def _zpopmin(self, key: bytes, most: bytes = b"1") -> Answer:
        count, found = _whole(most), self._of(Scores, key)
        if found is None:
            return ()
        pairs = [pair for pair, _ in zip(found.between(*_EVERYTHING), range(count), strict=False)]
        self._zrem(key, *(member for member, _ in pairs))
        return tuple(word for member, score in pairs for word in (member, _text(score)))

    def _zrange(self, key: bytes, low: bytes, high: bytes, *options: bytes) -> Answer:
        with_scores = options[4:] == (b"WITHSCORES",)
        if options[:2] != (b"BYSCORE", b"LIMIT") or len(options) != 4 + with_scores:
            raise ServerError("ERR syntax error")
        is_above = low.startswith(b"(")
        bounds = _score(low.removeprefix(b"(")), _score(high)
        skipped, count = map(_whole, options[2:4])
        found = self._of(Scores, key)
        if found is None:
            return ()
        rows = found.between(*bounds, is_above=is_above)
        pairs = [pair for pair, _ in zip(rows, range(skipped + count), strict=False)][skipped:]
        if not with_scores:
            return tuple(member for member, _ in pairs)
        return tuple(word for member, score in pairs for word in (member, _text(score)))


def _whole(word: bytes) -> int:
    if not word.removeprefix(b"-").isdigit():
        raise ServerError("ERR value is not an integer or out of range")
    return int(word)


def _score(word: bytes) -> float:
    try:
        return float(word)
    except ValueError:
        raise ServerError("ERR value is not a valid float") from None


def _text(score: float) -> bytes:
    return b"%d" % score if score == score // 1 else b"%.17g" % score


_COMMANDS: dict[str, Callable[..., Answer]] = {
    name.upper(): getattr(Keyspace, "_" + name)
    for name in (
        "time", "del", "get", "set", "incr", "pexpire", "pttl",
        "hset", "hsetnx", "hdel", "hget", "hmget", "hgetall", "hlen",
        "zadd", "zrem", "zcard", "zpopmin", "zrange",
    )
}  # fmt: skip
_READS = {"TIME", "GET", "PTTL", "HGET", "HMGET", "HGETALL", "HLEN", "ZCARD", "ZRANGE"}
#: Commands that a server refuses when it takes no writes.
WRITES = frozenset(_COMMANDS) - _READS
