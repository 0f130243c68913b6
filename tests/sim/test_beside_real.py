"""What sets the simulator beside the real vLLM: its arithmetic, without either."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schedsvc.sim.engine import CostFields, Profile, load_profile
from schedsvc.sim.fit import make_profile
from schedsvc.workload import TraceRequest
from tests.vllm import recorded, sim_compare, sim_picture
from tests.vllm.around import Around, Probed, around, engine_ms, probed


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


def flat(fixed_ns: int, prefill_ns: int = 0, prefill_token_ns: int = 0) -> Profile:
    """Make a profile whose steps take as long whatever they decode."""
    cost = CostFields(
        step_ns=fixed_ns,
        prefill_ns=prefill_ns,
        prefill_token_ns=prefill_token_ns,
        decode_kv_token_ns=0,
        decode_ns=[[0, 0], [64, 0]],
    )
    return make_profile("flat", "a test", cost, load_profile("cpu-tiny-llama").engine)


def seen(ttft_ms: float, others_per_s: float = 0.0) -> Probed:
    return Probed(ttft_ms, others_per_s, [(0, 4, 900)])


def test_the_engines_own_part_of_a_first_token() -> None:
    profile = flat(10_000_000, 20_000_000, 1_000)
    # Whoever comes at any time meets the step of 30 ms three times as often as that of 10 ms, and
    # waits for half of either; then comes a step with all who came at once, 64 tokens each.
    probes = probed(80.0, 3, [step(0.5), step(0.5, 192)])
    assert probes.others_per_s == 3 - 24 * 3
    assert probes.steps == [(0, 4, 900), (192, 4, 900)]
    long_ms = 30 + 0.192
    rest_ms = (10**2 + long_ms**2) / (10 + long_ms) / 2
    assert engine_ms(probes, 3, profile) == pytest.approx(rest_ms + long_ms)


def test_what_is_around_the_engine_grows_with_streams_and_neighbours() -> None:
    profile = flat(2_000_000, 1_000_000)  # 1 ms of rest and 3 ms of one's own
    runs = [
        [seen(4.0 + ms), seen(10.0 + ms), seen(26.0 + ms), seen(36.0 + ms)] for ms in (4, 3, 90)
    ]
    line = around(runs, profile)
    assert line.at(4, 0.0) == pytest.approx(4.0)
    assert line.at(48, 0.0) == pytest.approx(26.0)
    assert line.at(26, 0.0) == pytest.approx(15.0)
    # Two more at once cost 6 ms beside few streams and 10 ms beside many.
    assert line.at(26, 2.0) == pytest.approx(15.0 + 2 * 4.0)
    assert line.span_ms == pytest.approx((8.0 + 30.0) / 2)
    # The streams beside were neighbours of the probes: beside many, half of one on average.
    again = [[*run[:2], replace(run[2], others_per_s=500 / 19), *run[3:]] for run in runs]
    assert around(again, profile).at(48, 0.0) == pytest.approx(26.0 - 4.0 / 2)
    # A line that falls ends at nothing.
    assert Around(2.0, -1.0, 0.0, 9.0).at(40, 3.0) == 0.0


def test_neighbours_count_by_how_near_they_come() -> None:
    line = Around(0.0, 0.0, 0.0, span_ms=20.0)
    arrivals_ms = [0.0, 100.0, 105.0, 110.0, 120.0, 131.0]
    assert line.neighbours(arrivals_ms, 0.0) == 0.0
    assert line.neighbours(arrivals_ms, 110.0) == pytest.approx(0.5 + 0.75 + 0.5)
    assert line.neighbours([7.0, 7.0, 7.0], 7.0) == 2.0


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
        for line in (Around(0.0, 0.0, 0.0, 9.0), Around(100.0, 1_000.0, 0.0, 9.0))
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
