"""Runs a shim: the production client of a Session, its clients, and the engine behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from schedsvc_client import LimitExceeded, Outcome
from schedsvc_client.requests import Asked
from schedsvc_client.session_notices import (
    Faulted,
    LeaseLost,
    Notice,
    PoolRefused,
    Verdict,
    Welcomed,
)
from schedsvc_client.session_protocol import SessionProtocol
from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc_lab.faults.event_queue import EventQueue
from schedsvc_lab.faults.jobs import Job
from schedsvc_lab.faults.link import Connection
from schedsvc_lab.faults.options import Options, PoolOptions
from schedsvc_lab.faults.terms import counts_exactly

if TYPE_CHECKING:
    from schedsvc_lab.faults.server import Server

_WELCOME_NS = 5_000_000_000
_BACKOFF_NS = 50_000_000
_BACKOFFS_MAX = 6


class LooseProtocol(SessionProtocol):
    """Speaks the production protocol, and lets a test send what no client would."""

    def inject(self, event: pb.SessionEvent) -> None:
        """Send an event as it is, before anything else."""
        self._control_out.append(pb.SessionRequest(events=[event]).SerializeToString())


class Engine:
    """Holds what a shim knows about its engine: when it started, and how quickly it works."""

    def __init__(self, options: PoolOptions, epoch: int) -> None:
        self.options = options
        self.epoch = epoch
        self.capacity_tokens = options.capacity_tokens
        self.token_ns = options.token_ns
        self.sleeps_until_ns = 0
        self.shims: list[Shim] = []

    def registration(self) -> pool_pb2.PoolRegistration:
        """Make what a stream offers it with."""
        return pool_pb2.PoolRegistration(
            pool=self.options.name,
            epoch=self.epoch,
            capacity_tokens=self.capacity_tokens,
            block_size_tokens=self.options.block,
            max_running=self.options.max_running,
            max_model_tokens=self.options.max_model_tokens,
        )

    def restart(self, epoch: int) -> None:
        """Start again: all running requests are lost."""
        self.epoch = epoch
        for shim in self.shims:
            shim.engine_restarted()


class Shim:
    """Runs one shim process after the other, under one name."""

    def __init__(
        self,
        events: EventQueue,
        server: Server,
        options: Options,
        engine: Engine,
        number: int,
        principal: int,
    ) -> None:
        self.number = number
        self.engine = engine
        self.principal = principal
        self.is_alive = False
        self.is_calm = False
        self.unreachable_until_ns = 0
        self.conn: Connection | None = None
        self.jobs: dict[int, Job] = {}  # requests without verdict, by tag
        self.running: dict[int, Job] = {}  # by lease
        self.last_ended = (0, 0)  # lease and epoch
        self._events = events
        self._server = server
        self._options = options
        # A charge by time is known to the scheduler alone.
        self._counts_all = counts_exactly(options)
        self._incarnation = 0
        self._failures = 0
        self._welcomed = False
        self._pump_ns = -1
        self._gathering = False
        engine.shims.append(self)
        self.start()

    # The process.

    def start(self, _: object = None) -> None:
        """Begin a process that knows nothing."""
        if self.is_alive:
            return
        self._incarnation += 1
        self.is_alive = True
        self.protocol = LooseProtocol(f"shim-{self.number}", self._incarnation)
        self.protocol.register_pool(self.engine.registration())
        self._connect()

    def kill(self, *, server_ns: int) -> None:
        """Let the process die. The scheduler notices after a while."""
        self.is_alive = False
        self.jobs.clear()
        self.running.clear()
        conn, self.conn = self.conn, None
        if conn is not None:
            conn.cut(server_ns=server_ns)

    # The stream.

    def _connect(self, _: object = None) -> None:
        events = self._events
        if not self.is_alive or self.conn is not None:
            return
        if events.now_ns < self.unreachable_until_ns:
            events.at(self.unreachable_until_ns, self._connect)
            return
        self._server.streams_made += 1
        self._welcomed = False
        self.conn = conn = Connection(
            events,
            self._server,
            self._server.streams_made,
            self.principal,
            self._options.delay_ns,
            self._received,
            self._lost,
        )
        self.protocol.connected(events.now_ns)
        self.pump()
        events.after(_WELCOME_NS, self._give_up, conn)

    def _give_up(self, conn: Connection) -> None:
        if conn is self.conn and not self._welcomed:
            conn.cut()

    def _lost(self, conn: Connection) -> None:
        """Take note that the stream is over."""
        if conn is not self.conn:
            return
        self.conn = None
        self.protocol.disconnected()
        self._failures = min(self._failures + 1, _BACKOFFS_MAX)
        self._events.after(self._events.around(_BACKOFF_NS << self._failures), self._connect)

    def pump(self, _: object = None) -> None:
        """Send everything that is due, and set a timer for the next deadline."""
        conn, protocol, events = self.conn, self.protocol, self._events
        if conn is None or conn.is_broken:
            return
        now_ns = events.now_ns
        while (data := protocol.data_to_send(now_ns)) is not None:
            conn.send_up(data)
        due_ns = protocol.next_deadline_ns()
        if due_ns is not None and (self._pump_ns <= now_ns or due_ns < self._pump_ns):
            self._pump_ns = max(due_ns, now_ns + 1)
            events.at(self._pump_ns, self._pump_due, self._incarnation)

    def _pump_due(self, incarnation: int) -> None:
        if incarnation == self._incarnation and self.is_alive:
            self.pump()

    def _say(self) -> None:
        """Say something new: now, or gathered with what follows."""
        if not self._options.gather_ns:
            self.pump()
        elif not self._gathering:
            self._gathering = True
            self._events.after(self._options.gather_ns, self._gathered)

    def _gathered(self, _: object) -> None:
        self._gathering = False
        if self.is_alive:
            self.pump()

    def _received(self, what: tuple[Connection, Any]) -> None:
        conn, message = what
        if conn is not self.conn:
            return
        refused = False
        for notice in self.protocol.receive(self._events.now_ns, message):
            refused = refused or isinstance(notice, PoolRefused)
            self._heard(notice)
        if refused:
            conn.cut()
        self.pump()

    def _heard(self, notice: Notice) -> None:
        if isinstance(notice, Verdict):
            self._judged(notice)
        elif isinstance(notice, Welcomed):
            self._welcomed = True
            self._failures = 0
        elif isinstance(notice, LeaseLost):
            job = self.running.pop(notice.lease_id, None)
            if job is not None:
                job.is_over = True
                self._end(job, Outcome.CANCELLED)
        elif isinstance(notice, Faulted) and notice.tag:
            job = self.jobs.pop(notice.tag, None)
            if job is not None:
                job.is_over = True

    # Its clients.

    def ask(self, job: Job) -> None:
        """Let a client ask for something."""
        if not self.is_alive:
            return
        try:
            job.tag = self.protocol.admit(Asked.of(job.request))
        except LimitExceeded:
            job.is_over = True
            return
        job.tries += 1
        self.jobs[job.tag] = job
        self._say()

    def leave(self, job: Job) -> None:
        """Let a client leave, wherever its request is."""
        job.has_left = job.is_over = True
        if self.jobs.pop(job.tag, None) is not None:
            self.protocol.cancel(job.tag)
        elif self.running.pop(job.lease_id, None) is not None:
            if job.produced or self._counts_all:
                self._end(job, Outcome.CANCELLED)
            else:
                uncounted = (None, None, None)
                now_ns = self._events.now_ns
                self._note_computed(job)
                self.protocol.complete(now_ns, job.lease_id, Outcome.CANCELLED, uncounted)
        self._say()

    def _judged(self, verdict: Verdict) -> None:
        job = self.jobs.pop(verdict.tag, None)
        if verdict.lease is None:
            if job is not None:
                self._refused(job, verdict.response.refusal.retry_after_ms)
        elif job is None:
            self.protocol.complete(
                self._events.now_ns, verdict.lease.lease_id, Outcome.CANCELLED, (0, 0, 0)
            )
        else:
            job.lease_id, job.epoch = verdict.lease.lease_id, verdict.lease.pool_epoch
            self.running[job.lease_id] = job
            job.granted_ns = self._events.now_ns
            job.first_ns = self._work(job)

    def _refused(self, job: Job, retry_after_ms: int) -> None:
        """Let some clients try again with the same id."""
        if self.is_calm or job.tries > 2 or self._events.rnd.random() < 0.7 or not retry_after_ms:
            job.is_over = True
        else:
            self._events.after(retry_after_ms * 1_000_000, self._retry, (self._incarnation, job))

    def _retry(self, what: tuple[int, Job]) -> None:
        incarnation, job = what
        if incarnation == self._incarnation and not self.is_calm:
            self.ask(job)

    # Its engine.

    def _work(self, job: Job) -> int:
        """Advance the engine to the next report of a request. Returns its time."""
        events, engine = self._events, self.engine
        begin_ns = max(events.now_ns, engine.sleeps_until_ns)
        if engine.options.prefill_ns and not job.began_ns:
            job.began_ns = begin_ns
            work_ns = engine.options.prefill_ns * job.input_tokens
            wake_ns = begin_ns + engine.options.prompt_ns + work_ns
        else:
            work_ns = engine.token_ns * job.output_tokens // max(1, job.steps_left)
            wake_ns = begin_ns + events.around(work_ns)
        events.at(wake_ns, self._worked, job)
        return wake_ns

    def _note_computed(self, job: Job) -> None:
        """Report the tokens that the engine computed of a prompt whose client leaves."""
        pace_ns, fixed_ns = self.engine.options.prefill_ns, self.engine.options.prompt_ns
        took_ns = self._events.now_ns - job.began_ns - fixed_ns
        if pace_ns and took_ns > 0:
            tokens = min(job.input_tokens, took_ns // pace_ns)
            time_ns = fixed_ns + tokens * pace_ns
            self._server.auditor.books.note_computed(job.lease_id, tokens, time_ns)

    def _worked(self, job: Job) -> None:
        if job.is_over or self.running.get(job.lease_id) is not job:
            return
        job.steps_left -= 1
        if job.steps_left <= 0:
            job.produced = job.output_tokens
            job.is_over = True
            del self.running[job.lease_id]
            self._end(job, Outcome.COMPLETED)
        else:
            job.produced += (job.output_tokens - job.produced) // (job.steps_left + 1)
            if job.request.reports_progress:
                totals = (job.input_tokens, None, job.produced)
                self.protocol.progress(self._events.now_ns, job.lease_id, totals)
            self._work(job)
        self._say()

    def _end(self, job: Job, outcome: Outcome) -> None:
        # Cached input costs less, which is a refund at the end.
        cached = 0 if self._options.fair else job.input_tokens // 2
        totals = (job.input_tokens, cached, job.produced)
        self.protocol.complete(self._events.now_ns, job.lease_id, outcome, totals)
        self.last_ended = (job.lease_id, job.epoch)

    def engine_restarted(self) -> None:
        """End all running requests: they are lost, and the clients get an error."""
        if not self.is_alive:
            return
        for job in self.running.values():
            job.is_over = True
            self._end(job, Outcome.CANCELLED)
        self.running.clear()
        self.protocol.register_pool(self.engine.registration())
        self._say()

    def tell(self, *, used_tokens: int, epoch: int | None = None) -> None:
        """Report the engine's telemetry."""
        telemetry = pool_pb2.EngineTelemetry(
            pool=self.engine.options.name,
            epoch=self.engine.epoch if epoch is None else epoch,
            running=len(self.running),
            waiting=0,
            used_tokens=used_tokens,
            preemptions=0,
        )
        self.protocol.telemetry(telemetry)
        self._say()

    def inject(self, *events: pb.SessionEvent) -> bool:
        """Say what no client would say. False if there is no stream."""
        if self.conn is None or self.conn.is_broken or not self._welcomed:
            return False
        self.pump()  # the message that it contradicts has to be an earlier one
        for event in events:
            self.protocol.inject(event)
        self.pump()
        return True
