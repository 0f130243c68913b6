"""States the bars that the demo holds itself to."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from schedsvc_lab.load.report import CLIENT_LAG_MS_MAX

Report = dict[str, Any]
RUNS = ("alone", "without", "with", "with_again")

TTFT_RATIO_MAX = 0.25
THROUGHPUT_RATIO_MIN = 0.85
PREEMPTIONS_RATIO_MAX = 0.05
REPEAT_DIFFERENCE_MAX = 0.10


@dataclass(frozen=True, slots=True)
class Bar:
    """States one bar: whether it holds, and the figures that say so."""

    name: str
    holds: bool
    figures: str


def judge(report: Report, quick: bool = False) -> list[Bar]:
    """Hold a report against every bar. A figure that is missing holds none.

    `quick`: against the bars that a run of a few seconds on a busy machine can meet.
    """
    if quick:
        return [_completed(report), _leftovers(report["after"]), _errors(report)]
    return [
        *_latency(report),
        _throughput(report),
        _preemptions(report),
        _repeat(report),
        _leftovers(report["after"]),
        _errors(report),
        _health(report),
    ]


def completed(run: Report) -> int:
    """Count a run's completed requests."""
    return sum(tenant["completed"] for tenant in run["tenants"].values())


def _latency(report: Report) -> Iterator[Bar]:
    for point in ("p50", "p99"):
        without, with_it = (
            report[run]["tenants"]["quiet"]["ttft_ms"][point] for run in ("without", "with")
        )
        name = f"quiet's TTFT {point} at most {TTFT_RATIO_MAX} of without"
        if without is None or with_it is None:
            yield Bar(name, False, "no first token")
            continue
        figures = f"{with_it:,.0f} of {without:,.0f} ms: {with_it / without:.3f}"
        yield Bar(name, with_it <= TTFT_RATIO_MAX * without, figures)


def _throughput(report: Report) -> Bar:
    without, with_it = (report[run]["output_tokens_per_s"] for run in ("without", "with"))
    ratio = with_it / without if without else 0.0
    return Bar(
        f"output tokens/s at least {THROUGHPUT_RATIO_MIN} of without",
        ratio >= THROUGHPUT_RATIO_MIN,
        f"{with_it:,.0f} of {without:,.0f}: {ratio:.2f}",
    )


def _preemptions(report: Report) -> Bar:
    without, with_it = (report[run]["preemptions"] for run in ("without", "with"))
    return Bar(
        f"preemptions at most {PREEMPTIONS_RATIO_MAX:.0%} of without",
        without > 0 and with_it <= PREEMPTIONS_RATIO_MAX * without,
        f"{with_it} of {without}" if without else "the plain engine never preempted: no comparison",
    )


def _repeat(report: Report) -> Bar:
    first, second = completed(report["with"]), completed(report["with_again"])
    return Bar(
        f"a second run completes as much, within {REPEAT_DIFFERENCE_MAX:.0%}",
        first > 0 and abs(second - first) <= REPEAT_DIFFERENCE_MAX * first,
        f"{second} after {first}",
    )


def _completed(report: Report) -> Bar:
    """Every tenant of every run was served: otherwise an empty run would hold the other bars."""
    without = [
        f"{name} in {run}"
        for run in RUNS
        for name, tenant in report[run]["tenants"].items()
        if not tenant["completed"]
    ]
    return Bar("every tenant completed requests", not without, ", ".join(without) or "all did")


def _leftovers(after: Report) -> Bar:
    figures = ", ".join(f"{name} {value}" for name, value in after.items() if value) or "none"
    return Bar("afterwards nothing is promised, leased or queued", not any(after.values()), figures)


def _errors(report: Report) -> Bar:
    counts = {
        run: sum(tenant["errors"] for tenant in report[run]["tenants"].values()) for run in RUNS
    }
    figures = ", ".join(f"{run} {count}" for run, count in counts.items() if count) or "none"
    return Bar("no request ended in an error", not any(counts.values()), figures)


def _health(report: Report) -> Bar:
    lag_ms = max(report[run]["client_lag_ms_p99"] for run in RUNS)
    return Bar(
        f"the load generator kept its own pace (lag p99 at most {CLIENT_LAG_MS_MAX:.0f} ms)",
        lag_ms <= CLIENT_LAG_MS_MAX,
        f"{lag_ms:.1f} ms"
        + (
            "" if lag_ms <= CLIENT_LAG_MS_MAX else ": void, this machine was too busy; run it again"
        ),
    )
