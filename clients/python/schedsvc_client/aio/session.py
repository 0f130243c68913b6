"""Drives a Session for asyncio: one stream for a process, reconnected and replayed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from schedsvc_client.aio.admission import Admission, HoldingAsker
from schedsvc_client.aio.contest_log import ContestLog
from schedsvc_client.aio.engine_reports import EngineReports
from schedsvc_client.aio.heartbeat import Heartbeat
from schedsvc_client.aio.session_state import SessionState
from schedsvc_client.aio.session_stream import SessionStream
from schedsvc_client.aio.session_writer import Alarm
from schedsvc_client.channel import (
    ClientOptions,
    Token,
    bearer_metadata,
    open_aio_channel,
    options_of,
)
from schedsvc_client.errors import (
    CallError,
    InvalidRequest,
    SchedulerUnavailable,
    Unauthenticated,
    asks_elsewhere,
    is_contest,
    is_silence,
    refused,
    refuses_pool,
    unavailable,
)
from schedsvc_client.fence import Fence, fence_of
from schedsvc_client.leases import Lease, Totals
from schedsvc_client.outcomes import Outcome
from schedsvc_client.session_limits import limits_of
from schedsvc_client.session_notices import (
    Faulted,
    Fenced,
    LeaseLost,
    Notice,
    PoolContested,
    PoolRefused,
    PrefixUse,
    Verdict,
    Welcomed,
)
from schedsvc_client.session_protocol import SessionProtocol
from schedsvc_client.targets import Targets
from schedsvc_client.v1 import scheduler_pb2 as pb

_METHOD = "/schedsvc.v1.SchedulerService/Session"
# Waiting will not cure these: admissions fail at once, while attempts go on.
_HOPELESS = (Unauthenticated, InvalidRequest)
_log = logging.getLogger("schedsvc_client.session")


class SchedulerSession(EngineReports, HoldingAsker):
    """Represents one shim process at the scheduler. Use it inside one event loop.

    `target`: one, or several separated by commas; see `Targets`. `incarnation` must be larger at
    each start of the process that calls itself `client_id`: its start time in ns does. `on_state`
    is called with each new state. `fence`: of the process for these targets by default. `away`:
    what becomes of requests while no scheduler serves this session, for the log.
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
        fence: Fence | None = None,
        away: str = "admissions fail",
    ) -> None:
        super().__init__()
        self.target, self._away = target, away
        self._targets = Targets(target)
        self.state = SessionState.CONNECTING
        self.last_error: CallError | None = None
        #: The uses of prompt hashes that the scheduler last announced.
        self.prefix_use = PrefixUse()
        self._options = options_of(options)
        self._credentials = credentials
        self._token = token
        self._on_state = on_state
        self._protocol = SessionProtocol(
            client_id,
            incarnation,
            limits_of(self._options),
            fence or fence_of(self._targets.all),
        )
        self._waiting: dict[int, tuple[Admission, asyncio.Future[None]]] = {}
        self._running: dict[int, Admission] = {}
        self._flushed: list[asyncio.Future[None]] = []
        self._reached: list[asyncio.Future[bool]] = []
        # The time from which no scheduler serves this session; None while one serves it.
        self._away_since_s: float | None = time.monotonic()
        self._wake = Alarm()
        bound_s = self._options.silent_after_s
        if self._targets.several:
            bound_s = self._options.failover_silent_after_s
        self._heartbeat = Heartbeat(
            bound_s, self._send_beat, self._silence_changed, hangs_up=self._targets.several
        )
        self._contests = ContestLog()
        # None while admissions may be tried, else why not.
        self._given_up: CallError | None = None
        self._away_logged = False
        self._give_up_timer: asyncio.TimerHandle | None = None
        self._ends_timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    # For the shim.

    @property
    def available(self) -> bool:
        """Return whether it would ask for an admission: connected, or lost only a moment ago."""
        return self._task is not None and self._given_up is None

    @property
    def pool_refused(self) -> CallError | None:
        """Return why the scheduler refuses this client's pools: another engine has them."""
        error = self.last_error if self._given_up is not None else None
        return error if error is not None and is_contest(error) else None

    @property
    def open_leases(self) -> int:
        """Return the number of leases that this session renews."""
        return self._protocol.open_leases

    @property
    def open_requests(self) -> int:
        """Return the number of requests that have no verdict yet."""
        return self._protocol.open_requests

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
        self._wake.cancel()
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

    def reached(self) -> asyncio.Future[bool]:
        """Return a future that is done with True once a scheduler serves this session.

        With False once admissions fail, because none has served it for the failover wait.
        """
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self.state is SessionState.CONNECTED or self._given_up is not None:
            future.set_result(self._given_up is None)
        else:
            self._reached.append(future)
        return future

    # For its Admissions (the Holder protocol).

    def submit(self, admission: Admission) -> asyncio.Future[None]:
        """Ask for an admission; see `Admission.submit`."""
        if self._task is None:
            raise RuntimeError("the session is not started; use `async with` or start()")
        if self._given_up is not None:
            raise self._given_up.again()
        tag = self._protocol.admit(admission.asked)
        future = asyncio.get_running_loop().create_future()
        self._waiting[tag] = (admission, future)
        future.add_done_callback(lambda done: self._withdraw(tag) if done.cancelled() else None)
        self._wake.set()
        return future

    def report(self, lease: Lease, totals: Totals) -> None:
        """Report running totals; the writer looks at them when they are due."""
        self._protocol.progress(time.monotonic_ns(), lease.lease_id, totals)
        self._wake.at(self._protocol.next_deadline_ns())

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
            target = self._targets.current
            async with open_aio_channel(target, self._credentials) as channel:
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
            now_s = time.monotonic()
            if asks_elsewhere(error):
                silent_s = self._options.failover_silent_after_s if is_silence(error) else 0.0
                self._targets.move_on(target, error.leader, now_s=now_s, silent_s=silent_s)
            if self._away_since_s is None:
                self._away_since_s = now_s
            away_s = now_s - self._away_since_s
            pause_s = self._targets.pause_s(self._options, failures, away_s, now_s)
            await asyncio.sleep(pause_s)

    async def _one_stream(self, open_stream: Any) -> CallError:
        """Open a stream and serve it; why it ended."""
        try:
            metadata = bearer_metadata(self._token)
        except SchedulerUnavailable as error:
            return error
        stream = SessionStream(self._protocol, self._heartbeat, self._wake, self._take)
        several = self._targets.several
        return await stream.serve(
            open_stream(metadata=metadata),
            welcome_s=self._options.connect_deadline_s,
            sign_of_life_s=self._options.failover_silent_after_s if several else 0.0,
            is_open=lambda: self.state is not SessionState.CONNECTING,
        )

    def _take(self, response: pb.SessionResponse) -> CallError | None:
        """Take one message. Returns why the stream is of no use, if the message says so."""
        notices = self._protocol.receive(time.monotonic_ns(), response)
        self._heartbeat.heard(self._protocol.beats)
        self.prefix_use = self._protocol.prefix_use
        wrong: CallError | None = None
        for notice in notices:
            if not isinstance(notice, Verdict):
                wrong = wrong or _ends_stream(notice)
        for notice in notices:
            # A stream whose pools are all refused is none to ask on: it never counts as connected.
            if wrong is None or not isinstance(notice, Welcomed):
                self._notice(notice)
        if self._flushed and not self._protocol.unacknowledged:
            for future in self._flushed:
                if not future.done():
                    future.set_result(None)
            self._flushed.clear()
        if self._protocol.has_news:
            self._wake.set()
        elif notices:
            self._wake.at(self._protocol.next_deadline_ns())
        return wrong

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
        elif isinstance(notice, Fenced):
            _log.warning("%s is ignored: %s", self._targets.current, notice.error.message)
        elif not notice.of_all:
            _log.error("the scheduler refused a pool of this client: %s", notice.error)

    def _judge(self, verdict: Verdict) -> None:
        admission, future = self._waiting.pop(verdict.tag, (None, None))
        lease = verdict.lease
        if admission is None or future is None or future.done():
            if lease is not None:
                self.end(lease, Outcome.CANCELLED, (0, 0, 0))
            return
        admission.queue_duration_us = verdict.response.queue_duration_us + admission.held_us
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
            _log.warning("the scheduler at %s answers again", self._targets.current)
            self._set_state(SessionState.CONNECTED)
            return
        bound_s = self._options.silent_after_s
        error = unavailable(f"the scheduler at {self.target} did not answer for {bound_s:g} s")
        _log.warning("%s until the scheduler answers: %s", self._away, error.message)
        self.last_error = error
        self._set_state(SessionState.SILENT)
        self._stop_asking(error)
        self._wake.set()  # it withdraws the admissions, which the scheduler reads when it resumes

    def _welcome(self, welcomed: Welcomed) -> None:
        self._heartbeat.begin(beats=welcomed.beats)
        self._cancel_giving_up()
        if self._heartbeat.is_silent:
            self._set_state(SessionState.SILENT)  # until two beats have been answered
            return
        if self._away_logged or welcomed.restarted:
            # As loud as the loss: a log that shows one shows both.
            how = "another one" if welcomed.restarted else "the same"
            _log.warning("the scheduler at %s is back (%s)", self._targets.current, how)
        self._given_up, self._away_logged, self._away_since_s = None, False, None
        self._targets.answered()
        self._count_held()
        self._settle_reached(is_reached=True)
        self._set_state(SessionState.CONNECTED)

    def _count_held(self) -> None:
        """Count the waiting requests, also while no scheduler leads. O(waiting)."""
        if self._targets.several:
            now_s = time.monotonic()
            for admission, _ in self._waiting.values():
                admission.held_us = int((now_s - admission.asked_s) * 1e6)

    def _settle_reached(self, *, is_reached: bool) -> None:
        reached, self._reached = self._reached, []
        for future in reached:
            if not future.done():
                future.set_result(is_reached)

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
            _log.warning("lost the scheduler at %s: %s", self._targets.current, error)
            self._away_logged = True
        self._set_state(SessionState.CONNECTING)
        if isinstance(error, _HOPELESS) or refuses_pool(error):
            if self._given_up is None:
                place = self._targets.current
                what = "" if refuses_pool(error) else f"; {self._away} until it does not"
                _log.error("the scheduler at %s refuses this client: %s%s", place, error, what)
                self._away_logged = True
            # The error is of the stream, not of any admission: for them the scheduler is
            # unavailable.
            of_caller = isinstance(error, Unauthenticated)
            self._stop_asking(error if of_caller else unavailable(str(error)))
        else:
            self._watch(asyncio.get_running_loop())

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fail waiting admissions unless a stream opens within the time of the options."""
        if self._give_up_timer is None and self._given_up is None:
            several = self._targets.several
            wait_s = self._options.unavailable_after_s
            wait_s = self._options.failover_wait_s if several else wait_s
            self._give_up_timer = loop.call_later(wait_s, self._give_up)

    def _cancel_giving_up(self) -> None:
        if self._give_up_timer is not None:
            self._give_up_timer.cancel()
            self._give_up_timer = None

    def _give_up(self) -> None:
        self._give_up_timer = None
        cause = f": {self.last_error.message}" if self.last_error else ""
        error = unavailable(f"cannot reach the scheduler at {self.target}{cause}")
        _log.warning("%s until the scheduler is back: %s", self._away, error)
        self._away_logged = True
        self._stop_asking(error)

    def _stop_asking(self, error: CallError) -> None:
        self._given_up = error
        self._settle_reached(is_reached=False)
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
                    # An error of the caller; it must not end the session.
                    _log.exception("on_state failed")


def _ends_stream(notice: Notice) -> CallError | None:
    """Return why a stream is of no use after a notice; None if it is of use."""
    if isinstance(notice, Fenced) or (isinstance(notice, PoolRefused) and notice.of_all):
        return notice.error
    return None
