"""Measures how late the load generator is: its own latency must not pass for the server's."""

import asyncio
import time

_PERIOD_S = 0.01


class LagMeter:
    """Measures the event loop's lag: the time by which a 10 ms sleep ends too late.

    Use it as an asynchronous context manager around the run.
    """

    def __init__(self) -> None:
        self.lags_ms: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "LagMeter":
        self._task = asyncio.create_task(self._measure())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _measure(self) -> None:
        while True:
            started = time.perf_counter()
            await asyncio.sleep(_PERIOD_S)
            late_s = time.perf_counter() - started - _PERIOD_S
            self.lags_ms.append(max(0.0, late_s * 1e3))
