"""Checks rules of pools' limits and of adapters that look at more than one field."""

from collections.abc import Iterator, Mapping
from typing import Any

from schedsvc.config.rule_helpers import Finding, Once, items, mapping, name_findings, one_of
from schedsvc.config.yaml_positions import Path

__all__ = ["pool_findings"]

#: Each of these would never be reached above the one behind it.
_INSIDE = (
    ("max_request_total_tokens", "max_total_tokens"),
    ("max_request_input_tokens", "max_total_tokens"),
    ("max_request_input_tokens", "max_request_total_tokens"),
)


def pool_findings(data: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield path and message of each broken rule. O(file)."""
    every = mapping(mapping(data.get("scheduler")).get("each_pool"))
    yield from _inside(every, every, ("scheduler", "each_pool"))
    pools = Once("this pool")
    for i, entry in items(data.get("pool_limits")):
        path: Path = ("pool_limits", i)
        listed = entry.get("pools")
        for k, pool in enumerate(listed if isinstance(listed, list) else []):
            if isinstance(pool, str):
                yield from pools.see(pool, (*path, "pools", k))
                yield from name_findings(pool, (*path, "pools", k), 128)
        yield from _inside(every | entry, entry, path)
    names = Once("this adapter")
    for i, entry in items(data.get("adapters")):
        path = ("adapters", i)
        if isinstance(entry.get("name"), str):
            yield from names.see(entry["name"], (*path, "name"))
            yield from name_findings(entry["name"], (*path, "name"), 256)
        yield from one_of(entry, ("tokens", "rank"), path)


def _inside(limits: Mapping[str, Any], given: Mapping[str, Any], path: Path) -> Iterator[Finding]:
    """Compare the limits in force; what is wrong is named where it was given."""
    for name, bound in _INSIDE:
        inner, outer = limits.get(name), limits.get(bound)
        if not isinstance(inner, int) or not isinstance(outer, int) or not 0 < outer < inner:
            continue
        if name in given:
            yield (*path, name), f"is larger than {bound} ({outer}), so it would never be reached"
        elif bound in given:
            yield (*path, bound), f"is smaller than {name} ({inner}), which would never be reached"
