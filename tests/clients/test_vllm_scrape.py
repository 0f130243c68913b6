"""Tests telemetry from `/metrics`, if the stat logger is filtered out; several engines' sizes."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from schedsvc_client.testing import FakeScheduler
from schedsvc_vllm import engine, engine_offer
from schedsvc_vllm.engine import EngineView
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.scrape import ScrapeError, fetch_from_app, parse
from schedsvc_vllm.settings import PoolSettings, Settings
from schedsvc_vllm.telemetry import Reading, Readings

from tests.waiting import Stopwatch, until

from .asgi import Exchange, ask, owner, start

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0
vllm:num_requests_waiting{engine="1",model_name="tiny"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 2.5e-01
vllm:num_preemptions_total{engine="0",model_name="tiny"} 4.0
vllm:num_preemptions_created{engine="0",model_name="tiny"} 1.7e+09
process_cpu_seconds_total 5.0
"""


def test_a_page_is_summed_over_its_engines() -> None:
    assert parse(PAGE, 8_000) == Reading(5, 1, 3_000, 4, known=True)


@pytest.mark.parametrize(
    "page", ["", "vllm:num_requests_running 3\n", "vllm:kv_cache_usage_perc 1"]
)
def test_a_page_without_figures_is_an_error(page: str) -> None:
    with pytest.raises(ScrapeError, match="has no figures"):
        parse(page, 8_000)


# The page of two API processes before the engine's first step: prometheus_client leaves out gauges
# of the mode "mostrecent" that were not set yet.
AT_REST = """\
vllm:cache_config_info{block_size="128",engine="0",kv_cache_size_tokens="8000"} 1.0
vllm:num_preemptions_total{engine="0",model_name="tiny"} 0.0
vllm:num_preemptions_total{engine="1",model_name="tiny"} 0.0
"""


def test_engines_that_have_made_no_step_are_at_rest() -> None:
    assert parse(AT_REST, 8_000) == Reading(0, 0, 0, 0, known=True)
    one = AT_REST + 'vllm:kv_cache_usage_perc{engine="1"} 0.5\nvllm:num_requests_running 2.0\n'
    assert parse(one, 8_000) == Reading(2, 0, 2_000, 0, known=True)


class Serving:
    """Serves a page of metrics."""

    def __init__(self) -> None:
        self.page = PAGE
        self.status = 200
        self.fetched = 0
        self.scopes: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"].endswith("/metrics"):
            self.fetched += 1
            self.scopes.append(scope)
            assert (await receive())["type"] == "http.request"
            await send(start(self.status, b"text/plain"))
            half = len(self.page) // 2
            for piece in (self.page[:half], self.page[half:]):
                message = {"type": "http.response.body", "body": piece.encode(), "more_body": True}
                await send(message)
            return
        await receive()
        await send(start(200, b"application/json"))
        await send({"type": "http.response.body", "body": b"{}"})


async def test_the_page_is_asked_for_inside_the_process() -> None:
    app = Serving()
    outer = {"root_path": "/root", "app": "the app"}
    assert await fetch_from_app(app, outer) == PAGE
    (scope,) = app.scopes
    assert (scope["method"], scope["path"], scope["app"]) == ("GET", "/root/metrics", "the app")
    app.status = 404
    with pytest.raises(ScrapeError, match="404"):
        await fetch_from_app(app, outer)
    app.status, app.page = 200, "x" * (9 << 20)
    with pytest.raises(ScrapeError, match="bytes"):
        await fetch_from_app(app, outer)


async def test_without_a_stat_logger_the_gate_asks_the_page(
    fake: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_offer, "SCRAPE_PERIOD_S", 0.01)
    app = Serving()
    gate = Gate(app, Settings(target=fake.target))
    await Exchange(gate, ask(), owner=owner()).run()
    await until(lambda: fake.telemetry)
    told = fake.telemetry[0]
    # The part of the pool's 4,096 tokens.
    assert (told.running, told.waiting, told.used_tokens, told.preemptions) == (5, 1, 1_536, 4)
    await gate._close()
    fetched = app.fetched
    await asyncio.sleep(0.03)
    assert app.fetched == fetched


async def test_a_page_that_fails_is_said_once_and_asked_ever_more_seldom(
    fake: FakeScheduler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(engine_offer, "SCRAPE_PERIOD_S", 0.005)
    app = Serving()
    app.status = 503
    gate = Gate(app, Settings(target=fake.target))
    with caplog.at_level(logging.WARNING, logger="schedsvc_vllm"):
        watch = Stopwatch()
        await Exchange(gate, ask(), owner=owner()).run()
        await until(lambda: app.fetched >= 5)
    # At 0, 10, 30, 70 and 150 ms, or later.
    assert watch.ran_for(0.01 * (2 ** (app.fetched - 1) - 1) - 0.001)
    await gate._close()
    assert [r.getMessage() for r in caplog.records] == ["no telemetry: /metrics answers 503"]
    assert fake.telemetry == []


async def test_a_page_that_fails_for_a_day_is_still_asked(
    fake: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_offer, "SCRAPE_PERIOD_S_MAX", 0.0)
    app = Serving()
    app.status = 503
    gate = Gate(app, Settings(target=fake.target))
    await Exchange(gate, ask(), owner=owner()).run()
    await until(lambda: app.fetched > 1_100)
    await gate._close()


async def test_an_engine_that_others_keep_busy_is_asked_as_often(
    fake: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several API processes share an engine, and only the first asks."""
    monkeypatch.setattr(engine_offer, "SCRAPE_PERIOD_S", 600.0)
    monkeypatch.setattr(engine_offer, "TELEMETRY_PERIOD_S", 0.005)
    app = Serving()
    gate = Gate(app, Settings(target=fake.target))
    await Exchange(gate, ask(), owner=owner()).run()
    await until(lambda: app.fetched > 3)
    app.page = AT_REST
    await until(lambda: fake.telemetry and fake.telemetry[-1].running == 0)
    fetched = app.fetched
    await asyncio.sleep(0.03)
    assert app.fetched <= fetched + 1
    await gate._close()


@pytest.mark.parametrize(
    ("count", "rank", "by_plugin", "by_page"),
    [(1, 0, True, True), (1, -1, True, True), (2, 0, False, True), (2, 1, False, False)],
)
def test_first_of_several_api_processes_reads_common_page(
    count: int, rank: int, by_plugin: bool, by_page: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process gets the steps that vLLM gives it, and counts its own requests' preemptions."""
    readings = Readings()
    readings.attach(0)
    monkeypatch.setattr(engine, "READINGS", readings)
    view = engines(SimpleNamespace(_api_process_count=count, _api_process_rank=rank))
    assert view.offers_telemetry is by_plugin
    assert (view.metrics is not None) is by_page


def engines(parallel: Any) -> EngineView:
    shown = owner()
    shown.state.vllm_config.parallel_config = parallel
    return EngineView({"app": shown}, Serving())


@pytest.mark.parametrize(
    ("parallel", "number"),
    [
        (None, 1),
        (SimpleNamespace(data_parallel_size=1, local_engines_only=False), 1),
        (SimpleNamespace(data_parallel_size=4, local_engines_only=False), 4),
        # Each rank, or each node, has a server of its own.
        (
            SimpleNamespace(
                data_parallel_size=4, data_parallel_size_local=1, local_engines_only=True
            ),
            1,
        ),
        (
            SimpleNamespace(
                data_parallel_size=8, data_parallel_size_local=2, local_engines_only=True
            ),
            2,
        ),
    ],
)
def test_engines_behind_one_server_are_one_pool(parallel: Any, number: int) -> None:
    view = engines(parallel)
    pool = view.pool(PoolSettings(), 1)
    assert (pool.capacity_tokens, pool.max_running) == (4_096 * number, 32 * number)
    assert pool.max_model_tokens == 1_024
    given = view.pool(PoolSettings(capacity_tokens=777, max_running=5), 1)
    assert (given.capacity_tokens, given.max_running) == (777, 5)


def test_no_request_is_longer_than_one_engine() -> None:
    view = engines(SimpleNamespace(data_parallel_size=2, local_engines_only=False))
    state: Any = view._state
    state.vllm_config.model_config.max_model_len = 10_000
    assert view.pool(PoolSettings(), 1).max_model_tokens == 4_096
