"""A leader that ends in any way is followed by the standby, as a client under load sees it."""

from pathlib import Path

import pytest

from .failovers import Failover, fail_over, shown
from .members import ready_store
from .store_server import StoreServer

#: Bounds on a loaded machine; `python -m tests.cluster.failovers` prints what it takes.
GAP_S_MAX = {"kill": 6.0, "term": 4.0, "stop": 6.0}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(GAP_S_MAX))
async def test_the_standby_grants_without_a_violation(
    store: StoreServer, tmp_path: Path, kind: str
) -> None:
    await ready_store(store)
    seen = await fail_over(store, tmp_path, kind)
    print(f"\n{kind}: {seen.gap_s:.2f} s, {seen.granted} grants, {seen.reserved_max} reserved")
    assert seen.violations == []
    assert seen.gap_s < GAP_S_MAX[kind]


def test_the_report_names_gaps_and_violations() -> None:
    rows = [vars(Failover("kill", gap_s=gap_s)) for gap_s in (1.0, 3.0, 2.0)]
    rows[1]["violations"].append("7000 of 6400 tokens are reserved")
    text = shown(rows)
    assert "3 failovers: gap in s: least 1.00, median 2.00, p95 3.00, most 3.00" in text
    assert text.endswith("1 violations\n7000 of 6400 tokens are reserved")
