"""Reads pools and flows of the core in slices, between which the event loop has its turn.

A row of a pool takes 5 us to read and one of a flow 8 us, so 1,024 pools in one turn would hold up
every other caller for as long as hundreds of admissions take.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from heapq import merge
from typing import Any

from schedsvc.driver import Driver

__all__ = ["EVERYBODY", "Rest", "most_served", "one_turn", "pool_rows"]

#: A principal that sees everything.
EVERYBODY = -1

#: Rows of pools, and keys of flows, that are read in one turn: half a millisecond each.
_POOLS_AT_ONCE, _KEYS_AT_ONCE = 64, 500

#: Leaves the event loop to others between two slices.
Rest = Callable[[], Awaitable[None]]

#: A flow: whether it waits, its service, and its number, negative.
_Key = tuple[bool, int, int]


async def one_turn() -> None:
    """Leave one turn of the event loop to others."""
    await asyncio.sleep(0)


async def pool_rows(
    driver: Driver, principal: int = EVERYBODY, rest: Rest = one_turn
) -> AsyncIterator[list[dict[str, Any]]]:
    """Yield the rows of the pools that a principal may see, 64 at most in each turn.

    The first are of the moment of the call. O(pools). Raises Broken.
    """
    first, rows = driver.pool_rows(0, _POOLS_AT_ONCE, principal)
    yield rows
    while first:
        await rest()
        first, rows = driver.pool_rows(first, first + _POOLS_AT_ONCE, principal)
        yield rows


async def most_served(
    driver: Driver, limit: int, principal: int = EVERYBODY, rest: Rest = one_turn
) -> list[int]:
    """Return the flows that wait, and then those that were served most, in order of service.

    At most `limit`, of those that a principal may see. O(flows log flows). Raises Broken.
    """
    runs: list[list[_Key]] = []
    first, keys = driver.flow_keys(0, _KEYS_AT_ONCE, principal)
    while True:
        runs.append(sorted(keys, reverse=True))
        if sum(map(len, runs)) > 2 * limit:
            runs = [await _first(limit, runs, rest)]
        if first == 0:
            break
        await rest()
        first, keys = driver.flow_keys(first, first + _KEYS_AT_ONCE, principal)
    best = await _first(limit, runs, rest)
    # Each of the two is in the order of service already.
    halves = [[key for key in best if key[0] == waits] for waits in (True, False)]
    return [-key[2] for key in merge(*halves, key=lambda key: key[1:], reverse=True)]


async def _first(limit: int, runs: list[list[_Key]], rest: Rest) -> list[_Key]:
    """Merge sorted lists as far as `limit` goes, in slices. O(limit log lists)."""
    found: list[_Key] = []
    for key in merge(*runs, reverse=True):
        found.append(key)
        if len(found) == limit:
            break
        if len(found) % _KEYS_AT_ONCE == 0:
            await rest()
    return found
