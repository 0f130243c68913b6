"""Generates load: open loop by default, closed loop on request.

Open loop: each request is sent at the time in its trace, even if earlier ones wait or fail. A
closed loop slows down with the server, and hides the queue that an open loop shows; use it to find
the capacity of a server. Nothing is retried.
"""

import asyncio
import gc
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from itertools import chain

import aiohttp

from schedsvc_lab.load.exchange import Exchange
from schedsvc_lab.load.lag import LagMeter
from schedsvc_lab.load.samples import Recorder, Sample
from schedsvc_lab.load.target import Backend, Target
from schedsvc_lab.workload import TraceRequest

_ERROR_TEXT_MAX = 200
# It is below the 5 s after which servers close idle connections: a connection that is just being
# closed would cause an error of its next request.
_KEEPALIVE_S = 4.0


class TargetError(RuntimeError):
    """The endpoint cannot be used at all."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Says how a run goes.

    `warmup_requests` are sent one by one before the clock starts and appear in no figure.
    `warmup_s` is the part of the run that the throughput leaves out. `drain_s` is how long the run
    waits after the last arrival; what is open then is cancelled and counts as an error.
    `concurrency` makes it a closed loop with this many requests in flight: each is sent when an
    earlier one has ended, regardless of the trace's times. They start over the first `ramp_s`
    seconds.
    """

    seed: int = 0
    warmup_requests: int = 0
    warmup_s: float = 0.0
    drain_s: float = 60.0
    concurrency: int | None = None
    ramp_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RunResult:
    """Holds everything that was measured in a run; times in seconds since its start.

    `offered` is the number of requests to send, if it is known. An `interrupted` run holds the
    results until then.
    """

    recorder: Recorder
    loop_lag_ms: list[float]
    warmup_s: float
    last_arrival_s: float
    wall_s: float
    model: str = ""
    offered: int | None = None
    concurrency: int | None = None
    interrupted: bool = False


class LoadRun:
    """Runs a trace against a target. `recorder` may be watched while it goes."""

    def __init__(self, target: Target, trace: Iterable[TraceRequest], pace: Pace) -> None:
        self.recorder = Recorder()
        self.offered = len(trace) if isinstance(trace, Sized) else None
        self._target = target
        self._trace = trace
        self._pace = pace
        self._model = target.model
        self._prompts = target.prompts(pace.seed)
        # Request ids differ between runs with the same seed: a server may remember answers.
        self._run_id = f"load-{time.time_ns():x}"
        self._started = time.perf_counter()
        self._connect_started: dict[int, float] = {}
        self._last_arrival_s = 0.0
        self._sending: asyncio.Task[None] | None = None
        self._interrupted = False

    def now_s(self) -> float:
        """Return the seconds since the run's start."""
        return time.perf_counter() - self._started

    def interrupt(self) -> None:
        """End the run now; `run()` returns the results so far. Idempotent."""
        self._interrupted = True
        if self._sending is not None:
            self._sending.cancel()

    async def run(self) -> RunResult:
        """Send the trace and wait for the answers.

        Raises TargetError before anything is sent, PromptError if a prompt cannot be made.
        """
        async with self._session() as http:
            if not self._model and self._target.backend is not Backend.GENERATE_STREAM:
                self._model = await self._first_model(http)
            requests = iter(self._trace)
            first = next(requests, None)
            if first is None:
                raise TargetError("nothing to send: the trace holds no request")
            await self._warm_up(http, first)
            self.recorder.connect_ms.clear()
            # A full collection over a long run's samples would be a pause of the generator's own.
            is_frozen = gc.get_freeze_count() > 0  # the caller froze it, and it stays frozen
            gc.collect()
            gc.freeze()
            try:
                async with LagMeter() as lag:
                    await self._send(http, chain((first,), requests))
                    wall_s = self.now_s()
            finally:
                if not is_frozen:
                    gc.unfreeze()
        return RunResult(
            self.recorder,
            lag.lags_ms,
            self._pace.warmup_s,
            self._last_arrival_s,
            wall_s,
            self._model,
            self.offered,
            self._pace.concurrency,
            self._interrupted,
        )

    def _session(self) -> aiohttp.ClientSession:
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_create_start.append(self._on_connect_start)
        tracing.on_connection_create_end.append(self._on_connect_end)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, ttl_dns_cache=None, keepalive_timeout=_KEEPALIVE_S
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            trace_configs=[tracing],
            auto_decompress=False,
            read_bufsize=2**18,
        )

    async def _send(self, http: aiohttp.ClientSession, requests: Iterator[TraceRequest]) -> None:
        """Send everything, in a separate task, so that an interruption ends nothing else."""
        if self._interrupted:
            return
        exchange = Exchange(
            http, self._target, self.recorder, self.now_s, lambda: self._interrupted
        )
        loop = self._open_loop if self._pace.concurrency is None else self._closed_loop
        self._started = time.perf_counter()
        self._sending = asyncio.create_task(loop(exchange, enumerate(requests)))
        try:
            await self._sending
        except asyncio.CancelledError:
            if not self._interrupted:
                raise

    async def _open_loop(
        self, exchange: Exchange, requests: Iterator[tuple[int, TraceRequest]]
    ) -> None:
        """Send each request at its time, and wait for the end.

        Raises the first exception of a request that is no fate of it, after the wait.
        """
        tasks: set[asyncio.Task[None]] = set()
        defects: list[BaseException] = []
        settle = _settler(tasks, defects)
        try:
            for index, request in requests:
                # Written before its time, so it does not delay the request.
                body = self._target.body(request, self._model, self._prompts)
                self._last_arrival_s = request.arrival_s
                await asyncio.sleep(max(0.0, request.arrival_s - self.now_s()))
                sample = _sample(request, request.arrival_s)
                send = exchange.send(sample, body, f"{self._run_id}-{index}")
                task = asyncio.create_task(send)
                tasks.add(task)
                task.add_done_callback(settle)
            if tasks:
                await asyncio.wait(set(tasks), timeout=self._pace.drain_s)
        finally:
            await _cancel(tasks)
        if defects:
            # The generator itself failed; figures that lack these requests would mislead.
            raise defects[0]

    async def _closed_loop(
        self, exchange: Exchange, requests: Iterator[tuple[int, TraceRequest]]
    ) -> None:
        """Keep `concurrency` requests in flight, in the order of the trace, until it ends."""
        users = self._pace.concurrency or 1
        tasks: set[asyncio.Task[None]] = set()
        defects: list[BaseException] = []
        settle = _settler(tasks, defects)

        async def use(after_s: float) -> None:
            await asyncio.sleep(after_s)
            for index, request in requests:
                body = self._target.body(request, self._model, self._prompts)
                self._last_arrival_s = self.now_s()
                sample = _sample(request, self._last_arrival_s)
                await exchange.send(sample, body, f"{self._run_id}-{index}")

        for user in range(users):
            task = asyncio.create_task(use(self._pace.ramp_s * user / users))
            tasks.add(task)
            task.add_done_callback(settle)
        try:
            while tasks:
                await asyncio.wait(set(tasks), return_when=asyncio.FIRST_EXCEPTION)
                if defects:
                    raise defects[0]
        finally:
            await _cancel(tasks)

    async def _warm_up(self, http: aiohttp.ClientSession, first: TraceRequest) -> None:
        """Send a few small requests one by one; raises TargetError if the target fails."""
        url = self._target.generate_url
        for index in range(self._pace.warmup_requests):
            request = TraceRequest(0.0, first.tenant, 16, 4)
            body = self._target.body(request, self._model, self._prompts)
            headers = self._target.headers(first.tenant, f"{self._run_id}-warmup-{index}")
            try:
                async with http.post(url, data=body, headers=headers) as response:
                    text = await response.read()
            except (aiohttp.ClientError, OSError) as error:
                raise TargetError(f"{self._target.url}: {_describe(error)}") from None
            if response.status != 200:
                raise TargetError(
                    f"{url} answered {response.status} to a warm-up request: "
                    f"{text[:_ERROR_TEXT_MAX].decode(errors='replace')}"
                )

    async def _first_model(self, http: aiohttp.ClientSession) -> str:
        """Ask for the first model that the target serves."""
        url = self._target.models_url
        key = next(iter(self._target.api_keys.values()), None)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        headers.update(self._target.headers_for_all)
        try:
            async with http.get(url, headers=headers) as response:
                text = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise TargetError(f"{self._target.url}: {_describe(error)}") from None
        try:
            return str(json.loads(text)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise TargetError(
                f"{url} names no model (status {response.status}); give one with --model"
            ) from None

    async def _on_connect_start(self, _session: object, context: object, _params: object) -> None:
        self._connect_started[id(context)] = time.perf_counter()

    async def _on_connect_end(self, _session: object, context: object, _params: object) -> None:
        started = self._connect_started.pop(id(context))
        self.recorder.connect_ms.append((time.perf_counter() - started) * 1e3)


def _sample(request: TraceRequest, intended_s: float) -> Sample:
    return Sample(request.tenant, intended_s, request.prompt_tokens, request.output_tokens)


def _settler(
    tasks: set[asyncio.Task[None]], defects: list[BaseException]
) -> Callable[[asyncio.Task[None]], None]:
    """Return a callback that takes an ended task out, and keeps what it raised."""

    def settle(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            defects.append(error)

    return settle


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    left = set(tasks)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__
