"""Drafts a configuration: the settings that the search varies.

These are each tenant's weight, its quota and guarantee in tokens per minute (0: none), the queue
TTL, the headroom, and the prices of input, output and the KV cache. All other keys stay as they are
today.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml

from schedsvc.config import Config, rule_tenant
from schedsvc.config.models import Share, Tenant, TenantQuota
from schedsvc.config.rule_helpers import name_findings
from schedsvc.config.rules import RESERVED_TENANTS
from schedsvc_lab.sim.named_entries import EntryError, check_rules, entry_form

__all__ = [
    "Change",
    "Draft",
    "all_enforced",
    "apply",
    "can_be_listed",
    "changes",
    "draft_of",
    "draft_yaml",
    "listed",
]

WEIGHT_MILLI_MAX = 1_000_000_000
NAME_BYTES_MAX = 256
_PRICES = ("input", "output", "kv")
_HEAD = """\
# Drafted by schedsvc advise from recorded traffic. Keys that it does not draft are those of the
# configuration that it began with; comments are lost.
"""


@dataclass(frozen=True, slots=True)
class Draft:
    """Holds settings by tenant, ordered as in the configuration, and those of the scheduler."""

    weights_milli: tuple[int, ...]
    quotas: tuple[int, ...]
    shares: tuple[int, ...]
    queue_ttl_ms: int
    headroom_ppm: int
    prices_micro: tuple[int, int, int]  # of input, output, and a token-step of the KV cache


class Change(NamedTuple):
    """Names one key that a draft changes; None: the key is not set."""

    path: str
    today: float | int | None
    draft: float | int | None


def can_be_listed(name: str) -> bool:
    """Return whether a configuration can list a tenant of this name. O(length).

    It cannot list `unknown`, for which requests with a wrong key stand, nor a name that the rules
    of the file forbid.
    """
    if name in RESERVED_TENANTS or any(name_findings(name, (), NAME_BYTES_MAX)):
        return False
    try:
        Tenant.model_validate({"name": name})
    except ValueError:
        return False
    return True


def listed(config: Config, clients: Sequence[str]) -> Config:
    """Return the configuration with the clients as tenants, and every mode `enforce`.

    A draft can only set what is listed. With `unknown_tenants: own`, an unlisted client has the
    terms that it gets at first sight; with `refuse` it stays unlisted. O(clients * rules +
    tenants).
    """
    enforced = all_enforced(config)
    known = {tenant.name for tenant in config.tenants}
    fresh = [client for client in clients if client not in known and can_be_listed(client)]
    if config.unknown_tenants == "refuse":
        return enforced
    if config.unknown_tenants == "own":
        tenants = [rule_tenant(client, config) for client in fresh]
    else:
        tenants = [Tenant.model_validate({"name": client}) for client in fresh]
    return enforced.model_copy(update={"tenants": [*enforced.tenants, *tenants]})


def all_enforced(config: Config) -> Config:
    """Return the configuration with every mode `enforce`. O(tenants)."""
    tenants = [tenant.model_copy(update={"mode": None}) for tenant in config.tenants]
    return config.model_copy(update={"tenants": tenants, "mode": "enforce"})


def draft_of(config: Config) -> Draft:
    """Return the settings of a configuration."""
    tenants = config.tenants
    return Draft(
        weights_milli=tuple(tenant.weight_milli for tenant in tenants),
        quotas=tuple((each.quota and each.quota.tokens_per_minute) or 0 for each in tenants),
        shares=tuple(each.share.tokens_per_minute if each.share else 0 for each in tenants),
        queue_ttl_ms=config.scheduler.queue_ttl_ms,
        headroom_ppm=config.scheduler.headroom_ppm,
        prices_micro=prices_of(config),
    )


def prices_of(config: Config) -> tuple[int, int, int]:
    """Return the prices that a draft may change."""
    prices = config.scheduler.prices
    return prices.input_micro, prices.output_micro, prices.kv_micro


def apply(config: Config, draft: Draft) -> Config | None:
    """Return the configuration with the settings of a draft; None: its rules forbid them.

    O(tenants).
    """
    tenants = [
        _tenant(tenant, weight, quota, share)
        for tenant, weight, quota, share in zip(
            config.tenants, draft.weights_milli, draft.quotas, draft.shares, strict=True
        )
    ]
    priced = zip(("input_micro", "output_micro", "kv_micro"), draft.prices_micro, strict=True)
    settings = {
        "queue_ttl_ms": draft.queue_ttl_ms,
        "headroom_ppm": draft.headroom_ppm,
        "prices": config.scheduler.prices.model_copy(update=dict(priced)),
    }
    scheduler = config.scheduler.model_copy(update=settings)
    changed = config.model_copy(update={"tenants": tenants, "scheduler": scheduler})
    try:
        check_rules(changed)
    except EntryError:
        return None
    return changed


def _tenant(tenant: Tenant, weight_milli: int, quota: int, share: int) -> Tenant:
    limits = {} if tenant.quota is None else tenant.quota.model_dump(exclude_none=True)
    limits.pop("tokens_per_minute", None)
    if quota:
        limits["tokens_per_minute"] = quota
    promise: Share | None = None
    if share and tenant.share is not None:
        # A tenant lends at most its guarantee.
        lends = tenant.share.lends
        promise = tenant.share.model_copy(
            update={
                "tokens_per_minute": share,
                "lends": None if lends is None else min(lends, share),
            }
        )
    elif share:
        promise = Share(tokens_per_minute=share)
    return tenant.model_copy(
        update={
            "weight_milli": weight_milli,
            "quota": TenantQuota.model_validate(limits) if limits else None,
            "share": promise,
        }
    )


def changes(config: Config, today: Draft, draft: Draft) -> list[Change]:
    """List the keys that differ, as the file names them. O(tenants)."""
    return list(_changes(config, today, draft))


def _changes(config: Config, today: Draft, draft: Draft) -> Iterator[Change]:
    for at, tenant in enumerate(config.tenants):
        pairs: tuple[tuple[str, float | int, float | int], ...] = (
            ("weight", today.weights_milli[at] / 1_000, draft.weights_milli[at] / 1_000),
            ("quota.tokens_per_minute", today.quotas[at], draft.quotas[at]),
            ("share.tokens_per_minute", today.shares[at], draft.shares[at]),
        )
        for key, before, after in pairs:
            if before != after:
                yield Change(f"tenants.{tenant.name}.{key}", before or None, after or None)
    if today.queue_ttl_ms != draft.queue_ttl_ms:
        yield Change("scheduler.queue_ttl_ms", today.queue_ttl_ms, draft.queue_ttl_ms)
    if today.headroom_ppm != draft.headroom_ppm:
        before, after = today.headroom_ppm / 1e6, draft.headroom_ppm / 1e6
        yield Change("scheduler.headroom", before, after)
    for key, old, new in zip(_PRICES, today.prices_micro, draft.prices_micro, strict=True):
        if old != new:
            yield Change(f"scheduler.prices.{key}", old / 1e6, new / 1e6)


def draft_yaml(data: Mapping[str, Any], before: Config, drafted: Config) -> str:
    """Write a configuration file with a draft: `data` is today's file, `before` its content.

    The tenants of `tenants_dir` are listed in it, and each tenant keeps its mode. O(file).
    """
    modes = {tenant.name: tenant.mode for tenant in before.tenants}
    tenants = [
        tenant.model_copy(update={"mode": modes.get(tenant.name)}) for tenant in drafted.tenants
    ]
    whole = {key: value for key, value in data.items() if key not in ("tenants", "tenants_dir")}
    scheduler = dict(whole.get("scheduler") or {})
    settings = drafted.scheduler
    for key, same, value in (
        (
            "queue_ttl_ms",
            settings.queue_ttl_ms == before.scheduler.queue_ttl_ms,
            settings.queue_ttl_ms,
        ),
        (
            "headroom",
            settings.headroom_ppm == before.scheduler.headroom_ppm,
            settings.headroom_ppm / 1e6,
        ),
    ):
        if not same:
            scheduler[key] = value
    if prices_of(drafted) != prices_of(before):
        priced = zip(_PRICES, (price / 1e6 for price in prices_of(drafted)), strict=True)
        scheduler["prices"] = {**(scheduler.get("prices") or {}), **dict(priced)}
    if scheduler:
        whole["scheduler"] = scheduler
    whole["tenants"] = [entry_form(tenant) for tenant in tenants]
    return _HEAD + yaml.safe_dump(whole, sort_keys=False, allow_unicode=True, width=100)
