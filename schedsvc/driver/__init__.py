"""Drives the core: the single writer of its state, its clock, and one timer."""

from schedsvc._core import CallerError
from schedsvc.driver.calls import Broken, EscrowWatch, NotLeading, Waiting
from schedsvc.driver.driver import WORK_MAX, Driver, new_core
from schedsvc.driver.upkeep import Leading, Ledgering, Loading, Saving, SettingsShared, Sharing

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
