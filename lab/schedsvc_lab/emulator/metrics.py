"""Prometheus metrics under vLLM's names, read from the engine at scrape."""

from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from schedsvc_lab.emulator.realtime import Generation, RealTimeEngine
from schedsvc_lab.emulator.settings import CacheView

# vLLM's own buckets, in seconds.
_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_E2E_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_LABELS = ["model_name", "engine"]
_ENGINE = "0"


class EngineMetrics:
    """Exports the metrics of one emulator."""

    def __init__(self, model: str, cache: CacheView) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        success = Counter(
            "vllm:request_success",
            "Choices that ended, by reason.",
            [*_LABELS, "finished_reason"],
            registry=self.registry,
        )
        self._ends = {
            reason: success.labels(model, _ENGINE, reason) for reason in ("stop", "length", "abort")
        }
        self._ttft = Histogram(
            "vllm:time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            _LABELS,
            buckets=_TTFT_S,
            registry=self.registry,
        ).labels(model, _ENGINE)
        self._e2e = Histogram(
            "vllm:e2e_request_latency_seconds",
            "From a request's arrival to its last token.",
            _LABELS,
            buckets=_E2E_S,
            registry=self.registry,
        ).labels(model, _ENGINE)
        self._model = model
        self._cache = cache

    def watch(self, driver: RealTimeEngine) -> None:
        """Show this engine's gauges and totals at every scrape."""
        self.registry.register(_EngineCollector(self._model, self._cache, driver))

    def first_token(self, generation: Generation) -> None:
        """Record the time to the first token."""
        self._ttft.observe((generation.first_token_ns - generation.arrived_ns) / 1e9)

    def end(self, generation: Generation, now_ns: int) -> None:
        """Record how a generation ended."""
        for output, produced in zip(generation.outputs, generation.produced, strict=True):
            complete = produced == output.tokens
            self._ends[output.finish_reason if complete else "abort"].inc()
        if generation.finished:
            self._e2e.observe((now_ns - generation.arrived_ns) / 1e9)

    def render(self) -> bytes:
        """Give the exposition text."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    def __init__(self, model: str, cache: CacheView, driver: RealTimeEngine) -> None:
        self._labels = [model, _ENGINE]
        self._cache = cache
        self._driver = driver

    def collect(self) -> Iterator[Metric]:
        gauges = self._driver.engine.gauges()
        usage = gauges.used_blocks / gauges.total_blocks
        yield self._gauge("num_requests_running", "Sequences in the batch.", gauges.running)
        yield self._gauge("num_requests_waiting", "Sequences that wait.", gauges.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.", usage)
        yield self._counter("num_preemptions", "Sequences thrown out.", gauges.preemptions)
        yield self._counter("prompt_tokens", "Prompt tokens computed.", gauges.prompt_tokens)
        yield self._counter(
            "generation_tokens", "Output tokens produced.", gauges.generation_tokens
        )
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens looked up.", gauges.cache_query_tokens
        )
        yield self._counter("prefix_cache_hits", "Those found.", gauges.cache_hit_tokens)
        lost = CounterMetricFamily(
            "schedsvc_emulator_lost_seconds",
            "Time by which steps ended late for want of CPU, and which was not caught up.",
            labels=_LABELS,
        )
        lost.add_metric(self._labels, self._driver.lost_ns / 1e9)
        yield lost
        yield self._cache_info()

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _cache_info(self) -> Metric:
        info = {name: str(value) for name, value in asdict(self._cache).items()}
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache.", labels=[*_LABELS, *info]
        )
        family.add_metric([*self._labels, *info.values()], 1)
        return family
