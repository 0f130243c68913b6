"""The unary calls for asyncio: one held call for each admission, no stream."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, cast

import grpc
import grpc.aio

from schedsvc_client.aio.admission import Admission, HoldingAsker
from schedsvc_client.aio.calls import AioCalls, CallContext, OpenChannel
from schedsvc_client.attempts import Attempts, Method, Probes, Service
from schedsvc_client.channel import (
    ClientOptions,
    Token,
    backoff_ceiling_s,
    open_aio_channel,
    options_of,
)
from schedsvc_client.errors import (
    CallError,
    SchedulerUnavailable,
    from_rpc_error,
    is_final,
    refused,
    silent,
)
from schedsvc_client.fence import Fence
from schedsvc_client.leases import Lease, LeaseTable, Totals, lease_of
from schedsvc_client.message_sizes import accepted_bytes, progress_leases_max
from schedsvc_client.outcomes import LeaseState, Outcome
from schedsvc_client.requests import Asked, message_of
from schedsvc_client.v1 import explain_pb2, identity_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.explain_pb2_grpc import ExplainServiceStub
from schedsvc_client.v1.identity_pb2_grpc import IdentityServiceStub
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

_METHODS = Service(SchedulerServiceStub)
_log = logging.getLogger("schedsvc_client.unary")


class AsyncScheduler(HoldingAsker):
    """Asks by unary calls. Use it inside one event loop, as `async with`.

    Open leases are renewed, and their totals reported, by one Progress call for all of them.
    """

    _open: OpenChannel = staticmethod(open_aio_channel)

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: Token | None = None,
        options: ClientOptions | None = None,
        fence: Fence | None = None,
    ) -> None:
        super().__init__()
        self.target = target
        self._options = options_of(options)
        self._context = CallContext(target, token, self._options, fence)
        self._calls = AioCalls(self._context, credentials, self._open)
        self._probes = Probes(self._options)
        self._table = LeaseTable(int(self._options.progress_delay_s * 1e9))
        self._running: dict[int, Admission] = {}
        self._deliveries: dict[int, tuple[asyncio.Task[None], asyncio.Event]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._jitter = random.SystemRandom().random
        self._message_bytes_max = self._options.message_bytes_max

    async def __aenter__(self) -> AsyncScheduler:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self, *, flush_deadline_s: float = 1.0) -> None:
        """Cancel what is open, wait a moment until the scheduler knows, and hang up."""
        for admission in list(self._running.values()):
            admission.complete(outcome=Outcome.CANCELLED)
        ends_s = time.monotonic() + flush_deadline_s
        while self._background and (left_s := ends_s - time.monotonic()) > 0:
            await asyncio.wait(list(self._background), timeout=left_s)
        left = [*self._background, *([self._keeper] if self._keeper else [])]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._calls.close()

    async def stats(
        self, tenants: Sequence[str] = (), flow_limit: int = 0, max_age_ms: int = 0
    ) -> pb.StatsResponse:
        """Get pools, flows and counters, as of at most `max_age_ms` ago. Raises CallError."""
        request = message_of(
            pb.StatsRequest, tenants=tenants, flow_limit=flow_limit, max_age_ms=max_age_ms
        )
        response: pb.StatsResponse = await self._calls.call(_METHODS.Stats, request)
        return response

    async def tenant_of_key(self, api_key_sha256: bytes) -> str | None:
        """Ask for which tenant an API key stands; None: for none. Raises CallError."""
        request = message_of(identity_pb2.WhoIsRequest, api_key_sha256=api_key_sha256)
        method = Method(IdentityServiceStub, "WhoIs")
        try:
            response: identity_pb2.WhoIsResponse = await self._calls.call(method, request)
        except CallError as error:
            if error.code is grpc.StatusCode.NOT_FOUND:
                return None
            raise
        return response.tenant

    async def explain(self, request_id: str, tenant: str = "") -> explain_pb2.ExplainResponse:
        """Ask where a request stands, why it waits, or why it was refused. Raises CallError."""
        request = message_of(explain_pb2.ExplainRequest, request_id=request_id, tenant=tenant)
        method = Method(ExplainServiceStub, "Explain")
        response: explain_pb2.ExplainResponse = await self._calls.call(method, request)
        return response

    async def request_ids(self) -> list[str]:
        """Ask for the ids of the last requests, the latest first. Raises CallError."""
        method = Method(ExplainServiceStub, "ListRequestIds")
        request = explain_pb2.ListRequestIdsRequest()
        return list((await self._calls.call(method, request)).request_ids)

    # For its Admissions (the Holder protocol).

    def submit(self, admission: Admission) -> asyncio.Future[None]:
        """Ask for an admission; see `Admission.submit`."""
        return asyncio.get_running_loop().create_task(self._ask(admission))

    def report(self, lease: Lease, totals: Totals) -> None:
        """Report running totals; the keeper sends them when they are due."""
        was_due_ns = self._table.next_deadline_ns()
        self._table.note(time.monotonic_ns(), lease.lease_id, totals)
        if self._table.next_deadline_ns() != was_due_ns:
            self._wake.set()

    def end(self, lease: Lease, outcome: Outcome, totals: Totals) -> None:
        """Deliver a Complete in the background."""
        self._running.pop(lease.lease_id, None)
        self._table.close(lease.lease_id)
        tried = asyncio.Event()
        task = self._spawn(self._deliver(lease, lease.complete(outcome, totals), tried))
        self._deliveries[lease.lease_id] = task, tried
        task.add_done_callback(lambda _: self._deliveries.pop(lease.lease_id, None))

    async def settled(self, lease: Lease) -> None:
        """Wait for the delivery of its Complete."""
        task, _ = self._deliveries.get(lease.lease_id, (None, None))
        if task is not None:
            await asyncio.shield(task)

    async def tried(self, lease: Lease) -> None:
        """Wait until one call has tried to deliver its Complete."""
        _, tried = self._deliveries.get(lease.lease_id, (None, None))
        if tried is not None:
            await tried.wait()

    # The calls.

    async def _ask(self, admission: Admission) -> None:
        targets, now_s = self._context.targets, time.monotonic()
        attempts = Attempts(targets, self._options, now_s, self._options.admit_deadline_s)
        while True:
            target = targets.current
            try:
                timeout_s = attempts.timeout_s(now_s, held=True)
                response = await self._verdict(admission, target, timeout_s)
                self._context.check(target, response)
                break
            except CallError as error:
                pause_s = attempts.failed(target, error, time.monotonic())
            await asyncio.sleep(pause_s)
            now_s = time.monotonic()
        response.queue_duration_us += attempts.before_us
        admission.queue_duration_us = response.queue_duration_us
        if Outcome(response.outcome) is not Outcome.GRANTED:
            raise refused(response)
        lease = lease_of(admission.asked, response.grant, time.monotonic_ns())
        self._table.open(lease)
        self._running[lease.lease_id] = admission
        admission.lease = lease
        if self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(self._keep())
        self._wake.set()

    async def _verdict(
        self, admission: Admission, target: str, timeout_s: float
    ) -> pb.AdmitResponse:
        metadata = self._context.metadata()
        admit = self._calls.method(target, _METHODS.Admit)
        call = admit(admission.request, timeout=timeout_s, metadata=metadata)
        try:
            if self._context.targets.several and self._probes.step_s:
                await self._watch(call, target)
            response: pb.AdmitResponse = await call
            return response
        except asyncio.CancelledError:
            # Awaiting it has cancelled the call, unless the answer was here already.
            call.cancel()
            self._spawn(self._give_back(call, admission.asked))
            raise
        except grpc.RpcError as error:
            raise from_rpc_error(error, target) from None

    async def _watch(self, call: Any, target: str) -> None:
        """Return once a held call is done. Raises SchedulerUnavailable if its target is silent."""
        step_s = self._probes.step_s
        done = asyncio.Event()
        call.add_done_callback(lambda _: done.set())
        while not call.done():
            timer = asyncio.get_running_loop().call_later(step_s, done.set)
            await done.wait()
            timer.cancel()
            done.clear()
            if not call.done() and self._probes.due(target, time.monotonic()):
                answered = await self._answers(target, step_s)
                self._probes.judged(target, answered=answered)
            if not call.done() and self._probes.is_silent(target):
                call.cancel()
                silent_s = self._options.failover_silent_after_s
                raise silent(f"{target}: no answer for {silent_s:g} s")

    async def _answers(self, target: str, timeout_s: float) -> bool:
        """Return whether a scheduler answers anything: a Progress of no lease changes nothing.

        An answer under an ended term does not count.
        """
        progress = self._calls.method(target, _METHODS.Progress)
        metadata = self._context.metadata()
        try:
            response = await progress(pb.ProgressRequest(), timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            return error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        return self._context.is_obeyed(target, response)

    async def _give_back(self, call: Any, asked: Asked) -> None:
        response: pb.AdmitResponse | None
        try:
            response = await call
        except (asyncio.CancelledError, grpc.RpcError):
            response = await self._lost_verdict(asked.message)
        if response is not None and Outcome(response.outcome) is Outcome.GRANTED:
            lease = lease_of(asked, response.grant, time.monotonic_ns())
            self.end(lease, Outcome.CANCELLED, (0, 0, 0))

    async def _lost_verdict(self, request: pb.AdmitRequest) -> pb.AdmitResponse | None:
        """Ask again for a grant that was on its way when its call was cancelled: it is the same."""
        again = pb.AdmitRequest()
        again.CopyFrom(request)
        again.queue_ttl_ms = 1
        try:
            found = await self.explain(request.request_id, request.tenant)
            if any(story.state == explain_pb2.REQUEST_STATE_LIVE for story in found.requests):
                return cast("pb.AdmitResponse", await self._calls.call(_METHODS.Admit, again))
        except CallError as error:
            _log.debug("request %s may hold a lease until it expires: %s", again.request_id, error)
        return None

    async def _deliver(
        self, lease: Lease, request: pb.CompleteRequest, tried: asyncio.Event
    ) -> None:
        """Repeat a Complete until it is answered, or the lease has surely expired."""
        expired_s = time.monotonic() + lease.ttl_ns / 1e9 + self._options.lease_grace_s
        failures = 0
        while True:
            try:
                await self._calls.call(_METHODS.Complete, request)
            except CallError as error:
                if is_final(error) or time.monotonic() > expired_s:
                    _log.warning("Complete of lease %d was not taken: %s", lease.lease_id, error)
                    return
            else:
                return
            finally:
                tried.set()
            failures += 1
            ceiling_s = backoff_ceiling_s(self._options, failures)
            await asyncio.sleep(ceiling_s * (0.5 + 0.5 * self._jitter()))

    async def _keep(self) -> None:
        """Report and renew leases as they fall due."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            due = self._table.take_due(time.monotonic_ns())
            if due:
                while due:
                    count = progress_leases_max(self._message_bytes_max)
                    if await self._progress(due[:count]):
                        del due[:count]
                continue
            deadline_ns = self._table.next_deadline_ns()
            timer = None
            if deadline_ns is not None:
                delay_s = max(0, deadline_ns - time.monotonic_ns()) / 1e9
                timer = loop.call_later(delay_s, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                if timer is not None:
                    timer.cancel()

    async def _progress(self, leases: list[Lease]) -> bool:
        """Report leases; False if that was too large for the scheduler: fewer go at once then."""
        request = pb.ProgressRequest(leases=[lease.progress() for lease in leases])
        try:
            response: pb.ProgressResponse = await self._calls.call(_METHODS.Progress, request)
        except CallError as error:
            if 0 < (accepted := accepted_bytes(error)) < self._message_bytes_max:
                self._message_bytes_max = accepted
                return False
            # The next renewal, a third of the TTL later, reports the same totals.
            level = logging.DEBUG if isinstance(error, SchedulerUnavailable) else logging.WARNING
            _log.log(level, "%d leases were not renewed: %s", len(leases), error)
            return True
        for status in response.leases:
            state = LeaseState(status.state)
            if state is not LeaseState.LIVE and self._table.close(status.lease_id) is not None:
                self._running[status.lease_id].notify_lost(state)
        return True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
