"""Keeps counters, quotas and predictions over a restart, in one SQLite file."""

from schedsvc.state.place_feed import PlaceFeed
from schedsvc.state.row_feed import RowFeed
from schedsvc.state.state_writer import StateWriter, restore
from schedsvc.state.store import OperatorRows, StateError, Store

__all__ = ["OperatorRows", "PlaceFeed", "RowFeed", "StateError", "StateWriter", "Store", "restore"]
