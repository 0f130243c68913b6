"""Handles the five RPCs. Admit and Session pass bytes to the core unparsed."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import structlog
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.leader_pb2 import Leadership

from schedsvc._core import COMPLETED, TOTAL_TOKENS_MAX, CallerError
from schedsvc.driver import Broken, Driver
from schedsvc.driver.slices import EVERYBODY
from schedsvc.service.auth import Authenticator, Unauthenticated
from schedsvc.service.judging import Judge
from schedsvc.service.pace import Paces
from schedsvc.service.servicer_base import ServicerBase, invalid, parse
from schedsvc.service.session import Stream
from schedsvc.service.stats_response import Copy, snapshot
from schedsvc.service.status import UNARY_ERRORS, refusal_failure

__all__ = ["SERVICE_NAME", "Service", "parse"]

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["SchedulerService"].full_name

_log = structlog.get_logger("schedsvc.service")

#: A held Admit is answered this long before the call's own deadline, which gRPC reports rounded
#: up, by a hundredth at most.
_ANSWER_AHEAD_S, _ROUNDED_UP = 0.050, 0.01
_QUEUE_TTL_MIN_NS = 1_000_000
_BATCH_MAX = 4_096
_NOT_FOUND = 5
_LEASE_ID_MAX = (1 << 63) - 1


class Service(ServicerBase):
    """Serves SchedulerService on one listener."""

    def __init__(
        self,
        driver: Driver,
        *,
        authenticator: Authenticator,
        incarnation: int = 0,
        write_stall_s: float = 10.0,
        on_failure: Callable[[str, grpc.StatusCode], None] | None = None,
        paces: Paces | None = None,
        judge: Judge | None = None,
    ) -> None:
        """Serve a driver to the callers that the authenticator knows.

        `on_failure` gets the method and code of each call that ends in a gRPC error. `paces`: the
        callers' budgets over all listeners. `judge` writes the sentence of Stats.
        """
        super().__init__(authenticator, on_failure)
        self._driver = driver
        self._paces = paces or Paces(authenticator.credentials)
        self._judge = judge or Judge(driver)
        self._incarnation = incarnation
        self._write_stall_s = write_stall_s
        #: Held while Stats is read, by principal: there are as many as callers with a name.
        self._snapshots: dict[int, asyncio.Lock] = {}
        #: The last snapshot that may be sent again, of a caller that sees all.
        self._copy: Copy | None = None
        #: Open Session streams.
        self.streams: set[Stream] = set()

    def handler(self) -> "grpc.GenericRpcHandler[bytes, bytes]":
        """Return the handler to add to a grpc.aio server; all methods take and give bytes."""
        unary = grpc.unary_unary_rpc_method_handler
        methods = {
            "Admit": unary(self.admit),
            "Progress": unary(self.progress),
            "Complete": unary(self.complete),
            "Stats": unary(self.stats),
            "Session": grpc.stream_stream_rpc_method_handler(self.session),
        }
        return self._guarded(SERVICE_NAME, methods, self._driver)

    async def admit(self, data: bytes, context: Any) -> bytes:
        """Answer Admit once the verdict has fallen."""
        try:
            principal, pause_ns = self._arrived(context, len(data), reads=False)
            if pause_ns:
                await self._turns.hold(principal, pause_ns, len(data))
            began_ns = self._begin(principal)
            # On the wall clock, so it is asked once, when the call's turn has come.
            remaining_s = context.time_remaining()
            queue_ttl_ns = 0
            if remaining_s is not None:
                left_ns = int((remaining_s * (1 - _ROUNDED_UP) - _ANSWER_AHEAD_S) * 1e9)
                queue_ttl_ns = max(left_ns, _QUEUE_TTL_MIN_NS)
            try:
                answer = self._driver.admit(principal, data, queue_ttl_ns)
            finally:
                self._leave(principal, began_ns)
            if not isinstance(answer, bytes):
                answer = await self._driver.wait(answer, queue_ttl_ns)
        except (CallerError, Broken, Unauthenticated) as error:
            await self._fail(context, "Admit", error)
        # The outcome is the message's first field and below 128: the second byte.
        if answer[1] in UNARY_ERRORS:
            refusal = pb.AdmitResponse.FromString(answer).refusal
            failure = refusal_failure(answer[1], refusal.retry_after_ms)
            await self._abort(context, "Admit", failure)
        return answer

    async def progress(self, data: bytes, context: Any) -> bytes:
        """Answer Progress."""
        try:
            principal, pause_ns = self._arrived(context, len(data), reads=False)
            if pause_ns:
                await self._turns.hold(principal, pause_ns, len(data))
            began_ns = self._begin(principal)
            try:
                return self._progress(parse(pb.ProgressRequest, data), principal)
            finally:
                self._leave(principal, began_ns)
        except (CallerError, Broken, Unauthenticated) as error:
            await self._fail(context, "Progress", error)

    def _progress(self, request: pb.ProgressRequest, principal: int) -> bytes:
        if len(request.leases) > _BATCH_MAX:
            raise invalid("leases", f"has more than {_BATCH_MAX:,} entries; send several calls")
        # All or nothing: the core gets none before all are known to be right.
        totals = [_totals(lease, f"leases[{i}].") for i, lease in enumerate(request.leases)]
        response = pb.ProgressResponse(leadership=self._stated())
        for lease, (input_tokens, cached_tokens, output_tokens) in zip(
            request.leases, totals, strict=True
        ):
            state = self._driver.progress(
                _lease_id(lease),
                lease.pool_epoch,
                input_tokens,
                cached_tokens,
                output_tokens,
                principal,
            )
            response.leases.add(lease_id=lease.lease_id, state=pb.LeaseState.ValueType(state))
        self._driver.settle()
        return response.SerializeToString()

    async def complete(self, data: bytes, context: Any) -> bytes:
        """Answer Complete."""
        try:
            principal, pause_ns = self._arrived(context, len(data), reads=False)
            if pause_ns:
                await self._turns.hold(principal, pause_ns, len(data))
            began_ns = self._begin(principal)
            try:
                return self._complete(parse(pb.CompleteRequest, data), principal)
            finally:
                self._leave(principal, began_ns)
        except (CallerError, Broken, Unauthenticated) as error:
            await self._fail(context, "Complete", error)

    def _complete(self, request: pb.CompleteRequest, principal: int) -> bytes:
        outcome = request.outcome or COMPLETED
        if outcome not in (pb.OUTCOME_COMPLETED, pb.OUTCOME_CANCELLED):
            raise invalid("outcome", "has to be OUTCOME_COMPLETED or OUTCOME_CANCELLED")
        lease_id, epoch, totals = _lease_id(request), request.pool_epoch, _totals(request)
        ended = self._driver.complete(lease_id, epoch, outcome, *totals, principal)
        if ended is None:
            what = "no such lease, or its stored answer has been forgotten"
            raise CallerError(_NOT_FOUND, "lease_id", what)
        return pb.CompleteResponse(
            outcome=pb.Outcome.ValueType(ended.outcome),
            input_tokens=ended.input_tokens,
            cached_input_tokens=ended.cached_input_tokens,
            output_tokens=ended.output_tokens,
            repeated_call=ended.repeated,
            leadership=self._stated(),
        ).SerializeToString()

    def _stated(self) -> Leadership | None:
        """Return the leadership under which the core decides; None without a term."""
        stated = self._driver.leadership
        return Leadership.FromString(stated) if stated else None

    async def stats(self, data: bytes, context: Any) -> bytes:
        """Answer Stats."""
        try:
            principal = await self._turn(context, len(data))
            began_ns = self._begin(principal)
            try:
                return await self._stats(parse(pb.StatsRequest, data), principal)
            finally:
                self._leave(principal, began_ns)
        except (CallerError, Broken, Unauthenticated) as error:
            await self._fail(context, "Stats", error)

    async def _stats(self, request: pb.StatsRequest, principal: int) -> bytes:
        if request.flow_limit < 0:
            raise invalid("flow_limit", "must not be negative")
        if len(request.tenants) > _BATCH_MAX:
            raise invalid("tenants", f"has more than {_BATCH_MAX:,} entries")
        if request.max_age_ms < 0:
            raise invalid("max_age_ms", "must not be negative")
        sees_all = self._authenticator.credentials.sees_all(principal)
        viewer = EVERYBODY if sees_all else principal
        # One at a time for each caller: the slices of many calls would be one long turn together.
        async with self._snapshots.setdefault(principal, asyncio.Lock()):
            copy = self._copy
            if (
                viewer == EVERYBODY
                and copy is not None
                and copy.serves(request, time.monotonic_ns())
            ):
                return copy.written
            rest, taken_ns = self._turns.rests(principal), time.monotonic_ns()
            written = await snapshot(self._driver, request, self._incarnation, viewer, rest)
            judged = await self._judge.of(viewer)
            written += pb.StatsResponse(judgement=judged).SerializeToString()
            if viewer == EVERYBODY and request.max_age_ms and not request.tenants:
                self._copy = Copy(taken_ns, request.flow_limit, written)
            return written

    def _begin(self, principal: int) -> int:
        """Begin a call; return the thread's time, or 0 if it is not charged. Raises CallerError."""
        return time.thread_time_ns() if self._paces.enter(principal) else 0

    def _leave(self, principal: int, began_ns: int) -> None:
        if began_ns:
            self._paces.charge(principal, 1, time.thread_time_ns() - began_ns)

    async def session(self, requests: Any, context: Any) -> None:
        """Serve one Session stream."""
        try:
            principal = self._principal(context)
            stream = Stream(
                self._driver, context, self._write_stall_s, principal, self._paces, self._turns
            )
            self.streams.add(stream)
            caller = {"peer": context.peer(), "caller": self._name(principal)}
            _log.info("session_opened", **caller)
            try:
                failure = await stream.run()
            finally:
                self.streams.discard(stream)
                _log.info("session_closed", **caller)
        except (CallerError, Broken, Unauthenticated) as error:
            await self._fail(context, "Session", error)
        if failure is not None:
            await self._abort(context, "Session", failure)


def _lease_id(message: pb.LeaseProgress | pb.CompleteRequest) -> int:
    """Return the lease id as the core counts; no lease has 0."""
    return message.lease_id if message.lease_id <= _LEASE_ID_MAX else 0


def _totals(message: pb.LeaseProgress | pb.CompleteRequest, path: str = "") -> tuple[int, int, int]:
    """Return the three totals, -1 where absent."""
    totals = []
    for name in ("input_tokens", "cached_input_tokens", "output_tokens"):
        value = getattr(message, name) if message.HasField(name) else -1
        if message.HasField(name) and not 0 <= value <= TOTAL_TOKENS_MAX:
            raise invalid(path + name, f"must be from 0 to {TOTAL_TOKENS_MAX:,}, not {value:,}")
        totals.append(value)
    return totals[0], totals[1], totals[2]
