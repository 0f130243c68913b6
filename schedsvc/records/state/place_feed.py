"""Feeds the places of a leader's queue to its followers: numbered by change, each place once."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from schedsvc.driver import Driver
from schedsvc.records.state.row_feed import changed_since

__all__ = ["FeedPlace", "PlaceFeed"]

#: Places that are read from the core before the event loop gets its turn.
_AT_ONCE = 64


class FeedPlace(NamedTuple):
    """Holds a place as it changed last."""

    #: The number of its last change.
    number: int
    place: int
    #: The key of the request that has it; b"": none.
    key: bytes
    #: The time from which that request waits, by the feed's clock.
    since_ns: int


class PlaceFeed:
    """Places that a core returned, in the order of their last changes.

    The core has at most 100,000 places at once, so no more can wait for a reader.
    """

    def __init__(self, driver: Driver, now_ns: Callable[[], int]) -> None:
        self._driver = driver
        self.now_ns = now_ns
        #: The number of the last change.
        self.number = 0
        self._places: dict[int, FeedPlace] = {}

    async def collect(self) -> None:
        """Take over what changed in the core. Raises Broken."""
        while rows := self._driver.take_places(_AT_ONCE):
            present_ns = self.now_ns()
            for place, key, waited_ns in rows:
                self.number += 1
                self._places.pop(place, None)
                since_ns = present_ns - waited_ns
                self._places[place] = FeedPlace(self.number, place, key, since_ns)
            await asyncio.sleep(0)

    def since(self, number: int) -> list[FeedPlace]:
        """Return places that changed after a number, in order. O(places returned)."""
        return changed_since(self._places.values(), number)
