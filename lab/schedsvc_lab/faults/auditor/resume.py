"""Keeps the state that outlives a process: the saved books, and the load of its leases.

Leases are not saved. The scheduler holds the blocks of a lease until its holder replays it, or
until an unrenewed lease would have expired.
"""

from dataclasses import dataclass

from schedsvc_lab.faults.auditor.quotas import Levels

ANY_TOKENS = 1 << 60


@dataclass(frozen=True)
class Owed:
    """Bounds the tokens that a pool's leases of an earlier process hold."""

    epoch: int
    low: int
    high: int


@dataclass(frozen=True)
class Known:
    """Holds the books when everything was saved; None or absent: nothing is known of it."""

    pools: dict[str, Owed] | None = None  # None: they may hold anything
    levels: dict[str, Levels] | None = None
    drained: frozenset[str] = frozenset()  # pools
    closed: bool = False  # everything is drained
