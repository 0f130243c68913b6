"""Handles schedsvc.v1.OperatorService: what an operator may do to a scheduler that runs."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import grpc
import structlog
from schedsvc_client.v1 import mode_pb2
from schedsvc_client.v1 import operator_pb2 as pb

from schedsvc._core import LEASE_LIVE, LEASE_VOID, CallerError
from schedsvc.driver import Broken, Driver
from schedsvc.service.auth import Authenticator, Forbidden, Unauthenticated
from schedsvc.service.servicer_base import ServicerBase, invalid, parse
from schedsvc.service.stats_response import modes
from schedsvc.service.tenants import TenantCalls

__all__ = ["OPERATOR_SERVICE_NAME", "Actions", "OperatorService"]

OPERATOR_SERVICE_NAME = pb.DESCRIPTOR.services_by_name["OperatorService"].full_name

#: Leases of one page, and ids of one call.
PAGE_MAX = 1_000
IDS_MAX = 4_096
#: Records that are scanned, and leases that are listed or voided, before the event loop gets its
#: turn.
_SCAN = 8_192
_ROWS = 250
#: Pools that the error about an unknown one names.
_POOLS_NAMED = 10
#: A page that is not full after this many turns is returned as it is.
_TURNS_OF_A_PAGE = 64
_LEASE_ID_MAX = (1 << 63) - 1
_INT64_MAX = (1 << 63) - 1

#: Names of the modes for people.
_MODES = {
    mode_pb2.MODE_ENFORCE: "enforce",
    mode_pb2.MODE_AUDIT: "dry_run",
    mode_pb2.MODE_CONFIGURED: "configured",
}

_log = structlog.get_logger("schedsvc.operator")


class Actions(Protocol):
    """Declares actions that concern more than the core: health, and the configuration."""

    async def drain(self, pool: str, undo: bool) -> None:
        """Drain a pool or ("") the service, or let it serve again. Raises CallerError."""

    def set_mode(self, mode: int, tenant: str) -> None:
        """Say a mode for all ("") or for one tenant. Raises CallerError."""


class OperatorService(ServicerBase):
    """Serves OperatorService on one listener."""

    def __init__(
        self,
        driver: Driver,
        actions: Actions,
        tenants: TenantCalls,
        *,
        authenticator: Authenticator,
        open_here: bool,
        on_failure: Callable[[str, grpc.StatusCode], None] | None = None,
    ) -> None:
        """Serve a driver. `open_here`: operators may call on this listener at all.

        Those are the principals that are operators; on a listener without proof, all callers.
        """
        super().__init__(authenticator, on_failure)
        self._driver = driver
        self._actions = actions
        self._tenants = tenants
        self._open_here = open_here

    def handler(self) -> "grpc.GenericRpcHandler[bytes, bytes]":
        """Return the handler to add to a grpc.aio server; all methods take and give bytes."""
        calls = {
            "Drain": self.drain,
            "ListLeases": self.list_leases,
            "RevokeLeases": self.revoke_leases,
            "SetMode": self.set_mode,
            "ForgiveTenant": self.forgive_tenant,
            "ReleasePool": self.release_pool,
            **self._tenants.calls,
        }
        methods = {name: self._method(name, call) for name, call in calls.items()}
        return self._guarded(OPERATOR_SERVICE_NAME, methods, self._driver)

    def may_operate(self, principal: int) -> bool:
        """Return whether a principal of this listener is an operator."""
        if not self._authenticator.asks:
            return self._open_here
        return self._open_here and self._authenticator.credentials.may_operate(principal)

    async def drain(self, data: bytes, who: str) -> pb.DrainResponse:
        """Answer Drain."""
        request = parse(pb.DrainRequest, data)
        await self._actions.drain(request.pool, request.undo)
        _log.warning("operator_drain", pool=request.pool or "all", undo=request.undo, by=who)
        row = self._driver.pool_row(request.pool) if request.pool else None
        row = row or self._driver.stats(0, pools=False)["totals"]
        return pb.DrainResponse(live_leases=row["live_leases"], queued=row["queued"])

    async def list_leases(self, data: bytes, who: str) -> pb.ListLeasesResponse:
        """Answer ListLeases. O(page), bounded work between turns of the event loop."""
        request = parse(pb.ListLeasesRequest, data)
        if not 0 <= request.page_size <= PAGE_MAX:
            raise invalid("page_size", f"must be from 0 to {PAGE_MAX:,}")
        if not 0 <= request.page_token < 1 << 31:
            raise invalid("page_token", "is of no page")
        size, response = request.page_size or PAGE_MAX, pb.ListLeasesResponse()
        turns = 0
        async for start, rows in self._pages(request.filter, request.page_token, size):
            for row in rows:
                response.leases.add(**{**row, "principal": self._name(row["principal"])})
            response.next_page_token = start
            turns += 1
            size -= len(rows)
            if size == 0 or turns == _TURNS_OF_A_PAGE:
                break
        return response

    async def revoke_leases(self, data: bytes, who: str) -> pb.RevokeLeasesResponse:
        """Answer RevokeLeases. A filter covers leases that were granted before the call."""
        request = parse(pb.RevokeLeasesRequest, data)
        by_filter = bool(request.filter.ListFields())
        if by_filter == bool(request.lease_ids):
            raise invalid("filter", "give either lease_ids, or a filter that names something")
        if len(request.lease_ids) > IDS_MAX:
            raise invalid("lease_ids", f"has more than {IDS_MAX:,} entries; send several calls")
        response = pb.RevokeLeasesResponse()
        if by_filter:
            response.revoked = await self._revoke_meant(request.filter, dry_run=request.dry_run)
        elif request.dry_run:
            raise invalid("dry_run", "goes with a filter; ids are as many as they are")
        else:
            known = [lease_id for lease_id in request.lease_ids if lease_id <= _LEASE_ID_MAX]
            states = dict(zip(known, self._driver.revoke(known), strict=True))
            response.revoked = sum(state == LEASE_LIVE for state in states.values())
            response.unknown_lease_ids.extend(
                lease_id
                for lease_id in request.lease_ids
                if states.get(lease_id) not in (LEASE_LIVE, LEASE_VOID)
            )
        if not request.dry_run:
            _log.warning(
                "operator_revoke",
                revoked=response.revoked,
                meant=str(request.filter).replace("\n", " ").strip(),
                by=who,
            )
        return response

    async def _revoke_meant(self, meant: pb.LeaseFilter, *, dry_run: bool) -> int:
        revoked = 0
        async for _, rows in self._pages(meant, 0, None):
            ids = [row["lease_id"] for row in rows if row["state"] == LEASE_LIVE]
            revoked += len(ids)
            if not dry_run:
                self._driver.revoke(ids)
        return revoked

    async def set_mode(self, data: bytes, who: str) -> pb.SetModeResponse:
        """Answer SetMode."""
        request = parse(pb.SetModeRequest, data)
        if request.mode not in mode_pb2.Mode.values() or not request.mode:
            raise invalid("mode", "must be MODE_ENFORCE, MODE_AUDIT or MODE_CONFIGURED")
        self._actions.set_mode(request.mode, request.tenant)
        _log.warning(
            "operator_mode", mode=_MODES[request.mode], tenant=request.tenant or "all", by=who
        )
        return pb.SetModeResponse(mode=modes(self._driver))

    async def forgive_tenant(self, data: bytes, who: str) -> pb.ForgiveTenantResponse:
        """Answer ForgiveTenant."""
        request = parse(pb.ForgiveTenantRequest, data)
        limits = self._driver.forgive(request.tenant.encode())
        _log.warning("operator_forgive", tenant=request.tenant, limits=limits, by=who)
        return pb.ForgiveTenantResponse(limits=limits)

    async def release_pool(self, data: bytes, who: str) -> pb.ReleasePoolResponse:
        """Answer ReleasePool."""
        request = parse(pb.ReleasePoolRequest, data)
        self._driver.release_pool(request.pool.encode())
        _log.warning("operator_release", pool=request.pool, by=who)
        return pb.ReleasePoolResponse()

    def _number(self, principal: str) -> int:
        number = self._authenticator.credentials.number(principal)
        if number is None:
            text = f"no caller {principal[:100]!r} is known; ListLeases shows the names"
            raise CallerError(grpc.StatusCode.NOT_FOUND.value[0], "filter.principal", text)
        return number

    async def _pages(
        self, meant: pb.LeaseFilter, start: int, rows_max: int | None
    ) -> AsyncIterator[tuple[int, list[dict[str, Any]]]]:
        """Yield rows of leases that were granted by now, each time with where it would go on."""
        if not 0 <= meant.age_min_ms <= _INT64_MAX // 10**6:
            raise invalid("filter.age_min_ms", "must not be negative, nor beyond all time")
        granted_until_ns = self._driver.clock.now_ns() - meant.age_min_ms * 1_000_000
        given: dict[str, bytes | int] = {
            "tenant": meant.tenant.encode(),
            "pool": meant.pool.encode(),
            "client_id": meant.client_id.encode(),
            "pool_epoch": meant.pool_epoch,
        }
        if meant.principal:
            given["principal"] = self._number(meant.principal)
        while True:
            most = _ROWS if rows_max is None else min(_ROWS, rows_max)
            try:
                start, rows = self._driver.list_leases(start, _SCAN, most, granted_until_ns, given)
            except CallerError as error:
                raise CallerError(error.code, f"filter.{error.field}", error.description) from None
            yield start, rows
            if start == 0:
                return
            if rows_max is not None:
                rows_max -= len(rows)
            await asyncio.sleep(0)

    def _method(
        self, name: str, call: Callable[[bytes, str], Awaitable[Any]]
    ) -> "grpc.RpcMethodHandler[bytes, bytes]":
        async def answer(data: bytes, context: Any) -> bytes:
            try:
                answer: bytes = (
                    await call(data, await self._operator(context, len(data)))
                ).SerializeToString()
                return answer
            except CallerError as error:
                await self._fail(context, name, self._naming_pools(error))
            except (Broken, Unauthenticated, Forbidden) as error:
                await self._fail(context, name, error)

        return grpc.unary_unary_rpc_method_handler(answer)

    def _naming_pools(self, error: CallerError) -> CallerError:
        """Add the names of the pools to an error about an unknown one. O(pools)."""
        if error.code != grpc.StatusCode.NOT_FOUND.value[0] or not error.field.endswith("pool"):
            return error
        names = [row["name"] for row in self._driver.stats(0)["pools"]]
        more = f" and {len(names) - _POOLS_NAMED:,} more" if len(names) > _POOLS_NAMED else ""
        known = (
            f"the pools are {', '.join(names[:_POOLS_NAMED])}{more}" if names else "none is known"
        )
        return CallerError(error.code, error.field, f"{error.description}; {known}")

    async def _operator(self, context: Any, size: int) -> str:
        """Return the name of the operator who calls. Raises Unauthenticated and Forbidden."""
        principal = await self._turn(context, size)
        if self.may_operate(principal):
            return self._name(principal)
        if not self._open_here and self._authenticator.asks:
            raise Forbidden("this listener has `operate: false`: call another one")
        if not self._open_here:
            raise Forbidden(
                "this listener serves no operators: give it `operate: true`, or call a Unix socket,"
                " or a listener that asks for the token or certificate of an operator"
            )
        raise Forbidden(
            f"{self._name(principal)!r} may not operate: write `operator: true` to its entry of"
            " auth.principals"
        )
