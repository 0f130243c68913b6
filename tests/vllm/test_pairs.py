"""Runs the noisy neighbour in short, and measures the gate's cost, as any machine can.

The full measurement is `make vllm-pairs` and `make vllm-cost`, on a quiet machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import cost, pairs
from .figures import figures, judge, summary

# They compare times.
pytestmark = pytest.mark.alone

SECONDS, WARMUP_S = 20.0, 6.0
OVERLOAD = 1.5
BURSTS = 4


@pytest.fixture(scope="module")
def arms(folder: Path) -> Iterator[pairs.Arms]:
    with pairs.both() as made:
        yield made


@pytest.mark.timeout(600)
def test_the_noisy_neighbour_is_gone(arms: pairs.Arms, tmp_path: Path) -> None:
    # A rate that overloads one machine does not overload another.
    hog_per_s = OVERLOAD * pairs.saturated_per_s(arms.plain)
    # From a cold start the headroom has to find its size first: a minute is allowed for it.
    for _ in range(BURSTS):
        pairs.saturated_per_s(arms.gated)
    load = pairs.Load(SECONDS, WARMUP_S, hog_per_s)
    made = pairs.measure(arms, 1, 0, seed=5, load=load)
    (pair,) = made["pairs"]
    plain, gated = figures(pair["plain"]), figures(pair["with"])
    tenants = pair["with"]["tenants"]
    assert sum(tenant["errors"] for tenant in tenants.values()) == 0
    assert tenants["quiet"]["refused"] == 0
    assert tenants["quiet"]["completed"] == tenants["quiet"]["sent"] > 0
    # The engine's own queue thrashes; behind the gate it rarely does.
    assert pair["plain"]["preemptions"] >= 10
    assert pair["with"]["preemptions"] <= 0.1 * pair["plain"]["preemptions"]
    assert gated["edge p50"] < plain["edge p50"] / 2
    assert gated["tok/s"] > 0.5 * plain["tok/s"]
    # The report can be read again, and each bar has its figure.
    report = json.loads(json.dumps({**made, "summary": summary(made["pairs"], made["null"])}))
    assert report["summary"]["with/plain"]["edge p50"]["median"] < 0.5
    assert len({bar.what for bar in judge(report["pairs"])}) == 9


@pytest.mark.timeout(600)
def test_the_gate_costs_little(arms: pairs.Arms) -> None:
    """The bar is 5 %; so few rounds on a busy machine show no more than the order of it."""
    made = {
        name: cost.Arm(server, {})
        for name, server in (("plain", arms.plain.server), ("gated", arms.gated.server))
    }
    told = cost.report(asyncio.run(cost.measure(made, rounds=8)))
    assert told["ratio"]["median"] < 1.2


def test_a_cost_run_ended_early_prints_its_whole_rounds(
    monkeypatch: pytest.MonkeyPatch, arms: pairs.Arms
) -> None:
    async def slice_of(arm: cost.Arm, in_flight: int) -> cost.Slice:
        nonlocal left
        left -= 1
        if left == 0:
            signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0)
        return cost.Slice(1.0, 1.0)

    monkeypatch.setattr(cost, "run_slice", slice_of)
    made = dict.fromkeys(("plain", "gated"), cost.Arm(arms.plain.server, {}))
    left = 9
    assert len(asyncio.run(cost.measure(made, rounds=100))) == 3  # after one that does not count
    left = 3
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cost.measure(made, rounds=100))


@pytest.mark.parametrize(
    ("done", "told"),
    [
        (0, "interrupted; no report was written\n"),
        (2, "interrupted; {} has pairs: 2, null pairs: 1\n"),
    ],
)
def test_interrupted_pairs_name_the_kept_files(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    done: int,
    told: str,
) -> None:
    def measure(*_: object, keep: Callable[[dict[str, Any]], None], **__: object) -> None:
        if done:
            keep({"pairs": [{}] * done, "null": [{}], "alone": []})
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(pairs, "both", contextlib.nullcontext)
    monkeypatch.setattr(pairs, "measure", measure)
    for name in ("judge", "summary"):
        monkeypatch.setattr(pairs, name, lambda *_: [])
    monkeypatch.setattr(pairs.programs, "installed", lambda: True)
    monkeypatch.setattr(pairs.programs, "end_on_signal", lambda: None)
    monkeypatch.setattr(sys, "argv", ["pairs", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        pairs.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == told.format(tmp_path / "report.json")
