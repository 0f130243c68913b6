"""Checks rules of priority classes that look at more than one field."""

from collections.abc import Iterator, Mapping
from typing import Any

from schedsvc.config.rule_helpers import Finding, Once, items, mapping, name_findings, with_terms
from schedsvc.config.settings import Scheduler
from schedsvc.config.yaml_positions import Path

__all__ = ["DEFAULT_CLASS", "class_advice", "class_findings"]

#: The class of requests that name none, of tenants that have none.
DEFAULT_CLASS = "default"

_QUEUE_TTL_MS = Scheduler.model_fields["queue_ttl_ms"].default
_AGEING_MS = 5_000


def class_findings(data: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield path and message of each broken rule of classes, and of tenants' classes. O(file)."""
    names, ranks = Once("this class"), Once("this rank")
    queue_ttl_ms = mapping(data.get("scheduler")).get("queue_ttl_ms", _QUEUE_TTL_MS)
    known = {DEFAULT_CLASS: None}
    for i, entry in items(data.get("classes")):
        path: Path = ("classes", i)
        name = entry.get("name")
        if isinstance(name, str):
            known[name] = None
            yield from names.see(name, (*path, "name"))
            yield from name_findings(name, (*path, "name"), 128)
        yield from _rank(entry, name, path, ranks)
        ageing_ms = entry.get("ageing_ms", _AGEING_MS)
        numbers = isinstance(ageing_ms, int) and isinstance(queue_ttl_ms, int)
        if numbers and ageing_ms >= queue_ttl_ms and entry.get("exempt") is not True:
            message = f"is not shorter than scheduler.queue_ttl_ms ({queue_ttl_ms}): what waits so"
            where = (*path, "ageing_ms") if "ageing_ms" in entry else path
            yield where, f"ageing_ms {message} long is evicted before"
    if not any(entry.get("name") == DEFAULT_CLASS for _, entry in items(data.get("classes"))):
        for i, entry in items(data.get("classes")):
            if entry.get("rank") == 0 and entry.get("exempt") is not True:
                yield ("classes", i, "rank"), "is that of the class 'default'; choose another"
    for path, entry in with_terms(data):
        yield from _named(entry.get("class"), known, (*path, "class"))
        listed = entry.get("classes")
        for k, name in enumerate(listed if isinstance(listed, list) else []):
            yield from _named(name, known, (*path, "classes", k))


def class_advice(data: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield each class that no request can be of. O(file)."""
    used = {DEFAULT_CLASS}
    for _, entry in with_terms(data):
        listed = entry.get("classes")
        names = [entry.get("class"), *(listed if isinstance(listed, list) else [])]
        used.update(name for name in names if isinstance(name, str))
    for i, entry in items(data.get("classes")):
        name = entry.get("name")
        if isinstance(name, str) and name not in used and not data.get("tenants_dir"):
            message = (
                f"{name[:80]!r} is of no use, unless an operator gives it to a tenant: by default a"
                " tenant may name its own class only; list it in `class` or `classes` of a tenant,"
                " a rule, or unknown_tenants_limits"
            )
            yield ("classes", i, "name"), message


def _rank(entry: dict[str, Any], name: Any, path: Path, ranks: Once) -> Iterator[Finding]:
    rank = entry.get("rank")
    if entry.get("exempt") is True:
        if name == DEFAULT_CLASS:
            yield (*path, "exempt"), "would let every request pass; make another class exempt"
        elif rank is not None:
            yield (*path, "rank"), "is of no use: an exempt class precedes all; remove it"
    elif rank is None and name != DEFAULT_CLASS:
        yield path, "the key 'rank' is missing; add it: the least goes first, 'default' has 0"
    elif isinstance(rank, int) or rank is None:
        yield from ranks.see(rank or 0, (*path, "rank"))


def _named(name: Any, known: Mapping[str, None], path: Path) -> Iterator[Finding]:
    if isinstance(name, str) and name not in known:
        names = ", ".join(repr(each) for each in list(known)[:8])
        yield path, f"{name[:80]!r} is no class; add it to classes (known: {names})"
