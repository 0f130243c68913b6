"""Turns callers away at the door: before gRPC has read their message."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from schedsvc.service.auth import Authenticator

__all__ = ["AuthInterceptor"]

#: Gets the call's context, the method's name, and the reason; it aborts the call.
Refuse = Callable[[Any, str, str], Awaitable[None]]


class AuthInterceptor(grpc.GenericRpcHandler):  # type: ignore[type-arg] # it has none at run time
    """Stands before a handler on a listener that asks for tokens.

    gRPC reads the message of a unary call before it calls the handler. A call that is refused for
    its metadata needs no reading, and the peer can send no more than a window of unread bytes. So
    such a call gets the handler of a stream, which reads on demand.
    """

    def __init__(
        self,
        inner: "grpc.GenericRpcHandler[bytes, bytes]",
        authenticator: Authenticator,
        refuse: Refuse,
    ) -> None:
        self._inner = inner
        self._authenticator = authenticator
        self._refuse = refuse

    def service(self, handler_call_details: Any) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        """Return the handler of a call; None if the method is not ours. O(metadata)."""
        handler = self._inner.service(handler_call_details)
        if handler is None:
            return None
        why = self._authenticator.turned_away(handler_call_details.invocation_metadata)
        if not why:
            return handler
        method = handler_call_details.method.rpartition("/")[2]

        async def refuse(_: Any, context: Any) -> None:
            await self._refuse(context, method, why)

        return grpc.stream_stream_rpc_method_handler(refuse)
