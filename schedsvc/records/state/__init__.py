"""Keeps counters, quotas and predictions over a restart, in one SQLite file."""

from schedsvc.records.state.place_feed import PlaceFeed
from schedsvc.records.state.row_feed import RowFeed
from schedsvc.records.state.state_writer import StateWriter, restore
from schedsvc.records.state.store import OperatorRows, StateError, Store

__all__ = ["OperatorRows", "PlaceFeed", "RowFeed", "StateError", "StateWriter", "Store", "restore"]
