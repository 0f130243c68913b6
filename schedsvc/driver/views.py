"""Reads the core for the driver, and changes nothing."""

from typing import TYPE_CHECKING, Any

from schedsvc.driver.calls import Records, guarded
from schedsvc.driver.clock import SteadyClock

if TYPE_CHECKING:
    from schedsvc._core import Scheduler

__all__ = ["FlowKey", "Views"]

#: A flow: whether it waits, its service, and its number, negative.
FlowKey = tuple[bool, int, int]


class Views(Records):
    """Reads a core, at the time of its clock. Every method raises Broken after a defect."""

    def __init__(self, core: "Scheduler", clock: SteadyClock) -> None:
        """Read this core."""
        super().__init__(clock)
        self._core = core
        #: The bounds of all histograms, from the start on; see the core's.
        self.histogram_bounds_ms = core.histogram_bounds_ms()

    @guarded
    def stats(self, flow_limit: int, principal: int = -1, *, pools: bool = True) -> dict[str, Any]:
        """Return the core's snapshot, as a principal may see it (-1: all). O(flows + pools).

        `pools`: whether it has their rows, 5 us each. `slices.pool_rows()` reads them in slices.
        """
        return self._core.stats(self.clock.now_ns(), flow_limit, principal, pools)

    @guarded
    def pool_rows(
        self, first: int, end: int, principal: int = -1
    ) -> tuple[int, list[dict[str, Any]]]:
        """Return the rows of some pools, and where to go on; see the core's. O(end - first)."""
        return self._core.pool_rows(self.clock.now_ns(), first, end, principal)

    @guarded
    def pool_row(self, name: str) -> dict[str, Any] | None:
        """Return the row of one pool; None if there is none of this name. O(1)."""
        pool = self._core.pool_index(name.encode())
        if pool < 0:
            return None
        [row] = self._core.pool_rows(self.clock.now_ns(), pool, pool + 1)[1]
        return row

    @guarded
    def flow_keys(self, first: int, end: int, principal: int) -> tuple[int, list[FlowKey]]:
        """Return what Stats chooses some flows by; see the core. O(end - first)."""
        return self._core.flow_keys(first, end, principal)

    @guarded
    def flow_stats(self, flow: int) -> dict[str, Any]:
        """Return the snapshot of one flow. O(1)."""
        return self._core.flow_stats(self.clock.now_ns(), flow)

    @guarded
    def may_see_tenant(self, principal: int, tenant: bytes) -> bool:
        """Return whether a principal may vouch for a tenant. O(patterns)."""
        return self._core.may_see_tenant(principal, tenant)

    @guarded
    def may_see_pool(self, principal: int, pool: bytes) -> bool:
        """Return whether a principal may know how full a pool is. O(patterns)."""
        return self._core.may_see_pool(principal, pool)

    @guarded
    def tenant_stats(self, tenant: bytes) -> list[dict[str, Any]]:
        """Return a tenant's flows, that in the default class first; none if it is not known."""
        now_ns = self.clock.now_ns()
        return [self._core.flow_stats(now_ns, flow) for flow in self._core.flow_indices(tenant)]

    @guarded
    def unlisted_stats(self) -> dict[str, Any]:
        """Sum up the tenants that the configuration does not list. O(flows)."""
        return self._core.unlisted_stats()

    @guarded
    def histograms(self, tenant: bytes | None) -> list[dict[str, Any]]:
        """Return a tenant's histograms (None: of all others); see the core's. O(classes)."""
        if tenant is None:
            return self._core.histograms()
        flows = self._core.flow_indices(tenant)[:1]
        return [row for flow in flows for row in self._core.histograms(flow)]

    @guarded
    def explain(self, request_id: bytes, tenant: bytes, principal: int) -> list[dict[str, Any]]:
        """Return what is known of a request; see the core's `explain()`. Raises CallerError."""
        return self._core.explain(self.clock.now_ns(), request_id, tenant, principal)

    @guarded
    def recent_request_ids(self, principal: int) -> list[bytes]:
        """Return the ids of the last requests of a principal (-1: of all), the latest first."""
        return self._core.recent_request_ids(principal)

    @guarded
    def forgiven_micro(self) -> int:
        """Return what leads have forgiven; see the core. O(1)."""
        return self._core.forgiven_micro()

    @guarded
    def list_leases(
        self,
        start: int,
        scan_max: int,
        rows_max: int,
        granted_until_ns: int,
        meant: dict[str, bytes | int],
    ) -> tuple[int, list[dict[str, Any]]]:
        """Return leases from a place on, granted until a time, and where to go on.

        See the core's `list_leases()`. Raises CallerError. O(scan_max).
        """
        now_ns = self.clock.now_ns()
        age_min_ns = now_ns - granted_until_ns
        return self._core.list_leases(
            now_ns, start, scan_max, rows_max, age_min_ns=age_min_ns, **meant
        )
