"""Tests the result in vLLM's form, figure by figure."""

import json
import math
from typing import Any

import pytest

from schedsvc_lab.load.fairness import fairness, jain_index
from schedsvc_lab.load.generator import RunResult
from schedsvc_lab.load.result import DETAIL_KEYS, OWN_KEYS, About, Wanted, result_of
from schedsvc_lab.load.samples import Fate, Recorder, Sample

# The keys that `vllm bench serve` (0.32) saves, without and with --save-detailed; the texts of the
# answers are not kept here. tests/vllm/test_load_compare.py holds the list against vLLM itself.
VLLM_KEYS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts"),
    *("request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed"),
    *("total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput"),
    *("output_throughput", "total_token_throughput", "latencies", "queue_times"),
    *("max_output_tokens_per_s", "max_concurrent_requests", "rtfx"),
    *(
        f"{statistic}_{metric}_ms"
        for metric in ("ttft", "tpot", "itl", "e2el")
        for statistic in ("mean", "median", "std", "p99")
    ),
}
ABOUT = About("20260101-000000", "openai", "trace.csv")


def answered(
    recorder: Recorder, tenant: str, at_s: float, times_s: list[float], late_s: float = 0.0
) -> Sample:
    """Record a request of 100 tokens whose events with output came at these times."""
    sample = Sample(tenant, at_s, 100, len(times_s))
    recorder.sent(sample, at_s + late_s)
    for time_s in times_s:
        recorder.output(sample, 1, time_s)
    recorder.ended(sample, Fate.COMPLETED, times_s[-1])
    sample.prompt_tokens, sample.output_tokens = 100, len(times_s)
    return sample


def ended(recorder: Recorder, tenant: str, fate: Fate, reason: str) -> None:
    sample = Sample(tenant, 3.0, 50, 10)
    recorder.sent(sample, 3.0)
    recorder.ended(sample, fate, 3.5, reason)


def run(recorder: Recorder, **more: Any) -> RunResult:
    values: dict[str, Any] = {"warmup_s": 0.0, "last_arrival_s": 3.0, "wall_s": 10.0} | more
    return RunResult(recorder, [1.0, 2.0], **values)


def sample_run(**more: Any) -> RunResult:
    recorder = Recorder()
    answered(recorder, "a", 0.0, [0.1, 0.2, 0.4])
    answered(recorder, "b", 1.0, [1.5])
    answered(recorder, "b", 2.0, [2.3, 2.5])
    ended(recorder, "b", Fate.REFUSED, "429 flow_queue_full")
    ended(recorder, "b", Fate.ERROR, "500")
    return run(recorder, **more)


def test_the_keys_are_vllms_and_ours() -> None:
    result = result_of(sample_run(), ABOUT, Wanted())
    assert set(result) == VLLM_KEYS | OWN_KEYS
    detailed = result_of(sample_run(), ABOUT, Wanted(detail=True))
    assert set(detailed) == VLLM_KEYS | OWN_KEYS | set(DETAIL_KEYS)
    lists = {"latencies", "queue_times"}
    about = {"date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts"}
    load = {"request_rate", "burstiness", "max_concurrency"}
    for tenant in result["tenants"].values():
        assert set(tenant) >= VLLM_KEYS - lists - about - load
    json.dumps(detailed, allow_nan=False)


def test_figures_by_hand() -> None:
    result = result_of(sample_run(), ABOUT, Wanted(percentiles=(50, 99.9)))
    assert (result["completed"], result["failed"], result["sent"]) == (3, 2, 5)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (300, 6)
    assert result["request_throughput"] == pytest.approx(0.3)
    assert result["output_throughput"] == pytest.approx(0.6)
    assert result["total_token_throughput"] == pytest.approx(30.6)
    assert result["mean_ttft_ms"] == pytest.approx(300)
    assert result["median_ttft_ms"] == result["p50_ttft_ms"] == pytest.approx(300)
    assert result["std_ttft_ms"] == pytest.approx(math.sqrt(2 / 3) * 200)
    # 0.3 s over two tokens, 0.2 s over one; a single token has no time per token.
    assert result["mean_tpot_ms"] == pytest.approx(175)
    assert result["mean_itl_ms"] == pytest.approx(500 / 3)
    assert result["p99.9_e2el_ms"] == pytest.approx(500, rel=0.01)
    assert result["max_concurrent_requests"] == 1
    assert result["max_output_tokens_per_s"] == 3
    assert result["request_goodput"] is None
    assert result["latencies"] == [0.4, 0.5, 0.5, 0.0, 0.0]
    b = result["tenants"]["b"]
    assert (b["completed"], b["refused"], b["errors_by_reason"]) == (2, 1, {"500": 1})
    assert b["refusals"]["by_reason"] == {"429 flow_queue_full": 1}
    assert b["mean_ttft_ms"] == pytest.approx(400)


def test_detail_keeps_vllms_conventions() -> None:
    result = result_of(sample_run(), ABOUT, Wanted(detail=True))
    assert result["input_lens"] == [100, 100, 100, 50, 50]
    assert result["output_lens"] == [3, 1, 2, 0, 0]
    assert result["ttfts"] == [0.1, 0.5, 0.3, 0.0, 0.0]
    assert result["itls"] == [[0.1, 0.2], [], [0.2], [], []]
    assert result["start_times"] == [0.0, 1.0, 2.0, 3.0, 3.0]
    assert result["errors"] == ["", "", "", "429 flow_queue_full", "500"]


@pytest.mark.parametrize(
    ("goals", "good"),
    [
        ({"ttft": 300.5}, 2),
        ({"ttft": 600, "tpot": 160}, 2),
        ({"tpot": 100}, 1),
        ({"e2el": 450}, 1),
        ({"ttft": 50}, 0),
    ],
)
def test_goodput(goals: dict[str, float], good: int) -> None:
    result = result_of(sample_run(), ABOUT, Wanted(goals_ms=goals))
    assert result["request_goodput"] == pytest.approx(good / 10)


def test_a_closed_loop_has_no_rate() -> None:
    result = result_of(sample_run(concurrency=8), ABOUT, Wanted())
    assert (result["loop"], result["request_rate"], result["max_concurrency"]) == (
        "closed",
        "inf",
        8,
    )
    opened = result_of(sample_run(offered=7), ABOUT, Wanted())
    assert (opened["loop"], opened["num_prompts"]) == ("open", 7)
    assert opened["request_rate"] == pytest.approx(4 / 3)


def test_a_late_generator_says_so() -> None:
    recorder = Recorder()
    answered(recorder, "a", 0.0, [0.3], late_s=0.2)
    result = result_of(run(recorder), ABOUT, Wanted())
    assert result["generator"]["kept_up"] is False
    assert result["generator"]["send_lag_ms"]["max"] == pytest.approx(200)
    # Its delay is in the latency, not hidden.
    assert result["mean_ttft_ms"] == pytest.approx(300)


def test_an_interrupted_run_is_marked() -> None:
    recorder = Recorder()
    answered(recorder, "a", 0.0, [0.3])
    ended(recorder, "a", Fate.INTERRUPTED, "interrupted")
    result = result_of(run(recorder, interrupted=True, offered=9), ABOUT, Wanted())
    assert result["interrupted"] is True
    counts = [result[key] for key in ("num_prompts", "sent", "completed", "failed", "unfinished")]
    assert counts == [9, 2, 1, 0, 1]


def test_nothing_completed_is_valid_json() -> None:
    result = result_of(run(Recorder()), ABOUT, Wanted(goals_ms={"ttft": 1}, detail=True))
    assert (result["completed"], result["mean_ttft_ms"], result["request_goodput"]) == (0, 0.0, 0.0)
    json.dumps(result, allow_nan=False)


def test_jain() -> None:
    import numpy as np

    assert jain_index(np.array([3.0, 3.0, 3.0])) == pytest.approx(1)
    assert jain_index(np.array([5.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert jain_index(np.array([1.0, 3.0])) == pytest.approx(16 / 20)
    assert jain_index(np.array([1.0])) is None
    assert jain_index(np.zeros(3)) is None


def test_fairness_by_hand() -> None:
    recorder = Recorder()
    answered(recorder, "a", 0.0, [0.5] * 50)
    answered(recorder, "b", 0.0, [0.5] * 25)
    ended(recorder, "b", Fate.REFUSED, "429")
    told = fairness(recorder.samples, 10.0)
    assert told["service"] == {"a": 200.0, "b": 150.0}
    assert told["demand"] == {"a": 200.0, "b": 220.0}
    assert told["jain_index"] == pytest.approx(350**2 / (2 * (200**2 + 150**2)))
    share = 150 / 220
    assert told["jain_index_of_served_share"] == pytest.approx(
        (1 + share) ** 2 / (2 * (1 + share**2))
    )
    # In every 60 s window: b is 50 behind a, and 70 behind its demand.
    assert told["service_difference_per_s"]["max"] == pytest.approx(50 / 60)
