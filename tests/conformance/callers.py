"""Makes the unary calls of a script as an application makes them, by the Python client."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from typing import Any

import grpc
from google.protobuf.message import Message
from schedsvc_client import CallError, ClientOptions, LeaseState, Limit, Outcome, Refused
from schedsvc_client.aio import Admission, AsyncScheduler
from schedsvc_client.channel import open_aio_channel
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.wire import TOKENS_MAX

from tests.waiting import until

from .matching import Json
from .skew import Relay
from .wire import to_json

DEADLINE_MS = 30_000
_TOTALS = ("input_tokens", "cached_input_tokens", "output_tokens")
_ENDS = (Outcome.UNSPECIFIED, Outcome.COMPLETED, Outcome.CANCELLED)


class Callers:
    """Keeps the client of each caller of a script.

    Each has two targets. The first one passes calls on, and loses the answers that are grants.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._callers: dict[tuple[str, int], Caller] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Callers:
        first = await self._stack.enter_async_context(_LosingGrants(self._target))
        self._targets = f"{first.target},{self._target}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def of(self, step: dict[str, Any]) -> Caller | None:
        """Return the client of the caller that a step names; None: it makes no such call."""
        given = step.get("metadata", {}).get("authorization", "")
        bearer = re.fullmatch("(?:Bearer (.*))?", given)
        if bearer is None or "raw" in step or step.get("abandon"):
            return None
        key = bearer[1] or "", step.get("deadline_ms", DEADLINE_MS)
        if key not in self._callers:
            caller = self._callers[key] = Caller(self._targets, *key)
            self._stack.push_async_callback(caller.close)
        return self._callers[key]


class Caller:
    """Makes the calls of one caller, and holds the leases that it was granted."""

    def __init__(self, targets: str, token: str, deadline_ms: int) -> None:
        options = ClientOptions(
            admit_deadline_s=deadline_ms / 1_000,
            call_deadline_s=deadline_ms / 1_000,
            failover_silent_after_s=0,
        )
        self._scheduler = _Scheduler(targets, token=token, options=options)
        self._held: dict[int, Admission] = {}

    async def close(self) -> None:
        """End what is open, and hang up."""
        await self._scheduler.close()

    def offers(self, request: Message) -> bool:
        """Return whether the client makes such a call.

        It gives each request an id. It renews and ends its own leases alone, and within limits.
        """
        if isinstance(request, pb.AdmitRequest):
            return bool(request.request_id)
        if isinstance(request, pb.ProgressRequest):
            return bool(request.leases) and all(
                self._is_held(report) and self._held[report.lease_id].lost is None
                for report in request.leases
            )
        if isinstance(request, pb.CompleteRequest):
            return self._is_held(request) and request.outcome in _ENDS
        return True

    async def call(self, request: Any) -> dict[str, Json]:
        """Make a call; return its answer or its error, as a script expects them."""
        made = {
            pb.AdmitRequest: self._admit,
            pb.ProgressRequest: self._progress,
            pb.CompleteRequest: self._complete,
        }.get(type(request), self._ask)
        try:
            return {"answer": await made(request)}
        except CallError as error:
            return {
                "error": {
                    "code": error.code.name,
                    "message": error.message,
                    "field": [violation.field for violation in error.violations],
                    "retry": error.retry_after_ms > 0,
                }
            }

    def _is_held(self, report: pb.LeaseProgress | pb.CompleteRequest) -> bool:
        admission = self._held.get(report.lease_id)
        lease = admission and admission.granted and admission.lease
        fits = all(0 <= getattr(report, name) <= TOKENS_MAX for name in _TOTALS)
        return bool(lease) and fits and lease.pool_epoch == report.pool_epoch

    async def _ask(self, request: Any) -> Json:
        """Ask for Stats, or for Explain."""
        asks_stats = isinstance(request, pb.StatsRequest)
        ask: Any = self._scheduler.stats if asks_stats else self._scheduler.explain
        return to_json(await ask(**_values(request)))

    async def _admit(self, request: pb.AdmitRequest) -> Json:
        admission = self._scheduler.admission(**_values(request))
        try:
            await admission.submit()
        except Refused as refused:
            return {
                "outcome": _outcome(refused.outcome),
                "queue_duration_us": refused.queue_duration_us,
                "refusal": {
                    "retry_after_ms": refused.retry_after_ms,
                    "quota": {"limits": [_limit(limit) for limit in refused.quota]},
                    "queue_position": refused.queue_position,
                    "message": refused.message,
                },
            }
        lease = admission.lease
        assert lease is not None
        self._held[lease.lease_id] = admission
        return {
            "outcome": _outcome(Outcome.GRANTED),
            "queue_duration_us": admission.queue_duration_us,
            "grant": {
                "lease_id": lease.lease_id,
                "pool": lease.pool,
                "pool_epoch": lease.pool_epoch,
                "ttl_ms": lease.ttl_ns // 1_000_000,
                "reserved_tokens": lease.reserved_tokens,
                "engine_priority": lease.engine_priority,
                "quota": {"limits": [_limit(limit) for limit in lease.quota]},
            },
        }

    async def _progress(self, request: pb.ProgressRequest) -> Json:
        """Report totals. Without new ones the client reports at its next renewal."""
        since = len(self._scheduler.reports)
        for report in request.leases:
            self._held[report.lease_id].progress(**_totals(report))
        return {"leases": [await self._state(report.lease_id, since) for report in request.leases]}

    async def _state(self, lease_id: int, since: int) -> Json:
        """Return what the scheduler answers to the next report of a lease."""

        def sent() -> list[Any]:
            reports = self._scheduler.reports[since:]
            return [call for report, call in reports if lease_id in _reported(report)]

        first, *_ = await until(sent, f"the client reports lease {lease_id}")
        (status,) = (told for told in (await first).leases if told.lease_id == lease_id)
        state = LeaseState(status.state)
        lost = None if state is LeaseState.LIVE else state
        admission = self._held[lease_id]
        await until(lambda: admission.lost is lost, f"the client tells of {lease_id}: {state!r}")
        return to_json(status)

    async def _complete(self, request: pb.CompleteRequest) -> Json:
        admission = self._held.pop(request.lease_id)
        assert admission.lease is not None
        outcome = Outcome(request.outcome) or Outcome.COMPLETED
        admission.complete(outcome=outcome, **_totals(request))
        await self._scheduler.settled(admission.lease)
        ends = [call for end, call in self._scheduler.ends if end.lease_id == request.lease_id]
        assert ends, f"the client did not complete lease {request.lease_id}"
        return to_json(await ends[-1])


class _Scheduler(AsyncScheduler):
    """Keeps what it sends of its leases, each message with its call."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.reports: list[tuple[pb.ProgressRequest, Any]] = []
        self.ends: list[tuple[pb.CompleteRequest, Any]] = []
        super().__init__(*args, **named)

    def _open(self, target: str, credentials: grpc.ChannelCredentials | None) -> Any:
        channel = open_aio_channel(target, credentials)
        opened = channel.unary_unary

        def unary_unary(*method: Any, **named: Any) -> Any:
            make = opened(*method, **named)

            def call(request: Any, **how: Any) -> Any:
                made = make(request, **how)
                if isinstance(request, pb.ProgressRequest):
                    self.reports.append((request, made))
                elif isinstance(request, pb.CompleteRequest):
                    self.ends.append((request, made))
                return made

            return call

        channel.unary_unary = unary_unary
        return channel


class _LosingGrants(Relay):
    """Passes calls on, and loses each answer that is a grant."""

    async def _unary(self, path: str, method: str, data: bytes, context: Any) -> bytes:
        answer = await super()._unary(path, method, data, context)
        is_admit = method == "Admit"
        if is_admit and pb.AdmitResponse.FromString(answer).outcome == Outcome.GRANTED:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the answer was lost")
        return answer


def _values(request: Message) -> dict[str, Any]:
    """Return the fields of a message, without those of the optional ones that are not set."""
    return {
        field.name: getattr(request, field.name)
        for field in request.DESCRIPTOR.fields
        if not field.has_presence or request.HasField(field.name)
    }


def _totals(report: Message) -> dict[str, int]:
    return {name: getattr(report, name) for name in _TOTALS if report.HasField(name)}


def _reported(request: pb.ProgressRequest) -> set[int]:
    return {report.lease_id for report in request.leases}


def _outcome(outcome: Outcome) -> str:
    return f"OUTCOME_{outcome.name}"


def _limit(limit: Limit) -> dict[str, Json]:
    return {**limit._asdict(), "kind": f"LIMIT_KIND_{limit.kind.name}"}
