"""Lists tenants of the file or of an operator, as they are in force."""

from bisect import bisect_right, insort
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import structlog

from schedsvc.config import (
    UNKNOWN_TENANT,
    ApiKey,
    Config,
    EntryLog,
    OperatorEntry,
    Tenant,
    TenantError,
    checked_tenant,
    rule_tenant,
)

__all__ = ["ListedTenants", "fitting_entry", "sharing_origin", "shown_tenants"]

_log = structlog.get_logger("schedsvc.operator")


class ListedTenants:
    """Holds the file's tenants under operators' entries.

    An entry with terms replaces the file's, or those of a rule. Mode and API keys of the file stay,
    and the keys of the entry that have not expired count beside them.
    """

    def __init__(
        self,
        config: Config,
        entries: Mapping[str, OperatorEntry],
        log: EntryLog,
        looked_ms: int = 0,
        gone: Mapping[str, OperatorEntry] | None = None,
    ) -> None:
        """Put entries over a file; `log` takes each change for the state file. O(tenants).

        `looked_ms`: the time of the wall clock up to which keys have expired, see `look()`. `gone`:
        deleted entries that other members of a cluster may still have.

        Raises TenantError if the file lacks a group or class that an entry names.
        """
        self.entries = dict(entries)
        #: Deleted entries, by name; none unless members of a cluster share them.
        self.gone = dict(gone or {})
        #: The highest version of deleted entries that were forgotten.
        self.floor = 0
        #: The name of this member, if operators' entries are shared with others; else "".
        self.origin = sharing_origin(config)
        #: Grows with each change of an entry; in a cluster no lower than what others have stated.
        self.version = max(
            (entry.version for entry in (*entries.values(), *self.gone.values())), default=0
        )
        self._log = log
        self._file = {tenant.name: tenant for tenant in config.tenants}
        self._config = config
        self.in_force = dict(self._file)
        self._looked_ms = looked_ms
        #: The last end of an API key before the look, and the first after it; 0: none.
        self._last_ms = self._next_ms = 0
        for name, entry in entries.items():
            self.in_force[name] = self._placed(name, entry)
            self._note_ends(entry)
        self._names = sorted(self.in_force)
        self._owners = {
            bytes.fromhex(key): tenant.name
            for tenant in self.in_force.values()
            for key in tenant.api_keys_sha256
        }

    @staticmethod
    def resumed(
        config: Config, entries: Mapping[str, OperatorEntry], log: EntryLog
    ) -> "ListedTenants":
        """Put the entries of a state file over a file that may have changed meanwhile. O(tenants).

        A field of an entry that does not fit the file is left out of it, and the log names it.
        """
        kept, gone = {}, {}
        for name, entry in entries.items():
            if entry.gone_ms:
                gone[name] = entry
                log.put(name, entry.saved())
                continue
            kept[name] = fitting = fitting_entry(name, entry, config)
            log.put(name, fitting.saved())
        return ListedTenants(config, kept, log, gone=gone)

    def rebased(self, config: Config) -> "ListedTenants":
        """Return the same entries over another file. Raises TenantError as the constructor."""
        if (config.groups, config.classes) != (self._config.groups, self._config.classes):
            for name, entry in self.entries.items():
                try:
                    checked_tenant(name, entry.terms or {}, config)
                except TenantError as error:
                    raise TenantError(
                        error.field,
                        f"{error.description}; an operator has set it for tenant {name!r}: change"
                        " that with schedsvc tenants set, or undo it with schedsvc tenants delete",
                    ) from None
        found = ListedTenants(config, self.entries, self._log, self._looked_ms, self.gone)
        found.version, found.floor = max(found.version, self.version), self.floor
        return found

    def next_entry(
        self, terms: Mapping[str, Any] | None, keys: tuple[ApiKey, ...]
    ) -> OperatorEntry:
        """Return an entry that follows all others. O(1)."""
        return OperatorEntry(self._next_version, terms, keys, self.origin)

    @property
    def _next_version(self) -> int:
        # Below that of a shared entry is a version for what a member could not take over whole.
        return max(self.version, 1 if self.origin else 0) + 1

    def on(self, config: Config) -> Config:
        """Return the file with the tenants that are in force. O(tenants)."""
        return config.model_copy(update={"tenants": list(self.in_force.values())})

    def fallback(self, name: str) -> Tenant | None:
        """Return what the file says of a tenant; None: nothing. O(1)."""
        return self._file.get(name)

    def current(self, name: str) -> Tenant:
        """Return what a name has, also by a rule. O(1), O(rules)."""
        listed = self.in_force.get(name)
        return rule_tenant(name, self._config) if listed is None else listed

    def after(self, name: str, entry: OperatorEntry | None) -> Tenant | None:
        """Return what a tenant would have with this entry, or without one. O(1)."""
        return self.fallback(name) if entry is None else self._placed(name, entry)

    def put(self, name: str, entry: OperatorEntry | None, gone_ms: int = 0) -> None:
        """Keep another entry, or none. O(tenants).

        `gone_ms`: now by the wall clock; members of a cluster learn that it was deleted then.
        """
        after = self.after(name, entry)
        before = self.in_force.get(name)
        for key in before.api_keys_sha256 if before else ():
            self._owners.pop(bytes.fromhex(key), None)
        for key in after.api_keys_sha256 if after else ():
            self._owners[bytes.fromhex(key)] = name
        if after is None:
            del self.in_force[name]
            self._names.remove(name)
        else:
            if name not in self.in_force:
                insort(self._names, name)
            self.in_force[name] = after
        if entry is None:
            self.entries.pop(name, None)
            if self.origin and gone_ms:
                self.bury(name, OperatorEntry(self._next_version, None, (), self.origin, gone_ms))
            else:
                self._log.put(name, None)
        else:
            self.gone.pop(name, None)
            self.entries[name] = entry
            self._note_ends(entry)
            self.version = max(self.version, entry.version)
            self._log.put(name, entry.saved())

    def bury(self, name: str, gone: OperatorEntry) -> None:
        """Note that an entry was deleted, which has been taken out before. O(1)."""
        self.gone[name] = gone
        self.version = max(self.version, gone.version)
        self._log.put(name, gone.saved())

    def forget_gone(self, before_ms: int) -> list[str]:
        """Forget entries that were deleted before a time; return their names. O(deleted).

        The last of them stays: an entry of another name that is not above it comes too late.
        """
        old = {n: entry.version for n, entry in self.gone.items() if entry.gone_ms < before_ms}
        if not old:
            return []
        last = max(old, key=lambda name: (old[name], name))
        self.floor = max(self.floor, old.pop(last))
        for name in old:
            del self.gone[name]
            self._log.put(name, None)
        return list(old)

    def owner(self, sha256: bytes) -> Tenant | None:
        """Return the tenant for which an API key stands. O(1)."""
        name = self._owners.get(sha256)
        return None if name is None else self.in_force[name]

    def look(self, now_ms: int) -> list[str]:
        """Take the wall clock; return tenants of which a key has expired, or is valid again.

        The caller puts their entries once more. O(tenants), O(1) if there are none.
        """
        before_ms, self._looked_ms = self._looked_ms, now_ms
        if self._last_ms <= now_ms and not 0 < self._next_ms <= now_ms:
            return []
        first_ms, last_ms = sorted((before_ms, now_ms))
        found, self._last_ms, self._next_ms = [], 0, 0
        for name, entry in self.entries.items():
            self._note_ends(entry)
            if any(first_ms < key.expires_ms <= last_ms for key in entry.keys):
                found.append(name)
        return found

    def is_over(self, key: ApiKey) -> bool:
        """Return whether a key had expired at the last look. O(1)."""
        return 0 < key.expires_ms <= self._looked_ms

    def _note_ends(self, entry: OperatorEntry) -> None:
        for key in entry.keys:
            if self.is_over(key):
                self._last_ms = max(self._last_ms, key.expires_ms)
            elif key.expires_ms and (not self._next_ms or key.expires_ms < self._next_ms):
                self._next_ms = key.expires_ms

    def names_after(self, name: str, count: int) -> list[str]:
        """Return the next names in their order. O(count + log tenants)."""
        start = bisect_right(self._names, name)
        return self._names[start : start + count]

    def _placed(self, name: str, entry: OperatorEntry) -> Tenant:
        base = self._file.get(name) or rule_tenant(name, self._config)
        valid = (key.sha256 for key in entry.keys if not self.is_over(key))
        hashes = [*base.api_keys_sha256, *valid]
        if entry.terms is None:
            return base.model_copy(update={"api_keys_sha256": hashes})
        tenant = Tenant.model_validate({"name": name, **entry.terms})
        return tenant.model_copy(update={"mode": base.mode, "api_keys_sha256": hashes})


def sharing_origin(config: Config) -> str:
    """Return the member's name if it shares operators' settings with a cluster; else ""."""
    cluster = config.cluster
    return cluster.member_name if cluster is not None and cluster.secret_file else ""


def fitting_entry(name: str, entry: OperatorEntry, config: Config) -> OperatorEntry:
    """Return an entry without what the file lacks."""
    if entry.terms is None:
        return entry
    terms = dict(entry.terms)
    while True:
        try:
            checked_tenant(name, terms, config)
        except TenantError as error:
            field = error.field.partition(".")[0].partition("[")[0]
            _log.error(
                "operator_tenant_changed", tenant=name, field=field, reason=error.description,
                effect="this field is left out", undo="schedsvc tenants set or delete",
            )  # fmt: skip
            if field not in terms:
                return replace(entry, terms={})
            del terms[field]
        else:
            return replace(entry, terms=terms)


def shown_tenants(config: Config) -> list[str]:
    """Return the tenants with metric series of their own, in their order. O(tenants)."""
    tenants = [tenant.name for tenant in config.tenants]
    if config.unknown_tenants != "refuse" or config.mode == "dry_run":
        tenants.append(UNKNOWN_TENANT)
    return tenants
