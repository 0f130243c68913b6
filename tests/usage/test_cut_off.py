"""Tests a ledger that another program truncates: readable rows are kept, lost ones counted."""

import os
import tracemalloc
from pathlib import Path

import pytest

from schedsvc.records.usage.ledger import Ledger, UsageError, UsedLease
from tests.killed import holding

from .test_held_file import Losses
from .test_ledger import KEY, NOW, lease, opened, sums

PAGE = 4_096
MANY = 3_000
PLACES = pytest.mark.parametrize("size", [0, 1_000, PAGE, 20 * PAGE + 7, 70 * PAGE])


def of_tenants(count: int) -> list[UsedLease]:
    """Return leases whose rows take a page for some 50 of them."""
    return [lease(i, key=KEY._replace(tenant=f"tenant-{i}")) for i in range(count)]


def large(folder: Path) -> Ledger:
    """Write rows into the file, and one into its log alone."""
    ledger = opened(folder)
    ledger.add(of_tenants(MANY))
    ledger.close()
    ledger = opened(folder)
    ledger.add([lease(MANY)])
    return ledger


def written_back(folder: Path) -> Ledger:
    """Write rows into the file alone."""
    ledger = large(folder)
    ledger._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return ledger


def written(folder: Path) -> Ledger:
    """Write rows into the log alone."""
    ledger = opened(folder)
    ledger.add(of_tenants(MANY))
    return ledger


def larger_than_memory(folder: Path) -> Ledger:
    """Make a ledger of which SQLite keeps a few pages only."""
    ledger = large(folder)
    ledger._connection.execute("PRAGMA cache_size = 5")
    return ledger


def content(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in os.listdir(folder) if "-shm" not in name}


@PLACES
def test_ledger_truncated_and_killed_is_refused_unchanged(tmp_path: Path, size: int) -> None:
    with holding(large, tmp_path) as kill:
        os.truncate(tmp_path / "usage.db", size)
        kill()
    before = content(tmp_path)
    for _ in range(2):
        with pytest.raises(
            UsageError, match=r"is damaged \(.* missing\).* remove usage\.db, .* restore a backup"
        ):
            opened(tmp_path)
    assert content(tmp_path) == before
    # The advice of the message leads out of it.
    for name in tmp_path.glob("usage.db*"):
        name.unlink()
    opened(tmp_path).close()


def test_empty_ledger_of_a_killed_process_is_refused(tmp_path: Path) -> None:
    with holding(written_back, tmp_path) as kill:
        os.truncate(tmp_path / "usage.db", 0)
        kill()
    with pytest.raises(UsageError, match="it was truncated to 0 bytes"):
        opened(tmp_path)


def test_damaged_count_of_pages_takes_no_memory(tmp_path: Path) -> None:
    """A header may name 4 billion pages: a list of them takes hundreds of gigabytes."""
    with holding(written_back, tmp_path) as kill:
        kill()
    pages = 1 << 20
    with (tmp_path / "usage.db").open("r+b") as file:
        file.seek(28)
        file.write(pages.to_bytes(4, "big"))
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match=f"of its {pages:,} pages of 4,096 bytes are missing"):
            opened(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 8 * pages
    finally:
        tracemalloc.stop()


def test_empty_file_of_a_stopped_scheduler_begins_a_ledger(tmp_path: Path) -> None:
    (tmp_path / "usage.db").touch()
    ledger = opened(tmp_path)
    ledger.add([lease(1)])
    assert sums(tmp_path) == [(1, 10, 4, 5)]
    ledger.close()


def test_empty_file_is_restored_from_a_log_that_has_all(tmp_path: Path) -> None:
    with holding(written, tmp_path) as kill:
        os.truncate(tmp_path / "usage.db", 0)
        kill()
    ledger = opened(tmp_path)
    assert sums(tmp_path) == [(MANY, MANY * 10, MANY * 4, MANY * 5)]
    assert len(ledger.add(of_tenants(MANY))) == MANY
    ledger.close()


@PLACES
def test_truncated_ledger_is_saved_from_memory(tmp_path: Path, size: int) -> None:
    ledger = large(tmp_path)
    losses = Losses(ledger)
    os.truncate(ledger.path, size)
    ledger.add([lease(MANY + 1)])
    assert losses.missing == [0]
    assert sums(tmp_path)[0][0] == MANY + 2
    ledger.close()


@PLACES
def test_ledger_truncated_before_a_write_counts_what_is_lost(tmp_path: Path, size: int) -> None:
    ledger = larger_than_memory(tmp_path)
    losses = Losses(ledger)
    os.truncate(ledger.path, size)
    ledger.add([lease(MANY + 1)])
    [missing] = losses.missing
    [(requests, *tokens)] = sums(tmp_path)
    assert isinstance(requests, int)
    assert 0 < missing < MANY + 2
    assert (requests + missing, tokens) == (MANY + 2, [requests * 10, requests * 4, requests * 5])
    assert losses.asides == [tmp_path / "usage.db.aside"]
    ledger.close()


def test_ledger_truncated_during_a_write_takes_the_batch_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = larger_than_memory(tmp_path)
    losses = Losses(ledger)
    monkeypatch.setattr(ledger, "_prune_at_s", -1)
    monkeypatch.setattr(ledger, "_prune", lambda wall_s: os.truncate(ledger.path, PAGE))
    new = lease(MANY + 1, key=KEY._replace(tenant="new"))
    with pytest.raises(UsageError, match=r"was truncated from .* during a write"):
        ledger.add([new])
    monkeypatch.undo()
    assert ledger.add([new]) == []
    assert ("new", 1, 10, 4, 5) in sums(tmp_path, "tenant")
    assert losses.missing[0] > 0
    ledger.close()


@PLACES
def test_ledger_truncated_before_it_closes_reports_the_loss(tmp_path: Path, size: int) -> None:
    ledger = larger_than_memory(tmp_path)
    losses = Losses(ledger)
    os.truncate(ledger.path, size)
    ledger.close()
    [missing] = losses.missing
    ledger = opened(tmp_path)
    assert missing + int(str(sums(tmp_path)[0][0])) == MANY + 1
    ledger.close()


def test_deleted_old_rows_do_not_count_as_lost(tmp_path: Path) -> None:
    now_s = 0.0
    ledger = opened(tmp_path, keep_days=1, steady_s=lambda: now_s)
    ledger.add(of_tenants(10))
    now_s += 3 * 86_400
    ledger._ahead_s = NOW
    ledger.add([lease(11, at_s=NOW + 3 * 86_400)])
    losses = Losses(ledger)
    ledger.path.unlink()
    ledger.find_file()
    assert losses.missing == [0]
    assert ledger._saved == 1
    ledger.close()
