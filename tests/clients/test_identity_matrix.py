"""A request is charged to its rightful tenant or refused, wherever a client claims to be another.

Each test is a part of the matrix of identity_matrix.py: no front is before the gate, so it has to
withstand every byte that a front may pass on. tests/fronts/ has real fronts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from . import identity_matrix as matrix
from .identity_matrix import OWN, REFUSED, UNKNOWN, VICTIM, serving, sources

SOURCES = (
    "header", "header of llm-d", "header and listed key", "any key", "listed key", "x-api-key",
    "key of the scheduler", "token", "forwarded certificate", "certificate", "user of the body",
)  # fmt: skip


def test_every_source_is_tested(tmp_path: Path) -> None:
    assert tuple(sources(tmp_path)) == SOURCES


@pytest.mark.parametrize("kind", matrix.KINDS)
@pytest.mark.parametrize("name", SOURCES)
async def test_a_claim_in_any_place_names_no_other_tenant(
    name: str, kind: str, tmp_path: Path
) -> None:
    source = sources(tmp_path)[name]
    async with serving(source, kind, tmp_path) as served:
        # This source knows both tenants, so a claim that counted would show.
        for tenant in (OWN, VICTIM):
            assert await served.outcome(matrix.request(source.evidence(tenant)), tenant) == tenant
        table = await served.table()
    assert len(table) == len(matrix.CLAIMS) * len(matrix.PLACES)
    rightful = {OWN, REFUSED, *([UNKNOWN] if source.takes_unknown else [])}
    assert {cell: outcome for cell, outcome in table.items() if outcome not in rightful} == {}
    assert {OWN, REFUSED} <= set(table.values())
