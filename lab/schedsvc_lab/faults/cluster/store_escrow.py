"""The function of escrow.lua, as the store runs it: the buckets of quotas.

Amounts are Python's integers; the names are those of the Lua source, to be read beside it.
"""

from dataclasses import dataclass, field
from math import ceil
from typing import Any

from schedsvc_lab.faults.cluster.keyspace import Keyspace

__all__ = ["ESCROW_FUNCTIONS", "Bucket"]

_CHUNK_MS = 3_000
_ASK_MS = 1_500
_QUIET_MS = 1_500
_KEPT_MS = 120_000
_MINUTE_MS = 60_000
_STEP_MS = 5_000
_WRAP = 1 << 52
_KINDS = 4
_EACH = range(_KINDS)

Amounts = list[int]


@dataclass(slots=True)
class _Holder:
    drawn: Amounts
    held: Amounts = field(default_factory=lambda: [0] * _KINDS)
    call: int = -1
    due: int = 0

    def copy(self) -> "_Holder":
        return _Holder(list(self.drawn), list(self.held), self.call, self.due)


@dataclass(slots=True)
class _Ask:
    name: bytes
    due: int
    least: Amounts

    def copy(self) -> "_Ask":
        return _Ask(self.name, self.due, list(self.least))


@dataclass(slots=True)
class Bucket:
    """The bucket of a tenant's or group's limits a minute."""

    at: int
    rates: Amounts
    level: Amounts
    part: Amounts = field(default_factory=lambda: [0] * _KINDS)
    holders: dict[bytes, _Holder] = field(default_factory=dict)
    asks: list[_Ask] = field(default_factory=list)
    born: bytes = b""
    since: int = 0
    gone: Amounts = field(default_factory=lambda: [0] * _KINDS)
    quiet: int = 0

    def copy(self) -> "Bucket":
        """Return a bucket that shares nothing with this one. O(members + asks)."""
        holders = {name: holder.copy() for name, holder in self.holders.items()}
        asks = [ask.copy() for ask in self.asks]
        level, part = list(self.level), list(self.part)
        births = self.born, self.since, list(self.gone), self.quiet
        return Bucket(self.at, list(self.rates), level, part, holders, asks, *births)

    def outstanding(self, k: int) -> int:
        """Return what all members hold. O(members)."""
        return sum(holder.held[k] for holder in self.holders.values())

    def _tick(self, now: int) -> int:
        if now < self.at - _STEP_MS:
            for holder in self.holders.values():
                holder.due += now - self.at
            for ask in self.asks:
                ask.due += now - self.at
            self.since += now - self.at
            self.quiet += now - self.at
            self.at = now
        return max(self.at, now)

    def settle(self, rates: Amounts, clock: int) -> None:
        """Fill it up to the present, and forget chunks and asks that are over."""
        now = self._tick(clock)
        elapsed = min(now - self.at, _MINUTE_MS)
        self.at = now
        for k in _EACH:
            rate = rates[k]
            self.level[k] += rate - self.rates[k]
            room = rate - self.outstanding(k) - self.level[k]
            rest = elapsed * (rate % _MINUTE_MS) + self.part[k]
            gain = elapsed * (rate // _MINUTE_MS) + rest // _MINUTE_MS
            self.part[k] = rest % _MINUTE_MS
            if gain >= room:
                gain, self.part[k] = room, 0
            self.level[k] = max(self.level[k] + gain, -rate)
        self.rates = rates
        for name in [name for name, holder in self.holders.items() if holder.due <= now]:
            del self.holders[name]
        self.asks = [ask for ask in self.asks if ask.due > now]

    def draw(self, holder: _Holder, k: int, amount: int) -> None:
        """Give a member so much."""
        self.level[k] -= amount
        holder.held[k] += amount
        holder.drawn[k] = (holder.drawn[k] + amount) % _WRAP

    def report(self, name: bytes, call: int, drawn: Amounts, held: Amounts) -> Amounts | None:
        """Take over what a member states; returns what covers its debts, None if it is old."""
        holder = self.holders.get(name)
        if holder is not None and holder.call >= call:
            return None
        covered = [0] * _KINDS
        if holder is None:
            holder = self.holders[name] = _Holder(list(drawn), list(held))
            for k in _EACH:
                self.level[k] -= max(0, held[k])
        holder.call = call
        for k in _EACH:
            back = (holder.drawn[k] - drawn[k]) % _WRAP
            if back >= _WRAP // 2:
                back -= _WRAP
            self.level[k] += back
            self.count_gone(k, holder.held[k] - held[k] - back)
            holder.held[k], holder.drawn[k] = held[k], drawn[k]
            if held[k] < 0:
                covered[k] = -held[k]
                self.draw(holder, k, covered[k])
            most = self.rates[k] - self.outstanding(k)
            self.level[k] = max(-self.rates[k], min(self.level[k], most))
        return covered

    def count_gone(self, k: int, amount: int) -> None:
        """Count what was spent since it began again."""
        if self.at < self.since + _MINUTE_MS:
            self.gone[k] += max(0, amount)

    def take_over(self, name: bytes, call: int, mark: bytes, stated: "_Stated") -> Amounts | None:
        """Take over what a member states, and what it knew before the bucket began again."""
        holder = self.holders.get(name)
        is_behind = holder is None or holder.call < stated.known
        if holder is not None and is_behind and self.born == stated.born:
            self.born, self.since, self.gone = mark, self.at, [0] * _KINDS
        gone = list(self.gone)
        covered = self.report(name, call, stated.drawn, stated.held)
        if covered is not None and stated.born not in (b"", self.born):
            self.quiet = self.since + _QUIET_MS
            for k in _EACH:
                spent = stated.spent[k] if is_behind else 0
                if holder is None:
                    self.level[k] -= max(0, spent - covered[k])
                more = self.level[k] + self.outstanding(k) - (stated.left[k] - gone[k])
                self.level[k] = max(-self.rates[k], self.level[k] - max(0, more))
                if is_behind:
                    self.gone[k] = gone[k]
                self.count_gone(k, spent)
        return covered

    def forget_ask(self, name: bytes) -> None:
        """Withdraw an ask."""
        self.asks = [ask for ask in self.asks if ask.name != name]

    def obstacle(self, name: bytes, least: Amounts) -> tuple[int, bool] | None:
        """Return the ms until an ask can be served, and whether it waits for the bucket alone."""
        if not any(amount > 0 for amount in least):
            return None
        needed, is_first = list(least), True
        for ask in self.asks:
            if ask.name == name:
                break
            is_first = False
            needed = [n + m for n, m in zip(needed, ask.least, strict=True)]
        wait = max(0, self.quiet - self.at)
        is_short = not is_first or wait > 0
        for k in _EACH:
            missing = needed[k] - self.level[k]
            if least[k] > 0 and missing > 0:
                is_short = True
                units = missing * _MINUTE_MS - self.part[k]
                wait = max(wait, ceil(float(units) / float(self.rates[k])))
        return (max(1, wait), is_first) if is_short else None


@dataclass(slots=True)
class _Stated:
    drawn: Amounts
    held: Amounts
    left: Amounts
    spent: Amounts
    born: bytes
    known: int


_WORDS = 5 * _KINDS + 2


def _stated(args: list[bytes], at: int) -> _Stated:
    drawn, held, left, spent = (_numbers(args, at + _KINDS * n) for n in range(1, 5))
    born, known = args[at + 5 * _KINDS : at + _WORDS]
    return _Stated(drawn, held, left, spent, born, int(known))


@dataclass(slots=True)
class _Part:
    at: int
    least: Amounts
    most: Amounts
    given: Amounts | None = None


def _numbers(args: list[bytes], at: int) -> Amounts:
    return [int(arg) for arg in args[at : at + _KINDS]]


def _recall(
    data: Keyspace, row: Bucket, key: bytes, name: bytes, mine: bytes, least: Amounts
) -> None:
    prefix = mine[: len(mine) - len(name)]
    for other, holder in row.holders.items():
        short = any(least[k] > row.level[k] and holder.held[k] > 0 for k in _EACH)
        if other != name and short:
            data.put(prefix + other, key, b"")
            data.expire(prefix + other, _CHUNK_MS)


def _wait_at(row: Bucket, name: bytes, least: Amounts) -> None:
    for ask in row.asks:
        if ask.name == name:
            ask.due, ask.least = row.at + _ASK_MS, least
            return
    row.asks.append(_Ask(name, row.at + _ASK_MS, least))


def _serve(
    data: Keyspace, rows: list[Bucket], keys: list[bytes], who: bytes, name: bytes,
    path: list[_Part],
) -> tuple[int, int]:  # fmt: skip
    for part in path:
        row = rows[part.at]
        found = row.obstacle(name, part.least)
        if found is not None:
            wait, is_first = found
            _wait_at(row, name, part.least)
            for other in path:
                if other.at != part.at:
                    rows[other.at].forget_ask(name)
            if is_first:
                _recall(data, row, keys[part.at + 2], who, keys[0], part.least)
            return wait, part.at + 1
    for part in path:
        row = rows[part.at]
        row.forget_ask(name)
        part.given = [0] * _KINDS
        for k in _EACH:
            more = 0
            if not row.asks:
                half = (row.level[k] - part.least[k]) // 2
                more = max(0, min(part.most[k] - part.least[k], half))
            row.draw(row.holders[who], k, part.least[k] + more)
            part.given[k] = part.least[k] + more
    return 0, 0


def _load(data: Keyspace, key: bytes, rates: Amounts, clock: int, mark: bytes) -> Bucket:
    found = data.get(key)
    if found is None:
        return Bucket(clock, rates, list(rates), born=mark, since=clock)
    row: Bucket = found.copy()
    row.settle(rates, clock)
    return row


def _exchange(data: Keyspace, keys: list[bytes], args: list[bytes]) -> Any:
    clock, who, call = data.now_ms(), args[0], int(args[1])
    mark = who + b":" + args[1]
    at = 3 + int(args[2])
    gone = [who + b" " + name for name in args[3:at]]
    rows: list[Bucket] = []
    given: list[Amounts] = []
    for key in keys[2:]:
        row = _load(data, key, _numbers(args, at), clock, mark)
        covered = row.take_over(who, call, mark, _stated(args, at))
        if covered is None:
            return []
        for name in gone:
            row.forget_ask(name)
        rows.append(row)
        given.append(covered)
        at += _WORDS
    waits: list[int] = []
    while at < len(args):
        name, count = who + b" " + args[at], int(args[at + 1])
        at += 2
        path = []
        for _ in range(count):
            path.append(_Part(int(args[at]) - 1, _numbers(args, at + 1), _numbers(args, at + 5)))
            at += 1 + 2 * _KINDS
        waits += _serve(data, rows, keys, who, name, path)
        for part in path:
            if part.given is not None:
                for k in _EACH:
                    given[part.at][k] += part.given[k]
    if data.get(keys[1]) is None:
        data.set(keys[1], mark)
    life, out = data.get(keys[1]), []
    for key, row, amounts in zip(keys[2:], rows, given, strict=True):
        out += [*amounts, *row.level, *map(row.outstanding, _EACH)]
        row.holders[who].due = row.at + _CHUNK_MS
        data.set(key, row, _KEPT_MS)
    recalled = list(data.table(keys[0]))
    if recalled:
        data.delete(keys[0])
    return [out, waits, recalled, life, [row.born for row in rows]]


ESCROW_FUNCTIONS = {"schedsvc_escrow": _exchange}
