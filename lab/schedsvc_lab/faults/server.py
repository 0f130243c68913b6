"""Runs the scheduler's process: the production core, driven as the server's driver does it.

A message is given to the core, then the core is polled; verdicts are answered, messages are written
to streams, and one timer is set to the core's next deadline. The process can be killed, paused and
restarted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc._core import EXPIRED, LEASE_ENDED, LEASE_UNKNOWN, CallerError, InvariantError
from schedsvc.driver.clock import PAUSE_NS, SteadyClock
from schedsvc_lab.faults.auditor import Auditor, Known, Rows, ViolationError
from schedsvc_lab.faults.auditor.checks import pushed_out
from schedsvc_lab.faults.configured import configured
from schedsvc_lab.faults.disk import Saver
from schedsvc_lab.faults.event_queue import EventQueue
from schedsvc_lab.faults.hostile_options import HOSTILE_FAULTS
from schedsvc_lab.faults.link import Call, Connection
from schedsvc_lab.faults.options import Options

TICK_NS = 1_000_000
"""The driver's timer rings at whole milliseconds."""

_ROUNDS_PER_CHECK = 48
_POLLS_MAX = 1_000_000
_CALLS_PER_LOOK = 4
_ALL = 1 << 20
_ANSWER_NS = 20_000
"""Between a verdict and the moment in which the waiting call takes it."""


class Waiting:
    """Holds a queued request, and the calls that wait for its verdict."""

    __slots__ = ("answer", "calls", "delivered", "handle", "incarnation", "request")

    def __init__(self, incarnation: int, handle: int, request: Any) -> None:
        self.incarnation = incarnation
        self.handle = handle
        self.request = request  # in the auditor's books
        self.calls: list[Call] = []
        self.answer: Any = None
        self.delivered = False


class Server:
    """Runs one scheduler, over any number of processes one after the other."""

    def __init__(
        self,
        events: EventQueue,
        options: Options,
        auditor: Auditor,
        wall_ns: Callable[[], int],
    ) -> None:
        self.events = events
        self.auditor = auditor
        self.is_up = False
        self.incarnation = 0
        self.streams_made = 0
        self._options = options
        hostile = options.hostile if options.faults & HOSTILE_FAULTS.keys() else None
        self._suspect = -1 if hostile is None else hostile.grants.principal
        self._looks = 0
        self._paused = False
        self._superseded: set[int] = set()  # streams that have to end, whatever they send
        self._inbox: list[tuple[Callable[[Any], None], Any]] = []
        self._streams: dict[int, Connection] = {}
        self._waiting: dict[int, Waiting] = {}
        self._withdrawn: dict[int, Any] = {}
        self._timer_ns = -1
        self._rounds = 0
        self.saver: Saver | None = None
        if options.state is not None:
            self.saver = Saver(events, self, options.state, wall_ns)
        self.start()

    # The process.

    def start(self, _: object = None) -> None:
        """Begin a process that knows its configuration, and its state file if it has one."""
        if self.is_up:
            return
        self.incarnation += 1
        self._raw_ns = self.events.now_ns
        self._clock = SteadyClock(lambda: self._raw_ns)
        self._timer_ns = -1
        self._paused_ns = 0
        self.is_up = True
        now_ns = self._clock.now_ns()
        self.core = configured(self._options, self.incarnation, now_ns)
        if self.saver is None:
            self.auditor.restart(now_ns)
            return
        spare = configured(self._options, self.incarnation, now_ns)
        self.auditor.restart(now_ns, *self.saver.restore(self.core, spare, now_ns))
        self.saver.begin()

    def kill(self) -> None:
        """End the process without notice: its clients find out by themselves."""
        self.is_up = self._paused = False
        self._inbox.clear()
        for conn in self._streams.values():
            conn.session = None
            conn.cut(client_ns=self.events.soon(10_000_000))
        self._streams.clear()
        for waiting in self._waiting.values():
            for call in waiting.calls:
                call.fail()
        self._waiting.clear()
        self._withdrawn.clear()
        if self.saver:
            self.saver.die()

    def pause(self, duration_ns: int) -> None:
        """Stop the process for a while; the sockets go on to fill."""
        if self.is_up and not self._paused:
            self._paused = True
            self._paused_since_ns = self.events.now_ns
            self.events.after(duration_ns, self.resume)

    def resume(self, _: object = None) -> None:
        """Resume, with all messages that arrived meanwhile."""
        if not self._paused:
            return
        self._paused = False
        self._paused_ns += self.events.now_ns - self._paused_since_ns
        self.auditor.books.resumed = True
        self._raw_ns = self.events.now_ns
        self._clock.now_ns()
        inbox, self._inbox = self._inbox, []
        for act, what in inbox:
            self.auditor.books.resumed = True
            act(what)
        self.auditor.books.resumed = True
        self._settle(self._now())

    def enter(self, message: tuple[Callable[[Any], None], Any]) -> None:
        """Let something arrive at the process."""
        if self._paused:
            self._inbox.append(message)
        elif self.is_up:
            message[0](message[1])

    def _now(self) -> int:
        """Ask the production clock, which the event loop's heartbeat asks often enough."""
        now_ns = self.events.now_ns
        while now_ns - self._raw_ns > PAUSE_NS:
            self._raw_ns += PAUSE_NS
            self._clock.now_ns()
        self._raw_ns = now_ns
        return self._clock.now_ns()

    # Streams.

    def accept(self, conn: Connection) -> None:
        """Begin a stream, unless it has broken before it began."""
        if conn.is_broken:
            return
        try:
            conn.session = self.core.open_session(conn.principal)
        except CallerError:
            self.auditor.stream_refused(conn.principal)
            conn.cut(client_ns=self.events.soon(1_000_000))
            return
        self.auditor.stream_opened(conn.number, conn.principal)
        self._streams[conn.session.owner] = conn

    def receive(self, message: tuple[Connection, bytes]) -> None:
        """Take one message of a stream."""
        conn, data = message
        session = conn.session
        if session is None or conn.is_broken:
            return
        now_ns = self._now()
        before = self._seen(now_ns, conn.principal)
        try:
            session.receive(now_ns, data)
        except CallerError as error:
            may_end = conn.number in self._superseded or self.auditor.is_asleep
            if data not in conn.garbage and not may_end:
                raise ViolationError(f"a right message was refused: {error}") from error
            self.end_stream(conn)
            return
        if data in conn.garbage:
            raise ViolationError("a message that is none was taken")
        if conn.number in self._superseded:
            raise ViolationError("a stream goes on whose pool another engine has")
        self.auditor.request(now_ns, conn.number, conn.principal, data)
        self._compare(now_ns, before)
        self._settle(now_ns)

    def _seen(self, now_ns: int, principal: int) -> Rows | None:
        """Return what an operator sees before a message of the hostile principal's streams."""
        if principal != self._suspect:
            return None
        return self._rows(now_ns)

    def _seen_of_call(self, now_ns: int, principal: int) -> Rows | None:
        # Most of its calls are honest, so one in four is checked.
        if principal != self._suspect:
            return None
        self._looks += 1
        return self._rows(now_ns) if self._looks % _CALLS_PER_LOOK == 0 else None

    def _rows(self, now_ns: int) -> Rows:
        return Rows(self.core.stats(now_ns), self.core.list_leases(now_ns, 0, _ALL, _ALL)[1])

    def _compare(self, now_ns: int, before: Rows | None, *, dispatched: bool = False) -> None:
        if before is not None:
            self.auditor.unchanged(before, self._rows(now_ns), dispatched=dispatched)

    def end_stream(self, conn: Connection) -> None:
        """End a stream, as far as this side knows."""
        session, conn.session = conn.session, None
        if session is None or not self.is_up or self._streams.get(session.owner) is not conn:
            return
        now_ns = self._now()
        del self._streams[session.owner]
        before = self.core.stats(now_ns, 0)["totals"]["evicted"]
        session.close(now_ns)
        evicted = self.core.stats(now_ns, 0)["totals"]["evicted"] - before
        self.auditor.stream_closed(now_ns, conn.number, evicted)
        conn.cut(client_ns=self.events.soon(1_000_000))
        self._settle(now_ns)

    def _write(self, conn: Connection, now_ns: int) -> bool:
        """Send the messages of a stream, unless its peer does not read; False: it has to end."""
        session = conn.session
        if conn.is_stalled:
            self.auditor.books.lagging.add(conn.number)
            return True
        try:
            while (data := session.take(now_ns)) is not None:
                message = pb.SessionResponse.FromString(data)
                self.auditor.response(now_ns, conn.number, conn.principal, message)
                conn.send_down(message)
        except CallerError as error:
            if conn.number not in self._superseded and not self.auditor.is_asleep:
                raise ViolationError(f"a stream was ended: {error}") from error
            return False
        self.auditor.books.lagging.discard(conn.number)
        return True

    def unstall(self, conn: Connection) -> None:
        """Let the peer read again."""
        conn.is_stalled = False
        if conn.session is not None and self.is_up:
            now_ns = self._now()
            if self._write(conn, now_ns):
                self._settle(now_ns)
            else:
                self.end_stream(conn)

    # Unary calls.

    def admit(self, call: Call) -> None:
        """Take an Admit call; its answer may take a while."""
        now_ns = self._now()
        before = self._seen_of_call(now_ns, call.principal)
        r = self.auditor.ask(now_ns, call.principal, call.message, call.ttl_ns)
        is_sure = not self.auditor.is_asleep
        try:
            answer = self.core.admit_wire(
                now_ns, call.principal, call.message.SerializeToString(), call.ttl_ns
            )
        except CallerError as error:
            if r is not None and is_sure:
                raise ViolationError(f"a right request was refused: {error}") from error
            call.fail()
            return
        if r is None and is_sure:
            raise ViolationError("a wrong request was taken")
        self._compare(now_ns, before, dispatched=True)
        if isinstance(answer, bytes):
            response = pb.AdmitResponse.FromString(answer)
            if r is not None:
                self.auditor.verdict(now_ns, r, response)
            self._settle(now_ns)
            call.answer(response)
            return
        waiting = self._waiting.get(answer)
        if waiting is None:
            waiting = self._waiting[answer] = Waiting(self.incarnation, answer, r)
        waiting.calls.append(call)
        call.waiting = waiting
        self._settle(now_ns)

    def _decide(self, now_ns: int, decision: Any) -> None:
        """Answer the calls that wait for a verdict."""
        if decision.outcome == EXPIRED:
            self.auditor.expired(now_ns, decision.lease_id)
            return
        response = pb.AdmitResponse.FromString(self.core.encode(decision))
        waiting = self._waiting.pop(decision.handle, None)
        if waiting is None:
            self.auditor.verdict(now_ns, self._withdrawn.pop(decision.handle), response)
            return
        self.auditor.verdict(now_ns, waiting.request, response)
        waiting.answer = response
        self.events.after(_ANSWER_NS, self._deliver, waiting)

    def _deliver(self, waiting: Waiting) -> None:
        """Give the waiting calls their answer."""
        if waiting.incarnation == self.incarnation and self.is_up:
            for call in waiting.calls:
                waiting.delivered = True
                call.answer(waiting.answer)

    def leave(self, call: Call) -> None:
        """Cancel a call. The last waiting call withdraws the request."""
        waiting = call.waiting
        if waiting is None or waiting.incarnation != self.incarnation:
            return
        if waiting.delivered or call not in waiting.calls:
            return
        waiting.calls.remove(call)
        if waiting.calls:
            return
        now_ns = self._now()
        self._waiting.pop(waiting.handle, None)
        if waiting.answer is None:
            self._withdrawn[waiting.handle] = waiting.request
        self.auditor.withdraw(now_ns, waiting.request)
        self.core.cancel(now_ns, waiting.handle)
        self._settle(now_ns)

    def progress(self, call: Call) -> None:
        """Take a Progress call."""
        now_ns = self._now()
        arguments = (call.lease_id, call.epoch)
        before = self._seen_of_call(now_ns, call.principal)
        state = self.core.progress(now_ns, *arguments, *call.totals, call.principal)
        wanted = self.auditor.progress(now_ns, call.principal, *arguments, call.totals)
        if state != wanted and not self._may_answer(call, state):
            raise ViolationError(f"Progress was answered {state}, not {wanted}")
        self._compare(now_ns, before)
        self._settle(now_ns)
        call.answer(state)

    def complete(self, call: Call) -> None:
        """Take a Complete call."""
        now_ns = self._now()
        arguments = (call.lease_id, call.epoch, call.outcome)
        before = self._seen_of_call(now_ns, call.principal)
        ended = self.core.complete(now_ns, *arguments, *call.totals, call.principal)
        wanted = self.auditor.complete(now_ns, call.principal, *arguments, call.totals)
        if ended != wanted and not self._may_answer(call, LEASE_ENDED if ended else LEASE_UNKNOWN):
            raise ViolationError(f"Complete was answered {ended}, not {wanted}")
        self._compare(now_ns, before)
        self._settle(now_ns)
        call.answer(ended)

    def _may_answer(self, call: Call, state: int) -> bool:
        """Whether a lease may have another state than the books say."""
        return self.auditor.is_asleep or pushed_out(self.auditor.books, call.lease_id, state)

    # The core.

    def act(self, event: Callable[[int], None]) -> None:
        """Let an operator do something at this time."""
        now_ns = self._now()
        event(now_ns)
        self._settle(now_ns)

    def reload(self, weights: dict[str, int]) -> None:
        """Give tenants other weights."""
        for name, weight in weights.items():
            self.core.set_flow(name.encode(), weight)
        self.auditor.reweigh(weights)
        self._settle(self._now())

    def forget(self) -> None:
        """Let the core, at rest, forget what it has learned."""
        self.core.reset_learned()
        self.auditor.forget(self._now())

    def _settle(self, now_ns: int) -> None:
        """Let the core act on the messages it received, and send its answers."""
        core = self.core
        self._superseded.update(self.auditor.due(now_ns))
        for _ in range(_POLLS_MAX):
            for decision in core.poll(now_ns):
                self._decide(now_ns, decision)
            deadline_ns = core.next_deadline()
            if not 0 <= deadline_ns <= now_ns:
                break
        else:
            raise ViolationError("the scheduler never comes to rest")
        over = []
        for owner in core.ready():
            if not self._write(self._streams[owner], now_ns):
                over.append(self._streams[owner])
        self.auditor.settled(now_ns)
        self._rounds += 1
        if self._rounds % _ROUNDS_PER_CHECK == 0:
            self.check()
        if deadline_ns >= 0 and (self._timer_ns < 0 or deadline_ns < self._timer_ns):
            self._timer_ns = deadline_ns
            ticks = -(-(deadline_ns - now_ns) // TICK_NS)
            self.events.after(ticks * TICK_NS, self._ring, (self.incarnation, deadline_ns))
        for conn in over:
            self.end_stream(conn)

    def _ring(self, timer: tuple[int, int]) -> None:
        if timer == (self.incarnation, self._timer_ns):
            self.enter((self._on_timer, None))

    def _on_timer(self, _: object) -> None:
        self._timer_ns = -1
        self._settle(self._now())

    def save(self, rows_max: int) -> list[tuple[bytes, bytes | None]]:
        """Return rows of the core that have changed since the last call."""
        rows: list[tuple[bytes, bytes | None]] = self.core.save(self._now(), rows_max)
        return rows

    def known(self) -> tuple[Known, int]:
        """Return what the auditor knows of what is saved, and the time less all pauses."""
        return self.auditor.known(self._now()), self.events.now_ns - self._paused_ns

    def core_now(self) -> int:
        """Read the scheduler's own clock."""
        return self._now()

    def check(self) -> None:
        """Compare the core with the auditor's books, and check the core's own invariants. O(n)."""
        try:
            self.core.check()
        except InvariantError as error:
            raise ViolationError(f"an invariant is broken: {error}") from error
        self.auditor.snapshot(self.core.stats(self._now()))
