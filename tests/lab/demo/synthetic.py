"""Reports and runs without processes."""

from typing import Any

from schedsvc_lab.load.generator import RunResult
from schedsvc_lab.load.samples import Fate, Recorder, Sample


def run(ttft_ms: float | None, per_s: float, preemptions: int, completed: int) -> dict[str, Any]:
    """Return one run's report; every tenant has the same figures."""
    tenant = {
        "sent": completed + 1,
        "completed": completed,
        "refused": 1,
        "errors": 0,
        "ttft_ms": {"p50": ttft_ms, "p99": ttft_ms},
        "e2e_ms": {"p50": 2000.0, "p99": 3000.0},
        "output_tokens": 1234,
    }
    return {
        "tenants": {name: dict(tenant) for name in ("hog", "quiet", "steady")},
        "output_tokens_per_s": per_s,
        "preemptions": preemptions,
        "wall_s": 20.0,
        "client_lag_ms_p99": 5.0,
    }


def good() -> dict[str, Any]:
    """Return a report that holds every bar."""
    return {
        "alone": run(50.0, 100.0, 0, 40),
        "without": run(4000.0, 1000.0, 60, 100),
        "with": run(100.0, 980.0, 1, 80),
        "with_again": run(100.0, 980.0, 0, 84),
        "after": {"promised_tokens": 0, "live_leases": 0, "queued": 0},
    }


def result(wait_s: float) -> RunResult:
    """A run in which hog waits and is partly refused, and quiet waits a little."""
    recorder = Recorder()
    for index in range(40):
        for tenant, share in (("hog", 1.0), ("quiet", 0.1), ("steady", 0.3)):
            at_s = index * 0.3
            sample = Sample(tenant, at_s)
            recorder.sent(sample, at_s)
            if tenant == "hog" and index % 4 == 3:
                recorder.ended(sample, Fate.REFUSED, at_s + 5.0, "429 slow_down")
                sample.retry_after_ms = 2000
                continue
            first_s = at_s + 0.02 + wait_s * share * index / 40
            recorder.output(sample, 5, first_s)
            recorder.ended(sample, Fate.COMPLETED, first_s + 1.0)
            sample.output_tokens = 5
    return RunResult(recorder, [1.0], 2.0, 11.7, 14.0)
