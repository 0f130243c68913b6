"""Passes calls on byte for byte: those with a known token, and within what it is allowed."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc

from schedsvc.service import METHODS, Authenticator, Unauthenticated
from schedsvc.service.gcra import SECOND_NS, Bucket
from schedsvc.service.status import Failure, unauthenticated_failure

__all__ = ["Allowance", "Relay"]

_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
#: The edge passes on these RPCs and refuses all others: a caller cannot make it remember names.
_METHODS = METHODS | {_REFLECTION}


class Allowance:
    """How many calls a caller may begin in a second, and have open at once."""

    def __init__(self, per_second: int, open_max: int) -> None:
        """Allow `per_second` calls, which may come in one burst, and `open_max` at once."""
        self._per_second = per_second
        self._open_max = open_max
        self._calls = Bucket(SECOND_NS)
        #: Calls that are open.
        self.open = 0

    def refuses(self, now_ns: int) -> str:
        """Say why a call cannot begin now, else count it. O(1)."""
        if self.open >= self._open_max:
            return f"{self._open_max:,} calls are open with this token, which is all it may have"
        cost_ns = SECOND_NS // self._per_second
        if self._calls.wait_ns(now_ns, cost_ns):
            return f"more than {self._per_second:,} calls a second with this token; use a Session"
        self._calls.take(now_ns, cost_ns)
        return ""


class Relay(grpc.GenericRpcHandler):  # type: ignore[type-arg] # it has none at run time
    """Refuses calls before it reads a message, and passes the rest on to the upstream.

    The upstream verifies the token again, so a mistake here admits no caller.
    """

    def __init__(
        self,
        upstream: grpc.aio.Channel,
        authenticator: Authenticator,
        allowance: Callable[[], Allowance],
    ) -> None:
        """Pass calls on to a channel; each caller gets an `allowance` of its own."""
        self._upstream = upstream
        self._authenticator = authenticator
        self._new_allowance = allowance
        self._allowances: dict[int, Allowance] = {}  # as many as there are tokens
        #: How each RPC that was called is called upstream.
        self.methods: dict[str, Callable[..., Any]] = {}

    def service(self, handler_call_details: Any) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        """Return the handler of a call; None if it is no RPC of ours. O(metadata)."""
        method: str = handler_call_details.method
        if method not in _METHODS:
            return None
        metadata = handler_call_details.invocation_metadata
        try:
            principal = self._authenticator.principal_of(metadata)
        except Unauthenticated as error:
            return _handler(partial(_abort, unauthenticated_failure(str(error))))
        allowance = self._allowances.get(principal)
        if allowance is None:
            allowance = self._allowances[principal] = self._new_allowance()
        why = allowance.refuses(time.monotonic_ns())
        if why:
            return _handler(partial(_abort, Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, why)))
        proof = tuple((key, value) for key, value in metadata if key == "authorization")
        return _handler(partial(self._pass_on, method, proof, allowance))

    async def _pass_on(
        self,
        method: str,
        proof: tuple[tuple[str, str], ...],
        allowance: Allowance,
        requests: AsyncIterator[bytes],
        context: Any,
    ) -> None:
        """Be the client of a call whose server we are. It ends with either end."""
        begin = self.methods.get(method)
        if begin is None:
            begin = self.methods[method] = self._upstream.stream_stream(method, None, None)
        self._authenticator.note_proof(context)
        allowance.open += 1
        call = begin(requests, timeout=context.time_remaining(), metadata=proof)
        try:
            async for answer in call:
                await context.write(answer)
        except grpc.aio.AioRpcError as error:
            trailing: Any = error.trailing_metadata() or ()  # pairs, which the stubs do not know
            failure = Failure(error.code(), error.details() or "", tuple(trailing))
            await _abort(failure, requests, context)
        finally:
            allowance.open -= 1
            call.cancel()


def _handler(
    behave: Callable[[AsyncIterator[bytes], Any], Awaitable[None]],
) -> "grpc.RpcMethodHandler[bytes, bytes]":
    """Make the handler of a stream, which alone can read when it wants to, or not at all."""

    async def stream(requests: AsyncIterator[bytes], context: Any) -> None:
        await behave(requests, context)

    return grpc.stream_stream_rpc_method_handler(stream)


async def _abort(failure: Failure, _: AsyncIterator[bytes], context: Any) -> None:
    try:
        await context.abort(failure.code, failure.details, failure.trailing_metadata)
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError:
        # The peer left meanwhile: no caller is left to answer.
        raise asyncio.CancelledError from None
