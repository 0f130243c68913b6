"""Tests that the worked example of docs/understand/concepts.md has the figures of the core."""

import re
from pathlib import Path

from schedsvc import _core as core

from .support import admit, make, pool, vtc

PAGE = Path(__file__).parents[2] / "docs/understand/concepts.md"
TENANTS = ("trial", "research")
_ASKS = re.compile(r"(\w+) asks for (\d+) \+ (\d+)")
_ENDS = re.compile(r"(\w+)'s (\d)\w\w ends after (\d+)")


def rows() -> list[list[str]]:
    """Return the cells of the page's table."""
    text = PAGE.read_text().split("## An example in figures")[1].split("\n\n- ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_each_row_of_the_example_is_as_the_core_computes_it() -> None:
    scheduler = make(("trial", 1_000), ("research", 2_000), capacity=1_000, credit_max_micro=0)
    names: dict[int, tuple[str, int]] = {}
    leases: dict[tuple[str, int], int] = {}
    told = rows()
    for now, (event, _, *_) in enumerate(told):
        if asked := _ASKS.fullmatch(event):
            tenant, given, most = asked[1], int(asked[2]), int(asked[3])
            handle = admit(scheduler, now, f"r{now}", given, most, TENANTS.index(tenant))
            count = sum(name == tenant for name, _ in names.values())
            names[handle] = (tenant, count + 1)
        else:
            ended = _ENDS.fullmatch(event)
            assert ended, event
            lease = leases[ended[1], int(ended[2])]
            scheduler.complete(now, lease, 1, output_tokens=int(ended[3]))
        granted = scheduler.poll(now)
        assert all(decision.outcome == core.GRANTED for decision in granted)
        leases.update({names[decision.handle]: decision.lease_id for decision in granted})
        counters = [vtc(scheduler, now, flow) // 1_000_000 for flow in range(2)]
        figures = [f"{n:,}" for n in (pool(scheduler, now)["promised_tokens"], *counters)]
        assert [answer(event, [names[d.handle] for d in granted]), *figures] == told[now][1:]
    assert len(told) == 8


def answer(event: str, granted: list[tuple[str, int]]) -> str:
    """Return what the page says about the requests that an event lets run."""
    if "asks" in event:
        return "runs" if granted else "waits"
    [(tenant, number)] = granted
    return f"{tenant}'s {number}{['st', 'nd', 'rd'][number - 1]} runs"
