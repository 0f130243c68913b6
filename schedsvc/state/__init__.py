"""Keeps counters, quotas and predictions over a restart, in one SQLite file."""

from schedsvc.state.keeper import Keeper, restore
from schedsvc.state.store import StateError, Store

__all__ = ["Keeper", "StateError", "Store", "restore"]
