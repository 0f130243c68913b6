"""The client for plain threads: unary calls, and one thread that renews leases."""

from __future__ import annotations

import contextlib
import heapq
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import grpc

from schedsvc_client.attempts import Attempts, Method, Probes, Service
from schedsvc_client.calls import CallContext, Calls
from schedsvc_client.channel import ClientOptions, Token, backoff_ceiling_s
from schedsvc_client.errors import (
    CallError,
    Refused,
    from_rpc_error,
    is_final,
    refused,
    silent,
)
from schedsvc_client.leases import Lease, LeaseTable, Totals, lease_of
from schedsvc_client.message_sizes import accepted_bytes, progress_leases_max
from schedsvc_client.outcomes import LeaseState, Outcome
from schedsvc_client.requests import RequestIds, admit_request
from schedsvc_client.v1 import explain_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.explain_pb2_grpc import ExplainServiceStub
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

_METHODS = Service(SchedulerServiceStub)
_log = logging.getLogger("schedsvc_client.sync")


class Admission:
    """Holds one request for the time of a `with` block.

    Entering blocks until the grant; it raises Refused, SchedulerUnavailable or another
    SchedulerError. Leaving ends the lease exactly once on every way out: COMPLETED with the last
    totals, or CANCELLED where an exception leaves the block.
    """

    def __init__(self, scheduler: Scheduler, request: pb.AdmitRequest) -> None:
        self.request = request
        self.lease: Lease | None = None
        self.queue_duration_us = 0
        # The lease's state, if the scheduler gave it up before its end.
        self.lost: LeaseState | None = None
        self.on_lost: Callable[[LeaseState], None] | None = None
        self._scheduler = scheduler
        self._ended = False

    def progress(
        self,
        *,
        input_tokens: int | None = None,
        cached_input_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """Report running totals (never deltas). Cheap and never blocks: reports are batched."""
        if self.lease is not None and not self._ended:
            totals = (input_tokens, cached_input_tokens, output_tokens)
            self._scheduler._report(self.lease, totals)

    def complete(
        self,
        *,
        outcome: Outcome = Outcome.COMPLETED,
        input_tokens: int | None = None,
        cached_input_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """End the lease with its final totals. The first call counts.

        Tries once here; if that fails, the client's thread repeats it. A total that is not given
        is the last one that was reported.
        """
        if self.lease is not None and not self._ended:
            self._ended = True
            totals = (input_tokens, cached_input_tokens, output_tokens)
            self._scheduler._end(self.lease, outcome, totals)

    def _notify_lost(self, state: LeaseState) -> None:
        self.lost = state
        if self.on_lost is not None:
            try:
                self.on_lost(state)
            except Exception:
                # The caller's function must not end the thread that renews all leases.
                _log.exception("on_lost failed")

    def __enter__(self) -> Admission:
        if self.lease is not None:
            raise RuntimeError("an Admission asks only once; make another one")
        self._scheduler._ask(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.complete(outcome=Outcome.COMPLETED if kind is None else Outcome.CANCELLED)


class Scheduler:
    """A client for threads; share one between all of them. Use it as `with`, or `close()` it."""

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: Token | None = None,
        options: ClientOptions | None = None,
    ) -> None:
        self.target = target
        self._options = options or ClientOptions()
        self._calls = Calls(CallContext(target, token, self._options), credentials)
        self._probes = Probes(self._options)
        self._ids = RequestIds()
        self._jitter = random.SystemRandom().random
        # Only the keeper touches it.
        self._message_bytes_max = self._options.message_bytes_max
        # Everything below is shared between threads, and touched only under this.
        self._changed = threading.Condition()
        self._table = LeaseTable(int(self._options.progress_delay_s * 1e9))
        self._running: dict[int, Admission] = {}
        # (when, order, failures, lease, request): Completes that were not delivered yet.
        self._retries: list[tuple[float, int, int, Lease, pb.CompleteRequest]] = []
        self._closing = False
        self._keeper: threading.Thread | None = None

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is open, try once more what was not delivered, and hang up."""
        with self._changed:
            running = list(self._running.values())
        for admission in running:
            admission.complete(outcome=Outcome.CANCELLED)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            keeper = self._keeper
        if keeper is not None:
            keeper.join()
        for _, _, _, lease, request in self._retries:
            self._deliver(lease, request)
        self._retries.clear()
        self._calls.close()

    def admission(
        self,
        *,
        input_tokens: Sequence[int] | int,
        max_output_tokens: int,
        n: int = 1,
        tenant: str = "",
        api_key_sha256: bytes = b"",
        pool: str = "",
        adapter: str = "",
        request_class: str = "",
        prefix_block_hashes: Sequence[int] = (),
        deadline_ms: int = 0,
        queue_ttl_ms: int = 0,
        request_id: str | None = None,
        reports_progress: bool = True,
        whole_answer: bool = False,
        input_estimated: bool | None = None,
        tenant_proof: int = 0,
        client_request_id: str = "",
        session: str = "",
    ) -> Admission:
        """Prepare one request; see schedsvc.v1.AdmitRequest for the fields. Enter it to ask.

        Raises InvalidRequest, naming the field, where a value does not fit the wire.
        """
        request = admit_request(
            request_id=request_id or self._ids.next(),
            input_tokens=input_tokens,
            max_output_tokens=max_output_tokens,
            n=n,
            tenant=tenant,
            api_key_sha256=api_key_sha256,
            pool=pool,
            adapter=adapter,
            request_class=request_class,
            prefix_block_hashes=prefix_block_hashes,
            deadline_ms=deadline_ms,
            queue_ttl_ms=queue_ttl_ms,
            reports_progress=reports_progress,
            whole_answer=whole_answer,
            input_estimated=input_estimated,
            tenant_proof=tenant_proof,
            client_request_id=client_request_id,
            session=session,
        )
        return Admission(self, request)

    def stats(
        self, tenants: Sequence[str] = (), flow_limit: int = 0, max_age_ms: int = 0
    ) -> pb.StatsResponse:
        """Get pools, flows and counters, as of at most `max_age_ms` ago. Raises CallError."""
        request = pb.StatsRequest(tenants=tenants, flow_limit=flow_limit, max_age_ms=max_age_ms)
        response: pb.StatsResponse = self._calls.call(_METHODS.Stats, request)
        return response

    def explain(self, request_id: str, tenant: str = "") -> explain_pb2.ExplainResponse:
        """Ask where a request stands, why it waits, or why it was refused. Raises CallError."""
        request = explain_pb2.ExplainRequest(request_id=request_id, tenant=tenant)
        method = Method(ExplainServiceStub, "Explain")
        response: explain_pb2.ExplainResponse = self._calls.call(method, request)
        return response

    def request_ids(self) -> list[str]:
        """Ask for the ids of the last requests, the latest first. Raises CallError."""
        method = Method(ExplainServiceStub, "ListRequestIds")
        return list(self._calls.call(method, explain_pb2.ListRequestIdsRequest()).request_ids)

    # For its Admissions.

    def _ask(self, admission: Admission) -> None:
        context, now_s = self._calls.context, time.monotonic()
        attempts = Attempts(context.targets, self._options, now_s, self._options.admit_deadline_s)
        while True:
            target = context.targets.current
            try:
                response = self._verdict(admission, target, attempts.timeout_s(now_s, held=True))
                context.check(target, response)
                break
            except CallError as error:
                pause_s = attempts.failed(target, error, time.monotonic())
            time.sleep(pause_s)
            now_s = time.monotonic()
        response.queue_duration_us += attempts.before_us
        self._judge(admission, response)

    def _verdict(self, admission: Admission, target: str, timeout_s: float) -> pb.AdmitResponse:
        metadata = self._calls.context.metadata()
        admit = self._calls.method(target, _METHODS.Admit)
        future = admit.future(admission.request, timeout=timeout_s, metadata=metadata)
        try:
            if self._calls.context.targets.several and self._probes.step_s:
                self._watch(future, target)
            response: pb.AdmitResponse = future.result()
            return response
        except grpc.RpcError as error:
            raise from_rpc_error(error, target) from None
        except BaseException:
            # An interrupt: withdraw it, or give back what was granted in the same moment.
            if not future.cancel() and future.code() is grpc.StatusCode.OK:
                with contextlib.suppress(Refused):
                    self._judge(admission, future.result())
                    admission.complete(
                        outcome=Outcome.CANCELLED,
                        input_tokens=0,
                        cached_input_tokens=0,
                        output_tokens=0,
                    )
            raise

    def _watch(self, future: Any, target: str) -> None:
        """Return once a held call is done. Raises SchedulerUnavailable if its target is silent."""
        step_s = self._probes.step_s
        while True:
            try:
                future.exception(timeout=step_s)
            except grpc.FutureTimeoutError:
                pass
            else:
                return
            with self._changed:
                due = self._probes.due(target, time.monotonic())
            if due:
                answered = self._answers(target, step_s)
                with self._changed:
                    self._probes.judged(target, answered=answered)
            if self._probes.is_silent(target):
                silent_s = self._options.failover_silent_after_s
                raise silent(f"{target}: no answer for {silent_s:g} s")

    def _answers(self, target: str, timeout_s: float) -> bool:
        """Whether a scheduler answers anything: a Progress of no lease changes nothing.

        An answer under a term that is over is none.
        """
        progress = self._calls.method(target, _METHODS.Progress)
        metadata = self._calls.context.metadata()
        try:
            response = progress(pb.ProgressRequest(), timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            return error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        return self._calls.context.is_obeyed(target, response)

    def _judge(self, admission: Admission, response: pb.AdmitResponse) -> None:
        admission.queue_duration_us = response.queue_duration_us
        if Outcome(response.outcome) is not Outcome.GRANTED:
            raise refused(response)
        lease = lease_of(admission.request, response.grant, time.monotonic_ns())
        with self._changed:
            self._table.open(lease)
            self._running[lease.lease_id] = admission
            self._start_keeper()
        admission.lease = lease

    def _report(self, lease: Lease, totals: Totals) -> None:
        with self._changed:
            was_due_ns = self._table.next_deadline_ns()
            self._table.note(time.monotonic_ns(), lease.lease_id, totals)
            if self._table.next_deadline_ns() != was_due_ns:
                self._changed.notify_all()

    def _end(self, lease: Lease, outcome: Outcome, totals: Totals) -> None:
        with self._changed:
            self._running.pop(lease.lease_id, None)
            self._table.close(lease.lease_id)
            request = lease.complete(outcome, totals)
        if not self._deliver(lease, request):
            with self._changed:
                self._retry_later(lease, request, failures=1)
                self._start_keeper()

    def _deliver(self, lease: Lease, request: pb.CompleteRequest) -> bool:
        """Send a Complete; False where it should be sent again."""
        try:
            self._calls.call(_METHODS.Complete, request)
        except CallError as error:
            if not is_final(error):
                return False
            _log.warning("Complete of lease %d was not taken: %s", lease.lease_id, error)
        return True

    # The keeper thread.

    def _start_keeper(self) -> None:
        """Start the thread, or wake it for something new. The lock is held."""
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep, name="schedsvc-leases", daemon=True)
            self._keeper.start()
        self._changed.notify_all()

    def _retry_later(self, lease: Lease, request: pb.CompleteRequest, failures: int) -> None:
        """Queue a Complete for another attempt. The lock is held."""
        ceiling_s = backoff_ceiling_s(self._options, failures)
        when_s = time.monotonic() + ceiling_s * (0.5 + 0.5 * self._jitter())
        heapq.heappush(self._retries, (when_s, lease.lease_id, failures, lease, request))

    def _keep(self) -> None:
        while True:
            with self._changed:
                due = self._table.take_due(time.monotonic_ns())
                retries = self._due_retries()
                if not due and not retries:
                    if self._closing:
                        return
                    self._changed.wait(self._idle_s())
                    continue
            while due:
                count = progress_leases_max(self._message_bytes_max)
                if self._progress(due[:count]):
                    del due[:count]
            for failures, lease, request in retries:
                self._deliver_again(failures, lease, request)

    def _idle_s(self) -> float | None:
        """Return how long there is nothing to do; None: until something changes."""
        deadlines_s = [self._retries[0][0]] if self._retries else []
        due_ns = self._table.next_deadline_ns()
        if due_ns is not None:
            deadlines_s.append(due_ns / 1e9)
        return max(0.0, min(deadlines_s) - time.monotonic()) if deadlines_s else None

    def _due_retries(self) -> list[tuple[int, Lease, pb.CompleteRequest]]:
        due = []
        while self._retries and self._retries[0][0] <= time.monotonic():
            due.append(heapq.heappop(self._retries)[2:])
        return due

    def _deliver_again(self, failures: int, lease: Lease, request: pb.CompleteRequest) -> None:
        if self._deliver(lease, request):
            return
        expired_ns = lease.sent_ns + lease.ttl_ns + int(self._options.lease_grace_s * 1e9)
        if time.monotonic_ns() > expired_ns:
            _log.warning("Complete of lease %d was never delivered", lease.lease_id)
            return
        with self._changed:
            self._retry_later(lease, request, failures + 1)

    def _progress(self, leases: list[Lease]) -> bool:
        """Report leases; False if that was too large for the scheduler: fewer go at once then."""
        with self._changed:
            request = pb.ProgressRequest(leases=[lease.progress() for lease in leases])
        try:
            response = self._calls.call(_METHODS.Progress, request)
        except CallError as error:
            if 0 < (accepted := accepted_bytes(error)) < self._message_bytes_max:
                self._message_bytes_max = accepted
                return False
            # The next renewal, a third of the TTL later, reports the same totals.
            _log.debug("%d leases were not renewed: %s", len(leases), error)
            return True
        lost: list[tuple[Admission, LeaseState]] = []
        with self._changed:
            for status in response.leases:
                if status.state == LeaseState.LIVE:
                    continue
                if self._table.close(status.lease_id) is not None:
                    admission = self._running[status.lease_id]
                    lost.append((admission, LeaseState(status.state)))
        for admission, state in lost:
            admission._notify_lost(state)
        return True
