"""Puts tenants that an operator has set over those of the file and of its rules.

An operator's entry holds the terms of a tenant in the form of the file, hashes of API keys, or
both.
The file's entry, else the first rule that fits the name, is what the tenant falls back to.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from schedsvc.config.class_rules import class_findings
from schedsvc.config.explain import explain
from schedsvc.config.models import Config, Tenant
from schedsvc.config.quota_rules import quota_findings
from schedsvc.config.rule_helpers import Finding
from schedsvc.config.rules import tenant_findings
from schedsvc.config.yaml_positions import path_text

__all__ = [
    "ApiKey",
    "EntryLog",
    "OperatorEntry",
    "TenantError",
    "checked_tenant",
    "file_form",
    "restored_entries",
    "rule_tenant",
]

#: The keys of an entry's terms; its mode and the rest of its keys are the file's.
_TERMS = frozenset(
    {"weight", "group", "quota", "share", "budget", "max_wait_ms", "class", "classes"}
)
#: Keys that only entries of a cluster's members have.
_SHARED = frozenset({"origin", "gone_ms"})
_ENTRY_PATH = ("tenants", 0)


class TenantError(ValueError):
    """A field of a tenant is wrong; the message says what to do."""

    def __init__(self, field: str, description: str) -> None:
        self.field = field
        self.description = description
        super().__init__(f"{field}: {description}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Describes a key that an operator has made, by its hash."""

    id: str
    #: In hexadecimal digits, as the file writes them.
    sha256: str
    created_ms: int
    #: A time of the wall clock; 0: never.
    expires_ms: int = 0


@dataclass(frozen=True, slots=True)
class OperatorEntry:
    """Holds the settings of one tenant that operators have made."""

    #: Grows with each change of any entry.
    version: int
    #: In the form of the file, without the name; None: as the file or a rule says.
    terms: Mapping[str, Any] | None
    keys: tuple[ApiKey, ...] = ()
    #: The member of a cluster that made the last change; "": of a scheduler alone.
    origin: str = ""
    #: When it was deleted, by the wall clock; 0: it was not. A deleted entry says nothing, and is
    #: kept so that no other member of the cluster brings an older one back.
    gone_ms: int = 0

    def saved(self) -> bytes:
        """Return it as a state file keeps it."""
        keys = [[key.id, key.sha256, key.created_ms, key.expires_ms] for key in self.keys]
        terms = None if self.terms is None else dict(self.terms)
        told: dict[str, Any] = {"version": self.version, "terms": terms, "keys": keys}
        if self.origin:
            told = {"origin": self.origin, **told}
        if self.gone_ms:
            told["gone_ms"] = self.gone_ms
        return json.dumps(told).encode()

    @staticmethod
    def restored(saved: bytes) -> "OperatorEntry":
        """Return what was saved. Raises ValueError if no scheduler can have saved that."""
        try:
            told = json.loads(saved)
        except RecursionError:
            raise ValueError("an operator's entry of a tenant is nested too deeply") from None
        if not isinstance(told, dict) or told.keys() - _SHARED != {"version", "terms", "keys"}:
            raise ValueError("an operator's entry of a tenant cannot be read")
        version, terms, keys = told["version"], told["terms"], told["keys"]
        if not isinstance(version, int) or version <= 0:
            raise ValueError("an operator's entry of a tenant has no version")
        if terms is not None and not (isinstance(terms, dict) and _TERMS.issuperset(terms)):
            raise ValueError("an operator's entry of a tenant holds other terms than a tenant has")
        origin, gone_ms = told.get("origin", ""), told.get("gone_ms", 0)
        if not isinstance(origin, str) or type(gone_ms) is not int or gone_ms < 0:
            raise ValueError("an operator's entry of a tenant has no origin, or no end")
        found = tuple(_restored_key(key) for key in keys)
        hashes = [key.sha256 for key in found]
        Tenant.model_validate({"name": "a", **(terms or {}), "api_keys_sha256": hashes})
        if gone_ms and (terms is not None or found):
            raise ValueError("an operator's entry of a tenant is deleted and yet says something")
        return OperatorEntry(version, terms, found, origin, gone_ms)


def _restored_key(key: Any) -> ApiKey:
    if isinstance(key, list) and [type(part) for part in key] == [str, str, int, int]:
        return ApiKey(*key)
    raise ValueError("an API key of an operator's entry cannot be read")


def restored_entries(saved: Mapping[str, bytes]) -> dict[str, OperatorEntry]:
    """Return the entries of a state file. Raises ValueError as `OperatorEntry.restored()`."""
    return {name: OperatorEntry.restored(value) for name, value in saved.items()}


class EntryLog:
    """Holds operators' entries as the state file keeps them, and which of them it lacks."""

    def __init__(self) -> None:
        self._rows: dict[str, bytes] = {}
        self._changed: dict[str, bytes | None] = {}
        #: Gets the name of each entry that has changed.
        self.on_change: Callable[[str], None] = lambda name: None

    def put(self, name: str, value: bytes | None) -> None:
        """Keep an entry, or (None) delete it. O(1)."""
        if value is None:
            self._rows.pop(name, None)
        else:
            self._rows[name] = value
        self._changed[name] = value
        self.on_change(name)

    def take(self, *, everything: bool) -> dict[str, bytes | None]:
        """Return what the file lacks, or all for a file that has nothing. O(entries)."""
        taken, self._changed = self._changed, {}
        return dict(self._rows) if everything else taken

    def all(self) -> dict[str, bytes]:
        """Return all entries. O(entries)."""
        return dict(self._rows)

    def put_back(self, taken: Mapping[str, bytes | None]) -> None:
        """Keep what could not be written, unless it has changed since. O(entries)."""
        self._changed = {**taken, **self._changed}


def file_form(tenant: Tenant) -> dict[str, Any]:
    """Return the terms of a tenant as a file writes them, without name, mode and keys."""
    found = tenant.model_dump(
        by_alias=True, exclude_none=True, exclude={"name", "mode", "api_keys_sha256"}
    )
    weight = tenant.weight_milli / 1_000
    return {**found, "weight": int(weight) if weight.is_integer() else weight}


def rule_tenant(name: str, config: Config) -> Tenant:
    """Return what a name gets that nothing lists: what the first rule says that it fits. O(rules).

    * in a rule's `match` is any text.
    """
    for rule in config.tenant_rules:
        pattern = ".*".join(map(re.escape, rule.match.split("*")))
        if re.fullmatch(pattern, name, re.DOTALL):
            terms = {field: getattr(rule, field) for field in type(rule).model_fields}
            del terms["match"]
            return Tenant.model_construct(name=name, **terms, api_keys_sha256=[], mode=None)
    return Tenant.model_construct(name=name)


def checked_tenant(
    name: str, terms: Mapping[str, Any], config: Config, others: Iterable[Tenant] = ()
) -> Tenant:
    """Check a tenant as one of the file. Raises TenantError. O(groups), O(tenants) with a share.

    `others`: the tenants beside it, whose shares count if it has one.
    """
    entry = {"name": name, **terms}
    try:
        tenant = Tenant.model_validate(entry)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        path = tuple(details["loc"])
        message, _ = explain({**details, "loc": (*_ENTRY_PATH, *path)}, Config)
        raise TenantError(path_text(path), message) from None
    for path, message in _findings(entry, config, others):
        in_entry = path[:2] == _ENTRY_PATH
        raise TenantError(path_text(path[2:] if in_entry else path), message)
    return tenant


def _findings(entry: dict[str, Any], config: Config, others: Iterable[Tenant]) -> Iterator[Finding]:
    has_share = entry.get("share") is not None
    beside = []
    if has_share:
        beside = [{"name": other.name, **file_form(other)} for other in others if other.share]
    groups = [
        group.model_dump(by_alias=True, exclude_none=True) if has_share
        else {"name": group.name, "parent": group.parent}
        for group in config.groups
    ]  # fmt: skip
    data: dict[str, Any] = {
        "tenants": [entry, *beside],
        "groups": groups,
        "classes": [kind.model_dump(exclude_none=True) for kind in config.classes],
    }
    if config.usage is not None:
        data["usage"] = {"path": str(config.usage.path)}
    for rules in (tenant_findings, class_findings, quota_findings):
        for path, message in rules(data):
            if path[:2] == _ENTRY_PATH or (has_share and path[0] == "groups"):
                yield path, message
