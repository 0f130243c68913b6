"""Merges the ledgers of the members of a cluster: each lease counts once.

A leader may have saved a lease and died before its holder heard so. The holder then reports the end
to the next leader, whose ledger has the lease, too. Each ledger knows the leases that an earlier
process granted (`carried`), and only those can be in two of them.

The ledger of the member that granted a lease counts; one of the others takes its place only if that
ledger has an estimate and the other one the holder's report.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from schedsvc.records.sqlite_files import readable
from schedsvc.records.usage.ledger import UsageError, check_form

__all__ = ["LEDGERS_MAX", "open_to_read"]

#: SQLite attaches no more to one connection.
LEDGERS_MAX = 10
_COLUMNS = (
    "slot_s, groups, tenant, model, pool, adapter, class, estimated, requests, input_tokens,"
    " cached_tokens, output_tokens"
)

_LEASE = (
    "SELECT slot_s, groups, tenant, model, pool, adapter, class, estimated, -1, -input_tokens,"
    " -cached_tokens, -output_tokens FROM LEDGER.carried WHERE lease_id = ?"
)
_ESTIMATE = (
    "SELECT ended_s - ended_s % 900, groups, tenant, model, pool, adapter, class, 1, -1,"
    " -input_tokens, -cached_tokens, -output_tokens FROM LEDGER.estimates WHERE lease_id = ?"
)


class _Carried(NamedTuple):
    lease_id: int
    ledger: int
    is_estimate: bool


@contextmanager
def open_to_read(paths: Sequence[Path]) -> Iterator[sqlite3.Connection]:
    """Open ledgers to read, also while schedulers write them: their table is `usage`.

    Raises UsageError. O(carried leases * ledgers * log n) for several ledgers, else O(1).
    """
    if len(paths) > LEDGERS_MAX:
        raise UsageError(f"at most {LEDGERS_MAX} ledgers can be read at once, not {len(paths)}")
    path = paths[0]
    try:
        with ExitStack() as stack:
            connection = sqlite3.connect("file::memory:", uri=True, isolation_level=None)
            stack.callback(connection.close)
            for number, path in enumerate(paths):
                uri = stack.enter_context(readable(path))
                connection.execute(f"ATTACH ? AS m{number}", (uri,))
                check_form(connection, path, f"m{number}.")
            connection.execute("BEGIN")  # what each ledger has at the first look
            _make_view(connection, len(paths))
            yield connection
    except sqlite3.Error as error:
        raise UsageError(f"cannot read the usage ledger {path}: {error}") from error


def _of(query: str, number: int) -> str:
    """Name a ledger in a query. All that becomes text of it stands in this file."""
    return query.replace("LEDGER", f"m{number}").replace("COLUMNS", _COLUMNS)


def _make_view(connection: sqlite3.Connection, count: int) -> None:
    ask = connection.execute
    ask(_of("CREATE TABLE twice (COLUMNS)", 0))
    if count > 1:
        _find_twice(connection, count)
    parts = [_of("SELECT COLUMNS FROM LEDGER.usage", n) for n in range(count)]
    parts.append(_of("SELECT COLUMNS FROM main.twice", 0))
    ask("CREATE TEMP VIEW usage AS " + " UNION ALL ".join(parts))


def _find_twice(connection: sqlite3.Connection, count: int) -> None:
    """Put what has to be taken out of the sums into `twice`."""
    carried: dict[int, list[_Carried]] = {}
    for n in range(count):
        query = _of("SELECT lease_id, estimated FROM LEDGER.carried", n)
        for lease_id, estimated in connection.execute(query):
            carried.setdefault(lease_id, []).append(_Carried(lease_id, n, bool(estimated)))
    for lease_id, found in carried.items():
        carriers = {each.ledger for each in found}
        others = [n for n in range(count) if n not in carriers]
        owner = next((n for n in others if _has(connection, lease_id, n)), None)
        best = min(found, key=lambda each: each.is_estimate)
        if owner is not None and best.is_estimate < _is_estimate(connection, lease_id, owner):
            _take_out(connection, _ESTIMATE, owner, lease_id)
            owner = None
        for each in found:
            if owner is not None or each is not best:
                _take_out(connection, _LEASE, each.ledger, lease_id)


def _has(connection: sqlite3.Connection, lease_id: int, number: int) -> bool:
    queries = (
        "SELECT 1 FROM LEDGER.leases WHERE lease_id = ?",
        "SELECT 1 FROM LEDGER.last_ids WHERE lease_id = ?",
    )
    return any(connection.execute(_of(q, number), (lease_id,)).fetchone() for q in queries)


def _is_estimate(connection: sqlite3.Connection, lease_id: int, number: int) -> bool:
    query = _of("SELECT 1 FROM LEDGER.estimates WHERE lease_id = ?", number)
    return connection.execute(query, (lease_id,)).fetchone() is not None


def _take_out(connection: sqlite3.Connection, row: str, number: int, lease_id: int) -> None:
    """Take one lease of a ledger with its tokens out of the sums."""
    connection.execute("INSERT INTO twice " + _of(row, number), (lease_id,))
