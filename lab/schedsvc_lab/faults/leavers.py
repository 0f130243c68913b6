"""Clients that leave before the first token, and engines that generate more than they may."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc_lab.faults.event_queue import EventQueue
from schedsvc_lab.faults.jobs import Job, JobMaker

if TYPE_CHECKING:
    from schedsvc_lab.faults.shim import Shim


class Leavers:
    """Acts on a running request of a shim that has no output yet. False if there is none."""

    def __init__(self, events: EventQueue, maker: JobMaker) -> None:
        self._events = events
        self._maker = maker

    def leave_prefill(self, shim: Shim | None) -> bool:
        """Leave at 90 % of the time to the first token; half of them ask again at once."""
        again = self._events.rnd.random() < 0.5
        job = self._unseen(shim)
        if job is None:
            return False
        due_ns = job.granted_ns + (job.first_ns - job.granted_ns) * 9 // 10
        if due_ns < self._events.now_ns:
            return False
        self._events.at(due_ns, self._leave_due, (shim, job, again))
        return True

    def _leave_due(self, what: tuple[Shim, Job, bool]) -> None:
        shim, job, again = what
        if shim.running.get(job.lease_id) is job and not job.produced:
            shim.leave(job)
            if again:
                self._ask_again(shim, job)

    def leave_and_ask(self, shim: Shim | None) -> bool:
        """Leave, and ask for the same under another id at once."""
        job = self._unseen(shim)
        if shim is None or job is None:
            return False
        shim.leave(job)
        self._ask_again(shim, job)
        return True

    def _ask_again(self, shim: Shim, job: Job) -> None:
        if shim.is_calm:
            return
        request = pb.AdmitRequest()
        request.CopyFrom(job.request)
        request.request_id = self._maker.next_id()
        shim.ask(Job(request, job.input_tokens, job.output_tokens, max(1, job.steps_left)))

    def run_on(self, shim: Shim | None) -> bool:
        """Let the engine go on beyond `max_output_tokens`."""
        job = self._unseen(shim)
        if job is None:
            return False
        most = job.request.max_output_tokens * job.request.n * len(job.request.input_tokens)
        job.output_tokens = most + 1 + int(self._events.rnd.random() * 2 * most)
        return True

    def _unseen(self, shim: Shim | None) -> Job | None:
        jobs = [] if shim is None else [j for j in shim.running.values() if not j.produced]
        return jobs[int(self._events.rnd.random() * len(jobs))] if jobs else None
