"""Tests the ledger's file: each lease counts once, estimates give way, old rows go."""

import itertools
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from schedsvc.records.usage.export import Span, plain_rows
from schedsvc.records.usage.ledger import (
    IDS_KEPT_S,
    SLOT_S,
    Ledger,
    UsageError,
    UsageKey,
    UsedLease,
)

NOW = 1_700_000_100
KEY = UsageKey("org/team", "a", "llama", "gpu-1", "", "default")


def lease(
    lease_id: int, output: int = 5, *, estimated: bool = False, at_s: int = NOW, key: UsageKey = KEY
) -> UsedLease:
    return UsedLease(lease_id, at_s, key, estimated, 10, 4, output)


def opened(folder: Path, keep_days: int = 400, steady_s: Callable[[], float] = lambda: 0) -> Ledger:
    return Ledger(folder / "usage.db", keep_days, steady_s)


def sums(folder: Path, *by: str) -> list[tuple[object, ...]]:
    return [tuple(row.values()) for row in plain_rows(folder / "usage.db", by, Span())]


def test_ledger_sums_leases_by_key(tmp_path: Path) -> None:
    other = KEY._replace(tenant="b")
    opened(tmp_path).add([lease(1), lease(2), lease(3, 7, key=other)])
    assert sums(tmp_path, "tenant", "groups") == [
        ("a", "org/team", 2, 20, 8, 10),
        ("b", "org/team", 1, 10, 4, 7),
    ]


def test_a_lease_that_is_there_counts_once(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    ledger.add([lease(1)])
    repeated = lease(1, 99, at_s=NOW + 3 * SLOT_S)
    assert ledger.add([repeated, lease(2)]) == [repeated]
    ledger.close()
    again = opened(tmp_path)
    assert again.add([repeated]) == [repeated]
    assert sums(tmp_path) == [(2, 20, 8, 10)]


def test_a_report_replaces_an_estimate_where_it_stood(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    ledger.add([lease(1, 3, estimated=True)])
    late = lease(1, 8, at_s=NOW + 3_600, key=KEY._replace(adapter="lost"))
    assert ledger.add([late]) == []
    assert sums(tmp_path, "estimated", "adapter") == [(False, "", 1, 10, 4, 8)]
    assert ledger.add([late]) == [late]


def test_an_estimate_never_replaces_a_report(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    ledger.add([lease(1, 8)])
    estimate = lease(1, 3, estimated=True)
    assert ledger.add([estimate]) == [estimate]
    assert sums(tmp_path, "estimated") == [(False, 1, 10, 4, 8)]


def test_a_span_leaves_other_quarters_out(tmp_path: Path) -> None:
    begin = NOW - NOW % SLOT_S
    opened(tmp_path).add([lease(n, at_s=begin + n * SLOT_S) for n in range(4)])
    span = Span(begin + SLOT_S, begin + 3 * SLOT_S)
    assert [row["requests"] for row in plain_rows(tmp_path / "usage.db", (), span)] == [2]


def test_a_span_inside_a_quarter_is_refused() -> None:
    with pytest.raises(ValueError, match="since has to be a whole quarter of an hour"):
        Span(SLOT_S + 1)


def test_old_sums_and_ids_are_deleted(tmp_path: Path) -> None:
    ledger = opened(tmp_path, 2, itertools.count(0, 60).__next__)
    ledger.add([lease(1)])
    ledger.add([lease(2, at_s=NOW + IDS_KEPT_S + 1)])
    assert ledger.add([lease(1, at_s=NOW + IDS_KEPT_S + 2)]) == []  # forgotten
    ledger.add([lease(3, at_s=NOW + 3 * 86_400)])
    assert sums(tmp_path) == [(3, 30, 12, 15)]  # all but the first


def test_clock_set_forward_by_years_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steady_s = 0.0
    monkeypatch.setattr("time.time", lambda: NOW)
    ledger = opened(tmp_path, 2, lambda: steady_s)
    ledger.add([lease(1)])
    for days in (3_650, 0):
        steady_s += 3_600
        ledger.add([lease(2 + days, at_s=NOW + 3_600 + days * 86_400)])
    assert ledger.add([lease(1)]) == [lease(1)]
    assert sums(tmp_path) == [(3, 30, 12, 15)]
    # Rows that are too old by both clocks are deleted, whatever the clock showed meanwhile.
    steady_s += 3 * 86_400
    ledger.add([lease(4, at_s=NOW + int(steady_s))])
    assert sums(tmp_path) == [(2, 20, 8, 10)]


def test_a_second_process_is_kept_out(tmp_path: Path) -> None:
    first = opened(tmp_path)
    with pytest.raises(UsageError, match="is held by another process; stop that scheduler"):
        opened(tmp_path)
    first.close()
    opened(tmp_path).close()


def test_a_closed_ledger_can_be_closed_again(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    ledger.close()
    ledger.close()


def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "usage.db") as connection:
        connection.execute("CREATE TABLE t (x)")
    with pytest.raises(UsageError, match="is another program's database; name another file"):
        opened(tmp_path)


def test_another_form_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with sqlite3.connect(tmp_path / "usage.db") as connection:
        connection.execute("PRAGMA user_version = 9")
    with pytest.raises(UsageError, match="form 9, this one reads 1"):
        opened(tmp_path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "usage.db").write_bytes(b"nonsense" * 512)
    with pytest.raises(UsageError, match="cannot open the usage ledger"):
        opened(tmp_path)


def test_a_batch_that_fails_adds_nothing(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    wrong = lease(2, output=1 << 70)
    with pytest.raises(OverflowError):
        ledger.add([lease(1), wrong])
    assert sums(tmp_path) == [(0, 0, 0, 0)]


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    opened(tmp_path)
    assert (tmp_path / "usage.db").stat().st_mode & 0o777 == 0o600


def test_a_missing_ledger_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the usage ledger"):
        sums(tmp_path)
