"""What sets the simulator beside the real vLLM: its arithmetic, without either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from schedsvc.sim.engine import load_profile
from schedsvc.workload import TraceRequest
from tests.vllm import recorded, sim_compare, sim_picture
from tests.vllm.around import Around, around, engine_ms


def step(duration_s: float, prompt_tokens: int = 0) -> str:
    return json.dumps(
        {
            "duration_s": duration_s,
            "prompt_tokens": prompt_tokens,
            "running": 4,
            "kv_tokens": 900,
            "preemptions": 0,
        }
    )


def run(ttfts_ms: dict[str, float], throughput: float, preemptions: int) -> dict[str, Any]:
    first_tokens = [(0.5 * at, tenant, ms) for at, (tenant, ms) in enumerate(ttfts_ms.items())]
    return {
        "throughput": throughput,
        "preemptions": preemptions,
        "ttft_ms": ttfts_ms,
        "first_tokens": first_tokens,
    }


def test_the_engines_own_part_of_a_first_token() -> None:
    # Whoever comes at any time meets the step of 30 ms three times as often as that of 10 ms, and
    # waits for half of either; then comes a step with a prompt, of 30 ms.
    assert engine_ms([step(0.010), step(0.030, 64)]) == pytest.approx(5 / 4 + 45 / 4 + 30)


def test_what_is_around_the_engine_grows_with_the_streams() -> None:
    line = around([[4.0, 26.0], [5.0, 27.0], [90.0, 11.0]])
    assert line.at(4) == pytest.approx(5.0)
    assert line.at(48) == pytest.approx(26.0)
    assert line.at(26) == pytest.approx(15.5)
    # A line that falls ends at nothing.
    assert Around(alone_ms=2.0, each_ms=-1.0).at(40) == 0.0


def test_a_run_is_judged_by_the_others() -> None:
    assert recorded.others([7, 8, 9], 1) == [7, 9]
    assert recorded.others([7], 0) == [7]


def test_profiles_are_fitted_to_the_steps_of_the_other_runs(tmp_path: Path) -> None:
    runs = [[step(0.001 * ms)] * 50 for ms in (10, 20, 40)]
    recorded.save(runs, tmp_path, "w")
    made = recorded.profiles(tmp_path, "w", 3)
    ms = [each.step_cost(8).duration_ns(0, 4, 900) / 1e6 for each in made]
    assert ms == pytest.approx([30, 25, 15], rel=0.02)


def test_what_is_around_the_engine_is_added_to_the_simulated_first_tokens() -> None:
    profile = load_profile("cpu-tiny-llama")
    requests = [TraceRequest(0.001 * at, "a", 32, 40) for at in range(3)]
    bare, added = (
        sim_compare.imitate([requests, requests], 60.0, profile, "engine", None, line)
        for line in (Around(0.0, 0.0), Around(100.0, 1_000.0))
    )
    assert bare["completed"] == added["completed"] == 3
    assert added["throughput"] == bare["throughput"]
    extra = [
        round(ours[2] - theirs[2])
        for ours, theirs in zip(added["first_tokens"], bare["first_tokens"], strict=True)
    ]
    # The first begins alone; what begins in the same step counts none of its own.
    assert extra[0] == 100
    assert sorted(extra) == extra
    assert set(extra) <= {100, 1_100, 2_100}
    # Of the second run only: each at its time since that run's start.
    assert [round(at_s, 4) for at_s, _, _ in added["first_tokens"]] == [0.0, 0.001, 0.002]


def test_what_holds_and_what_does_not() -> None:
    real = [run({"a": ms, "b": 9.0}, 100.0, 40) for ms in (10.0, 20.0, 30.0)]
    counts = {"a": 10, "b": 9}
    good = [run({"a": 29.0}, 91.0, 21)] * 3
    assert [row[3] for row in sim_compare.judge(real, good, counts)] == [True] * 3
    bad = [run({"a": 31.0}, 89.0, 81)] * 3
    assert [row[3] for row in sim_compare.judge(real, bad, counts)] == [False] * 3
    # A tenant of whom one world serves nothing.
    none: list[dict[str, Any]] = [run({}, 100.0, 40)] * 3
    assert not sim_compare.judge(real, none, counts)[2][3]


def test_the_picture_of_both(tmp_path: Path) -> None:
    report = {
        "real": [run({"a": 10.0, "b": 100.0}, 1, 0)],
        "simulated": [run({"a": 20.0, "b": 50.0}, 1, 0)],
    }
    assert sim_picture.pairs(report) == [(10.0, 20.0), (100.0, 50.0)]
    assert sim_picture.off([(10.0, 20.0), (100.0, 50.0), (3.0, 3.0)]) == 2.0
    sim_picture.draw({"lmsys-plain": report}, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
