"""Refuses what only the leader of a set answers, and hears which terms clients have seen.

A member that does not lead answers UNAVAILABLE, with the leader's target in the trailing metadata
`schedsvc-leader`. A reported term is only a hint, since a client proves nothing by it: a leader
refuses that call, asks the store, and goes on leading unless the store confirms the term.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.driver import Driver, NotLeading
from schedsvc.service.status import Failure, not_leading_failure

__all__ = ["TERM_KEY", "LeadGate", "check_report", "term_seen"]

#: Metadata of a unary call: the highest term that the client has seen.
TERM_KEY = "schedsvc-term"
#: The answer of a member that does not lead.
_OPEN = frozenset({"Stats", "Follow"})
#: A client sends its Hello at once.
_HELLO_S = 0.25
_DIGITS_MAX = 20

#: Gets the call's context, the method's name, and the failure; it aborts the call.
Abort = Callable[[Any, str, Failure], Awaitable[None]]


def term_seen(data: bytes) -> int:
    """Return the term that the Hello of a serialised SessionRequest reports; 0: none."""
    try:
        events = pb.SessionRequest.FromString(data).events
    except DecodeError:
        return 0  # the core says what is wrong with it
    return max((event.hello.leadership_seen.term for event in events), default=0)


def check_report(driver: Driver, term: int) -> None:
    """Raise NotLeading if the store has to be asked about a term that a client reported."""
    leading = driver.leading
    if leading is not None and term > leading.term and leading.on_report(term):
        raise driver.not_leading()


class LeadGate(grpc.GenericRpcHandler):  # type: ignore[type-arg] # it has none at run time
    """Stands before the handler of a member that has a role in a set."""

    def __init__(
        self, inner: "grpc.GenericRpcHandler[bytes, bytes]", driver: Driver, abort: Abort
    ) -> None:
        self._inner, self._driver, self._abort = inner, driver, abort

    def service(self, handler_call_details: Any) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        """Return the handler of a call; None if the method is not ours. O(metadata)."""
        handler = self._inner.service(handler_call_details)
        method = handler_call_details.method.rpartition("/")[2]
        if handler is None or method in _OPEN:
            return handler
        try:
            check_report(self._driver, _term_of(handler_call_details.invocation_metadata))
        except NotLeading:
            return self._refusal(method)
        return handler if self._driver.is_under_term else self._refusal(method)

    def _refusal(self, method: str) -> "grpc.RpcMethodHandler[bytes, bytes]":
        async def refuse(_: Any, context: Any) -> None:
            if method == "Session":
                await _hear(self._driver, context)
            error = self._driver.not_leading()
            await self._abort(context, method, not_leading_failure(str(error), error.target))

        return grpc.stream_stream_rpc_method_handler(refuse)


async def _hear(driver: Driver, context: Any) -> None:
    """Note the term that the first message of a Session reports."""
    try:
        async with asyncio.timeout(_HELLO_S):
            data = await context.read()
    except TimeoutError:
        return
    if isinstance(data, bytes) and driver.leading is not None:
        driver.leading.on_report(term_seen(data))


def _term_of(metadata: Any) -> int:
    for key, value in metadata or ():
        if key == TERM_KEY and isinstance(value, str) and len(value) <= _DIGITS_MAX:
            return int(value) if value.isdecimal() else 0
    return 0
