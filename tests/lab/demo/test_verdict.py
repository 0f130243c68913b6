from typing import Any

import pytest

from schedsvc_lab.demo.verdict import judge

from .synthetic import good


def failing(report: dict[str, Any]) -> list[str]:
    return [bar.name for bar in judge(report) if not bar.holds]


def put(report: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        report = report[name]
    assert last in report
    report[last] = value


@pytest.mark.parametrize(
    ("path", "value", "name"),
    [
        ("with.tenants.quiet.completed", 0, "every tenant completed requests"),
        ("after.queued", 1, "afterwards nothing is promised, leased or queued"),
        ("alone.tenants.quiet.errors", 1, "no request ended in an error"),
    ],
)
def test_each_bar_of_a_quick_run_fails_alone(path: str, value: Any, name: str) -> None:
    report = good()
    put(report, path, value)
    assert [bar.name for bar in judge(report, quick=True) if not bar.holds] == [name]


def test_quick_run_is_not_held_to_comparisons() -> None:
    report = good()
    put(report, "without.preemptions", 0)
    put(report, "with.client_lag_ms_p99", 900.0)
    assert all(bar.holds for bar in judge(report, quick=True))


def test_a_good_report_holds_every_bar() -> None:
    bars = judge(good())
    assert failing(good()) == []
    assert len(bars) == 8
    assert bars[0].figures == "100 of 4,000 ms: 0.025"


@pytest.mark.parametrize(
    ("path", "value", "name"),
    [
        ("with.tenants.quiet.ttft_ms.p50", 1001.0, "quiet's TTFT p50 at most 0.25 of without"),
        ("with.tenants.quiet.ttft_ms.p99", 1001.0, "quiet's TTFT p99 at most 0.25 of without"),
        ("with.tenants.quiet.ttft_ms.p99", None, "quiet's TTFT p99 at most 0.25 of without"),
        ("without.tenants.quiet.ttft_ms.p50", None, "quiet's TTFT p50 at most 0.25 of without"),
        ("with.output_tokens_per_s", 849.0, "output tokens/s at least 0.85 of without"),
        ("without.output_tokens_per_s", 0.0, "output tokens/s at least 0.85 of without"),
        ("with.preemptions", 4, "preemptions at most 5% of without"),
        ("without.preemptions", 0, "preemptions at most 5% of without"),
        (
            "with_again.tenants.hog.completed",
            40,
            "a second run completes as much, within 10%",
        ),
        ("with_again.tenants.hog.completed", 120, "a second run completes as much, within 10%"),
        ("after.promised_tokens", 16, "afterwards nothing is promised, leased or queued"),
        ("after.live_leases", 1, "afterwards nothing is promised, leased or queued"),
        ("after.queued", 1, "afterwards nothing is promised, leased or queued"),
        ("alone.tenants.quiet.errors", 1, "no request ended in an error"),
        (
            "with_again.client_lag_ms_p99",
            50.1,
            "the load generator kept its own pace (lag p99 at most 50 ms)",
        ),
    ],
)
def test_each_bar_fails_alone(path: str, value: Any, name: str) -> None:
    report = good()
    put(report, path, value)
    assert failing(report) == [name]


def test_a_late_generator_voids_the_run() -> None:
    report = good()
    put(report, "without.client_lag_ms_p99", 80.0)
    assert "void" in next(bar.figures for bar in judge(report) if not bar.holds)


def test_the_edge_of_a_bar_holds() -> None:
    report = good()
    put(report, "with.tenants.quiet.ttft_ms.p50", 1000.0)
    put(report, "with.output_tokens_per_s", 850.0)
    put(report, "with.preemptions", 3)
    assert failing(report) == []
