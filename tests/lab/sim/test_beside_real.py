"""Tests the comparison of the simulator with the real vLLM: arithmetic, without either."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from schedsvc_lab.engine import load_profile
from schedsvc_lab.load.samples import Sample
from schedsvc_lab.workload import TraceRequest
from tests.vllm import recorded, sim_compare, sim_picture
from tests.vllm.around import added_ms, around_ms, rest_of_a_step_ms


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


def sample(end_s: float, size: tuple[int, int], first_s: float, queue_ms: float) -> Sample:
    return Sample(
        "a", 1.0, first_s=first_s, end_s=end_s, queue_ms=queue_ms,
        prompt_tokens=size[0], output_tokens=size[1],
    )  # fmt: skip


def finished(size: tuple[int, int], first_token_s: float) -> str:
    told = {"prompt_tokens": size[0], "output_tokens": size[1], "first_token_s": first_token_s}
    return json.dumps(told)


def test_the_rest_of_a_step() -> None:
    # Half of the time there is a step of 30 ms, whose rest is 15 ms, a quarter of it one of 15 ms.
    steps = [step(0.030), step(0.015)]
    assert rest_of_a_step_ms(steps, 0.060) == pytest.approx(15 / 2 + 7.5 / 4)
    # Steps are seen a little late; they never take more than all the time.
    assert rest_of_a_step_ms(steps, 0.040) == pytest.approx(15 * 2 / 3 + 7.5 / 3)


def test_time_around_the_engine_excludes_engine_and_queue() -> None:
    small, large = (8, 2), (90, 7)
    samples = [
        sample(5.0, small, 1.100, math.nan),
        sample(4.0, large, 1.500, 380.0),
        sample(3.0, small, 1.060, 0.0),
    ]
    # The first is a warm-up's, which the client did not count.
    requests = [
        finished(small, 9.0), finished(small, 0.020), finished(large, 0.070), finished(small, 0.040)
    ]  # fmt: skip
    steps = [step(0.010)] * 500  # their rest is 5 ms
    assert added_ms(samples, requests, steps) == pytest.approx([55.0, 45.0, 35.0])
    with pytest.raises(KeyError):
        added_ms(samples, [], steps)
    assert around_ms([[1.0, 2.0], [3.0, 50.0, 60.0]]) == 3.0


def test_a_run_is_judged_by_the_others() -> None:
    assert recorded.others([7, 8, 9], 1) == [7, 9]
    assert recorded.others([7], 0) == [7]


def test_profiles_are_fitted_to_the_steps_of_the_other_runs(tmp_path: Path) -> None:
    runs = [[step(0.001 * ms)] * 50 for ms in (10, 20, 40)]
    recorded.save(runs, tmp_path, "w")
    made = recorded.profiles(tmp_path, "w", 3)
    ms = [each.step_cost(8).duration_ns(0, 4, 900) / 1e6 for each in made]
    assert ms == pytest.approx([30, 25, 15], rel=0.02)


def test_time_around_the_engine_is_added_to_first_tokens() -> None:
    profile = load_profile("cpu-tiny-llama")
    requests = [TraceRequest(0.001 * at, "a", 32, 40) for at in range(3)]
    bare, added = (
        sim_compare.imitate([requests, requests], 60.0, profile, "engine", None, more_ms)
        for more_ms in (0.0, 100.0)
    )
    assert bare["completed"] == added["completed"] == 3
    assert added["throughput"] == bare["throughput"]
    extra = [
        round(ours[2] - theirs[2])
        for ours, theirs in zip(added["first_tokens"], bare["first_tokens"], strict=True)
    ]
    assert extra == [100, 100, 100]
    # Only the second run counts: each at its time since that run's start.
    assert [round(at_s, 4) for at_s, _, _ in added["first_tokens"]] == [0.0, 0.001, 0.002]


def test_judge_passes_good_runs_and_fails_bad_ones() -> None:
    real = [run({"a": ms, "b": 9.0}, 100.0, 40) for ms in (10.0, 20.0, 30.0)]
    counts = {"a": 10, "b": 9}
    good = [run({"a": 29.0}, 91.0, 21)] * 3
    assert [row[3] for row in sim_compare.judge(real, good, counts)] == [True] * 3
    bad = [run({"a": 31.0}, 89.0, 81)] * 3
    assert [row[3] for row in sim_compare.judge(real, bad, counts)] == [False] * 3
    # A tenant that one world does not serve.
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
