"""An operator's handles: drains, leases that run, and modes (schedsvc.v1.OperatorService)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import grpc

from schedsvc_client.aio.calls import AioCalls, CallContext
from schedsvc_client.attempts import Service
from schedsvc_client.channel import ClientOptions, Token, options_of
from schedsvc_client.errors import CallError
from schedsvc_client.loop_thread import LoopThread
from schedsvc_client.message_sizes import accepted_bytes
from schedsvc_client.thread_channel import open_thread_channel
from schedsvc_client.v1 import mode_pb2, scheduler_pb2
from schedsvc_client.v1 import operator_pb2 as pb
from schedsvc_client.v1.operator_pb2_grpc import OperatorServiceStub
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

__all__ = ["MODES", "ORIGINS", "Operator"]

#: Names of modes, and their numbers.
MODES = {
    "enforce": mode_pb2.MODE_ENFORCE,
    "dry_run": mode_pb2.MODE_AUDIT,
    "configured": mode_pb2.MODE_CONFIGURED,
}
#: Origins of a tenant's settings.
ORIGINS = {
    "operator": pb.TENANT_ORIGIN_OPERATOR,
    "file": pb.TENANT_ORIGIN_FILE,
    "rule": pb.TENANT_ORIGIN_RULE,
}
_IDS_MAX = 4_096
_ID_BYTES = 8


class Operator:
    """Makes the calls of an operator. Use it as `with`, or `close()` it.

    Every call raises CallError: Unauthenticated if the caller may not operate, with the setting to
    change; LeaseNotFound (NOT_FOUND) if the scheduler does not know the pool, tenant or shim.
    """

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: Token | None = None,
        options: ClientOptions | None = None,
    ) -> None:
        self.target = target
        given = options_of(options)
        self._thread = LoopThread(
            lambda: AioCalls(CallContext(target, token, given), credentials, open_thread_channel)
        )
        self._operator = Service(OperatorServiceStub)
        self._scheduler = Service(SchedulerServiceStub)

    def __enter__(self) -> Operator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._thread.close(AioCalls.close)

    def drain(self, pool: str = "", *, undo: bool = False) -> pb.DrainResponse:
        """Stop admitting to a pool or (`""`) to the whole service, or begin again."""
        request = pb.DrainRequest(pool=pool, undo=undo)
        response: pb.DrainResponse = self._call(self._operator.Drain, request)
        return response

    def stats(self) -> scheduler_pb2.StatsResponse:
        """Take a snapshot of pools and totals, with as good as no tenants."""
        request = scheduler_pb2.StatsRequest(flow_limit=1)
        response: scheduler_pb2.StatsResponse = self._call(self._scheduler.Stats, request)
        return response

    def leases(
        self, meant: pb.LeaseFilter | None = None, *, page_size: int = 0
    ) -> Iterator[pb.Lease]:
        """Yield the leases that run, a page at a time: memory is bounded by a page."""
        request = pb.ListLeasesRequest(filter=meant, page_size=page_size)
        while True:
            response = self._call(self._operator.ListLeases, request)
            yield from response.leases
            if not response.next_page_token:
                return
            request.page_token = response.next_page_token

    def forgive(self, tenant: str) -> int:
        """Forgive what a tenant's own quota owes; return how many of its limits it had overshot."""
        request = pb.ForgiveTenantRequest(tenant=tenant)
        return int(self._call(self._operator.ForgiveTenant, request).limits)

    def tenants(self, origin: str = "", *, page_size: int = 0) -> Iterator[pb.Tenant]:
        """Yield tenants, a page at a time; `origin`: only those of one of ORIGINS."""
        request = pb.ListTenantsRequest(page_size=page_size)
        if origin:
            request.origin = ORIGINS[origin]
        while True:
            response = self._call(self._operator.ListTenants, request)
            yield from response.tenants
            if not response.next_page_token:
                return
            request.page_token = response.next_page_token

    def tenant(self, name: str) -> pb.Tenant:
        """Return a tenant as it is in force."""
        response: pb.GetTenantResponse = self._call(
            self._operator.GetTenant, pb.GetTenantRequest(name=name)
        )
        return response.tenant

    def set_tenant(
        self, name: str, *, classes: Sequence[str] | None = None, **changes: Any
    ) -> pb.Tenant:
        """List a tenant or change fields of it; `changes`: those of SetTenantRequest."""
        request = pb.SetTenantRequest(name=name, **changes)
        if classes is not None:
            request.classes.CopyFrom(pb.TenantClasses(names=classes))
        response: pb.SetTenantResponse = self._call(self._operator.SetTenant, request)
        return response.tenant

    def delete_tenant(self, name: str, *, if_version: int | None = None) -> tuple[str, int]:
        """Delete an operator's entry; return one of ORIGINS, and how many keys were revoked."""
        request = pb.DeleteTenantRequest(name=name, if_version=if_version)
        response = self._call(self._operator.DeleteTenant, request)
        fallback = next(key for key, value in ORIGINS.items() if value == response.fallback)
        return fallback, int(response.keys_revoked)

    def create_key(self, tenant: str, *, expires_in_s: float = 0.0) -> pb.CreateTenantKeyResponse:
        """Make an API key for a tenant; the scheduler shows it this once. 0: it never expires."""
        request = pb.CreateTenantKeyRequest(name=tenant, expires_in_ms=_milliseconds(expires_in_s))
        response: pb.CreateTenantKeyResponse = self._call(self._operator.CreateTenantKey, request)
        return response

    def rotate_key(
        self, tenant: str, key_id: str = "", *, grace_s: float, expires_in_s: float = 0.0
    ) -> pb.RotateTenantKeyResponse:
        """Replace an API key by a new one; the replaced key expires after `grace_s`."""
        request = pb.RotateTenantKeyRequest(
            name=tenant,
            id=key_id,
            grace_ms=_milliseconds(grace_s),
            expires_in_ms=_milliseconds(expires_in_s),
        )
        response: pb.RotateTenantKeyResponse = self._call(self._operator.RotateTenantKey, request)
        return response

    def revoke_key(self, tenant: str, key_id: str) -> None:
        """Revoke an API key."""
        request = pb.RevokeTenantKeyRequest(name=tenant, id=key_id)
        self._call(self._operator.RevokeTenantKey, request)

    def keys(self, tenant: str) -> list[pb.TenantKey]:
        """Return the API keys that operators have made for a tenant, the oldest first."""
        request = pb.ListTenantKeysRequest(name=tenant)
        return list(self._call(self._operator.ListTenantKeys, request).keys)

    def release_pool(self, pool: str) -> None:
        """Let another caller offer a pool whose owner is gone."""
        self._call(self._operator.ReleasePool, pb.ReleasePoolRequest(pool=pool))

    def revoke(self, lease_ids: Sequence[int]) -> pb.RevokeLeasesResponse:
        """Void leases; say how many were revoked, and which are not known."""
        total = pb.RevokeLeasesResponse()
        left, count = list(lease_ids), _IDS_MAX
        while left:
            request = pb.RevokeLeasesRequest(lease_ids=left[:count])
            try:
                response = self._call(self._operator.RevokeLeases, request)
            except CallError as error:
                fewer = accepted_bytes(error) // _ID_BYTES - 1
                if not 0 < fewer < count:
                    raise
                count = fewer
                continue
            del left[:count]
            total.revoked += response.revoked
            total.unknown_lease_ids.extend(response.unknown_lease_ids)
        return total

    def revoke_all(self, meant: pb.LeaseFilter, *, dry_run: bool = False) -> int:
        """Void, or only count, all leases for which everything holds that is given."""
        request = pb.RevokeLeasesRequest(filter=meant, dry_run=dry_run)
        response = self._call(self._operator.RevokeLeases, request)
        return int(response.revoked)

    def set_mode(self, mode: str, tenant: str = "") -> mode_pb2.ModeStats:
        """Say one of MODES for a tenant, or (`""`) for all."""
        if mode not in MODES:
            raise ValueError(f"mode {mode!r} must be one of {', '.join(MODES)}")
        request = pb.SetModeRequest(mode=MODES[mode], tenant=tenant)
        response: pb.SetModeResponse = self._call(self._operator.SetMode, request)
        return response.mode

    @staticmethod
    def filter(
        *,
        tenant: str = "",
        pool: str = "",
        client_id: str = "",
        pool_epoch: int = 0,
        age_min_s: float = 0.0,
        principal: str = "",
    ) -> pb.LeaseFilter:
        """Make a filter; see schedsvc.v1.LeaseFilter."""
        return pb.LeaseFilter(
            tenant=tenant,
            pool=pool,
            client_id=client_id,
            pool_epoch=pool_epoch,
            age_min_ms=int(age_min_s * 1_000),
            principal=principal,
        )

    def _call(self, method: Any, request: Any) -> Any:
        # Some of them, such as making a key, must not be done twice.
        return self._thread.run(lambda calls: calls.call(method, request, once=True))


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1_000)
