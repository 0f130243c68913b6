"""The ledger equals the engine's counts although scheduler, gate and engine are killed."""

import sqlite3
from pathlib import Path

import pytest

from .books import compare
from .proof import Proof


@pytest.mark.alone
@pytest.mark.slow
def test_the_export_equals_the_engines_counts_over_kills(tmp_path: Path) -> None:
    figures = Proof(tmp_path, requests=5_000, kills=3).run()
    assert figures["kills"] == 3
    assert figures["whole"] >= 5_000
    assert figures["sums_without_a_cut_off"] > figures["sums"] // 2
    with sqlite3.connect(tmp_path / "usage.db") as connection:
        connection.execute("UPDATE usage SET output_tokens = output_tokens + 1 WHERE tenant = 't0'")
    connection.close()
    with pytest.raises(AssertionError, match="the ledger differs"):
        compare(tmp_path)


@pytest.mark.alone
@pytest.mark.slow
def test_export_equals_the_counts_if_the_file_is_taken(tmp_path: Path) -> None:
    figures = Proof(tmp_path, requests=4_000, kills=1, attacks=5).run()
    assert (figures["kills"], figures["attacks"]) == (1, 5)
    assert figures["whole"] >= 4_000
