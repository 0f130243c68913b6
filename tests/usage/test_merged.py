"""Sums up ledgers of several members as one: a lease that several have counts once."""

import csv
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from schedsvc.cli import main
from schedsvc.records.usage.export import Span, plain_rows
from schedsvc.records.usage.ledger import IDS_KEPT_S, Ledger, UsageError, UsedLease
from schedsvc.records.usage.merged import LEDGERS_MAX

from .test_ledger import KEY, NOW, lease


def carried(lease_id: int, output: int = 5, *, estimated: bool = False) -> UsedLease:
    """Return a lease that another process granted."""
    return replace(lease(lease_id, output, estimated=estimated), carried=True)


def write(folder: Path, name: str, *leases: UsedLease) -> Path:
    """Let a member add leases, and end."""
    ledger = Ledger(folder / name, 400, lambda: 0)
    ledger.add(leases)
    ledger.close()
    return folder / name


def merged(*paths: Path) -> list[tuple[object, ...]]:
    """Return estimated, requests and output tokens of all ledgers, in any of their orders."""
    by = ("estimated",)
    found = [
        [
            (row["estimated"], row["requests"], row["output_tokens"])
            for row in plain_rows(path, by, Span(), [other for other in paths if other != path])
        ]
        for path in paths
    ]
    assert all(each == found[0] for each in found)
    return found[0]


def test_a_lease_that_was_saved_and_repeated_counts_once(tmp_path: Path) -> None:
    """1 was saved at both, 2 at the first leader only, 3 and 4 at the second only."""
    a = write(tmp_path, "a.db", lease(1), lease(2))
    b = write(tmp_path, "b.db", carried(1), carried(3), lease(4))
    assert merged(a, b) == [(False, 4, 20)]
    assert merged(b) == [(False, 3, 15)]


def test_a_lease_of_three_leaders_counts_once(tmp_path: Path) -> None:
    b = write(tmp_path, "b.db", carried(1))
    c = write(tmp_path, "c.db", carried(1))
    assert merged(b, c) == [(False, 1, 5)]
    a = write(tmp_path, "a.db", lease(1))
    assert merged(a, b, c) == [(False, 1, 5)]


def test_holders_report_overrides_an_estimate(tmp_path: Path) -> None:
    a = write(tmp_path, "a.db", lease(1, 3, estimated=True), lease(2, 9))
    b = write(tmp_path, "b.db", carried(1, 8), carried(2, 4, estimated=True))
    assert merged(a, b) == [(False, 2, 17)]


def test_an_estimate_that_is_replaced_stays_carried(tmp_path: Path) -> None:
    b = write(tmp_path, "b.db", carried(1, 3, estimated=True))
    write(tmp_path, "b.db", lease(1, 8))  # the holder's report, at the same member
    a = write(tmp_path, "a.db", lease(1, 8))
    assert merged(b) == [(False, 1, 8)]
    assert merged(a, b) == [(False, 1, 8)]


def test_a_ledger_knows_its_last_leases_for_good(tmp_path: Path) -> None:
    """Its process was killed, and a later process deletes the ids of that day."""
    a = write(tmp_path, "a.db", lease(1))
    b = write(tmp_path, "b.db", carried(1))
    at_s = NOW + 2 * IDS_KEPT_S
    later = Ledger(a, 400, lambda: 0)
    later._steady_s = lambda: 2.0 * IDS_KEPT_S  # type: ignore[method-assign]
    later._ahead_s = float(NOW)
    later.add([lease(2, at_s=at_s)])
    later.close()
    with sqlite3.connect(a) as connection:
        assert connection.execute("SELECT lease_id FROM leases").fetchall() == [(2,)]
    assert merged(a, b) == [(False, 2, 10)]


def test_old_carried_leases_go(tmp_path: Path) -> None:
    path = write(tmp_path, "a.db", carried(1))
    ledger = Ledger(path, 1, lambda: 0)
    ledger._steady_s = lambda: 3.0 * IDS_KEPT_S  # type: ignore[method-assign]
    ledger._ahead_s = float(NOW)
    ledger.add([lease(2, at_s=NOW + 3 * IDS_KEPT_S)])
    ledger.close()
    with sqlite3.connect(path) as connection:
        for table in ("carried", "last_ids"):
            query = "SELECT count(*) FROM " + table
            assert connection.execute(query).fetchone() == (0,)


def test_the_command_adds_ledgers(tmp_path: Path) -> None:
    write(tmp_path, "usage.db", lease(1), lease(2))
    b = write(tmp_path, "b.db", carried(1), lease(3))
    config = tmp_path / "schedsvc.yaml"
    config.write_text('listeners: [{tcp: "127.0.0.1:0"}]\nusage: {path: usage.db}\n')
    words = ["usage", "export", "--config", str(config), "--by", "tenant"]
    alone = CliRunner().invoke(main, words)
    assert alone.stdout.splitlines()[1:] == [f"{KEY.tenant},2,20,8,10"]
    both = CliRunner().invoke(main, [*words, "--ledger", str(b)])
    assert both.stdout.splitlines()[1:] == [f"{KEY.tenant},3,30,12,15"]
    words[-2:] = ["--format", "focus"]
    focus = csv.DictReader(
        CliRunner().invoke(main, [*words, "--ledger", str(b)]).stdout.splitlines()
    )
    assert sum(int(charge["ConsumedQuantity"]) for charge in focus) == 3 * 15
    wrong = CliRunner().invoke(main, [*words, "--ledger", str(config)])
    assert wrong.exit_code == 1
    assert "schedsvc.yaml" in wrong.output


def test_too_many_ledgers_are_named(tmp_path: Path) -> None:
    paths = [write(tmp_path, f"{n}.db", lease(n)) for n in range(LEDGERS_MAX + 1)]
    assert len(list(plain_rows(paths[0], (), Span(), paths[1:-1]))) == 1
    with pytest.raises(UsageError, match=f"at most {LEDGERS_MAX} ledgers"):
        list(plain_rows(paths[0], (), Span(), paths[1:]))
