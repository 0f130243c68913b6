"""Writes the core's snapshot as a StatsResponse."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from schedsvc_client.v1 import (
    cluster_pb2,
    judgement_pb2,
    leader_pb2,
    mode_pb2,
    pool_pb2,
    quota_pb2,
    tenants_pb2,
    usage_pb2,
)
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.driver import Driver, SettingsShared
from schedsvc.driver.slices import EVERYBODY, Rest, most_served, one_turn, pool_rows

__all__ = ["FLOW_LIMIT_DEFAULT", "FLOW_LIMIT_MAX", "Copy", "modes", "of_core", "snapshot"]

FLOW_LIMIT_DEFAULT = 1_000
#: Flows that fit into gRPC's default limit of 4 MiB a message.
FLOW_LIMIT_MAX = 10_000

#: Rows of flows, and names, that are read before others have the event loop: half a millisecond.
_FLOWS_AT_ONCE, _NAMES_AT_ONCE = 32, 256

_POOL_FIELDS = frozenset(pool_pb2.PoolStats.DESCRIPTOR.fields_by_name)
_FLOW_FIELDS = frozenset(pb.FlowStats.DESCRIPTOR.fields_by_name)
#: Numbers by outcome.
_COUNTS = frozenset({"refusals", "audited_refusals"})
_QUOTA_FIELDS = frozenset(quota_pb2.QuotaStats.DESCRIPTOR.fields_by_name)
_CLASS_FIELDS = frozenset(quota_pb2.ClassStats.DESCRIPTOR.fields_by_name)
_MODES = {"enforce": mode_pb2.MODE_ENFORCE, "dry_run": mode_pb2.MODE_AUDIT}
_TENANTS_TOLD = 100
_INT64_MAX = (1 << 63) - 1
_TOTALS_FIELDS = frozenset(pb.Totals.DESCRIPTOR.fields_by_name)


class Copy(NamedTuple):
    """Holds a snapshot that was sent, for callers that may get an old one."""

    taken_ns: int
    flow_limit: int
    written: bytes

    def serves(self, request: pb.StatsRequest, now_ns: int) -> bool:
        """Return whether it answers a request at `now_ns`."""
        is_same = not request.tenants and request.flow_limit == self.flow_limit
        return is_same and now_ns - self.taken_ns < request.max_age_ms * 1_000_000


async def snapshot(
    driver: Driver,
    request: pb.StatsRequest,
    incarnation: int,
    principal: int = EVERYBODY,
    rest: Rest = one_turn,
) -> bytes:
    """Take a snapshot of pools, flows and totals, as a serialised StatsResponse. O(flows + pools).

    For a principal with grants it holds only the pools and tenants that the principal may name, and
    neither totals nor groups, nor the quotas of models. All but the pools and the flows is of one
    moment. These are read in slices, with a `rest` after each, in which others are served. Raises
    Broken.
    """
    stats = driver.stats(0, principal, pools=False)
    parts = [_whole(driver, stats, incarnation).SerializeToString()]
    async for pools in pool_rows(driver, principal, rest):
        parts.append(pb.StatsResponse(pools=map(_pool, pools)).SerializeToString())
    limit = min(request.flow_limit or FLOW_LIMIT_DEFAULT, FLOW_LIMIT_MAX)
    if request.tenants:
        rows = _of_tenants(driver, request.tenants, principal, rest)
    else:
        rows = _of_most_served(driver, limit, principal, rest)
    flows: list[dict[str, Any]] = []
    async for row in rows:
        flows.append(row)
        limit -= 1
        if limit == 0:
            break
        if len(flows) == _FLOWS_AT_ONCE:
            parts.append(_serialised(flows))
            flows = []
            await rest()
    parts.append(_serialised(flows))
    await rest()
    return b"".join(parts)  # a repeated field may come in parts


def _serialised(flows: list[dict[str, Any]]) -> bytes:
    return pb.StatsResponse(flows=map(_flow, flows)).SerializeToString()


def _pool(row: dict[str, Any]) -> pool_pb2.PoolStats:
    return pool_pb2.PoolStats(**_only(row, _POOL_FIELDS))


def _flow(row: dict[str, Any]) -> pb.FlowStats:
    return pb.FlowStats(**_counted(row, _FLOW_FIELDS))


async def _of_tenants(
    driver: Driver, names: Sequence[str], principal: int, rest: Rest
) -> AsyncIterator[dict[str, Any]]:
    for number, name in enumerate(names, 1):
        tenant = name.encode()
        if principal == EVERYBODY or driver.may_see_tenant(principal, tenant):
            for flow in driver.tenant_stats(tenant):
                yield flow
        # Also where no name stands for a flow, so that there are no rows to count.
        if number % _NAMES_AT_ONCE == 0:
            await rest()


async def _of_most_served(
    driver: Driver, limit: int, principal: int, rest: Rest
) -> AsyncIterator[dict[str, Any]]:
    for flow in await most_served(driver, limit, principal, rest):
        yield driver.flow_stats(flow)


def of_core(stats: dict[str, Any]) -> pb.StatsResponse:
    """Return what the core's snapshot alone says, with the flows and pools that are in it. O(n)."""
    totals = stats["totals"]
    return pb.StatsResponse(
        pools=map(_pool, stats["pools"]),
        flows=map(_flow, stats["flows"]),
        tenants=None if totals is None else tenants_pb2.TenantsStats(**stats["tenants"]),
        totals=None if totals is None else pb.Totals(**_counted(totals, _TOTALS_FIELDS)),
        prices=judgement_pb2.Prices(**stats["prices"]),
        policy=stats["policy"],
        flow_order=stats["flow_order"],
        digest=stats["digest"],
        draining=stats["draining"],
        classes=[quota_pb2.ClassStats(**_only(entry, _CLASS_FIELDS)) for entry in stats["classes"]],
        groups=[quota_pb2.GroupStats(**entry) for entry in stats["groups"]],
        quotas=[
            quota_pb2.QuotaStats(**_counted(entry, _QUOTA_FIELDS)) for entry in stats["quotas"]
        ],
    )


def _whole(driver: Driver, stats: dict[str, Any], incarnation: int) -> pb.StatsResponse:
    """Return all but the pools and the flows."""
    found = of_core(stats)
    found.MergeFrom(
        pb.StatsResponse(
            incarnation=incarnation,
            state=_state(driver),
            config=_config(driver),
            usage=_usage(driver),
            cluster=_cluster(driver) if found.HasField("totals") else None,
            mode=modes(driver),
        )
    )
    return found


def modes(driver: Driver) -> mode_pb2.ModeStats:
    """Return the modes in force, with at most 100 tenants whose mode an operator has set."""
    overlay = driver.mode_overlay
    tenants = sorted(overlay.tenants.items())
    return mode_pb2.ModeStats(
        configured=_MODES[driver.mode_configured],
        overlay=_MODES[overlay.everyone] if overlay.everyone else mode_pb2.MODE_UNSPECIFIED,
        tenants=[
            mode_pb2.TenantMode(tenant=tenant, mode=_MODES[mode])
            for tenant, mode in tenants[:_TENANTS_TOLD]
        ],
        tenants_overlaid=len(tenants),
    )


def _state(driver: Driver) -> mode_pb2.StateStats | None:
    if driver.saving is None:
        return None
    return mode_pb2.StateStats(
        unsaved_ms=driver.unsaved_ns() // 1_000_000,
        problem=driver.saving.problem,
        log_bytes=driver.saving.log_bytes,
    )


def _usage(driver: Driver) -> usage_pb2.UsageStats | None:
    if driver.ledgering is None:
        return None
    kept = driver.ledgering
    return usage_pb2.UsageStats(
        waiting_rows=kept.waiting_rows,
        lost_rows=kept.lost_rows,
        saved_rows=kept.saved_rows,
        problem=kept.problem,
        log_bytes=kept.log_bytes,
    )


def _cluster(driver: Driver) -> cluster_pb2.ClusterStats | None:
    sharing, leading = driver.sharing, driver.leading
    if sharing is None:
        if leading is None:
            return None
        # A member that stands by serves nothing, so it shares nothing.
        return cluster_pb2.ClusterStats(member=leading.me.partition("/")[0], set=_set(driver))
    return cluster_pb2.ClusterStats(
        cluster=sharing.cluster,
        member=sharing.member,
        members=sharing.members,
        unsynced_ms=driver.unsynced_ns() // 1_000_000,
        problem=sharing.problem,
        totals_own=sharing.own,
        totals_others=sharing.seen,
        remote_micro=min(sharing.charged_micro, _INT64_MAX),
        repeats=sharing.repeats,
        rows_ignored=sharing.ignored,
        forgiven_micro=driver.forgiven_micro(),
        set=_set(driver),
        quotas=cluster_pb2.SharedQuotas(
            buckets=sharing.buckets,
            chunks=sharing.chunks,
            problem=sharing.quota_problem,
            divided_by=sharing.divided_by,
            slots=sharing.slots,
            concurrency_overlap=sharing.overlap,
            budgets=sharing.budgets,
            losses=sharing.losses,
        ),
        settings=_settings(sharing.settings),
    )


def _settings(shared: SettingsShared | None) -> cluster_pb2.SharedSettings | None:
    if shared is None:
        return None
    return cluster_pb2.SharedSettings(
        rows=shared.rows,
        applied=shared.applied,
        rows_forged=shared.forged,
        rows_refused=shared.refused,
        problem=shared.problem,
    )


def _set(driver: Driver) -> cluster_pb2.SetStats | None:
    leading = driver.leading
    if leading is None:
        return None
    return cluster_pb2.SetStats(
        name=leading.pool_set,
        leads=driver.leads,
        leadership=leader_pb2.Leadership(term=leading.term, leader=leading.leader),
        target=leading.target,
        followers=leading.followers if driver.leads else (),
        places=0 if driver.leads else leading.followed_places,
        terms_taken=leading.taken,
        terms_lost=leading.lost,
        rows_forged=leading.forged,
        problem=leading.problem,
    )


def _config(driver: Driver) -> mode_pb2.ConfigStats:
    loading = driver.loading
    return mode_pb2.ConfigStats(
        last_success_unix_ms=loading.succeeded_ms,
        problem=loading.problem,
        needs_restart=loading.waiting,
    )


def _counted(values: dict[str, Any], fields: frozenset[str]) -> dict[str, Any]:
    kept = _only(values, fields)
    for key in kept.keys() & _COUNTS:
        kept[key] = [
            pb.OutcomeCount(outcome=outcome, count=count) for outcome, count in values[key].items()
        ]
    for key in kept.keys() & {"quotas", "limits"}:
        kept[key] = [quota_pb2.Limit(**limit) for limit in kept[key]]
    return kept


def _only(values: dict[str, Any], fields: frozenset[str]) -> dict[str, Any]:
    """Return the values that the message has a field for; the core may report more."""
    return {key: value for key, value in values.items() if key in fields}
