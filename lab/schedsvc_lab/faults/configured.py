"""Makes a core as the options of a run say."""

from collections.abc import Collection
from dataclasses import asdict

from schedsvc._core import Scheduler
from schedsvc_lab.faults.auditor import Limits
from schedsvc_lab.faults.hostile_options import TENANT
from schedsvc_lab.faults.options import Options

UNKNOWN_WEIGHT = 100
"""Weight of the flow that all unknown tenants share, in thousandths."""

HOSTILE_WEIGHT = 1_000

_QUOTA_GROUP = "group"

_LEASES_PER_PROCESS = 1_000_000_000


def configured(options: Options, incarnation: int, now_ns: int) -> Scheduler:
    """Make a core as the configuration says."""
    core = Scheduler(
        incarnation=incarnation,
        hash_key=options.seed.to_bytes(16, "little"),
        lease_id_base=incarnation * _LEASES_PER_PROCESS,
        **options.core,
    )
    for name, weight in options.tenants.items():
        core.set_flow(name.encode(), weight)
    _set_hostile(core, options, now_ns)
    if options.shares_unknown:
        core.set_unknown(core.set_flow(b"unknown", UNKNOWN_WEIGHT))
    _set_classes(core, options)
    if options.limits is not None:
        core.set_pool_limits(now_ns, **asdict(options.limits))
    for name, tokens in (options.adapters or {}).items():
        core.set_adapter(now_ns, name.encode(), tokens)
    _set_quotas(core, options, now_ns, _set_tree(core, options, now_ns))
    return core


def _set_tree(core: Scheduler, options: Options, now_ns: int) -> dict[str, int]:
    """Make the groups with a weight, but for that with a quota; return their indices."""
    tree = options.tree
    found: dict[str, int] = {}
    for name in tree.names():
        if name != _QUOTA_GROUP:
            above = found.get(tree.parent(name), -1)
            weight = tree.weights[name]
            found[name] = core.set_quota(now_ns, name.encode(), above, weight_milli=weight)
    if options.quotas is None:
        for tenant in options.tenants:
            above = found.get(tree.parent(tenant), -1)
            if above != -1:
                core.set_flow_quota(now_ns, core.flow_index(tenant.encode()), above)
    above = found.get(tree.parent(TENANT), -1)
    if options.hostile is not None and above != -1:
        core.set_flow_quota(now_ns, core.flow_index(TENANT.encode()), above)
    return found


def _set_hostile(core: Scheduler, options: Options, now_ns: int) -> None:
    """Give the hostile principal its tenant and its grants; all others may do everything."""
    if options.hostile is not None:
        grants = options.hostile.grants
        core.set_flow(TENANT.encode(), HOSTILE_WEIGHT)
        core.set_principal(
            now_ns,
            grants.principal,
            b"mal",
            pools=[name.encode() for name in grants.pools],
            tenants=[name.encode() for name in grants.tenants],
            share_ppm=grants.share_ppm,
        )
        list_pools(core, options, now_ns, options.hostile.closed)


def list_pools(core: Scheduler, options: Options, now_ns: int, closed: Collection[str]) -> None:
    """List all pools but those that shall only take requests that name them."""
    names = (pool.name for pool in options.pools if pool.name not in closed)
    core.set_pools_listed(now_ns, tuple(name.encode() for name in names))


def _set_classes(core: Scheduler, options: Options) -> None:
    """Give tenants their classes; every request may name those that are not exempt."""
    classes = options.classes
    if classes is None:
        return
    numbers = {
        c.name: core.set_class(c.name.encode(), c.rank, c.ageing_ns, c.exempt)
        for c in classes.known.values()
    }
    named = tuple(numbers[c.name] for c in classes.known.values() if not c.exempt)
    hostile = [] if options.hostile is None else [TENANT]
    unknown = ["unknown"] if options.shares_unknown else []
    for tenant in (*options.tenants, *hostile, *unknown):
        own = numbers[classes.of_tenants.get(tenant, "default")]
        core.set_flow_class(core.flow_index(tenant.encode()), own, named)


def _set_quotas(core: Scheduler, options: Options, now_ns: int, groups: dict[str, int]) -> None:
    """Give tenants, their group and a model their limits; `groups`: those with a weight."""
    quotas, tree = options.quotas, options.tree
    if quotas is None:
        return
    group = model = -1
    if quotas.group is not None:
        above = groups.get(tree.parent(_QUOTA_GROUP), -1)
        group = core.set_quota(
            now_ns,
            _QUOTA_GROUP.encode(),
            above,
            weight_milli=tree.weights.get(_QUOTA_GROUP, 0),
            **asdict(quotas.group),
        )
    if quotas.model is not None:
        model = core.set_quota(now_ns, b"model", -1, **asdict(quotas.model))
        core.set_pool_quota(now_ns, quotas.model_pool.encode(), model)
    for name in options.tenants:
        core.set_flow_quota(
            now_ns,
            core.flow_index(name.encode()),
            group if name in quotas.members else groups.get(tree.parent(name), -1),
            refuse=name in quotas.refusing,
            **asdict(quotas.tenants.get(name, Limits())),
        )
