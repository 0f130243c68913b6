"""Tests the cost of the gate: the measurement runs, and counts only granted requests."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from bench import gate


@pytest.mark.slow
def test_the_gate_is_measured() -> None:
    # The gate gives up on a scheduler that a machine keeps for a second, and says that it did.
    for _ in range(3):
        done = CliRunner().invoke(gate.main, ["--rounds", "2", "--requests", "12", "--json"])
        if "did not answer in time" not in f"{done.output}{done.exception}":
            break
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert {len(rounds) for rounds in report["all_rounds_ms"].values()} == {2}
    # Under any load of the machine, JSON, a lease and its end cost something.
    assert 0 < report["few_pieces_ms"] < 100


async def test_run_without_the_scheduler_is_no_result() -> None:
    async def open_gate(scope: Any, receive: Any, send: Any) -> None:
        mode = {"headers": [(b"x-schedsvc-mode", b"fail-open")]}
        await send({"type": "http.response.start", "status": 200, **mode})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    with pytest.raises(RuntimeError, match="did not answer in time"):
        await gate.serve_slice(open_gate, gate.Engine(), 1)


async def test_run_that_was_not_served_is_no_result() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    with pytest.raises(RuntimeError, match="500"):
        await gate.serve_slice(broken, gate.Engine(), 1)
