"""Gives a core its configuration: a fresh core all of it, a running one the changes."""

from typing import Any, Protocol

from schedsvc.config.class_rules import DEFAULT_CLASS
from schedsvc.config.in_force import in_force
from schedsvc.config.models import Class, Config, Group, Pool, Tenant, Terms
from schedsvc.config.rules import UNKNOWN_TENANT
from schedsvc.config.settings import LIVE_OPTIONS

__all__ = [
    "Configurable",
    "change_modes",
    "class_flow",
    "configure",
    "group_name",
    "limit_flow",
    "reconfigure",
]

_NO_QUOTA = -1
_MS = 1_000_000
_USUAL = -1


class Configurable(Protocol):
    """Declares the core's methods that `configure` and `reconfigure` call; see there."""

    def set_options(self, now_ns: int, **options: Any) -> None:
        """Give the core other settings."""

    def set_shared(self, now_ns: int) -> None:
        """Share service with other members of a cluster."""

    def set_flow(self, name: bytes, weight_milli: int) -> int:
        """Add a flow."""

    def set_class(self, name: bytes, rank: int, ageing_ns: int, exempt: bool) -> int:
        """Add a priority class."""

    def set_class_gone(self, name: bytes) -> None:
        """Let no request name a class from now on."""

    def set_flow_class(self, flow: int, default_class: int, named: tuple[int, ...]) -> None:
        """Give a tenant its class, and those that its requests may name."""

    def set_flow_mode(self, now_ns: int, flow: int, dry_run: bool) -> None:
        """Enforce decisions on a flow, or only count them."""

    def set_gone(self, now_ns: int, name: bytes) -> None:
        """Let a name be unknown from now on."""

    def set_retired(self, now_ns: int, name: bytes) -> None:
        """Let a name be unknown, and a new tenant have its flow once it loses nothing by that."""

    def is_known(self, name: bytes) -> bool:
        """Return whether a tenant has this name now."""

    def class_index(self, name: bytes) -> int:
        """Return the index of a class."""

    def quota_index(self, name: bytes) -> int:
        """Return the index of a quota that several share."""

    def set_key_gone(self, api_key_sha256: bytes) -> None:
        """Let a key hash stand for no flow."""

    def set_quota(
        self,
        now_ns: int,
        name: bytes,
        parent: int = -1,
        requests: int = 0,
        input_tokens: int = 0,
        output_tokens: int = 0,
        total_tokens: int = 0,
        concurrency: int = 0,
        share: int = 0,
        lends: int = -1,
        borrows: int = -1,
        day_tokens: int = 0,
        month_tokens: int = 0,
        weight_milli: int = 0,
    ) -> int:
        """Add a quota that several share, and with a weight their service."""

    def set_flow_quota(
        self,
        now_ns: int,
        flow: int,
        parent: int = -1,
        refuse: bool = False,
        requests: int = 0,
        input_tokens: int = 0,
        output_tokens: int = 0,
        total_tokens: int = 0,
        concurrency: int = 0,
        share: int = 0,
        lends: int = -1,
        borrows: int = -1,
        day_tokens: int = 0,
        month_tokens: int = 0,
        max_wait_ns: int = 0,
    ) -> None:
        """Give a flow limits."""

    def set_pool_quota(self, now_ns: int, pool: bytes, quota: int) -> None:
        """Give a pool the quota of its model."""

    def set_pool_limits(self, now_ns: int, pool: bytes = b"", **limits: int) -> None:
        """Limit a pool, or all that have no limits of their own."""

    def set_adapter(self, now_ns: int, name: bytes, tokens: int) -> None:
        """Say what an adapter takes of a pool."""

    def set_no_pool_limits(self, now_ns: int) -> None:
        """Limit no pool."""

    def set_key(self, api_key_sha256: bytes, flow: int) -> None:
        """Let a key hash stand for a flow."""

    def set_no_keys(self) -> None:
        """Let no key hash stand for any flow."""

    def set_unknown(self, flow: int, refused: bool = False, own: bool = False) -> None:
        """Serve unknown tenants in a flow, or in flows of their own."""

    def set_tenant_rule(
        self,
        now_ns: int,
        pattern: bytes,
        weight_milli: int = 1_000,
        default_class: int = 0,
        named: tuple[int, ...] = (),
        dry_run: bool = False,
        parent: int = -1,
        refuse: bool = False,
        requests: int = 0,
        input_tokens: int = 0,
        output_tokens: int = 0,
        total_tokens: int = 0,
        concurrency: int = 0,
        max_wait_ns: int = 0,
    ) -> None:
        """Append a rule for tenants at first sight."""

    def set_no_tenant_rules(self, now_ns: int, dry_run: bool = False) -> None:
        """Forget all rules."""

    def set_rules_followed(self, now_ns: int) -> None:
        """Give the flows of tenants at first sight what the rules say."""

    def set_pools_listed(self, now_ns: int, names: tuple[bytes, ...]) -> None:
        """Let these pools take requests that name none, by any caller that offers them."""

    def set_pool(
        self,
        now_ns: int,
        name: bytes,
        epoch: int,
        capacity_tokens: int,
        block_size_tokens: int,
        max_running: int = 0,
        max_model_tokens: int = 0,
    ) -> int:
        """Register a pool."""


def configure(core: Configurable, config: Config, now_ns: int) -> None:
    """Give a fresh core its flows, keys, quotas and pools. O(tenants + pools)."""
    if config.cluster is not None:
        core.set_shared(now_ns)
    _apply(core, config, None, now_ns)
    _limit_pools(core, config, None, now_ns)
    _list_pools(core, config, now_ns)
    for pool in config.pools:
        _pool(core, pool, now_ns)


def reconfigure(
    core: Configurable, config: Config, before: Config, now_ns: int
) -> list[tuple[str, str]]:
    """Give a running core what differs from the configuration in force. O(tenants + queued).

    Leases keep what they have; of a tenant that is gone what is queued is still served, and a new
    tenant gets its flow once that takes nothing from it; what
    `needs_restart()` names stays as it was. Returns pools, each with the reason why the core keeps
    its old figures. If the core refuses anything else, `before` is in force again and its error
    is raised.
    """
    config = in_force(config, before)
    try:
        _change(core, config, before, now_ns)
    except Exception:
        # The core had accepted all of it.
        _change(core, before, config, now_ns)
        raise
    kept = []
    old_pools = {pool.name: pool for pool in before.pools}
    for pool in config.pools:
        if pool != old_pools.get(pool.name):
            try:
                _pool(core, pool, now_ns)
            except ValueError as error:  # a shim offers it by now, in another way
                kept.append((pool.name, str(error)))
    return kept


def _change(core: Configurable, config: Config, before: Config, now_ns: int) -> None:
    options = {k: v for k, v in config.core_options().items() if k in LIVE_OPTIONS}
    core.set_options(now_ns, **options)
    names = {tenant.name for tenant in config.tenants}
    for name in (tenant.name.encode() for tenant in before.tenants if tenant.name not in names):
        if core.is_known(name):  # not if the core refused a change before it came to this tenant
            core.set_retired(now_ns, name)
    _apply(core, config, before, now_ns)
    _limit_pools(core, config, before, now_ns)
    _list_pools(core, config, now_ns)


def change_modes(core: Configurable, config: Config, before: Config, now_ns: int) -> None:
    """Give a running core the modes of a configuration that differs in nothing else.

    O(tenants + groups).
    """
    for tenant, old in zip(config.tenants, before.tenants, strict=True):
        if config.is_dry_run(tenant) != before.is_dry_run(old):
            flow = core.set_flow(tenant.name.encode(), tenant.weight_milli)
            core.set_flow_mode(now_ns, flow, config.is_dry_run(tenant))
    if config.mode != before.mode:
        classes = _classes(core, config, before)
        groups = _shared_quotas(core, config, before, now_ns)
        _unknown(core, config, before, now_ns, classes, groups)
        _rules(core, config, before, now_ns, classes, groups)


def _apply(core: Configurable, config: Config, before: Config | None, now_ns: int) -> None:
    classes = _classes(core, config, before)
    groups = _shared_quotas(core, config, before, now_ns)
    if before is not None:
        core.set_no_keys()
    for tenant in config.tenants:
        flow = core.set_flow(tenant.name.encode(), tenant.weight_milli)
        # A tenant that was removed still has its former limits, classes and mode in the core.
        if before is not None or tenant.is_limited:
            limit_flow(core, flow, tenant, groups, now_ns)
        if before is not None or tenant.names_classes:
            class_flow(core, flow, tenant, classes)
        if before is not None or config.is_dry_run(tenant):
            core.set_flow_mode(now_ns, flow, config.is_dry_run(tenant))
        for key in tenant.api_keys_sha256:
            core.set_key(bytes.fromhex(key), flow)
    _unknown(core, config, before, now_ns, classes, groups)
    _rules(core, config, before, now_ns, classes, groups)


def limit_flow(
    core: Configurable, flow: int, terms: Terms, groups: dict[str, int], now_ns: int
) -> None:
    """Give a tenant its quota, share and group; `groups`: their indices."""
    quota, share = terms.quota, terms.share
    parent = _NO_QUOTA if terms.group is None else groups[terms.group]
    refuse = quota is not None and quota.over == "refuse"
    limits = (quota.core_limits() if quota else {}) | (share.core_share() if share else {})
    if isinstance(terms, Tenant) and terms.budget is not None:
        limits |= terms.budget.core_limits()
    if terms.max_wait_ms is not None:
        limits["max_wait_ns"] = terms.max_wait_ms * _MS
    core.set_flow_quota(now_ns, flow, parent, refuse, **limits)


def class_flow(core: Configurable, flow: int, terms: Terms, classes: dict[str, int]) -> None:
    """Give a tenant its classes; `classes`: their indices."""
    core.set_flow_class(
        flow,
        classes[terms.request_class or DEFAULT_CLASS],
        tuple(classes[name] for name in terms.classes or ()),
    )


def _classes(core: Configurable, config: Config, before: Config | None) -> dict[str, int]:
    """Declare the classes; return their indices."""
    old = {entry.name for entry in before.classes} if before else set()
    entries = {entry.name: entry for entry in config.classes}
    for name in sorted(old - entries.keys()):
        core.set_class_gone(name.encode())
    if DEFAULT_CLASS in old:
        entries.setdefault(DEFAULT_CLASS, Class(name=DEFAULT_CLASS))
    found = {DEFAULT_CLASS: 0}
    names = list(entries)
    if before:  # a class that returns comes before a new one, which would take its place
        names.sort(key=lambda name: core.class_index(name.encode()) < 0)
    for name in names:
        entry = entries[name]
        found[name] = core.set_class(
            name.encode(),
            entry.rank or 0,
            entry.ageing_ms * _MS,
            entry.exempt,
        )
    return found


def _list_pools(core: Configurable, config: Config, now_ns: int) -> None:
    core.set_pools_listed(now_ns, tuple(pool.name.encode() for pool in config.pools))


def _pool(core: Configurable, pool: Pool, now_ns: int) -> None:
    if pool.capacity_tokens is None:
        return
    core.set_pool(
        now_ns,
        pool.name.encode(),
        pool.epoch,
        pool.capacity_tokens,
        pool.block_size_tokens,
        pool.max_running,
        pool.max_model_tokens,
    )


def _limit_pools(core: Configurable, config: Config, before: Config | None, now_ns: int) -> None:
    taken = {adapter.name: adapter.taken_tokens for adapter in config.adapters}
    for adapter in before.adapters if before else []:
        if adapter.name not in taken:
            core.set_adapter(now_ns, adapter.name.encode(), _USUAL)
    for name, tokens in taken.items():
        core.set_adapter(now_ns, name.encode(), tokens)
    limits = config.limits_of_pools()
    if before is not None:
        if limits == before.limits_of_pools():
            return
        core.set_no_pool_limits(now_ns)
    for pool, given in limits.items():
        core.set_pool_limits(now_ns, pool.encode(), **given)


def _unknown(
    core: Configurable,
    config: Config,
    before: Config | None,
    now_ns: int,
    classes: dict[str, int],
    groups: dict[str, int],
) -> None:
    dry_run, refused = config.mode == "dry_run", config.unknown_tenants == "refuse"
    if refused and not dry_run:
        if before is not None:
            core.set_unknown(-1)
            # Otherwise a request that names the tenant "unknown" would be known.
            core.set_gone(now_ns, UNKNOWN_TENANT.encode())
        return
    terms = config.unknown_limits
    flow = core.set_flow(UNKNOWN_TENANT.encode(), config.unknown_weight_milli)
    if before is not None or terms.is_limited:
        limit_flow(core, flow, terms, groups, now_ns)
    if before is not None or terms.names_classes:
        class_flow(core, flow, terms, classes)
    if before is not None or dry_run:
        core.set_flow_mode(now_ns, flow, dry_run)
    if config.unknown_tenants == "own":
        core.set_unknown(flow, refused, own=True)
    else:
        core.set_unknown(flow, refused)


def _rules(
    core: Configurable,
    config: Config,
    before: Config | None,
    now_ns: int,
    classes: dict[str, int],
    groups: dict[str, int],
) -> None:
    dry_run = config.mode == "dry_run"
    if before is not None or dry_run:
        core.set_no_tenant_rules(now_ns, dry_run)
    for rule in config.tenant_rules:
        core.set_tenant_rule(
            now_ns,
            rule.match.encode(),
            rule.weight_milli,
            classes[rule.request_class or DEFAULT_CLASS],
            tuple(classes[name] for name in rule.classes or ()),
            dry_run,
            _NO_QUOTA if rule.group is None else groups[rule.group],
            rule.quota is not None and rule.quota.over == "refuse",
            max_wait_ns=(rule.max_wait_ms or 0) * _MS,
            **(rule.quota.core_limits() if rule.quota else {}),
        )
    if before is not None:
        core.set_rules_followed(now_ns)


def _shared_quotas(
    core: Configurable, config: Config, before: Config | None, now_ns: int
) -> dict[str, int]:
    """Declare groups, parents first, and models; return the groups' indices."""
    found: dict[str, int] = {}
    limits = {group.name: _group_terms(group) for group in config.groups}
    # First without parents: a group may change places with the one above it.
    for group in before.groups if before else []:
        core.set_quota(now_ns, group_name(group.name), **limits.get(group.name, {}))
    waiting = list(config.groups)
    while waiting:
        later = []
        for group in waiting:
            if group.parent is None or group.parent in found:
                parent = _NO_QUOTA if group.parent is None else found[group.parent]
                found[group.name] = core.set_quota(
                    now_ns, group_name(group.name), parent, **limits[group.name]
                )
            else:
                later.append(group)
        waiting = later
    pools = {pool for model in config.models for pool in model.pools}
    for model in before.models if before else []:
        for pool in model.pools:
            if pool not in pools:
                core.set_pool_quota(now_ns, pool.encode(), _NO_QUOTA)
    for model in config.models:
        node = core.set_quota(now_ns, b"model:" + model.name.encode(), **model.quota.core_limits())
        for pool in model.pools:
            core.set_pool_quota(now_ns, pool.encode(), node)
    return found


def _group_terms(group: Group) -> dict[str, int]:
    """Return keyword arguments for the core."""
    return {
        **group.quota.core_limits(),
        **(group.share.core_share() if group.share else {}),
        **(group.budget.core_limits() if group.budget else {}),
        **({"weight_milli": group.weight_milli} if group.weight_milli else {}),
    }


def group_name(name: str) -> bytes:
    """Return what the core calls a group."""
    return b"group:" + name.encode()
