"""Changes one key of a tenant or a group of a configuration, by its name.

A path is `tenants.NAME.KEY` or `groups.NAME.KEY`; a dot in KEY leads into a section, such as
`tenants.a.share.lends`. Names may have dots, too. The value is that of the file; null removes a
key. The rules of the file check the result.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from pydantic import BaseModel, ValidationError

from schedsvc.config import Config
from schedsvc.config.class_rules import class_findings
from schedsvc.config.explain import explain
from schedsvc.config.models import Group, Tenant
from schedsvc.config.quota_rules import quota_findings
from schedsvc.config.yaml_positions import path_text

__all__ = ["ENTRY_SECTIONS", "EntryError", "changed_entry", "check_rules", "entry_form"]

ENTRY_SECTIONS: Mapping[str, type[Tenant] | type[Group]] = {"tenants": Tenant, "groups": Group}

#: Names that an error lists at most.
_NAMES_SHOWN = 20


class EntryError(ValueError):
    """The path or its value is wrong; the message says what is allowed."""


def entry_form(entry: Tenant | Group) -> dict[str, Any]:
    """Return a tenant or a group as the file writes it. O(1)."""
    found = entry.model_dump(by_alias=True, exclude_defaults=True, exclude_none=True, mode="json")
    if "weight" in found:
        weight = found["weight"] / 1_000
        found["weight"] = int(weight) if weight.is_integer() else weight
    return found


def changed_entry(config: Config, path: str, value: Any) -> Config:
    """Return the configuration with one key of one entry changed. O(tenants + groups).

    Raises EntryError: there is no such entry or key, or a rule forbids the value.
    """
    section, _, rest = path.partition(".")
    entries: list[Any] = list(getattr(config, section))
    at, keys = _find(entries, section, rest)
    data = deepcopy(entry_form(entries[at]))
    _put(data, keys, value)
    entries[at] = _checked(config, section, at, data)
    changed = config.model_copy(update={section: entries})
    check_rules(changed)
    return changed


def _find(entries: list[Any], section: str, rest: str) -> tuple[int, list[str]]:
    """Find the entry with the longest name that the rest of a path begins with, and its keys."""
    fitting = [
        (len(entry.name), at)
        for at, entry in enumerate(entries)
        if rest == entry.name or rest.startswith(f"{entry.name}.")
    ]
    kind = section.removesuffix("s")
    if not fitting:
        names = ", ".join(entry.name for entry in entries[:_NAMES_SHOWN]) or "none"
        more = len(entries) - _NAMES_SHOWN
        names += f" and {more:,} more" if more > 0 else ""
        raise EntryError(f"no {kind} of that name; there are {names}")
    length, at = max(fitting)
    keys = rest[length + 1 :].split(".")
    known = [name for name in _keys(ENTRY_SECTIONS[section]) if name != "name"]
    if keys[0] not in known:
        what = f"{keys[0]!r} is no key of a {kind}" if keys[0] else f"names no key of the {kind}"
        raise EntryError(f"{what}; known are {', '.join(known)}")
    return at, keys


def _put(data: dict[str, Any], keys: list[str], value: Any) -> None:
    """Put a value at the end of a path of keys; sections that are absent are made."""
    for depth, key in enumerate(keys[:-1]):
        inner = data.setdefault(key, {})
        if not isinstance(inner, dict):
            raise EntryError(f"{'.'.join(keys[: depth + 1])} has no parts")
        data = inner
    if value is None:
        data.pop(keys[-1], None)
    else:
        data[keys[-1]] = value


def _checked(config: Config, section: str, at: int, data: dict[str, Any]) -> Tenant | Group:
    try:
        return ENTRY_SECTIONS[section].model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        path = tuple(details["loc"])
        message, _ = explain({**details, "loc": (section, at, *path)}, type(config))
        if details["type"] == "missing":
            path = path[:-1]
        raise EntryError(f"{path_text(path)} {message}") from None


def check_rules(config: Config) -> None:
    """Hold tenants, groups and classes to the rules that look at several of them. O(entries).

    Raises EntryError.
    """
    data: dict[str, Any] = {
        "tenants": [entry_form(tenant) for tenant in config.tenants],
        "groups": [entry_form(group) for group in config.groups],
        "pools": [{"name": pool.name} for pool in config.pools],
        "classes": [each.model_dump(exclude_none=True) for each in config.classes],
        "scheduler": {"queue_ttl_ms": config.scheduler.queue_ttl_ms},
    }
    if config.usage is not None:
        data["usage"] = {}
    for path, message in (*class_findings(data), *quota_findings(data)):
        raise EntryError(f"{path_text(path)} {message}")


def _keys(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]
