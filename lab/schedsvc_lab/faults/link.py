"""Simulates the network: streams keep their order and break; calls get lost and overtake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from schedsvc_lab.faults.event_queue import EventQueue


class ServingProcess(Protocol):
    """Names the calls that the network makes to the scheduler's process."""

    @property
    def is_up(self) -> bool:
        """Return whether the process runs."""

    def enter(self, message: tuple[Callable[[Any], None], Any]) -> None:
        """Let something arrive at the process."""

    def accept(self, conn: Connection) -> None:
        """Begin a stream."""

    def receive(self, message: tuple[Connection, bytes]) -> None:
        """Take a message of a stream."""

    def end_stream(self, conn: Connection) -> None:
        """End a stream."""


class Connection:
    """Simulates one stream between a shim and the scheduler.

    Messages keep their order. Each message arrives after a while, or never if the stream breaks
    first.
    """

    __slots__ = (
        "_delay_ns",
        "_down_ns",
        "_events",
        "_process",
        "_up_ns",
        "garbage",
        "is_broken",
        "is_stalled",
        "number",
        "on_lost",
        "on_message",
        "principal",
        "session",
    )  # fmt: skip

    def __init__(
        self,
        events: EventQueue,
        process: ServingProcess,
        number: int,
        principal: int,
        delay_ns: int,
        on_message: Callable[[tuple[Connection, Any]], None],
        on_lost: Callable[[Connection], None],
    ) -> None:
        self.number = number
        self.principal = principal
        self.session: Any = None  # the scheduler's end
        self.is_broken = False
        self.is_stalled = False  # the shim does not read
        self.garbage: set[bytes] = set()
        self.on_message = on_message
        self.on_lost = on_lost
        self._events = events
        self._process = process
        self._delay_ns = delay_ns
        self._up_ns = self._down_ns = 0
        self._up_ns = events.now_ns + events.soon(delay_ns)
        events.at(self._up_ns, self._open)

    def _open(self, _: object) -> None:
        if self._process.is_up:
            self._process.enter((self._process.accept, self))
        else:
            self.cut(client_ns=self._delay_ns)

    def delay(self, duration_ns: int) -> None:
        """Let nothing arrive for a while, in either direction."""
        until_ns = self._events.now_ns + duration_ns
        self._up_ns = max(self._up_ns, until_ns)
        self._down_ns = max(self._down_ns, until_ns)

    def send_up(self, data: bytes) -> None:
        """Send a message to the scheduler."""
        events = self._events
        arrival_ns = events.now_ns + events.soon(self._delay_ns)
        if arrival_ns > self._up_ns:
            self._up_ns = arrival_ns
        events.at(self._up_ns, self._arrive_up, data)

    def _arrive_up(self, data: bytes) -> None:
        if not self.is_broken:
            self._process.enter((self._process.receive, (self, data)))

    def send_down(self, message: Any) -> None:
        """Send a message to the shim."""
        events = self._events
        arrival_ns = events.now_ns + events.soon(self._delay_ns)
        if arrival_ns > self._down_ns:
            self._down_ns = arrival_ns
        events.at(self._down_ns, self._arrive_down, message)

    def _arrive_down(self, message: Any) -> None:
        if not self.is_broken:
            self.on_message((self, message))

    def cut(self, *, client_ns: int = 0, server_ns: int = 0) -> None:
        """Break it: messages under way are lost. Each side notices after its time."""
        if not self.is_broken:
            self.is_broken = True
            self._events.after(client_ns, self.on_lost, self)
            self._events.after(server_ns, self._server_notices)

    def _server_notices(self, _: object) -> None:
        self._process.enter((self._process.end_stream, self))


class Call:
    """Simulates one unary call. It is lost on its way, its answer is lost, or it succeeds."""

    __slots__ = (
        "_delay_ns",
        "_events",
        "_lost_permille",
        "_then",
        "epoch",
        "is_over",
        "lease_id",
        "message",
        "outcome",
        "principal",
        "totals",
        "ttl_ns",
        "waiting",
    )  # fmt: skip

    def __init__(
        self,
        events: EventQueue,
        delay_ns: int,
        lost_permille: int,
        then: Callable[[Call, Any], None],
        principal: int,
    ) -> None:
        """`then(call, answer)` is called with the answer; None if the call has failed."""
        self._events = events
        self._delay_ns = delay_ns
        self._lost_permille = lost_permille
        self._then = then
        self.principal = principal
        self.is_over = False
        self.message: Any = None  # of an Admit
        self.ttl_ns = 0
        self.waiting: Any = None
        self.lease_id = self.epoch = self.outcome = 0
        self.totals = (-1, -1, -1)

    def send(self, process: ServingProcess, method: Callable[[Call], None]) -> int:
        """Send it. Returns the arrival time; -1: it was lost; 0: no process is up."""
        events = self._events
        is_lost = events.rnd.random() * 1_000 < self._lost_permille
        if is_lost or not process.is_up:
            self.fail()
            return -1 if is_lost else 0
        arrival_ns = events.now_ns + events.soon(self._delay_ns)
        events.at(arrival_ns, process.enter, (method, self))
        return arrival_ns

    def answer(self, answer: Any) -> None:
        """Send the answer back; it may be lost."""
        events = self._events
        if events.rnd.random() * 1_000 < self._lost_permille:
            self.fail()
        else:
            events.after(events.soon(self._delay_ns), self._over, answer)

    def fail(self) -> None:
        """Let the caller find out, after a while, that no answer will come."""
        self._events.after(self._events.soon(200_000_000), self._over, None)

    def _over(self, answer: Any) -> None:
        if not self.is_over:
            self.is_over = True
            self._then(self, answer)
