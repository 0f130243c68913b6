"""What outlives a process: the books as they were saved, and what leases of before are owed.

Leases are not saved. Until their holders tell of them, or a lease that nobody renews would have
ended, their blocks are held, and what they were charged stands in the counters: the first lease
that is told of takes over what its flow is owed, so that nothing is charged twice.
"""

from dataclasses import dataclass

from schedsvc.lab.faults.auditor.counters import CounterState
from schedsvc.lab.faults.auditor.quotas import Levels

ANY_TOKENS = 1 << 60


@dataclass(frozen=True)
class Owed:
    """What a pool's leases of an earlier process hold at least and at most, in tokens."""

    epoch: int
    low: int
    high: int


@dataclass(frozen=True)
class Known:
    """The books when everything was saved; of what is None or absent nothing is known."""

    pools: dict[str, Owed] | None = None  # None: they may hold anything
    counters: CounterState | None = None
    levels: dict[str, Levels] | None = None
    drained: frozenset[str] = frozenset()  # pools
    closed: bool = False  # everything is drained
