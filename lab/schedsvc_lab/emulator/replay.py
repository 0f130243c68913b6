"""Replays a trace inside the emulator: its engine in real time, without HTTP and without a client.

Requests go to the engine at the trace's times, even if earlier ones wait or fail; times are those
of the emulated engine, so `speed` shortens the wait and changes no figure.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from schedsvc_lab.emulator.output import Output
from schedsvc_lab.emulator.realtime import Generation, PromptPlan, RealTimeEngine
from schedsvc_lab.emulator.settings import EmulatorSettings
from schedsvc_lab.engine import Engine, EngineRequestError
from schedsvc_lab.engine.prefix import keys_of_hashes, keys_of_tokens
from schedsvc_lab.workload import TraceRequest

Keys = tuple[Any, ...]


@dataclass(slots=True)
class _Ended:
    """Records how and when one request ended; ns since the replay's start."""

    tenant: str
    prompt_tokens: int
    arrival_ns: int
    first_ns: int
    end_ns: int
    output_tokens: int


class Replay:
    """Runs one replay. `ended` and `refused` may be watched while it goes.

    `clock` returns nanoseconds and must advance like the event loop's timers.
    """

    def __init__(
        self,
        settings: EmulatorSettings,
        trace: Sequence[TraceRequest],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        config = settings.config
        self.ended = 0
        self.refused: dict[str, int] = {}
        self._trace = trace
        self._clock = clock
        self._speed = settings.speed
        self._block_tokens = config.block_size_tokens if config.prefix_cache != "off" else 0
        self._driver = RealTimeEngine(
            Engine(config, settings.profile.step_cost(config.sequences_max)),
            settings.speed,
            on_first_token=lambda _generation: None,
            on_end=self._end,
            clock=clock,
        )
        self._asked: dict[int, TraceRequest] = {}
        self._rows: list[_Ended] = []
        self._started_ns = 0
        self._idle = asyncio.Event()

    async def run(self, tick: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Send everything, wait for the end, and sum up. `tick` is called after each request."""
        engine = asyncio.create_task(self._driver.run())
        self._started_ns = self._clock()
        try:
            for request in self._trace:
                due_s = request.arrival_s / self._speed
                await asyncio.sleep(max(0.0, due_s - self._now_ns() / 1e9))
                self._submit(request)
                tick()
            while self._asked and not engine.done():
                self._idle.clear()
                waiter = asyncio.create_task(self._idle.wait())
                await asyncio.wait({waiter, engine}, return_when=asyncio.FIRST_COMPLETED)
                waiter.cancel()
                tick()
            if engine.done():
                engine.result()
        finally:
            engine.cancel()
            await asyncio.wait([engine])
        return self._summary()

    def _now_ns(self) -> int:
        return self._clock() - self._started_ns

    def _submit(self, request: TraceRequest) -> None:
        output = Output(0, 1, request.output_tokens, "length", None, None)
        plan = PromptPlan(request.prompt_tokens, (output,), self._keys(request))
        try:
            generation = self._driver.submit((plan,), 0)
        except EngineRequestError as error:
            self.refused[error.field] = self.refused.get(error.field, 0) + 1
            return
        self._asked[id(generation)] = request

    def _keys(self, request: TraceRequest) -> Keys:
        """Name the prompt's blocks by the trace's hashes, or by its token ids."""
        record = request.record
        if not self._block_tokens or record is None:
            return ()
        if record.token_ids:
            return keys_of_tokens(record.token_ids, self._block_tokens)
        if record.blocks and record.block_tokens:
            return keys_of_hashes(
                record.blocks, record.block_tokens, request.prompt_tokens, self._block_tokens
            )
        return ()

    def _end(self, generation: Generation) -> None:
        request = self._asked.pop(id(generation))
        self.ended += 1
        self._idle.set()
        self._rows.append(
            _Ended(
                request.tenant,
                request.prompt_tokens,
                round(request.arrival_s * 1e9),
                round((generation.first_token_ns - self._started_ns) * self._speed),
                round(self._now_ns() * self._speed),
                generation.completion_tokens,
            )
        )

    def _summary(self) -> dict[str, Any]:
        rows, gauges = self._rows, self._driver.engine.gauges()
        duration_s = max((row.end_ns for row in rows), default=0) / 1e9
        output_tokens = sum(row.output_tokens for row in rows)
        tenants: dict[str, list[_Ended]] = {}
        for row in rows:
            tenants.setdefault(row.tenant, []).append(row)
        asked, hit = gauges.cache_query_tokens, gauges.cache_hit_tokens
        return {
            "requests": len(self._trace),
            "completed": len(rows),
            "refused": dict(self.refused),
            "duration_s": duration_s,
            "input_tokens": sum(row.prompt_tokens for row in rows),
            "output_tokens": output_tokens,
            "output_tokens_per_s": output_tokens / duration_s if duration_s else 0.0,
            **_latencies(rows),
            "preemptions": gauges.preemptions,
            "prefix_cache": {
                "enabled": bool(self._block_tokens),
                "query_tokens": asked,
                "hit_tokens": hit,
                "hit_rate": hit / asked if asked else 0.0,
                "evictions": gauges.cache_evictions,
            },
            "lost_s": self._driver.lost_ns / 1e9,
            "tenants": {
                name: {"completed": len(own), **_latencies(own)}
                for name, own in sorted(tenants.items())
            },
        }


def _latencies(rows: Sequence[_Ended]) -> dict[str, Any]:
    return {
        "ttft_ms": _spread([(row.first_ns - row.arrival_ns) / 1e6 for row in rows]),
        "e2e_ms": _spread([(row.end_ns - row.arrival_ns) / 1e6 for row in rows]),
    }


def _spread(values: list[float]) -> dict[str, float] | None:
    """Return mean and percentiles (the least value that so large a share does not exceed)."""
    if not values:
        return None
    ordered = sorted(values)
    points = {f"p{percent}": -(-len(ordered) * percent // 100) - 1 for percent in (50, 90, 99)}
    return {"mean": fmean(ordered), **{name: ordered[at] for name, at in points.items()}}
