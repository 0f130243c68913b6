"""The functions of limits.lua and settings.lua, as the store runs them.

The names are those of the Lua sources, to be read beside them.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any

from schedsvc_lab.faults.cluster.keyspace import Keyspace
from schedsvc_lab.faults.cluster.store_escrow import Bucket

__all__ = ["LIMITS_FUNCTIONS", "SETTINGS_FUNCTIONS", "Cap"]

_SET_MS, _ASK_MS, _TOLD_MS, _KEPT_MS, _STEP_MS = 60_000, 1_500, 3_000, 120_000, 5_000
_BUDGET_MS = 3_456_000_000


@dataclass(slots=True)
class _Holder:
    term: int
    life: bytes
    call: int
    held: int
    due: int


@dataclass(slots=True)
class _Ask:
    owner: bytes
    due: int


@dataclass(slots=True)
class Cap:
    """A cap on concurrent requests."""

    at: int
    holders: dict[bytes, _Holder] = field(default_factory=dict)
    asks: list[_Ask] = field(default_factory=list)

    def copy(self) -> "Cap":
        """Return a cap that shares nothing with this one. O(holders + asks)."""
        holders = {
            name: _Holder(each.term, each.life, each.call, each.held, each.due)
            for name, each in self.holders.items()
        }
        return Cap(self.at, holders, [_Ask(ask.owner, ask.due) for ask in self.asks])

    def settle(self, clock: int) -> None:
        """Forget holders and asks that are over."""
        back = self.at - clock
        if back > _STEP_MS:
            for holder in self.holders.values():
                holder.due -= back
            for ask in self.asks:
                ask.due -= back
            self.at = clock
        self.at = max(self.at, clock)
        self.holders = {name: each for name, each in self.holders.items() if each.due > self.at}
        self.asks = [ask for ask in self.asks if ask.due > self.at]

    def take_ask(self, owner: bytes) -> tuple[int, int]:
        """Take an ask out; return how many precede it, and how many there are without it."""
        ahead = next((k for k, ask in enumerate(self.asks) if ask.owner == owner), None)
        self.asks = [ask for ask in self.asks if ask.owner != owner]
        return (len(self.asks) if ahead is None else ahead), len(self.asks)

    def fair_part(self, limit: int, owner: bytes) -> int:
        """Return the part of each that holds slots or asks for some."""
        claims = {owner, *(ask.owner for ask in self.asks)}
        claims |= {name for name, each in self.holders.items() if each.held > 0}
        return limit // len(claims)


def _slots(data: Keyspace, keys: list[bytes], args: list[bytes]) -> Any:
    owner, term, life, call = args[0], int(args[1]), args[2], int(args[3])
    prefix, rows = keys[0][: len(keys[0]) - len(owner)], []
    for key in keys[1:]:
        found = data.get(key)
        row = Cap(data.now_ms()) if found is None else found.copy()
        row.settle(data.now_ms())
        mine = row.holders.get(owner)
        if mine and (mine.term > term or (mine.life == life and mine.call >= call)):
            return []
        rows.append(row)
    out: list[int] = []
    for k, (key, row) in enumerate(zip(keys[1:], rows, strict=True)):
        limit, keep, want = (int(word) for word in args[4 + 3 * k : 7 + 3 * k])
        before = row.holders.get(owner)
        if before and before.life != life:
            keep = max(keep, before.held)
        mine = row.holders[owner] = _Holder(term, life, call, keep, row.at + _SET_MS)
        free = limit - sum(each.held for each in row.holders.values())
        ahead, others = row.take_ask(owner)
        given = min(want, free - ahead) if want > 0 else 0
        if given > 0 and others:
            part = max(1, row.fair_part(limit, owner)) - mine.held
            given = min(given, max(1, part) if ahead == 0 else part)
        waits = want > 0 and given <= 0
        if given > 0:
            mine.held, free = mine.held + given, free - given
        if waits:
            row.asks.insert(ahead, _Ask(owner, row.at + _ASK_MS))
            fair = row.fair_part(limit, owner)
            for name, each in row.holders.items():
                if name != owner and ahead == 0 and each.held > 0:
                    data.put(prefix + name, key, b"%d" % fair)
                    data.expire(prefix + name, _TOLD_MS)
        if mine.held == 0:
            mine.due = row.at + _TOLD_MS
        data.set(key, row, _KEPT_MS)
        out += (mine.held, max(0, free), max(0, -free), int(waits))
    told = [word for cap, fair in data.table(keys[0]).items() for word in (cap, int(fair))]
    data.delete(keys[0])
    return [out, told]


def _budgets(data: Keyspace, keys: list[bytes], args: list[bytes]) -> Any:
    out = []
    for key, spent in zip(keys, args[1:], strict=True):
        data.put(key, args[0], spent)
        data.expire(key, _BUDGET_MS)
        others = (int(n) for member, n in data.table(key).items() if member != args[0])
        out.append(b"%d" % sum(max(0, n) for n in others))
    return out


def _forgive(data: Keyspace, keys: list[bytes], _: list[bytes]) -> Any:
    found = 0
    for key in keys:
        row: Bucket | None = data.get(key)
        if row is not None and min(row.level) < 0:
            row = row.copy()
            row.level = [max(0, level) for level in row.level]
            data.set(key, row, _KEPT_MS)
            found += 1
    return found


def _settings(data: Keyspace, keys: list[bytes], args: list[bytes]) -> Any:
    number, life, index, rows = keys
    kept: list[bytes] = []
    if data.get(life) is None:
        data.set(life, args[2])
    for place, seen, row in zip(args[3::3], args[4::3], args[5::3], strict=True):
        stands = data.table(rows).get(place, b"")
        sha1 = hashlib.sha1(stands, usedforsecurity=False).hexdigest().encode() if stands else b""
        if sha1 != seen:
            kept += (place, stands)
        elif not row:
            data.drop(rows, place)
            data.drop(index, place)
        else:
            data.set(number, (data.get(number) or 0) + 1)
            data.put(rows, place, row)
            data.put(index, place, data.get(number))
    last, limit = data.get(number) or 0, int(args[1])
    found = sorted((n, place) for place, n in data.table(index).items() if n > int(args[0]))
    found = found[:limit]
    read = [word for _, place in found for word in (place, data.table(rows).get(place, b""))]
    upto = found[-1][0] if len(found) == limit else last
    return [b"%d" % last, data.get(life), b"%d" % upto, read, kept]


LIMITS_FUNCTIONS = {
    "schedsvc_slots": _slots,
    "schedsvc_budgets": _budgets,
    "schedsvc_forgive": _forgive,
}
SETTINGS_FUNCTIONS = {"schedsvc_settings": _settings}
