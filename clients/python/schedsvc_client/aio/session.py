"""The asyncio driver of a Session: one stream for a process, reconnected and replayed."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from schedsvc_client.aio.admission import Admission, Asker
from schedsvc_client.aio.contest_log import ContestLog
from schedsvc_client.aio.heartbeat import Heartbeat
from schedsvc_client.aio.session_state import SessionState
from schedsvc_client.aio.session_writer import send_all
from schedsvc_client.channel import (
    ClientOptions,
    Token,
    backoff_ceiling_s,
    bearer_metadata,
    check_target,
    open_aio_channel,
)
from schedsvc_client.errors import (
    CallError,
    InvalidRequest,
    SchedulerUnavailable,
    Unauthenticated,
    defect,
    from_rpc_error,
    is_contest,
    refused,
    refuses_pool,
    unavailable,
)
from schedsvc_client.leases import Lease, Totals
from schedsvc_client.outcomes import Outcome
from schedsvc_client.session_notices import (
    Faulted,
    LeaseLost,
    Notice,
    PoolContested,
    PoolRefused,
    PrefixUse,
    Verdict,
    Welcomed,
)
from schedsvc_client.session_protocol import SessionProtocol, limits_of
from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

_METHOD = "/schedsvc.v1.SchedulerService/Session"
# Waiting will not cure these: admissions fail at once, while attempts go on.
_HOPELESS = (Unauthenticated, InvalidRequest)
_log = logging.getLogger("schedsvc_client.session")


class SchedulerSession(Asker):
    """One shim process at the scheduler. Use it inside one event loop.

    `incarnation` must be larger at each start of the process that calls itself `client_id`: its
    start time in ns does. `on_state` is called with each new state.
    """

    def __init__(
        self,
        target: str,
        *,
        client_id: str,
        incarnation: int,
        credentials: grpc.ChannelCredentials | None = None,
        token: Token | None = None,
        options: ClientOptions | None = None,
        on_state: Callable[[SessionState], None] | None = None,
    ) -> None:
        super().__init__()
        self.target = check_target(target)
        self.state = SessionState.CONNECTING
        self.last_error: CallError | None = None
        self._options = options or ClientOptions()
        self._credentials = credentials
        self._token = token
        self._on_state = on_state
        self._protocol = SessionProtocol(client_id, incarnation, limits_of(self._options))
        self._waiting: dict[int, tuple[Admission, asyncio.Future[None]]] = {}
        self._running: dict[int, Admission] = {}
        self._flushed: list[asyncio.Future[None]] = []
        self._wake = asyncio.Event()
        bound_s = self._options.silent_after_s
        self._heartbeat = Heartbeat(bound_s, self._send_beat, self._silence_changed)
        self._jitter = random.SystemRandom().random
        self._contests = ContestLog()
        # None while admissions are worth a try, else why they are not.
        self._given_up: CallError | None = None
        self._away_logged = False
        self._give_up_timer: asyncio.TimerHandle | None = None
        self._ends_timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    # For the shim.

    @property
    def available(self) -> bool:
        """Whether an admission would be asked for: connected, or lost only a moment ago."""
        return self._task is not None and self._given_up is None

    @property
    def pool_refused(self) -> CallError | None:
        """Why the scheduler refuses this client's pools, while it does: another engine has them."""
        error = self.last_error if self._given_up is not None else None
        return error if error is not None and is_contest(error) else None

    @property
    def open_leases(self) -> int:
        """Leases that this session renews."""
        return self._protocol.open_leases

    @property
    def open_requests(self) -> int:
        """Requests that have no verdict yet."""
        return self._protocol.open_requests

    @property
    def prefix_use(self) -> PrefixUse:
        """The uses of prompt hashes that the scheduler last announced."""
        return self._protocol.prefix_use

    def start(self) -> None:
        """Begin to connect, in the running event loop. Idempotent until `close`."""
        if self.state is SessionState.CLOSED:
            raise RuntimeError("the session is closed; make another one")
        if self._task is None:
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._run(), name="schedsvc-session")
            self._watch(loop)

    async def close(self, *, flush_deadline_s: float = 1.0) -> None:
        """Cancel what is open, wait a moment for the scheduler to learn of it, and hang up."""
        if self.state is SessionState.CLOSED:
            return
        for admission in list(self._running.values()):
            admission.complete(outcome=Outcome.CANCELLED)
        self._stop_asking(unavailable("the session was closed"))
        if self.state is SessionState.CONNECTED:
            self._protocol.say_goodbye()
            await self.flush(flush_deadline_s)
        self._set_state(SessionState.CLOSED)
        for timer in filter(None, (self._give_up_timer, self._ends_timer)):
            timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def __aenter__(self) -> SchedulerSession:
        self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def register_pool(
        self,
        *,
        pool: str,
        epoch: int,
        capacity_tokens: int,
        block_size_tokens: int,
        max_running: int = 0,
        max_model_tokens: int = 0,
        gates: int = 1,
    ) -> None:
        """Offer the engine's KV cache, now and on every new stream.

        `gates`: how many sessions offer this pool, one for each API process of the engine.
        """
        registration = pool_pb2.PoolRegistration(
            pool=pool,
            epoch=epoch,
            capacity_tokens=capacity_tokens,
            block_size_tokens=block_size_tokens,
            max_running=max_running,
            max_model_tokens=max_model_tokens,
            gates=gates,
        )
        self._protocol.register_pool(registration)
        self._wake.set()

    def telemetry(
        self,
        *,
        pool: str,
        epoch: int,
        running: int,
        waiting: int,
        used_tokens: int,
        preemptions: int,
    ) -> None:
        """Report what the engine says of itself; dropped while there is no stream."""
        report = pool_pb2.EngineTelemetry(
            pool=pool,
            epoch=epoch,
            running=running,
            waiting=waiting,
            used_tokens=used_tokens,
            preemptions=preemptions,
        )
        self._protocol.telemetry(report)
        self._wake.set()

    async def flush(self, deadline_s: float) -> bool:
        """Wait until every Complete is acknowledged and saved; False if the deadline came first."""
        if not self._protocol.unacknowledged:
            return True
        self._wake.set()
        future = asyncio.get_running_loop().create_future()
        self._flushed.append(future)
        done, _ = await asyncio.wait((future,), timeout=deadline_s)
        if not done:
            self._flushed.remove(future)
        return bool(done)

    # For its Admissions (the Holder protocol).

    def submit(self, admission: Admission) -> asyncio.Future[None]:
        """Ask for an admission; see `Admission.submit`."""
        if self._task is None:
            raise RuntimeError("the session is not started; use `async with` or start()")
        if self._given_up is not None:
            raise self._given_up.again()
        tag = self._protocol.admit(admission.request)
        future = asyncio.get_running_loop().create_future()
        self._waiting[tag] = (admission, future)
        future.add_done_callback(lambda done: self._withdraw(tag) if done.cancelled() else None)
        self._wake.set()
        return future

    def report(self, lease: Lease, totals: Totals) -> None:
        """Report running totals; the writer looks at them when they are due."""
        was_due_ns = self._protocol.next_deadline_ns()
        self._protocol.progress(time.monotonic_ns(), lease.lease_id, totals)
        if self._protocol.next_deadline_ns() != was_due_ns:
            self._wake.set()

    def end(self, lease: Lease, outcome: Outcome, totals: Totals) -> None:
        """Queue a Complete; the protocol repeats it until it is acknowledged."""
        self._running.pop(lease.lease_id, None)
        self._protocol.complete(time.monotonic_ns(), lease.lease_id, outcome, totals)
        if self._waiting or not self._options.end_delay_s:
            self._wake.set()  # it may make room
        elif self._ends_timer is None:
            loop = asyncio.get_running_loop()
            self._ends_timer = loop.call_later(self._options.end_delay_s, self._send_ends)

    def _send_ends(self) -> None:
        self._ends_timer = None
        self._wake.set()

    async def settled(self, lease: Lease) -> None:
        """Return at once: the stream delivers it; `flush` waits for all."""

    # The stream.

    async def _run(self) -> None:
        """Keep a stream open until the session is closed."""
        failures = 0
        while True:
            opened_s = time.monotonic()
            # A connection of its own, because the one before it may be dead.
            async with open_aio_channel(self.target, self._credentials) as channel:
                open_stream = channel.stream_stream(
                    _METHOD,
                    request_serializer=None,
                    response_deserializer=pb.SessionResponse.FromString,
                )
                error = await self._one_stream(open_stream)
            self._protocol.disconnected(error)
            lived_s = time.monotonic() - opened_s
            failures = 0 if lived_s > self._options.backoff_max_s else failures + 1
            self._lost_stream(error)
            ceiling_s = backoff_ceiling_s(self._options, failures)
            await asyncio.sleep(ceiling_s * (0.5 + 0.5 * self._jitter()))

    async def _one_stream(self, open_stream: Any) -> CallError:
        """Open a stream and serve it; why it ended."""
        try:
            metadata = bearer_metadata(self._token)
        except SchedulerUnavailable as error:
            return error
        call = open_stream(metadata=metadata)
        self._protocol.connected(time.monotonic_ns())
        reader = asyncio.create_task(self._read(call))
        writer = asyncio.create_task(self._write(call, reader))
        ends = (reader, writer, asyncio.create_task(self._heartbeat.death()))
        first = asyncio.FIRST_COMPLETED
        try:
            # Not wait_for: before Python 3.12 it may swallow a cancellation.
            connect_s = self._options.connect_deadline_s
            done, _ = await asyncio.wait(ends, timeout=connect_s, return_when=first)
            if not done and self.state is SessionState.CONNECTING:
                return unavailable(f"no Welcome within {connect_s:g} s")
            done, _ = await asyncio.wait(ends, return_when=first)
            return done.pop().result()
        finally:
            self._heartbeat.end()
            self._protocol.disconnected()
            for task in ends:
                task.cancel()
            call.cancel()

    async def _read(self, call: Any) -> CallError:
        """Take messages until the stream ends; why it did."""
        try:
            while True:
                response = await call.read()
                if not isinstance(response, pb.SessionResponse):
                    return unavailable("the scheduler ended the stream")
                wrong = self._take(response)
                if wrong is not None:
                    return wrong
        except grpc.RpcError as error:
            return from_rpc_error(error)
        except Exception as error:
            # A defect of ours or of a callback must not end the session for good.
            _log.exception("cannot handle a message of the scheduler")
            return defect(error)

    def _take(self, response: pb.SessionResponse) -> CallError | None:
        """Take one message. Returns why the stream is of no use, where it says so."""
        was_due_ns = self._protocol.next_deadline_ns()
        notices = self._protocol.receive(time.monotonic_ns(), response)
        self._heartbeat.heard(self._protocol.beats)
        wrong = next((n.error for n in notices if isinstance(n, PoolRefused) and n.of_all), None)
        for notice in notices:
            # A stream whose pools are all refused is none to ask on: it never counts as connected.
            if wrong is None or not isinstance(notice, Welcomed):
                self._notice(notice)
        if self._flushed and not self._protocol.unacknowledged:
            for future in self._flushed:
                if not future.done():
                    future.set_result(None)
            self._flushed.clear()
        if self._protocol.has_news or self._protocol.next_deadline_ns() != was_due_ns:
            self._wake.set()
        return wrong

    async def _write(self, call: Any, reader: asyncio.Task[CallError]) -> CallError:
        """Send until the stream ends; why it did."""
        try:
            await send_all(call, self._protocol, self._wake)
        except Exception as error:
            # A defect of ours must not leave a stream that says nothing.
            _log.exception("cannot make a message for the scheduler")
            return defect(error)
        return await asyncio.shield(reader)

    # Notices from the scheduler.

    def _notice(self, notice: Notice) -> None:
        if isinstance(notice, Verdict):
            self._judge(notice)
        elif isinstance(notice, Welcomed):
            self._welcome(notice)
        elif isinstance(notice, LeaseLost):
            admission = self._running.get(notice.lease_id)
            if admission is not None:
                admission.notify_lost(notice.state)
        elif isinstance(notice, Faulted):
            self._fault(notice)
        elif isinstance(notice, PoolContested):
            if notice.claims:
                self._cancel_giving_up()  # the scheduler is there, and answers within seconds
            else:
                self._contests.log(notice)
        elif not notice.of_all:
            _log.error("the scheduler refused a pool of this client: %s", notice.error)

    def _judge(self, verdict: Verdict) -> None:
        admission, future = self._waiting.pop(verdict.tag, (None, None))
        lease = verdict.lease
        if admission is None or future is None or future.done():
            if lease is not None:
                self.end(lease, Outcome.CANCELLED, (0, 0, 0))
            return
        admission.queue_duration_us = verdict.response.queue_duration_us
        if lease is None:
            future.set_exception(refused(verdict.response))
            return
        admission.lease = lease
        self._running[lease.lease_id] = admission
        future.set_result(None)

    def _fault(self, fault: Faulted) -> None:
        _, future = self._waiting.pop(fault.tag, (None, None))
        if future is None:
            _log.warning("the scheduler refused an event as wrong: %s", fault.error)
        elif not future.done():
            future.set_exception(fault.error)

    def _send_beat(self) -> None:
        self._protocol.beat()
        self._wake.set()

    def _silence_changed(self) -> None:
        """Fail what waits while the scheduler is silent, although its stream is open."""
        if not self._heartbeat.is_silent:
            self._given_up = None
            _log.warning("the scheduler at %s answers again", self.target)
            self._set_state(SessionState.CONNECTED)
            return
        bound_s = self._options.silent_after_s
        error = unavailable(f"the scheduler at {self.target} did not answer for {bound_s:g} s")
        _log.warning("admissions fail until the scheduler answers: %s", error.message)
        self.last_error = error
        self._set_state(SessionState.SILENT)
        self._stop_asking(error)
        self._wake.set()  # it withdraws what was asked, which the scheduler reads when it is back

    def _welcome(self, welcomed: Welcomed) -> None:
        self._heartbeat.begin(beats=welcomed.beats)
        self._cancel_giving_up()
        if self._heartbeat.is_silent:
            self._set_state(SessionState.SILENT)  # until two beats have been answered
            return
        if self._away_logged or welcomed.restarted:
            # As loud as the loss: a log that shows the one shows the other.
            how = "another one" if welcomed.restarted else "the same"
            _log.warning("the scheduler at %s is back (%s)", self.target, how)
        self._given_up, self._away_logged = None, False
        self._set_state(SessionState.CONNECTED)

    def _withdraw(self, tag: int) -> None:
        if self._waiting.pop(tag, None) is not None:
            self._protocol.cancel(tag)
            self._wake.set()

    # Admissions while there is no stream.

    def _lost_stream(self, error: CallError) -> None:
        self.last_error = error
        if self.state is SessionState.CLOSED:
            return
        if self.state in (SessionState.CONNECTED, SessionState.SILENT):
            _log.warning("lost the scheduler at %s: %s", self.target, error)
            self._away_logged = True
        self._set_state(SessionState.CONNECTING)
        if isinstance(error, _HOPELESS) or refuses_pool(error):
            if self._given_up is None:
                _log.error("the scheduler at %s refuses this client: %s", self.target, error)
                self._away_logged = True
            # Of the stream, not of any admission: for them the scheduler is unavailable.
            of_caller = isinstance(error, Unauthenticated)
            self._stop_asking(error if of_caller else unavailable(str(error)))
        else:
            self._watch(asyncio.get_running_loop())

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fail waiting admissions unless a stream opens within `unavailable_after_s`."""
        if self._give_up_timer is None and self._given_up is None:
            self._give_up_timer = loop.call_later(self._options.unavailable_after_s, self._give_up)

    def _cancel_giving_up(self) -> None:
        if self._give_up_timer is not None:
            self._give_up_timer.cancel()
            self._give_up_timer = None

    def _give_up(self) -> None:
        self._give_up_timer = None
        cause = f": {self.last_error.message}" if self.last_error else ""
        error = unavailable(f"cannot reach the scheduler at {self.target}{cause}")
        _log.warning("admissions fail until the scheduler is back: %s", error)
        self._away_logged = True
        self._stop_asking(error)

    def _stop_asking(self, error: CallError) -> None:
        self._given_up = error
        waiting, self._waiting = self._waiting, {}
        for tag, (_, future) in waiting.items():
            self._protocol.cancel(tag)
            if not future.done():
                future.set_exception(error.again())

    def _set_state(self, state: SessionState) -> None:
        if state is not self.state:
            self.state = state
            if self._on_state is not None:
                try:
                    self._on_state(state)
                except Exception:
                    # Of the caller; it must not end the session.
                    _log.exception("on_state failed")
