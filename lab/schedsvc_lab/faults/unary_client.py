"""A client of the unary calls: it retries, hedges, gives up, and may forget to complete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from schedsvc_lab.faults.event_queue import EventQueue
from schedsvc_lab.faults.jobs import Job, totals
from schedsvc_lab.faults.link import Call
from schedsvc_lab.faults.options import Options

if TYPE_CHECKING:
    from schedsvc_lab.faults.server import Server

_GRANTED = 1
_COMPLETED, _CANCELLED = 48, 49
_TRIES_MAX = 4
_WORK_NS = 2_000_000
"""The time for a token of output."""


class UnaryClient:
    """Calls Admit, Progress and Complete, as one process."""

    def __init__(
        self, events: EventQueue, server: Server, options: Options, principal: int
    ) -> None:
        self.principal = principal
        self.lost_permille = options.lost_permille
        self.is_calm = False
        self.waiting: dict[str, tuple[Job, Call]] = {}  # by request id
        self.running: dict[int, Job] = {}  # by lease
        self.last_ended = (0, 0)
        self.harm = {"message-lost": 0, "complete-lost": 0, "message-reordered": 0}
        self._events = events
        self._server = server
        self._options = options
        self._latest_ns = 0

    def _send(self, call: Call, method: Any, lost: str = "message-lost") -> None:
        """Send a call, and count the network's effects on it."""
        arrival_ns = call.send(self._server, method)
        if arrival_ns < 0:
            self.harm[lost] += 1
        elif arrival_ns:
            self.harm["message-reordered"] += arrival_ns < self._latest_ns
            self._latest_ns = max(self._latest_ns, arrival_ns)

    def _call(self, then: Any) -> Call:
        return Call(self._events, self._options.delay_ns, self.lost_permille, then, self.principal)

    def ask(self, job: Job) -> None:
        """Ask for a request, and wait."""
        job.tries += 1
        call = self._call(lambda call, answer: self._asked(job, call, answer))
        call.message = job.request
        self.waiting[job.request.request_id] = (job, call)
        self._send(call, self._server.admit)

    def hedge(self, job: Job) -> None:
        """Ask for the same once more, without waiting for the first call to fail."""
        twin = self._call(lambda call, answer: self._asked(job, call, answer))
        twin.message = job.request
        self._send(twin, self._server.admit)

    def conflict(self, request: Any) -> None:
        """Ask under an id that is another request's; the answer does not matter."""
        call = self._call(lambda call, answer: None)
        call.message = request
        self._send(call, self._server.admit)

    def leave(self, job: Job) -> None:
        """Let a client leave: its call is cancelled, or its lease ended."""
        job.has_left = True
        waiting = self.waiting.pop(job.request.request_id, None)
        if waiting is not None:
            self._cancel(waiting[1])
        if self.running.pop(job.lease_id, None) is not None:
            self.complete(job, _CANCELLED)

    def _cancel(self, call: Call) -> None:
        call.is_over = True
        delay_ns = self._events.soon(self._options.delay_ns)
        self._events.after(delay_ns, self._server.enter, (self._server.leave, call))

    def vanish(self) -> None:
        """End the process: its calls break, and its leases have no holder."""
        for _, call in self.waiting.values():
            self._cancel(call)
        self.waiting.clear()
        for job in self.running.values():
            job.is_over = True
        self.running.clear()

    def _asked(self, job: Job, call: Call, answer: Any) -> None:
        waiting = self.waiting.get(job.request.request_id)
        if waiting is not None and waiting[1] is call:
            del self.waiting[job.request.request_id]
        if answer is None:
            if not job.lease_id and not job.has_left and job.tries < _TRIES_MAX:
                self.ask(job)
            return
        if answer.outcome != _GRANTED:
            return
        if job.lease_id in (0, answer.grant.lease_id) and not job.is_over and not job.has_left:
            if not job.lease_id:
                job.lease_id, job.epoch = answer.grant.lease_id, answer.grant.pool_epoch
                self.running[job.lease_id] = job
                self._work(job)
            return
        if job.has_left and not job.is_over:
            job.lease_id, job.epoch = answer.grant.lease_id, answer.grant.pool_epoch
            self.complete(job, _CANCELLED)

    def _work(self, job: Job) -> None:
        work_ns = _WORK_NS * job.output_tokens // max(1, job.steps_left)
        self._events.after(self._events.around(work_ns), self._worked, job)

    def _worked(self, job: Job) -> None:
        if self.running.get(job.lease_id) is not job:
            return
        job.steps_left -= 1
        if job.steps_left <= 0:
            job.produced = job.output_tokens
            del self.running[job.lease_id]
            self.complete(job, _COMPLETED)
            return
        job.produced += (job.output_tokens - job.produced) // (job.steps_left + 1)
        self.report(job.lease_id, job.epoch, totals(job))
        self._work(job)

    def report(self, lease_id: int, epoch: int, used: tuple[int, int, int]) -> None:
        """Report totals; if the call is lost, the next one makes up for it."""
        call = self._call(lambda call, answer: None)
        call.lease_id, call.epoch, call.totals = lease_id, epoch, used
        self._send(call, self._server.progress)

    def complete(self, job: Job, outcome: int, tries: int = 0) -> None:
        """End a lease; repeat that a few times if no answer comes."""
        job.is_over = True
        self.last_ended = (job.lease_id, job.epoch)

        def answered(_: Call, answer: Any) -> None:
            if answer is None and tries < _TRIES_MAX:
                self.complete(job, outcome, tries + 1)

        self.end(job.lease_id, job.epoch, outcome, totals(job), answered)

    def end(
        self, lease_id: int, epoch: int, outcome: int, used: tuple[int, int, int], then: Any
    ) -> None:
        """Call Complete once."""
        call = self._call(then)
        call.lease_id, call.epoch, call.totals, call.outcome = lease_id, epoch, used, outcome
        self._send(call, self._server.complete, "complete-lost")
