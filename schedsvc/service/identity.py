"""Handles schedsvc.v1.IdentityService, which names the tenant of an API key."""

import time
from collections.abc import Callable
from typing import Any

import grpc
from schedsvc_client.v1 import identity_pb2 as pb

from schedsvc._core import CallerError
from schedsvc.driver import Broken, Driver
from schedsvc.service.auth import Authenticator, Unauthenticated
from schedsvc.service.pace import Paces
from schedsvc.service.servicer_base import ServicerBase, invalid, not_found, parse

__all__ = ["IDENTITY_SERVICE_NAME", "IdentityService"]

IDENTITY_SERVICE_NAME = pb.DESCRIPTOR.services_by_name["IdentityService"].full_name
_SHA256_BYTES = 32


class IdentityService(ServicerBase):
    """Serves IdentityService on one listener."""

    def __init__(
        self,
        driver: Driver,
        who_is: Callable[[bytes], pb.WhoIsResponse | None],
        paces: Paces,
        *,
        authenticator: Authenticator,
        on_failure: Callable[[str, grpc.StatusCode], None] | None = None,
    ) -> None:
        """Answer by `who_is`, within the budget that a principal has."""
        super().__init__(authenticator, on_failure)
        self._driver = driver
        self._who_is = who_is
        self._paces = paces

    def handler(self) -> "grpc.GenericRpcHandler[bytes, bytes]":
        """Return the handler to add to a grpc.aio server; its method takes and gives bytes."""
        methods = {"WhoIs": grpc.unary_unary_rpc_method_handler(self.who_is)}
        return self._guarded(IDENTITY_SERVICE_NAME, methods, self._driver)

    async def who_is(self, data: bytes, context: Any) -> bytes:
        """Answer WhoIs. O(patterns of the caller)."""
        try:
            principal = await self._turn(context, len(data))
            self._paces.enter(principal)
            began_ns = time.thread_time_ns()
            request = parse(pb.WhoIsRequest, data)
            if len(request.api_key_sha256) != _SHA256_BYTES:
                size = len(request.api_key_sha256)
                raise invalid("api_key_sha256", f"must have {_SHA256_BYTES} bytes, not {size:,}")
            found = self._who_is(request.api_key_sha256)
            if found is None or not self._driver.may_see_tenant(principal, found.tenant.encode()):
                found = None
            self._paces.charge(principal, 1, time.thread_time_ns() - began_ns)
            if found is None:
                # The same answer for both: a caller learns of no key beyond its tenants.
                raise not_found("api_key_sha256", "no tenant that this caller may name has the key")
        except (CallerError, Broken, Unauthenticated) as error:
            await self._fail(context, "WhoIs", error)
        return found.SerializeToString()
