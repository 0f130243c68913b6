"""Replays the main job's traffic: clients of a public chat service, through the gate, on vLLM."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from . import programs
from .conftest import CLIENTS
from .stack import Stack

TRACE = programs.ROOT.parent / "shared/data/traces/lmsys_arena_vtc.csv"
# The first requests of each client: so all 27 are there, the largest do not crowd out the others,
# and times, lengths and order are the real ones.
REQUESTS_OF_A_CLIENT = 5
# 600 s of arrivals in 30 s, which the tiny model on two cores can serve.
SPEED = 20
LOAD_S_MAX = 120.0


def write_slice(path: Path) -> Counter[str]:
    """Write the slice, and count its requests by client."""
    taken: Counter[str] = Counter()
    with TRACE.open(newline="") as source, path.open("w", newline="") as target:
        rows = csv.DictReader(source)
        assert rows.fieldnames is not None
        writer = csv.DictWriter(target, rows.fieldnames)
        writer.writeheader()
        for row in rows:
            if taken[row["client"]] < REQUESTS_OF_A_CLIENT:
                taken[row["client"]] += 1
                writer.writerow(row)
    return taken


def test_the_books_agree_with_what_27_clients_got(stack: Stack, tmp_path: Path) -> None:
    if not TRACE.exists():
        pytest.skip("the LMSYS arena trace is not here; ../shared/data/traces holds it")
    path, out = tmp_path / "slice.csv", tmp_path / "out"
    asked = write_slice(path)
    assert set(asked) == set(CLIENTS)
    before = {client: stack.flow(client) for client in CLIENTS}
    command = [sys.executable, "-m", "schedsvc", "load", "--url", stack.url, "--trace", str(path)]
    command += ["--rate-scale", str(SPEED), "--warmup", "0", "--out", str(out), "--json"]
    load = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_S_MAX)
    # A slow machine makes the latencies void, not the books.
    assert load.returncode == 0 or "could not keep up" in load.stderr, load.stderr[-2_000:]
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    stack.rest()
    assert result["sent"] == sum(asked.values())
    assert result["errors_by_reason"] == {}
    assert result["completed"] >= 0.9 * result["sent"]
    for client in CLIENTS:
        told, books, after = result["tenants"][client], before[client], stack.flow(client)
        assert told["sent"] == asked[client]
        assert after.completed - books.completed == told["completed"]
        assert after.input_tokens - books.input_tokens == told["total_input_tokens"]
        assert after.output_tokens - books.output_tokens == told["total_output_tokens"]
        assert told["completed"] + told["refused"] == asked[client]
    assert sum(tenant["total_output_tokens"] for tenant in result["tenants"].values()) > 20_000
