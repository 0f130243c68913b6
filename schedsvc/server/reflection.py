"""Serves gRPC server reflection to those who may call the service."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from schedsvc.service import (
    EXPLAIN_SERVICE_NAME,
    OPERATOR_SERVICE_NAME,
    SERVICE_NAME,
    Authenticator,
    Unauthenticated,
)

__all__ = ["add_reflection"]

_NAMES = (
    SERVICE_NAME,
    EXPLAIN_SERVICE_NAME,
    OPERATOR_SERVICE_NAME,
    health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
    reflection.SERVICE_NAME,
)


class _Reflection(reflection.aio.ReflectionServicer):  # type: ignore # not in the stubs
    """Describes the services only to callers that the listener's authenticator knows."""

    def __init__(self, authenticator: Authenticator) -> None:
        super().__init__(_NAMES)
        self._authenticator = authenticator

    async def ServerReflectionInfo(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        try:
            self._authenticator.principal(context)
        except Unauthenticated as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        async for answer in super().ServerReflectionInfo(request_iterator, context):
            yield answer


def add_reflection(server: Any, authenticator: Authenticator) -> None:
    """Let a server describe its services and messages."""
    servicer = _Reflection(authenticator)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
