from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from schedsvc_vllm import engine
from schedsvc_vllm.engine import EngineView
from schedsvc_vllm.telemetry import Reading, Readings


async def nowhere(*_: Any) -> None:
    raise AssertionError("nobody is served here")


def step(running: int, waiting: int, skipped: int, usage: float) -> Any:
    return SimpleNamespace(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_skipped_waiting_reqs=skipped,
        kv_cache_usage=usage,
    )


def record(readings: Readings, engine: int, capacity: int, scheduler: Any, iteration: Any) -> None:
    """Report a step as the plugin does."""
    engines = readings._engines
    engines[engine].capacity_tokens = capacity
    engines[engine].record(scheduler, iteration)


def preempted(number: int) -> Any:
    return SimpleNamespace(num_preempted_reqs=number)


def told(readings: Readings) -> tuple[int, ...] | None:
    totals = readings.totals()
    if totals is None:
        return None
    return totals.running, totals.waiting, totals.used_tokens, totals.preemptions


def test_the_last_step_counts_and_preemptions_add_up() -> None:
    readings = Readings()
    assert not readings.expected
    readings.attach(0)
    assert readings.expected
    record(readings, 0, 1_000, step(3, 1, 2, 0.5), preempted(2))
    record(readings, 0, 1_000, step(2, 0, 1, 0.25), preempted(1))
    assert told(readings) == (2, 1, 250, 3)


def test_no_figures_before_the_first_step() -> None:
    readings = Readings()
    readings.attach(0)
    assert told(readings) is None
    # A step's statistics may come without those of the scheduler.
    record(readings, 0, 1_000, None, preempted(1))
    assert told(readings) is None


def test_engines_are_summed_up_and_a_new_one_starts_at_zero() -> None:
    readings = Readings()
    for number in range(2):
        readings.attach(number)
        record(readings, number, 1_000, step(number + 1, 4, 0, 0.1), preempted(5))
    assert told(readings) == (3, 8, 200, 10)
    readings.attach(1)
    assert told(readings) == (1, 4, 100, 5)


def test_unreadable_telemetry_is_logged_once_never_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    readings = Readings()
    readings.attach(0)
    record(readings, 0, 1_000, step(1, 0, 0, 0.1), None)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            record(readings, 0, 1_000, SimpleNamespace(), SimpleNamespace())
            assert told(readings) is None
    assert len(caplog.records) == 1


def test_the_gate_reads_it_where_the_server_offers_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings = Readings()
    monkeypatch.setattr(engine, "READINGS", readings)
    view = EngineView({"app": SimpleNamespace(state=SimpleNamespace())}, nowhere)
    assert not view.offers_telemetry
    readings.attach(0)
    assert view.offers_telemetry
    assert view.telemetry() is None
    record(readings, 0, 20_480, step(7, 2, 0, 0.5), preempted(1))
    assert view.telemetry() == Reading(7, 2, 10_240, 1, known=True)
