"""Identifies callers, reads messages, and fails calls, for all services."""

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from schedsvc._core import CallerError
from schedsvc.driver import Driver, NotLeading
from schedsvc.service.auth import Authenticator, Forbidden, Unauthenticated
from schedsvc.service.auth_interceptor import AuthInterceptor
from schedsvc.service.lead_gate import LeadGate
from schedsvc.service.status import (
    Failure,
    caller_failure,
    forbidden_failure,
    internal_failure,
    not_leading_failure,
    unauthenticated_failure,
)

__all__ = [
    "ServicerBase",
    "exhausted",
    "invalid",
    "not_found",
    "parse",
    "unavailable",
    "untimely",
]

_INVALID_ARGUMENT = 3
_NOT_FOUND = 5
_RESOURCE_EXHAUSTED = 8
_FAILED_PRECONDITION = 9
_UNAVAILABLE = 14

M = TypeVar("M", bound=Message)


class ServicerBase:
    """Handles the calls of one service on one listener."""

    def __init__(
        self,
        authenticator: Authenticator,
        on_failure: Callable[[str, grpc.StatusCode], None] | None,
    ) -> None:
        """Find out who calls by an authenticator.

        `on_failure` gets the method and code of each call that ends in a gRPC error.
        """
        self._authenticator = authenticator
        self._turns = authenticator.credentials.turns
        self._on_failure = on_failure

    def _guarded(
        self,
        service: str,
        methods: dict[str, "grpc.RpcMethodHandler[bytes, bytes]"],
        driver: Driver | None = None,
    ) -> "grpc.GenericRpcHandler[bytes, bytes]":
        """Make a handler of the methods, which take and give bytes.

        `driver`: of the member that has to lead, else the methods are refused.
        """
        handler = grpc.method_handlers_generic_handler(service, methods)
        if driver is not None and driver.leading is not None:
            handler = LeadGate(handler, driver, self._abort)
        if not self._authenticator.asks:
            return handler
        return AuthInterceptor(handler, self._authenticator, self._turn_away)

    def _principal(self, context: Any) -> int:
        return self._authenticator.principal(context)

    def _arrived(self, context: Any, size: int, *, reads: bool) -> tuple[int, int]:
        """Return the caller of a unary call of some bytes, and how many ns later its turn is.

        `reads`: it asks for no admission and ends none. Raises as auth.
        """
        principal = self._authenticator.principal(context)
        return principal, self._turns.begin_call(principal, size, reads=reads)

    async def _turn(self, context: Any, size: int) -> int:
        """Return the caller of a call that only reads, once it is its turn.

        Raises CallerError, or as auth.
        """
        principal, pause_ns = self._arrived(context, size, reads=True)
        if pause_ns:
            await self._turns.hold(principal, pause_ns, size)
        return principal

    def _name(self, principal: int) -> str:
        return self._authenticator.credentials.name(principal)

    async def _turn_away(self, context: Any, method: str, why: str) -> None:
        await self._abort(context, method, unauthenticated_failure(why))

    async def _fail(self, context: Any, method: str, error: Exception) -> NoReturn:
        if isinstance(error, CallerError):
            failure = caller_failure(error)
        elif isinstance(error, Unauthenticated):
            failure = unauthenticated_failure(str(error))
        elif isinstance(error, Forbidden):
            failure = forbidden_failure(str(error))
        elif isinstance(error, NotLeading):
            failure = not_leading_failure(str(error), error.target)
        else:
            failure = internal_failure()
        await self._abort(context, method, failure)

    async def _abort(self, context: Any, method: str, failure: Failure) -> NoReturn:
        if self._on_failure is not None:
            self._on_failure(method, failure.code)
        try:
            await context.abort(failure.code, failure.details, failure.trailing_metadata)
        except grpc.aio.AbortError:
            raise
        except grpc.aio.BaseError:
            # The peer left meanwhile: no caller is left to answer.
            raise asyncio.CancelledError from None
        raise AssertionError("abort() raises")


def invalid(field: str, description: str) -> CallerError:
    """Return the error for a field that is wrong."""
    return CallerError(_INVALID_ARGUMENT, field, description)


def not_found(field: str, description: str) -> CallerError:
    """Return the error for a field that names something unknown."""
    return CallerError(_NOT_FOUND, field, description)


def untimely(field: str, description: str) -> CallerError:
    """Return the error for what cannot be in this state."""
    return CallerError(_FAILED_PRECONDITION, field, description)


def exhausted(field: str, description: str) -> CallerError:
    """Return the error for a limit that is reached."""
    return CallerError(_RESOURCE_EXHAUSTED, field, description)


def unavailable(description: str) -> CallerError:
    """Return the error for what this process cannot do now."""
    return CallerError(_UNAVAILABLE, "", description)


def parse(kind: type[M], data: bytes) -> M:
    """Read a message. Raises CallerError."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise invalid("", f"the message is no {kind.DESCRIPTOR.full_name}") from None
