"""Runs the example of docs/use/prefix.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from schedsvc_lab.workload.fields import Fields
from schedsvc_lab.workload.json_forms import own_record
from schedsvc_lab.workload.prefix.caches import Belady, Cache, Fifo, Lfu, Lru, next_uses
from schedsvc_lab.workload.prefix.requests import asked, cutter
from schedsvc_lab.workload.prefix.sharing import Sharing

PAGE = (Path(__file__).parents[3] / "docs/use/prefix.md").read_text()
BLOCK_TOKENS = 4
NAMES = "ABCDEF"


def table(first: str) -> list[list[str]]:
    """Return the rows of the page's table whose first column is called so."""
    found = re.search(rf"^\| {first} \|.*\n\|[- |]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert found, first
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in found[1].splitlines()]


@pytest.fixture(scope="module")
def example() -> tuple[Sharing, list[list[str]], list[tuple[int, int]]]:
    """Return the page's requests: counted, as names of blocks, and what was shared of each."""
    lines = re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert lines
    records = [own_record(Fields(json.loads(line))) for line in lines[1].splitlines()]
    sharing, cut = Sharing(BLOCK_TOKENS), cutter(BLOCK_TOKENS, None)
    names, served = [], []
    for request in asked(records, None):
        blocks = cut(request)
        found = sharing.add(blocks, request.input_tokens, request.arrival_s)
        names.append([NAMES[block] for block in blocks])
        served.append((found.shared_blocks, found.shared_tokens))
        assert found.sharing_fraction == found.shared_tokens / request.input_tokens
    return sharing, names, served


def test_page_shows_each_requests_shared_part(
    example: tuple[Sharing, list[list[str]], list[tuple[int, int]]],
):
    sharing, names, served = example
    rows = table("request")
    assert [row[1].split() for row in rows] == names
    assert [(int(row[2]), int(row[3])) for row in rows] == served
    assert [int(row[4]) for row in rows] == list(sharing.uses.tokens)
    told = re.search(
        r"In all, (\d+) of (\d+) blocks and (\d+) of (\d+) tokens are shared;\s+(\d+) of (\d+)",
        PAGE,
    )
    assert told
    summary = sharing.summary()
    counts = (summary["shared_blocks"], summary["blocks"], summary["shared_tokens"])
    reused = round(summary["block_reuse_rate"] * summary["different_blocks"])
    wanted = [*counts, summary["input_tokens"], reused, summary["different_blocks"]]
    assert [int(number) for number in told.groups()] == wanted


def test_how_often_each_block_is_used(
    example: tuple[Sharing, list[list[str]], list[tuple[int, int]]],
) -> None:
    sharing, _, _ = example
    all_gaps = []
    for number, (name, hits, gaps_text) in enumerate(table("block")):
        assert name == NAMES[number]
        use = sharing.block_use(number)
        gaps = [float(gap) for gap in gaps_text.split(",") if gap]
        all_gaps += gaps
        assert use.hits == int(hits) == len(gaps) + 1
        if gaps:
            told = (use.gap_min_s, use.gap_mean_s, use.gap_max_s)
            assert told == (min(gaps), sum(gaps) / len(gaps), max(gaps))
    assert sorted(sharing.gaps_s) == sorted(all_gaps)


def order_of_eviction(cache: Cache) -> list[int]:
    """Return the contents of a cache, the next to be evicted first."""
    if isinstance(cache, Lru | Fifo):
        return list(cache._held)
    assert isinstance(cache, Lfu | Belady)
    return sorted(cache._held, key=lambda block: (*cache._held[block], block))


def test_page_shows_hits_of_three_block_caches(
    example: tuple[Sharing, list[list[str]], list[tuple[int, int]]],
) -> None:
    sharing, names, _ = example
    caches: dict[str, Cache] = {
        "LRU": Lru(3),
        "FIFO": Fifo(3),
        "LFU": Lfu(3),
        "Belady": Belady(3, next_uses(sharing.uses)),
    }
    rows = table("policy")
    assert [row[0] for row in rows] == list(caches)
    for row in rows:
        cache = caches[row[0]]
        served = []
        for after, request in zip(row[1:6], names, strict=True):
            served.append(cache.serve([NAMES.index(name) for name in request]))
            assert [NAMES[block] for block in order_of_eviction(cache)] == after.split(), row[0]
        assert served == [int(hits) for hits in row[6].split()]
        assert sum(served) == int(row[7])
