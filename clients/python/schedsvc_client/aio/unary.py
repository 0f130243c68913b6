"""The unary calls for asyncio: one held call for each admission, no stream."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from schedsvc_client.aio.admission import Admission, Asker
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
    SchedulerUnavailable,
    from_rpc_error,
    is_final,
    refused,
)
from schedsvc_client.leases import Lease, LeaseTable, Totals, lease_of
from schedsvc_client.message_sizes import accepted_bytes, progress_leases_max
from schedsvc_client.outcomes import LeaseState, Outcome
from schedsvc_client.v1 import explain_pb2, identity_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.explain_pb2_grpc import ExplainServiceStub
from schedsvc_client.v1.identity_pb2_grpc import IdentityServiceStub
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

_log = logging.getLogger("schedsvc_client.unary")


class AsyncScheduler(Asker):
    """A client that asks by unary calls. Use it inside one event loop, as `async with`.

    Open leases are renewed, and their totals reported, by one Progress call for all of them.
    """

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: Token | None = None,
        options: ClientOptions | None = None,
    ) -> None:
        super().__init__()
        self.target = check_target(target)
        self._options = options or ClientOptions()
        self._credentials = credentials
        self._token = token
        self._table = LeaseTable(int(self._options.progress_delay_s * 1e9))
        self._running: dict[int, Admission] = {}
        self._deliveries: dict[int, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._jitter = random.SystemRandom().random
        self._message_bytes_max = self._options.message_bytes_max
        self._channel: grpc.aio.Channel | None = None
        self._calls: Any = None

    async def __aenter__(self) -> AsyncScheduler:
        self._stub()
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
        if self._deliveries:
            await asyncio.wait(list(self._deliveries.values()), timeout=flush_deadline_s)
        left = [*self._background, *([self._keeper] if self._keeper else [])]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close(grace=None)

    async def stats(self, tenants: Sequence[str] = (), flow_limit: int = 0) -> pb.StatsResponse:
        """Take a snapshot of pools, flows and counters. Raises CallError."""
        request = pb.StatsRequest(tenants=tenants, flow_limit=flow_limit)
        response: pb.StatsResponse = await self._call(self._stub().Stats, request)
        return response

    async def tenant_of_key(self, api_key_sha256: bytes) -> str | None:
        """Ask for which tenant an API key stands; None: for none. Raises CallError."""
        request = identity_pb2.WhoIsRequest(api_key_sha256=api_key_sha256)
        self._stub()
        stub: Any = IdentityServiceStub(self._channel)  # type: ignore[arg-type]  # just made
        try:
            response: identity_pb2.WhoIsResponse = await self._call(stub.WhoIs, request)
        except CallError as error:
            if error.code is grpc.StatusCode.NOT_FOUND:
                return None
            raise
        return response.tenant

    async def explain(self, request_id: str, tenant: str = "") -> explain_pb2.ExplainResponse:
        """Ask where a request stands, why it waits, or why it was refused. Raises CallError."""
        request = explain_pb2.ExplainRequest(request_id=request_id, tenant=tenant)
        self._stub()
        stub: Any = ExplainServiceStub(self._channel)  # type: ignore[arg-type]  # just made
        response: explain_pb2.ExplainResponse = await self._call(stub.Explain, request)
        return response

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
        task = self._spawn(self._deliver(lease, lease.complete(outcome, totals)))
        self._deliveries[lease.lease_id] = task
        task.add_done_callback(lambda _: self._deliveries.pop(lease.lease_id, None))

    async def settled(self, lease: Lease) -> None:
        """Wait for the delivery of its Complete."""
        task = self._deliveries.get(lease.lease_id)
        if task is not None:
            await asyncio.shield(task)

    # The calls.

    def _stub(self) -> Any:
        """Make the channel at the first use, inside the event loop that will use it."""
        if self._channel is None:
            self._channel = open_aio_channel(self.target, self._credentials)
            self._calls = SchedulerServiceStub(self._channel)
        return self._calls

    async def _call(self, method: Any, request: Any) -> Any:
        metadata = bearer_metadata(self._token)
        try:
            return await method(request, timeout=self._options.call_deadline_s, metadata=metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.target) from None

    async def _ask(self, admission: Admission) -> None:
        call = self._stub().Admit(
            admission.request,
            timeout=self._options.admit_deadline_s,
            metadata=bearer_metadata(self._token),
        )
        try:
            response: pb.AdmitResponse = await call
        except asyncio.CancelledError:
            # Awaiting it has cancelled the call, unless the answer was here already.
            self._spawn(self._give_back(call, admission.request))
            raise
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.target) from None
        admission.queue_duration_us = response.queue_duration_us
        if Outcome(response.outcome) is not Outcome.GRANTED:
            raise refused(response)
        lease = lease_of(admission.request, response.grant, time.monotonic_ns())
        self._table.open(lease)
        self._running[lease.lease_id] = admission
        admission.lease = lease
        if self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(self._keep())
        self._wake.set()

    async def _give_back(self, call: Any, request: pb.AdmitRequest) -> None:
        try:
            response: pb.AdmitResponse = await call
        except (asyncio.CancelledError, grpc.RpcError):
            return
        if Outcome(response.outcome) is Outcome.GRANTED:
            lease = lease_of(request, response.grant, time.monotonic_ns())
            self.end(lease, Outcome.CANCELLED, (0, 0, 0))

    async def _deliver(self, lease: Lease, request: pb.CompleteRequest) -> None:
        """Repeat a Complete until it is answered, or the lease has surely expired."""
        expired_s = time.monotonic() + lease.ttl_ns / 1e9 + self._options.lease_grace_s
        failures = 0
        while True:
            try:
                await self._call(self._stub().Complete, request)
            except CallError as error:
                if is_final(error) or time.monotonic() > expired_s:
                    _log.warning("Complete of lease %d was not taken: %s", lease.lease_id, error)
                    return
            else:
                return
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
            response: pb.ProgressResponse = await self._call(self._stub().Progress, request)
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
