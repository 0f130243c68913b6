"""The README's example runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from schedsvc_client.v1 import scheduler_pb2 as pb

from .fake_scheduler import FakeScheduler, refusal

README = Path(__file__).parents[2] / "clients/python/README.md"


async def test_the_example_runs(fake: FakeScheduler, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    example: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, str(README), "exec"), example)
    assert await example["main"](fake.target) == "done"
    end = fake.books[1].end
    assert (end.outcome, end.output_tokens) == (pb.OUTCOME_COMPLETED, 3)
    assert fake.pools[0].capacity_tokens == 20_000
    fake.decide = lambda request: refusal(retry_after_ms=70, message="full")
    assert await example["main"](fake.target) == "retry in 70 ms: full"
    assert (await example["main"](f"unix:{tmp_path}/nobody")).startswith("no scheduler answers")
