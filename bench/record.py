"""Stores the result of a measurement for the report, beside pytest-benchmark's own figures."""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import numpy as np

from bench.compare import Comparison

__all__ = ["CONTROLS", "FEATURES", "RUNGS", "Benchmark", "Recorder"]

#: pytest-benchmark's fixture; the package has no types.
Benchmark = Any
Setup = Callable[[], tuple[Any, ...]]

#: Keys of a test's `extra_info`.
RUNGS = "rungs"
CONTROLS = "controls"
FEATURES = "features"

#: A comparison of two sizes, and which.
Growth = tuple[Comparison, tuple[int, int]]


def _empty_step(first: object, second: object = None, third: object = None) -> None:
    pass


class Recorder:
    """Measures with pytest-benchmark, and records the rungs and controls of one test."""

    def __init__(self, benchmark: Benchmark) -> None:
        self._benchmark = benchmark
        self._rungs: list[dict[str, Any]] = []
        self._controls: list[dict[str, Any]] = []
        self._features: list[dict[str, Any]] = []
        benchmark.extra_info[FEATURES] = self._features
        benchmark.extra_info[RUNGS] = self._rungs
        benchmark.extra_info[CONTROLS] = self._controls

    def steps(
        self, step: Callable[..., object], setup: Setup, rounds: int, events: int = 1
    ) -> dict[str, float]:
        """Time a step by itself, again and again; `setup` makes its arguments, untimed.

        Returns median and 99th percentile in ns for each of the step's events, less the cost of the
        timing: an empty step is timed beside each one.
        """
        timing: list[float] = []

        def prepared() -> tuple[tuple[Any, ...], dict[str, Any]]:
            arguments = setup()
            named: dict[str, Any] = {}
            began = perf_counter()
            _empty_step(*arguments, **named)
            timing.append(perf_counter() - began)
            return arguments, named

        self._benchmark.pedantic(
            step, setup=prepared, rounds=rounds, warmup_rounds=max(1, rounds // 20)
        )
        if self._benchmark.disabled:
            return {"median_ns": 0.0}
        timing_ns = float(np.median(timing)) * 1e9
        median, high = np.quantile(self._benchmark.stats.stats.data, [0.5, 0.99]) * 1e9
        return {
            "median_ns": max(1.0, float(median) - timing_ns) / events,
            "p99_ns": max(1.0, float(high) - timing_ns) / events,
            "timing_ns": timing_ns / events,
        }

    def once(self, work: Callable[[], object]) -> None:
        """Run what is no repeated step."""
        self._benchmark.pedantic(work)

    def rung(
        self,
        name: str,
        label: str,
        sizes: dict[str, int],
        *,
        figures: dict[str, float],
        reference: str | None = None,
        comparison: Comparison | None = None,
        reference_ns: float | None = None,
        digest: int | None = None,
    ) -> None:
        """Record one rung: its figures, and how it compares to its reference.

        The digest is the core's, over all its decisions meanwhile.
        """
        entry: dict[str, Any] = {"name": name, "label": label, "sizes": sizes, **figures}
        if comparison is not None:
            entry["reference"] = reference
            entry["reference_ns"] = reference_ns
            entry["ratio"] = comparison.ratio
            entry["ratio_ci95"] = [comparison.low, comparison.high]
        if digest is not None:
            entry["digest"] = f"{digest:016x}"
        self._rungs.append(entry)

    def control(self, name: str, comparison: Comparison) -> None:
        """Record how a thing compares to itself."""
        self._controls.append(
            {
                "name": name,
                "ratio": comparison.ratio,
                "ratio_ci95": [comparison.low, comparison.high],
                "contains_one": comparison.contains_one,
            }
        )

    def feature(
        self,
        name: str,
        label: str,
        beside_default: Mapping[str, Comparison],
        growth: Mapping[str, Growth],
        digest: int,
    ) -> None:
        """Record what a feature costs beside the default policies, and from size to size."""
        self._features.append(
            {
                "name": name,
                "label": label,
                "beside_default": {key: _figures(found) for key, found in beside_default.items()},
                "growth": {
                    key: {"sizes": list(sizes), **_figures(found)}
                    for key, (found, sizes) in growth.items()
                },
                "digest": f"{digest:016x}",
            }
        )


def _figures(found: Comparison) -> dict[str, Any]:
    ratio, ns = found.ratio, found.a
    return {
        "ratio": ratio,
        "ratio_ci95": [found.low, found.high],
        "ns": ns,
        "reference_ns": found.b,
    }
