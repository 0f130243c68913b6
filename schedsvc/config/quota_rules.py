"""Checks rules of quotas that look at more than one field."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from schedsvc.config.rule_helpers import Finding, Once, items, mapping, name_findings, with_terms
from schedsvc.config.yaml_positions import Path

__all__ = ["quota_findings"]

#: Groups above one another; the core's own bound, less the tenant's level.
_LEVELS_MAX = 4
#: Pools that groups with a weight can share; the core's own bound.
_POOLS_MAX = 64


def quota_findings(data: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield path and message of each broken rule of groups, models and tenants' quotas. O(file)."""
    parents = _parents(data)
    names = Once("this group")
    for i, entry in items(data.get("groups")):
        path: Path = ("groups", i)
        name = entry.get("name")
        if isinstance(name, str):
            yield from names.see(name, (*path, "name"))
            yield from name_findings(name, (*path, "name"), 128)
        yield from _group(entry.get("parent"), parents, (*path, "parent"))
        if isinstance(name, str) and isinstance(entry.get("parent"), str):
            yield from _tower(name, parents, (*path, "parent"))
    for path, entry in with_terms(data):
        yield from _group(entry.get("group"), parents, (*path, "group"))
    yield from _budgets(data)
    yield from _models(data)
    yield from _shares(data, parents)
    yield from _weights(data, parents)


def _weights(data: Mapping[str, Any], parents: Mapping[str, str | None]) -> Iterator[Finding]:
    """Yield what groups with a weight do not go with. O(groups)."""
    weighted = [i for i, entry in items(data.get("groups")) if entry.get("weight") is not None]
    if not weighted:
        return
    first: Path = ("groups", weighted[0], "weight")
    pools = data.get("pools")
    if isinstance(pools, list) and len(pools) > _POOLS_MAX:
        yield (
            first,
            f"needs a scheduler with at most {_POOLS_MAX} pools, but pools lists {len(pools)}; run"
            " a second scheduler, or remove the weights of all groups",
        )
    if data.get("cluster") is not None:
        yield first, "does not go with cluster; remove one of them"
    groups: list[tuple[Path, dict[str, Any]]] = [
        (("groups", i), entry) for i, entry in items(data.get("groups"))
    ]
    for path, entry in (*groups, *with_terms(data)):
        if entry.get("share") is not None:
            where = (*path, "share")
            yield where, "does not go with groups that have a weight; remove one of them"
    quotas = {e["name"] for _, e in groups if isinstance(e.get("name"), str) and e.get("quota")}
    for i in weighted:
        parent = data["groups"][i].get("parent")
        for above in _tower_of(parent, parents):
            if above in quotas:
                yield (
                    ("groups", i, "weight"),
                    f"stands below the quota of group {above!r}, which groups with weights cannot"
                    " share; give each of them its own quota, or remove the weight",
                )
                break


def _budgets(data: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield budgets that limit nothing, or that no ledger could restore."""
    for section in ("groups", "tenants"):
        for i, entry in items(data.get(section)):
            if not isinstance(budget := entry.get("budget"), dict):
                continue
            path: Path = (section, i, "budget")
            if not budget.keys() & {"tokens_per_day", "tokens_per_month"}:
                yield path, "limits nothing; give tokens_per_day or tokens_per_month"
            if not isinstance(data.get("usage"), dict):
                yield path, "is kept in the usage ledger; give usage.path too"


def _shares(data: Mapping[str, Any], parents: Mapping[str, str | None]) -> Iterator[Finding]:
    """Yield what lends more than it has, and groups that promise more than their own share."""
    shares: dict[str, int] = {}
    found = []
    groups: list[tuple[Path, dict[str, Any]]] = [
        (("groups", i), entry) for i, entry in items(data.get("groups"))
    ]
    for path, entry in (*groups, *with_terms(data)):
        share, is_group = mapping(entry.get("share")), path[0] == "groups"
        size, lends = share.get("tokens_per_minute"), share.get("lends")
        if not _is_count(size):
            continue
        found.append((entry.get("parent" if is_group else "group"), size))
        if is_group and isinstance(entry.get("name"), str):
            shares[entry["name"]] = size
        if _is_count(lends) and lends > size:
            where = (*path, "share", "lends")
            yield where, f"is {lends:,}, more than its tokens_per_minute, {size:,}"
    promised = dict.fromkeys(shares, 0)
    for above, size in found:
        for group in _tower_of(above, parents):
            if group in shares:
                promised[group] += size
                break
    for i, entry in items(data.get("groups")):
        name = entry.get("name")
        if isinstance(name, str) and promised.get(name, 0) > shares.get(name, 0):
            yield (
                ("groups", i, "share", "tokens_per_minute"),
                f"is {shares[name]:,}, but its members are promised {promised[name]:,}; raise it,"
                " or lower theirs",
            )


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _tower_of(group: Any, parents: Mapping[str, str | None]) -> list[str]:
    """Return the groups from this one up."""
    found: list[str] = []
    while isinstance(group, str) and group in parents and group not in found:
        found.append(group)
        group = parents[group]
    return found


def _parents(data: Mapping[str, Any]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for _, entry in items(data.get("groups")):
        name, parent = entry.get("name"), entry.get("parent")
        if isinstance(name, str):
            found.setdefault(name, parent if isinstance(parent, str) else None)
    return found


def _group(name: Any, parents: Mapping[str, str | None], path: Path) -> Iterator[Finding]:
    if isinstance(name, str) and name not in parents:
        known = ", ".join(repr(group) for group in list(parents)[:8]) or "none"
        yield path, f"{name[:80]!r} is no group; add it to groups (known: {known})"


def _tower(name: str, parents: Mapping[str, str | None], path: Path) -> Iterator[Finding]:
    above = [name]
    while (parent := parents.get(above[-1])) is not None:
        if parent == name:
            yield path, f"the groups form a circle, {' -> '.join([*above, name])}; remove one"
            return
        if parent in above or len(above) > _LEVELS_MAX:
            break  # a circle further up is named there
        above.append(parent)
    if len(above) > _LEVELS_MAX:
        yield path, f"at most {_LEVELS_MAX} groups may stand above one another"


def _models(data: Mapping[str, Any]) -> Iterator[Finding]:
    names, pools = Once("this model"), Once("this pool")
    for i, entry in items(data.get("models")):
        path: Path = ("models", i)
        name, listed = entry.get("name"), entry.get("pools")
        if isinstance(name, str):
            yield from names.see(name, (*path, "name"))
            yield from name_findings(name, (*path, "name"), 128)
        for k, pool in enumerate(listed if isinstance(listed, list) else []):
            if isinstance(pool, str):
                yield from pools.see(pool, (*path, "pools", k))
                yield from name_findings(pool, (*path, "pools", k), 128)
