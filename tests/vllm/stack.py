"""Shows the running stack to tests: the engine's gauges, the scheduler's books."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

from .programs import MODEL, Scheduler, Server

SETTLE_S_MAX = 30.0
_SAMPLE = re.compile(r"^(?:vllm:|schedsvc_)(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Stack:
    """Holds scheduler and gated vLLM."""

    server: Server
    scheduler: Scheduler

    @property
    def url(self) -> str:
        """Return where vLLM answers."""
        return self.server.url

    @property
    def log(self) -> Path:
        """Return the output of vLLM."""
        return self.server.log

    def stats(self) -> pb.StatsResponse:
        """Ask the scheduler."""
        with grpc.insecure_channel(self.scheduler.target) as channel:
            stub: Any = SchedulerServiceStub(channel)
            answer: pb.StatsResponse = stub.Stats(
                pb.StatsRequest(), timeout=20, wait_for_ready=True
            )
        return answer

    def flow(self, tenant: str) -> pb.FlowStats:
        """Read one tenant's books."""
        return next(flow for flow in self.stats().flows if flow.tenant == tenant)

    @property
    def pool(self) -> pool_pb2.PoolStats:
        """Read the books of the one pool."""
        return self.stats().pools[0]

    def gauges(self) -> dict[str, float]:
        """Scrape the engine: each of its metrics and of the gate's, summed over labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            text = response.read().decode()
        sums: dict[str, float] = {}
        for name, value in _SAMPLE.findall(text):
            sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def busy(self) -> dict[str, float]:
        """Name what is not at rest: the engine's requests, the scheduler's promises."""
        gauges, stats = self.gauges(), self.stats()
        found = {
            "running": gauges["num_requests_running"],
            "waiting": gauges["num_requests_waiting"],
            "kv_cache_usage": gauges["kv_cache_usage_perc"],
            "queued": float(stats.totals.queued),
            "live_leases": float(stats.totals.live_leases),
            "promised_tokens": float(stats.totals.promised_tokens),
        }
        return {name: value for name, value in found.items() if value}

    def rest(self, wait_s_max: float = SETTLE_S_MAX) -> float:
        """Wait until everything is at rest; return how long that took, in seconds."""
        started = time.monotonic()
        while left := self.busy():
            assert time.monotonic() - started < wait_s_max, f"still busy: {left}"
            time.sleep(0.02)
        return time.monotonic() - started

    def connected(self) -> None:
        """Wait until the gate has found the scheduler, which it gives up after a second."""
        self.until(lambda: self.gauges().get("gate_connected") == 1)

    def until(self, condition: Callable[[], object], wait_s_max: float = 120.0) -> float:
        """Wait for a condition; return how long that took, in seconds."""
        started = time.monotonic()
        while not condition():
            assert time.monotonic() - started < wait_s_max, "the condition never came true"
            time.sleep(0.02)
        return time.monotonic() - started


def completion(input_tokens: int, output_tokens: int, **more: Any) -> dict[str, Any]:
    """Make the body of a completion whose lengths are exact."""
    return {
        "model": MODEL,
        "prompt": [100 + (7 * number) % 1900 for number in range(input_tokens)],
        "max_tokens": output_tokens,
        "min_tokens": output_tokens,
        "ignore_eos": True,
        **more,
    }


def chat(text: str, output_tokens: int, **more: Any) -> dict[str, Any]:
    """Make the body of a chat whose output length is exact."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": output_tokens,
        "min_tokens": output_tokens,
        "ignore_eos": True,
        **more,
    }


def events(text: str) -> list[Any]:
    """Parse a stream of server-sent events; checks that it ends as OpenAI's do."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert data[-1] == "[DONE]", data[-1]
    return [json.loads(item) for item in data[:-1]]
