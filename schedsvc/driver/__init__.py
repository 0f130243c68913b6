"""Drives the core: the single writer of its state, its clock, and one timer."""

from schedsvc.driver.driver import (
    WORK_MAX,
    Broken,
    CallerError,
    Driver,
    EscrowWatch,
    Leading,
    Ledgering,
    Loading,
    NotLeading,
    Saving,
    SettingsShared,
    Sharing,
    Waiting,
    new_core,
)

__all__ = [
    "WORK_MAX",
    "Broken",
    "CallerError",
    "Driver",
    "EscrowWatch",
    "Leading",
    "Ledgering",
    "Loading",
    "NotLeading",
    "Saving",
    "SettingsShared",
    "Sharing",
    "Waiting",
    "new_core",
]
