"""The open-loop load generator.

Open loop: each request goes out at the time that its trace says, whatever became of the ones
before. A closed loop would slow down with the server and hide the very queue that it has to show.
Nothing is retried.
"""

import asyncio
import gc
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import aiohttp
import numpy as np

from schedsvc.load.lag import LagMeter
from schedsvc.load.samples import Fate, Recorder, Sample
from schedsvc.load.sse import Scanner
from schedsvc.load.target import Target
from schedsvc.workload import TraceRequest

REFUSALS = frozenset({429, 503})
_ERROR_TEXT_MAX = 200


class TargetError(RuntimeError):
    """The endpoint cannot be used at all."""


class _BadAnswer(RuntimeError):
    """An answer that breaks the protocol."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How a run goes.

    `warmup_requests` are sent one by one before the clock starts and appear in no figure.
    `warmup_s` is the part of the run that the throughput leaves out. `drain_s` is how long the run
    waits after the last arrival; what is open then is cancelled and counts as an error.
    """

    seed: int = 0
    warmup_requests: int = 0
    warmup_s: float = 0.0
    drain_s: float = 60.0


@dataclass(frozen=True, slots=True)
class RunResult:
    """Everything that was measured in a run; times in seconds since its start."""

    recorder: Recorder
    loop_lag_ms: list[float]
    warmup_s: float
    last_arrival_s: float
    wall_s: float


class LoadRun:
    """One run of a trace against a target. `recorder` may be watched while it goes."""

    def __init__(self, target: Target, trace: Iterable[TraceRequest], pace: Pace) -> None:
        self.recorder = Recorder()
        self._target = target
        self._trace = trace
        self._pace = pace
        self._model = target.model
        self._random = np.random.default_rng(pace.seed)
        # Request ids differ between runs with the same seed: a server may remember answers.
        self._run_id = f"load-{time.time_ns():x}"
        self._started = time.perf_counter()
        self._connect_started: dict[int, float] = {}

    def now_s(self) -> float:
        """Seconds since the run's start."""
        return time.perf_counter() - self._started

    async def run(self) -> RunResult:
        """Send the trace and wait for the answers. Raises TargetError before anything is sent."""
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_create_start.append(self._on_connect_start)
        tracing.on_connection_create_end.append(self._on_connect_end)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=None, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            trace_configs=[tracing],
            auto_decompress=False,
            read_bufsize=2**18,
        ) as http:
            self._model = self._model or await self._first_model(http)
            requests = iter(self._trace)
            first = next(requests, None)
            if first is None:
                raise TargetError("nothing to send: the trace holds no request")
            await self._warm_up(http, first.tenant)
            self.recorder.connect_ms.clear()
            # A full collection over a long run's samples would be a pause of the generator's own.
            gc.collect()
            gc.freeze()
            try:
                async with LagMeter() as lag:
                    last_arrival_s = await self._send_all(http, chain((first,), requests))
                    wall_s = self.now_s()
            finally:
                gc.unfreeze()
        return RunResult(self.recorder, lag.lags_ms, self._pace.warmup_s, last_arrival_s, wall_s)

    async def _send_all(
        self, http: aiohttp.ClientSession, requests: Iterable[TraceRequest]
    ) -> float:
        """Send everything on time and wait for the end. Returns the last arrival.

        Raises the first exception of a request that is no fate of it, after the wait.
        """
        self._started = time.perf_counter()
        tasks: set[asyncio.Task[None]] = set()
        defects: list[BaseException] = []

        def settle(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None:
                defects.append(error)

        arrival_s = 0.0
        try:
            for index, request in enumerate(requests):
                # Written before its time, so that this costs the request nothing.
                body = self._target.body(request, self._model, self._random)
                arrival_s = request.arrival_s
                await asyncio.sleep(max(0.0, arrival_s - self.now_s()))
                task = asyncio.create_task(self._send(http, request, body, index))
                tasks.add(task)
                task.add_done_callback(settle)
            if tasks:
                await asyncio.wait(set(tasks), timeout=self._pace.drain_s)
        finally:
            left = set(tasks)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        if defects:
            # Of the generator itself: figures that lack these requests would mislead.
            raise defects[0]
        return arrival_s

    async def _send(
        self, http: aiohttp.ClientSession, request: TraceRequest, body: bytes, index: int
    ) -> None:
        """Send one request and record what becomes of it."""
        sample = Sample(request.tenant, request.arrival_s)
        self.recorder.sent(sample, self.now_s())
        headers = self._target.headers(request.tenant, f"{self._run_id}-{index}")
        try:
            async with http.post(
                self._target.completions_url, data=body, headers=headers
            ) as response:
                if response.status == 200:
                    await self._stream(response, sample)
                    fate, reason = Fate.COMPLETED, ""
                else:
                    fate, reason = await _refusal_of(response, sample)
        except asyncio.CancelledError:
            self.recorder.ended(sample, Fate.ERROR, self.now_s(), "unfinished")
            raise
        except _BadAnswer as error:
            fate, reason = Fate.ERROR, str(error)
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            fate, reason = Fate.ERROR, type(error).__name__
        self.recorder.ended(sample, fate, self.now_s(), reason)

    async def _stream(self, response: aiohttp.ClientResponse, sample: Sample) -> None:
        """Read a streamed answer to its end. Raises _BadAnswer where it breaks off."""
        if response.content_type != "text/event-stream":
            raise _BadAnswer(f"answered {response.content_type} instead of an event stream")
        sample.queue_ms = _number(response.headers.get("x-schedsvc-queue-duration-ms"))
        scanner = Scanner()
        content = response.content
        while piece := await content.readany():
            try:
                events = scanner.feed(piece)
            except ValueError:
                raise _BadAnswer("an event is not JSON") from None
            if events:
                self.recorder.output(sample, events, self.now_s())
        if scanner.error is not None:
            raise _BadAnswer(f"error in the stream: {scanner.error.get('code') or 'unnamed'}")
        if not scanner.done:
            raise _BadAnswer("the stream broke off")
        usage = scanner.usage
        if usage is None:
            raise _BadAnswer("the stream has no usage")
        sample.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        sample.output_tokens = int(usage.get("completion_tokens") or 0)

    async def _warm_up(self, http: aiohttp.ClientSession, tenant: str) -> None:
        """Send a few small requests one by one; raises TargetError if the target fails."""
        for index in range(self._pace.warmup_requests):
            request = TraceRequest(0.0, tenant, 16, 4)
            body = self._target.body(request, self._model, self._random)
            headers = self._target.headers(tenant, f"{self._run_id}-warmup-{index}")
            try:
                async with http.post(
                    self._target.completions_url, data=body, headers=headers
                ) as response:
                    text = await response.read()
            except (aiohttp.ClientError, OSError) as error:
                raise TargetError(f"{self._target.url}: {_describe(error)}") from None
            if response.status != 200:
                raise TargetError(
                    f"{self._target.completions_url} answered {response.status} to a warm-up "
                    f"request: {text[:_ERROR_TEXT_MAX].decode(errors='replace')}"
                )

    async def _first_model(self, http: aiohttp.ClientSession) -> str:
        """Ask for the first model that the target serves."""
        url = self._target.models_url
        key = next(iter(self._target.api_keys.values()), None)
        headers = {"authorization": f"Bearer {key}"} if key else {}
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


async def _refusal_of(response: aiohttp.ClientResponse, sample: Sample) -> tuple[Fate, str]:
    """Read an answer that is not 200, and say what it means."""
    text = await response.read()
    try:
        error = json.loads(text)["error"]
        code = str(error.get("code") or error.get("type") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        code = ""
    if response.status not in REFUSALS:
        return Fate.ERROR, f"{response.status} {code}".rstrip()
    sample.queue_ms = _number(response.headers.get("x-schedsvc-queue-duration-ms"))
    retry_after_ms = _number(response.headers.get("retry-after-ms"))
    if retry_after_ms != retry_after_ms:
        retry_after_ms = _number(response.headers.get("retry-after")) * 1e3
    if retry_after_ms == retry_after_ms:
        sample.retry_after_ms = round(retry_after_ms)
    reason = response.headers.get("x-schedsvc-dropped-reason") or code
    return Fate.REFUSED, f"{response.status} {reason}".rstrip()


def _number(text: str | None) -> float:
    """Read a header's number; NaN where there is none."""
    try:
        return float(text) if text is not None else float("nan")
    except ValueError:
        return float("nan")


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__
