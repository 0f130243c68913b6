"""Runs the README's examples as they are printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from schedsvc_client.testing import FakeScheduler, refusal
from schedsvc_client.v1 import scheduler_pb2 as pb

README = Path(__file__).parents[2] / "clients/python/README.md"


def blocks() -> list[dict[str, Any]]:
    """Run the page's blocks, and return what they define."""
    found = []
    for code in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL):
        found.append({"__name__": "example"})
        exec(compile(code, str(README), "exec"), found[-1])
    return found


def test_the_test_of_the_page_passes() -> None:
    (test,) = (value for name, value in blocks()[1].items() if name.startswith("test_"))
    test()


async def test_the_example_runs(fake: FakeScheduler, tmp_path: Path) -> None:
    example = blocks()[0]
    assert await example["main"](fake.target) == "done"
    end = fake.books[1].end
    assert (end.outcome, end.output_tokens) == (pb.OUTCOME_COMPLETED, 3)
    assert fake.pools[0].capacity_tokens == 20_000
    fake.decide = lambda request: refusal(retry_after_ms=70, message="full")
    assert await example["main"](fake.target) == "retry in 70 ms: full"
    assert (await example["main"](f"unix:{tmp_path}/nobody")).startswith("no scheduler answers")
