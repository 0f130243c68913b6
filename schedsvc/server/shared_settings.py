"""Turns operators' tenants, API keys and modes into settings that members of a cluster share."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from schedsvc.config import Config, ModeOverlay, OperatorEntry, checked_tenant
from schedsvc.config.files import read_file
from schedsvc.driver import CallerError, Driver
from schedsvc.driver.clock import wall_ms
from schedsvc.server.cluster import ClusterError
from schedsvc.server.listed_tenants import fitting_entry, sharing_origin
from schedsvc.server.operator import OperatorActions
from schedsvc.server.tenants import TenantActions

if TYPE_CHECKING:
    from schedsvc.cluster.member import Member

__all__ = ["GONE_MS", "OperatorSettings", "share_settings"]

#: The time for which a deleted entry is kept. A member that was away for longer may bring it back.
GONE_MS = 30 * 86_400_000
_MODES, _TENANT = b"modes", b"tenant:"


class OperatorSettings:
    """Keeps the settings of OperatorService, by places: `modes`, and `tenant:NAME`."""

    def __init__(
        self, driver: Driver, handles: OperatorActions, tenants: TenantActions,
        now_ms: Callable[[], int] = wall_ms,
    ) -> None:  # fmt: skip
        self._handles, self._tenants, self._now_ms = handles, tenants, now_ms
        self._driver = driver
        #: Called with each place whose setting has changed.
        self.on_change: Callable[[bytes], None] = lambda place: None
        handles.on_modes = lambda: self.on_change(_MODES)
        driver.tenant_entries.on_change = lambda name: self.on_change(_TENANT + name.encode())

    def places(self) -> list[bytes]:
        """Return the places of all settings, deleted ones too. O(entries)."""
        listed = self._handles.listed
        return [_MODES, *(_TENANT + name.encode() for name in (*listed.entries, *listed.gone))]

    def saved(self, place: bytes) -> tuple[int, bytes] | None:
        """Return version and content of a setting; None: there is none. O(its size)."""
        if place == _MODES:
            modes = self._driver.mode_overlay
            if not modes.version and modes.says_nothing:
                return None
            # An operator may have said it before this member shared anything.
            version = max(1, modes.version)
            return version, replace(modes, version=version).saved()
        name, listed = _name_of(place), self._handles.listed
        entry = listed.entries.get(name) or listed.gone.get(name)
        return None if entry is None else (entry.version, entry.saved())

    def put(self, place: bytes, version: int, content: bytes) -> None:
        """Put another member's setting in force. Raises ValueError if this one cannot."""
        if place == _MODES:
            modes = ModeOverlay.restored(content)
            if modes.version != version:
                raise ValueError("the modes are of another version than their row")
            self._handles.take_modes(modes)
            return
        name, entry = _name_of(place), OperatorEntry.restored(content)
        if not name or entry.version != version:
            raise ValueError("an entry of a tenant has no name, or another version than its row")
        try:
            self._put_entry(name, entry)
        except CallerError as error:
            raise ValueError(str(error)) from None

    def _put_entry(self, name: str, entry: OperatorEntry) -> None:
        listed = self._handles.listed
        is_known = name in listed.entries or name in listed.gone
        if not is_known and entry.version <= listed.floor:
            raise ValueError("the entry is older than deleted ones that are forgotten already")
        listed.version = max(listed.version, entry.version)
        if entry.gone_ms:
            if name in listed.entries:
                self._tenants.change(name, None)
            listed.bury(name, entry)
            return
        checked_tenant(name, {}, self._handles.config)
        self._tenants.check_room(name)
        fitting = fitting_entry(name, entry, self._handles.config)
        if fitting != entry:
            # The row of the store stays the better one, and is read again after a restart.
            fitting = replace(fitting, version=max(1, entry.version - 1))
        self._tenants.change(name, fitting)

    def forget_gone(self) -> list[bytes]:
        """Forget entries that were deleted long ago; return their places. O(deleted)."""
        names = self._handles.listed.forget_gone(self._now_ms() - GONE_MS)
        return [_TENANT + name.encode() for name in names]


def _name_of(place: bytes) -> str:
    """Return the name of a tenant's place; "": it is of no tenant."""
    if not place.startswith(_TENANT):
        return ""
    return place.removeprefix(_TENANT).decode(errors="ignore")


def share_settings(
    member: "Member | None", driver: Driver, config: Config, tenants: TenantActions,
    handles: OperatorActions,
) -> None:  # fmt: skip
    """Let a member share what operators set, if its cluster has a secret. Raises ClusterError."""
    if member is None or config.cluster is None or not sharing_origin(config):
        return
    try:
        secret = read_file(config.resolve(config.cluster.secret_file or "")).strip()
    except OSError as error:
        raise ClusterError(f"cluster.secret_file: {error}") from None
    member.share_settings(OperatorSettings(driver, handles, tenants), secret)
