"""The functions of functions.lua, and of terms.lua, as the store runs them.

Each takes the keyspace, its keys and its arguments, all as bytes, and returns the answer of a
server.
"""

import re
import struct
from functools import lru_cache
from typing import Any

from schedsvc.lab.faults.cluster.keyspace import Keyspace

__all__ = ["TERM_FUNCTIONS", "TOTALS_FUNCTIONS"]

_ROW_MINUTES = 60
_KEPT_MS = 7_200_000
_PRUNED_MAX = 400
_TTL_MAX_MS = 18_000
_TERM_MS = 2_000
_MEMBER = re.compile(rb"(\d+) ([0-9A-Fa-f]+) (\d+) ([0-9A-Fa-f]*)")
_SIZES = struct.Struct(">HH")


@lru_cache(1_024)
def _member(value: bytes) -> tuple[int, bytes, int, bytes] | None:
    found = _MEMBER.fullmatch(value)
    return None if found is None else (int(found[1]), found[2], int(found[3]), found[4])


def _entries(data: Keyspace, keys: list[bytes], now: int) -> list[tuple[bytes, bytes]]:
    for name, value in list(data.table(keys[5]).items()):
        due, gap, rest = value.partition(b" ")
        if gap and due.isdigit() and int(due) > now + _TTL_MAX_MS:
            data.put(keys[5], name, b"%d %s" % (now + _TTL_MAX_MS, rest))
    return list(data.table(keys[5]).items())


def _join(data: Keyspace, keys: list[bytes], args: list[bytes]) -> Any:
    now, members = data.now_ms(), keys[5]
    for name, value in _entries(data, keys, now):
        told = _member(value)
        if told is None or told[0] <= now:
            data.drop(members, name)
        elif name == args[0] and told[1] != args[1]:
            return [b"name", b"%d" % (told[0] - now)]
        elif name != args[0] and told[3] != args[2]:
            return [b"fingerprint", name]
    data.put(members, args[0], b"%d %s 0 %s" % (now + int(args[3]), args[1], args[2]))
    return [b"joined", b""]


def _leave(data: Keyspace, keys: list[bytes], args: list[bytes]) -> Any:
    mine = data.table(keys[5]).get(args[0])
    told = None if mine is None else _member(mine)
    if told is not None and told[1] == args[1]:
        data.drop(keys[5], args[0])
    return b"left"


def _scored(table: dict[bytes, int], upto: int) -> list[tuple[int, bytes]]:
    """Return members of a sorted set with a score up to one, in their order."""
    return sorted((score, name) for name, score in table.items() if score <= upto)


def _changed(rows: dict[bytes, int], since: int) -> list[tuple[int, bytes]]:
    """Return rows that changed after a number, in the order of a sorted set. O(rows returned)."""
    found = []
    for name, number in reversed(rows.items()):  # the numbers only grow
        if number <= since:
            break
        found.append((number, name))
    found.sort()
    return found


def _prune(data: Keyspace, keys: list[bytes], now: int, number: int) -> None:
    minute = now // 60_000
    if minute not in data.table(keys[4]).values():
        data.put(keys[4], b"%d:%d" % (minute, number), minute)
    for key in keys[2:5]:
        data.expire(key, _KEPT_MS)
    before = _scored(data.table(keys[4]), minute - _ROW_MINUTES)
    newest = max((int(entry.rpartition(b":")[2]) for _, entry in before), default=0)
    if newest == 0:
        return
    old = _scored(data.table(keys[2]), newest)[:_PRUNED_MAX]
    for _, row in old:
        data.drop(keys[2], row)
        data.drop(keys[3], row)
    if len(old) < _PRUNED_MAX:
        for _, entry in before:
            data.drop(keys[4], entry)


def _alive(data: Keyspace, keys: list[bytes], now: int) -> bytes:
    names = []
    for name, value in _entries(data, keys, now):
        told = _member(value)
        if told is not None and told[0] > now:
            names.append(name)
    return b" ".join(sorted(names))


def _sync(data: Keyspace, keys: list[bytes], args: list[bytes]) -> Any:
    now = data.now_ms()
    mine = data.table(keys[5]).get(args[0])
    told = None if mine is None else _member(mine)
    if told is not None:
        is_same = told[1] == args[1]
        if (not is_same and told[0] > now) or (is_same and told[2] >= int(args[4])):
            return [b"0"]
    value = b"%d %s %s %s" % (now + int(args[3]), args[1], args[4], args[2])
    data.put(keys[5], args[0], value)
    if data.get(keys[1]) is None:
        data.set(keys[1], args[5])
    number = int(data.get(keys[0]) or b"0") + 1
    data.set(keys[0], b"%d" % number)
    for at in range(9, len(args), 2):
        data.put(keys[3], args[at], args[at + 1])
        data.put_last(keys[2], args[at], number)
    if number % 16 == 0:
        _prune(data, keys, now, number)
    limit = int(args[7])
    found = _changed(data.table(keys[2]), int(args[6]))[:limit]
    upto = number
    if len(found) == limit:
        upto = found[-1][0]
        if found[0][0] < upto:
            upto -= 1
    rows = []
    totals = data.table(keys[3])
    for _, row in found:
        if not row.startswith(args[8]):
            held = totals.get(row, b"")
            rows.append(_SIZES.pack(len(row), len(held)) + row + held)
    life = data.get(keys[1])
    return [b"%d" % number, life, b"%d" % upto, b"".join(rows), _alive(data, keys, now)]


def _look(data: Keyspace, keys: list[bytes], args: list[bytes]) -> Any:
    is_new = bool(args[1]) and args[1] not in data.table(keys[2])
    if args[1]:
        data.put(keys[2], args[1], b"%d" % (data.now_ms() + int(args[2])))
    if data.left_ms(keys[0]) > _TERM_MS:
        data.expire(keys[0], _TERM_MS)
    rows = data.table(keys[1])
    found = [data.get(keys[0]) or b"", rows.get(b"counter", b""), rows.get(b"set:" + args[0], b"")]
    return [*found, int(is_new)] if len(args) > 3 else found


def _take(data: Keyspace, keys: list[bytes], args: list[bytes]) -> Any:
    hold = data.get(keys[0]) or b""
    counter = data.table(keys[1]).get(b"counter", b"")
    if hold != args[1] or counter != args[2]:
        return b"changed"
    data.set(keys[0], args[3], int(args[5]))
    data.put(keys[1], b"counter", args[4])
    data.put(keys[1], b"set:" + args[0], args[3])
    data.drop(keys[2], args[6])
    return b"taken"


def _renew(data: Keyspace, keys: list[bytes], args: list[bytes]) -> Any:
    hold, last = data.get(keys[0]), data.table(keys[1]).get(b"set:" + args[0])
    found = hold if hold is not None else last if last is not None else args[1]
    if found not in (args[1], args[4]):
        return [b"other", found]
    data.set(keys[0], args[1], int(args[3]))
    if last != args[1]:
        data.put(keys[1], b"set:" + args[0], args[1])
    if b"counter" not in data.table(keys[1]):
        data.put(keys[1], b"counter", args[2])
    names, now = [], data.now_ms()
    for name, due in list(data.table(keys[2]).items()):
        if due.isdigit() and int(due) > now:
            names.append(name)
        else:
            data.drop(keys[2], name)
    return [b"held", b" ".join(names)]


def _release(data: Keyspace, keys: list[bytes], args: list[bytes]) -> Any:
    if data.get(keys[0]) == args[1]:
        data.delete(keys[0])
    return b"released"


TOTALS_FUNCTIONS = {"schedsvc_join": _join, "schedsvc_leave": _leave, "schedsvc_sync": _sync}
TERM_FUNCTIONS = {
    "schedsvc_term_look": _look,
    "schedsvc_term_take": _take,
    "schedsvc_term_renew": _renew,
    "schedsvc_term_release": _release,
}
