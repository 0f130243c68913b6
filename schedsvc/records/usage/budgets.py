"""Reports the periods of budgets to the core: calendar days and months of a time zone.

The core charges budgets and has no calendar. At the start, and when a budget is new, what its
period has used is read from the ledger, so a restart refills no budget. A wall clock that is set
back opens no period again: the core keeps the later one until the clock has passed its end. Only a
period that a wrong clock opened too early is closed: its budget would stay spent until its end.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import NamedTuple

from schedsvc._core import Scheduler
from schedsvc.config import Budget, Config, Tenant, time_zone
from schedsvc.driver import Broken, Driver
from schedsvc.records.usage.ledger import Ledger, UsedLease
from schedsvc.records.usage.places import Places

__all__ = ["Budgets", "Period", "period_of"]

_DAY, _MONTH = 0, 1
#: A step of the wall clock is noticed within this.
_LOOK_S = 1.0


class Period(NamedTuple):
    """Describes a calendar day or month: its number, and its begin and end in Unix time."""

    number: int
    begin_s: int
    end_s: int


class _Watched(NamedTuple):
    """Watches one budget: the core's name of it, which period it has, and where."""

    name: bytes
    which: int
    timezone: str


def period_of(now_s: float, which: int, timezone: str) -> Period:
    """Return the day (0) or month (1) of a time zone in which a moment lies."""
    local = datetime.fromtimestamp(now_s, time_zone(timezone))
    begin = local.replace(hour=0, minute=0, second=0, microsecond=0, fold=0)
    if which == _DAY:
        number = begin.toordinal()
        after = begin + timedelta(days=1)
    else:
        begin = begin.replace(day=1)
        number = begin.year * 12 + begin.month
        after = (begin + timedelta(days=32)).replace(day=1)
    return Period(number, int(begin.timestamp()), int(after.timestamp()))


class Budgets:
    """Watches the wall clock for all budgets of a configuration."""

    def __init__(
        self,
        driver: Driver,
        ledger: Ledger,
        config: Config,
        wall_s: Callable[[], float] | None = None,
        steady_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Report every period at once. `steady_s`: a clock that is never set.

        Raises UsageError if the ledger cannot be read.
        """
        self._driver = driver
        self._ledger = ledger
        self._wall_s = wall_s or time.time
        self._steady_s = steady_s
        self._ahead_s = self._wall_s() - steady_s()
        self._reported: dict[_Watched, Period] = {}
        #: The numbers of periods as the core knows them: each is higher than those before.
        self._turns = 0
        self._turn_of: dict[_Watched, int] = {}
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Watch the budgets of another configuration from now on. Raises UsageError."""
        self._places = Places(config)
        self._exempt = frozenset(entry.name for entry in config.classes if entry.exempt)
        self._watched = _watched(config)
        self._reported = {key: p for key, p in self._reported.items() if key in self._watched}
        self.look()

    def move(self, name: str, tenant: Tenant | None) -> None:
        """Watch the budgets that an operator has given a tenant; None: none. O(budgets).

        Raises UsageError.
        """
        key = b"tenant:" + name.encode()
        budget = None if tenant is None else tenant.budget
        others = [watched for watched in self._watched if watched.name != key]
        self._watched = [*others, *_watched_of(key, budget)]
        self._reported = {each: p for each, p in self._reported.items() if each in self._watched}
        self.look()

    def look(self) -> None:
        """Report the periods that have begun, or whose end has moved. O(budgets)."""
        now_s = self._wall_s()
        now_ns = self._driver.clock.now_ns()
        for budget in self._watched:
            last = self._reported.get(budget)
            period = period_of(now_s, budget.which, budget.timezone)
            if last is not None and period.number < last.number and not self._is_early(last):
                period = last  # the wall clock was set back
            ends_ns = now_ns + int((period.end_s - now_s) * 1e9)
            spent = 0 if last == period else self._spent(budget, period)
            if last is None or period.number != last.number:
                self._turns += 1
                self._turn_of[budget] = self._turns
            row = (budget.name, budget.which, self._turn_of[budget], ends_ns, spent)
            self._driver.change(partial(_set_period, row))
            self._reported[budget] = period

    def running(self) -> list[tuple[bytes, int, bytes, int]]:
        """Return all budgets, as other members of a cluster get them. O(budgets).

        For each budget its name, 0 for the day or 1 for the month, its period in words that mean
        the same everywhere, and the core's number of the period.
        """
        found = []
        for budget, period in self._reported.items():
            kind = "month" if budget.which else "day"
            words = f"{kind}-{period.number}-{budget.timezone}".encode()
            found.append((budget.name, budget.which, words, self._turn_of[budget]))
        return found

    def _is_early(self, period: Period) -> bool:
        """Return whether a period has not begun by the start's wall clock and the time since then.

        Not while usage waits for the ledger: the period before it would begin without that.
        """
        ledgering = self._driver.ledgering
        if ledgering is not None and ledgering.waiting_rows:
            return False
        return period.begin_s > self._ahead_s + self._steady_s()

    def _spent(self, budget: _Watched, period: Period) -> int:
        kind, _, name = budget.name.decode().partition(":")
        groups = "/".join(reversed(self._places.path_of_group(name))) if kind == "group" else None
        return self._ledger.spent(
            period.begin_s, period.end_s, self._exempt, tenant=name, groups=groups
        )

    def refund(self, leases: list[UsedLease]) -> None:
        """Take back what a restart charged twice: leases that the ledger had. O(leases)."""
        for lease in leases:
            if self._watched and lease.key.request_class not in self._exempt:
                tokens = lease.input_tokens + lease.output_tokens
                self._driver.change(partial(_refund, lease.key.tenant.encode(), tokens))

    async def run(self) -> None:
        """Look every second until it is cancelled, or the core is broken."""
        with suppress(Broken):
            while True:
                await asyncio.sleep(_LOOK_S)
                self.look()


def _watched(config: Config) -> list[_Watched]:
    entries = [(b"group:", group.name, group.budget) for group in config.groups]
    entries += [(b"tenant:", tenant.name, tenant.budget) for tenant in config.tenants]
    found = []
    for prefix, name, budget in entries:
        found += _watched_of(prefix + name.encode(), budget)
    return found


def _watched_of(key: bytes, budget: Budget | None) -> list[_Watched]:
    if budget is None:
        return []
    kinds = ((_DAY, budget.tokens_per_day), (_MONTH, budget.tokens_per_month))
    return [_Watched(key, which, budget.timezone) for which, tokens in kinds if tokens is not None]


def _set_period(row: tuple[bytes, int, int, int, int], core: Scheduler, now_ns: int) -> None:
    core.set_budget_period(now_ns, *row)


def _refund(tenant: bytes, tokens: int, core: Scheduler, now_ns: int) -> None:
    core.set_budget_refund(now_ns, tenant, tokens)
