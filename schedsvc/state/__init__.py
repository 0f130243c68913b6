"""Keeps counters, quotas and predictions over a restart, in one SQLite file."""

from schedsvc.state.state_writer import StateWriter, restore
from schedsvc.state.store import StateError, Store

__all__ = ["StateError", "StateWriter", "Store", "restore"]
