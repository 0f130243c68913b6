"""The calls of schedsvc.v1.OperatorService about tenants."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import structlog
from schedsvc_client.v1 import operator_pb2 as pb

from schedsvc.service.servicer_base import invalid, parse

__all__ = ["TenantCalls", "Tenants"]

#: Tenants of one page: each may have many API keys.
PAGE_MAX = 500

_log = structlog.get_logger("schedsvc.operator")


class Tenants(Protocol):
    """What an operator can do with tenants. All raise CallerError."""

    def page(self, origin: int, size: int, token: str) -> tuple[list[pb.Tenant], str]:
        """Return tenants, and where to go on."""

    def get(self, name: str) -> pb.Tenant:
        """Return a tenant."""

    async def set(self, request: pb.SetTenantRequest) -> pb.Tenant:
        """Change fields of a tenant."""

    async def delete(self, request: pb.DeleteTenantRequest) -> pb.DeleteTenantResponse:
        """Delete an operator's entry."""


class TenantCalls:
    """Answers of OperatorService; each method gets the message and who calls."""

    def __init__(self, tenants: Tenants) -> None:
        """Answer for these tenants."""
        self._tenants = tenants

    @property
    def calls(self) -> dict[str, Callable[[bytes, str], Awaitable[Any]]]:
        """The methods by the names of their RPCs."""
        return {
            "ListTenants": self.list_tenants,
            "GetTenant": self.get_tenant,
            "SetTenant": self.set_tenant,
            "DeleteTenant": self.delete_tenant,
        }

    async def list_tenants(self, data: bytes, who: str) -> pb.ListTenantsResponse:
        """Answer ListTenants. O(page)."""
        request = parse(pb.ListTenantsRequest, data)
        if not 0 <= request.page_size <= PAGE_MAX:
            raise invalid("page_size", f"must be from 0 to {PAGE_MAX}")
        if request.origin not in pb.TenantOrigin.values():
            raise invalid("origin", "is no TenantOrigin")
        size = request.page_size or PAGE_MAX
        found, token = self._tenants.page(request.origin, size, request.page_token)
        return pb.ListTenantsResponse(tenants=found, next_page_token=token)

    async def get_tenant(self, data: bytes, who: str) -> pb.GetTenantResponse:
        """Answer GetTenant."""
        request = parse(pb.GetTenantRequest, data)
        return pb.GetTenantResponse(tenant=self._tenants.get(request.name))

    async def set_tenant(self, data: bytes, who: str) -> pb.SetTenantResponse:
        """Answer SetTenant."""
        request = parse(pb.SetTenantRequest, data)
        tenant = await self._tenants.set(request)
        _log.warning("operator_tenant_set", tenant=tenant.name, version=tenant.version, by=who)
        return pb.SetTenantResponse(tenant=tenant)

    async def delete_tenant(self, data: bytes, who: str) -> pb.DeleteTenantResponse:
        """Answer DeleteTenant."""
        request = parse(pb.DeleteTenantRequest, data)
        answer = await self._tenants.delete(request)
        fallback = pb.TenantOrigin.Name(answer.fallback).removeprefix("TENANT_ORIGIN_").lower()
        _log.warning("operator_tenant_deleted", tenant=request.name, fallback=fallback, by=who)
        return answer
