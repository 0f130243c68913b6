"""Keeps the modes that operators set over those of the file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from schedsvc.config.models import Config, Mode, Tenant

__all__ = ["ModeOverlay"]

_MODES = get_args(Mode)


@dataclass(frozen=True, slots=True)
class ModeOverlay:
    """Holds modes that override the file's: for all tenants, or for one, which overrides both."""

    everyone: Mode | None = None
    tenants: Mapping[str, Mode] = field(default_factory=dict)
    #: In a cluster: grows with each change; and the member that made the last one.
    version: int = 0
    origin: str = ""

    @property
    def says_nothing(self) -> bool:
        """Return whether it overrides no mode."""
        return self.everyone is None and not self.tenants

    def saying(self, mode: Mode | None, tenant: str = "") -> "ModeOverlay":
        """Return the overlay with this mode, for all tenants if `tenant` is ""; None removes one.

        A mode for all tenants removes those of single tenants.
        """
        if not tenant:
            return replace(self, everyone=mode, tenants={})
        tenants = {name: said for name, said in self.tenants.items() if name != tenant}
        if mode is not None:
            tenants[tenant] = mode
        return replace(self, tenants=tenants)

    def naming(self, tenants: set[str]) -> "ModeOverlay":
        """Return what is said of these tenants, and of everyone."""
        kept = {name: said for name, said in self.tenants.items() if name in tenants}
        return replace(self, tenants=kept)

    def changed_by(self, origin: str) -> "ModeOverlay":
        """Return the next version, by a member of a cluster; "": it is shared with none."""
        if not origin:
            return self
        return replace(self, version=self.version + 1, origin=origin)

    def saved(self) -> bytes:
        """Return it as a state file keeps it; nothing where nothing is said."""
        if self == ModeOverlay():
            return b""
        told: dict[str, Any] = {"everyone": self.everyone, "tenants": dict(self.tenants)}
        if self.version:
            told = {"origin": self.origin, "version": self.version, **told}
        return json.dumps(told).encode()

    @staticmethod
    def restored(saved: bytes) -> "ModeOverlay":
        """Return the saved overlay. Raises ValueError if `saved()` cannot have written it."""
        if not saved:
            return ModeOverlay()
        try:
            told = json.loads(saved)
        except RecursionError:
            raise ValueError("the modes that operators set are nested too deeply") from None
        if isinstance(told, dict) and isinstance(told.get("tenants"), dict):
            everyone, tenants = told.get("everyone"), told["tenants"]
            version, origin = told.get("version", 0), told.get("origin", "")
            is_valid = everyone in (None, *_MODES) and all(m in _MODES for m in tenants.values())
            if is_valid and type(version) is int and version >= 0 and isinstance(origin, str):
                return ModeOverlay(everyone, tenants, version, origin)
        raise ValueError("the modes that operators set cannot be read")

    def on(self, config: Config) -> Config:
        """Return the configuration as it is in force. O(tenants)."""
        if self.says_nothing:
            return config
        tenants = [self.of(tenant) for tenant in config.tenants]
        return config.model_copy(update={"mode": self.everyone or config.mode, "tenants": tenants})

    def of(self, tenant: Tenant) -> Tenant:
        """Return a tenant with the mode that is in force for it. O(1)."""
        mode = self.tenants.get(tenant.name, self.everyone or tenant.mode)
        return tenant.model_copy(update={"mode": mode})
