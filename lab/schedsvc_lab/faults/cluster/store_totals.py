"""The functions of functions.lua, and of terms.lua, as the store runs them.

Each takes the keyspace, its keys and its arguments, all as bytes, and returns the answer of a
server.
"""

import re
import struct
from functools import lru_cache
from typing import Any

from schedsvc_lab.faults.cluster.keyspace import Keyspace

__all__ = ["TERM_FUNCTIONS", "TOTALS_FUNCTIONS"]

_ROW_MINUTES = 60
_KEPT_MS = 7_200_000
_PRUNED_MAX = 400
_TTL_MAX_MS = 18_000
_TERM_MS = 2_000
_MEMBER = re.compile(rb"(\d+) ([0-9A-Fa-f]+) (\d+) ([0-9A-Fa-f]*)")
_SIZES = struct.Struct(">HH")
_ORIGIN = re.compile(rb"([^/]*)/([^/]*)/")


@lru_cache(1_024)
def _member(value: bytes) -> tuple[int, bytes, int, bytes] | None:
    found = _MEMBER.fullmatch(value)
    return None if found is None else (int(found[1]), found[2], int(found[3]), found[4])


def _entries(data: Keyspace, keys: list[bytes], now: int) -> list[tuple[bytes, bytes]]:
    for name, value in list(data.table(keys[4]).items()):
        due, gap, rest = value.partition(b" ")
        if gap and due.isdigit() and int(due) > now + _TTL_MAX_MS:
            data.put(keys[4], name, b"%d %s" % (now + _TTL_MAX_MS, rest))
    return list(data.table(keys[4]).items())


def _join(data: Keyspace, keys: list[bytes], args: list[bytes]) -> Any:
    now, members = data.now_ms(), keys[4]
    for name, value in _entries(data, keys, now):
        told = _member(value)
        if told is None or told[0] <= now:
            data.drop(members, name)
        elif name == args[0] and told[1] != args[1]:
            return [b"name", b"%d" % (told[0] - now)]
        elif name != args[0] and told[3] != args[2]:
            return [b"fingerprint", name]
    data.put(members, args[0], b"%d %s 0 %s" % (now + int(args[3]), args[1], args[2]))
    data.delete(keys[6] + args[0])
    return [b"joined", b""]


def _leave(data: Keyspace, keys: list[bytes], args: list[bytes]) -> Any:
    mine = data.table(keys[4]).get(args[0])
    told = None if mine is None else _member(mine)
    if told is not None and told[1] == args[1]:
        data.drop(keys[4], args[0])
        data.delete(keys[6] + args[0])
    return b"left"


def _disown(data: Keyspace, keys: list[bytes], row: bytes) -> None:
    found = _ORIGIN.match(row)
    origin = b"" if found is None else found[0]
    rest = row[len(origin) :]
    kept = [other for other in data.table(keys[5]).get(rest, b"").split() if other != origin]
    if kept:
        data.put(keys[5], rest, b" ".join(kept))
    else:
        data.drop(keys[5], rest)


def _prune(data: Keyspace, keys: list[bytes], all_: list[tuple[bytes, bytes]], now: int) -> None:
    for name, value in all_:
        told = _member(value)
        if told is not None and told[0] > now:
            data.expire(keys[6] + name, _KEPT_MS)
        else:
            data.drop(keys[4], name)
            data.delete(keys[6] + name)
    for key in (keys[2], keys[3], keys[5]):
        data.expire(key, _KEPT_MS)
    for _, row in data.scored(keys[2], now // 60_000 - _ROW_MINUTES)[:_PRUNED_MAX]:
        data.drop(keys[2], row)
        data.drop(keys[3], row)
        _disown(data, keys, row)


def _alive(all_: list[tuple[bytes, bytes]], now: int) -> bytes:
    names = []
    for name, value in all_:
        told = _member(value)
        if told is not None and told[0] > now:
            names.append(name)
    return b" ".join(sorted(names))


def _write(
    data: Keyspace,
    keys: list[bytes],
    args: list[bytes],
    now: int,
    number: int,
    lives: dict[bytes, bytes],
) -> None:
    own, again = args[8], args[6] == b"1"
    rests = [row[len(own) :] for row in args[9::2]]
    for row, totals in zip(args[9::2], args[10::2], strict=True):
        data.put(keys[3], row, totals)
        data.put_scored(keys[2], row, now // 60_000)
    held = data.table(keys[5])
    found = [held.get(rest) for rest in rests]
    for rest, origins in zip(rests, found, strict=True):
        all_ = [] if origins is None else origins.split()
        is_known = own in all_
        if not is_known:
            data.put(keys[5], rest, own if origins is None else origins + b" " + own)
        for origin in all_:
            if origin == own:
                continue
            parts = _ORIGIN.match(origin)
            name = None if parts is None else parts[1]
            if parts is not None and lives.get(parts[1]) == parts[2]:
                data.put_last(keys[6] + parts[1], own + rest, number)
            if (again or not is_known) and name != args[0]:
                data.put_last(keys[6] + args[0], origin + rest, number)


def _read(data: Keyspace, keys: list[bytes], args: list[bytes]) -> tuple[bytes, bytes]:
    limit, inbox = int(args[7]), keys[6] + args[0]
    names = data.first(inbox, limit)
    rows, totals = [], data.table(keys[3])
    for name in names:
        data.drop(inbox, name)
        if (held := totals.get(name)) is not None:
            rows.append(_SIZES.pack(len(name), len(held)) + name + held)
    is_all = len(names) < limit or not data.table(inbox)
    return b"".join(rows), b"all" if is_all else b"more"


def _sync(data: Keyspace, keys: list[bytes], args: list[bytes]) -> Any:
    now = data.now_ms()
    lives, is_known = {}, False
    for name, value in _entries(data, keys, now):
        told = _member(value)
        if told is not None and name == args[0]:
            is_known = told[1] == args[1]
            if told[2] >= int(args[4]) if is_known else told[0] > now:
                return [b"0"]
        elif told is not None:
            lives[name] = told[1]
    value = b"%d %s %s %s" % (now + int(args[3]), args[1], args[4], args[2])
    data.put(keys[4], args[0], value)
    if data.get(keys[1]) is None:
        data.set(keys[1], args[5])
    number = int(data.get(keys[0]) or b"0") + 1
    data.set(keys[0], b"%d" % number)
    if not is_known:
        data.delete(keys[6] + args[0])
    if len(args) > 9:
        _write(data, keys, args, now, number, lives)
    all_ = _entries(data, keys, now)
    if number % 16 == 0:
        _prune(data, keys, all_, now)
    rows, state = _read(data, keys, args)
    state = state if is_known else b"lost"
    return [b"%d" % number, data.get(keys[1]), state, rows, _alive(all_, now)]


def _probe(data: Keyspace, keys: list[bytes], args: list[bytes]) -> Any:
    data.delete(keys[0])
    return b"written"


def _look(data: Keyspace, keys: list[bytes], args: list[bytes]) -> Any:
    is_new = bool(args[1]) and args[1] not in data.table(keys[2])
    if args[1]:
        data.put(keys[2], args[1], b"%d" % (data.now_ms() + int(args[2])))
    if data.left_ms(keys[0]) > _TERM_MS:
        data.expire(keys[0], _TERM_MS)
    rows = data.table(keys[1])
    found = [data.get(keys[0]) or b"", rows.get(b"counter", b""), rows.get(b"set:" + args[0], b"")]
    return [*found, int(is_new)]


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
    if data.table(keys[1]).get(b"ended:" + args[0]) == args[1]:
        return [b"other", args[1]]
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
    return [b"held", b" ".join(names), data.table(keys[1])[b"counter"]]


def _release(data: Keyspace, keys: list[bytes], args: list[bytes]) -> Any:
    if data.get(keys[0]) == args[1]:
        data.delete(keys[0])
    data.put(keys[1], b"ended:" + args[0], args[1])
    return b"released"


def _note(data: Keyspace, keys: list[bytes], args: list[bytes]) -> Any:
    data.put(keys[0], args[0], b"%d " % data.now_ms() + args[1])
    return b"noted"


TOTALS_FUNCTIONS = {
    "schedsvc_probe": _probe,
    "schedsvc_join": _join,
    "schedsvc_leave": _leave,
    "schedsvc_sync": _sync,
}
TERM_FUNCTIONS = {
    "schedsvc_term_look": _look,
    "schedsvc_term_take": _take,
    "schedsvc_term_renew": _renew,
    "schedsvc_term_release": _release,
    "schedsvc_set_note": _note,
}
