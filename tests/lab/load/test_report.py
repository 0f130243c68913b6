import math

import pytest

from schedsvc_lab.load.generator import RunResult
from schedsvc_lab.load.report import output_tokens_per_s, percentile, run_report
from schedsvc_lab.load.samples import Fate, Recorder, Sample

TENANT_KEYS = {"sent", "completed", "refused", "errors", "ttft_ms", "e2e_ms", "output_tokens"}
RUN_KEYS = {"tenants", "output_tokens_per_s", "preemptions", "wall_s", "client_lag_ms_p99"}


def streamed(recorder: Recorder, tenant: str, at_s: float, times_s: list[float]) -> Sample:
    """Record a request whose events with output came at these times."""
    sample = Sample(tenant, at_s)
    recorder.sent(sample, at_s)
    for time_s in times_s:
        recorder.output(sample, 1, time_s)
    recorder.ended(sample, Fate.COMPLETED, times_s[-1])
    sample.output_tokens = len(times_s)
    return sample


def result(recorder: Recorder, **figures: float) -> RunResult:
    values = {"warmup_s": 0.0, "last_arrival_s": 10.0, "wall_s": 12.0} | figures
    return RunResult(recorder, [1.0, 2.0], **values)


def test_the_form_of_a_run() -> None:
    recorder = Recorder()
    streamed(recorder, "quiet", 1.0, [1.5, 2.0])
    report = run_report(result(recorder), preemptions=3)
    assert set(report) == RUN_KEYS
    assert set(report["tenants"]["quiet"]) == TENANT_KEYS
    assert report["tenants"]["quiet"] == {
        "sent": 1,
        "completed": 1,
        "refused": 0,
        "errors": 0,
        "ttft_ms": {"p50": 500.0, "p99": 500.0},
        "e2e_ms": {"p50": 1000.0, "p99": 1000.0},
        "output_tokens": 2,
    }
    assert (report["preemptions"], report["wall_s"]) == (3, 12.0)


def test_throughput_counts_the_window_only() -> None:
    recorder = Recorder()
    streamed(recorder, "a", 0.0, [1.0, 3.0, 4.0, 11.0])
    assert output_tokens_per_s(result(recorder, warmup_s=2.0)) == 2 / 8
    assert output_tokens_per_s(result(recorder, warmup_s=10.0)) == 0.0


def test_throughput_spreads_the_usage_over_merged_events() -> None:
    recorder = Recorder()
    sample = streamed(recorder, "a", 0.0, [1.0, 3.0])
    sample.output_tokens = 10
    assert output_tokens_per_s(result(recorder, warmup_s=2.0)) == 5 / 8


def test_client_lag_is_the_worst_of_its_parts() -> None:
    recorder = Recorder()
    sample = Sample("a", 1.0)
    recorder.sent(sample, 1.07)
    recorder.connect_ms.append(3.0)
    assert run_report(result(recorder))["client_lag_ms_p99"] == pytest.approx(70.0)
    recorder.connect_ms.append(90.0)
    assert run_report(result(recorder))["client_lag_ms_p99"] > 70.0


def test_percentiles() -> None:
    assert percentile([], 50) is None
    assert percentile([math.nan], 99) is None
    assert percentile([1.0, math.nan, 3.0], 50) == 2.0


def test_tallies_forget_what_is_old() -> None:
    recorder = Recorder()
    streamed(recorder, "a", 0.0, [1.0, 8.0])
    tally = recorder.tallies["a"]
    tally.forget(9.0)
    assert [events for _, events in tally.recent_events] == [1]
    assert not tally.recent_ttft_ms
    assert tally.events_per_s(9.0) == 1 / 5
