"""Checks rules of `tenant_rules` and `unknown_tenants` that look at more than one field."""

from collections.abc import Iterator, Mapping
from typing import Any

from schedsvc.config.rule_helpers import Finding, items, mapping, name_findings
from schedsvc.config.yaml_positions import Path

__all__ = ["tenant_rule_advice", "tenant_rule_findings"]

#: Keys that a rule cannot have, and what to do.
_NOT_IN_RULES = {
    "parent": "belongs to a hierarchy of tenants, which this version does not have; remove it, or"
    " name a `group` for a quota that tenants share",
    "share": "is for tenants that are listed; remove it, or list the tenant in `tenants`",
}


def tenant_rule_findings(data: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield path and message of each broken rule of `tenant_rules`. O(rules)."""
    catch_all = ""
    for i, entry in items(data.get("tenant_rules")):
        path: Path = ("tenant_rules", i)
        match = entry.get("match")
        for key, message in _NOT_IN_RULES.items():
            if key in entry:
                yield (*path, key), message
        if not isinstance(match, str):
            continue
        yield from name_findings(match, (*path, "match"), 256)
        if catch_all:
            yield (*path, "match"), f"is never reached, because {catch_all} fits every name"
        if set(match) == {"*"}:
            catch_all = f"tenant_rules[{i}]"


def tenant_rule_advice(data: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what is allowed and has less effect than one may think. O(1)."""
    unknown = data.get("unknown_tenants", "own")
    if data.get("tenant_rules") and unknown in ("share", "refuse"):
        yield ("tenant_rules",), f"has no effect, because unknown_tenants is {unknown}"
    if unknown == "own" and mapping(data.get("unknown_tenants_limits")):
        message = (
            "bounds only names without a proof; limit the others in `tenant_rules`, or write"
            " unknown_tenants: share"
        )
        yield ("unknown_tenants_limits",), message
