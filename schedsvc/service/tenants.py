"""Handles the calls of schedsvc.v1.OperatorService about tenants."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import structlog
from schedsvc_client.v1 import operator_pb2 as pb

from schedsvc.service.servicer_base import invalid, parse

__all__ = ["Keys", "TenantCalls", "Tenants"]

#: Tenants of one page: each may have many API keys.
PAGE_MAX = 500

_log = structlog.get_logger("schedsvc.operator")


class Tenants(Protocol):
    """Declares an operator's actions on tenants. All raise CallerError."""

    def page(self, origin: int, size: int, token: str) -> tuple[list[pb.Tenant], str]:
        """Return tenants, and where to go on."""

    def get(self, name: str) -> pb.Tenant:
        """Return a tenant."""

    async def set(self, request: pb.SetTenantRequest) -> pb.Tenant:
        """Change fields of a tenant."""

    async def delete(self, request: pb.DeleteTenantRequest) -> pb.DeleteTenantResponse:
        """Delete an operator's entry."""


class Keys(Protocol):
    """Declares an operator's actions on API keys of tenants. All raise CallerError."""

    async def create(self, request: pb.CreateTenantKeyRequest) -> pb.CreateTenantKeyResponse:
        """Make a key."""

    async def rotate(self, request: pb.RotateTenantKeyRequest) -> pb.RotateTenantKeyResponse:
        """Replace a key by a new one."""

    async def revoke(self, request: pb.RevokeTenantKeyRequest) -> None:
        """Revoke a key."""

    def list(self, name: str) -> list[pb.TenantKey]:
        """Return the keys of a tenant."""


class TenantCalls:
    """Answers OperatorService; each method gets the message and who calls."""

    def __init__(self, tenants: Tenants, keys: Keys) -> None:
        """Answer for these tenants and their keys."""
        self._tenants = tenants
        self._keys = keys

    @property
    def calls(self) -> dict[str, Callable[[bytes, str], Awaitable[Any]]]:
        """Return the methods by the names of their RPCs."""
        return {
            "ListTenants": self.list_tenants,
            "GetTenant": self.get_tenant,
            "SetTenant": self.set_tenant,
            "DeleteTenant": self.delete_tenant,
            "CreateTenantKey": self.create_key,
            "RotateTenantKey": self.rotate_key,
            "RevokeTenantKey": self.revoke_key,
            "ListTenantKeys": self.list_keys,
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

    async def create_key(self, data: bytes, who: str) -> pb.CreateTenantKeyResponse:
        """Answer CreateTenantKey. The log gets the key's id, never the key."""
        request = parse(pb.CreateTenantKeyRequest, data)
        answer = await self._keys.create(request)
        _log.warning("operator_key_created", tenant=request.name, key_id=answer.key.id, by=who)
        return answer

    async def rotate_key(self, data: bytes, who: str) -> pb.RotateTenantKeyResponse:
        """Answer RotateTenantKey."""
        request = parse(pb.RotateTenantKeyRequest, data)
        answer = await self._keys.rotate(request)
        _log.warning(
            "operator_key_rotated", tenant=request.name, key_id=answer.key.id,
            old_key_id=answer.old_key.id, grace_ms=request.grace_ms, by=who,
        )  # fmt: skip
        return answer

    async def revoke_key(self, data: bytes, who: str) -> pb.RevokeTenantKeyResponse:
        """Answer RevokeTenantKey."""
        request = parse(pb.RevokeTenantKeyRequest, data)
        await self._keys.revoke(request)
        _log.warning("operator_key_revoked", tenant=request.name, key_id=request.id, by=who)
        return pb.RevokeTenantKeyResponse()

    async def list_keys(self, data: bytes, who: str) -> pb.ListTenantKeysResponse:
        """Answer ListTenantKeys."""
        request = parse(pb.ListTenantKeysRequest, data)
        return pb.ListTenantKeysResponse(keys=self._keys.list(request.name))
