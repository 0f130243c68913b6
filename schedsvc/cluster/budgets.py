"""Shares what each member has spent of the budgets of a day or month.

A budget is no escrow: a member goes on by what the others said last. So together they overshoot it
by what they admit in one interval at most.
"""

from typing import NamedTuple, Protocol

from schedsvc.cluster.errors import StoreError
from schedsvc.cluster.library import budget_key_of
from schedsvc.cluster.store import StoreConnection
from schedsvc.driver import CallerError, Driver, Sharing

__all__ = ["BudgetRow", "HeldBudgets", "SharedBudgets"]

#: In one call; with more budgets an interval is longer.
_BUDGETS_MAX = 200


class BudgetRow(NamedTuple):
    """Describes a budget in the period that runs."""

    name: bytes
    #: 0: of the day, 1: of the month.
    which: int
    #: The period in words, the same at all members.
    period: bytes
    #: The core's number of the period.
    turn: int


class HeldBudgets(Protocol):
    """Holds the budgets of a scheduler."""

    def running(self) -> list[tuple[bytes, int, bytes, int]]:
        """Return the fields of a BudgetRow for each budget. O(budgets)."""


class SharedBudgets:
    """Does the task's part about budgets."""

    def __init__(self, driver: Driver, cluster: str, member: str, sharing: Sharing) -> None:
        self._driver, self._cluster, self._member = driver, cluster, member
        self._sharing = sharing
        self.held: HeldBudgets | None = None
        self._next = 0
        #: The sums that others have spent, as the core knows them.
        self._applied: dict[BudgetRow, int] = {}

    def has_some(self) -> bool:
        """Return whether there is a budget to share. O(budgets)."""
        return self.held is not None and bool(self.held.running())

    async def exchange(self, link: StoreConnection) -> None:
        """State what was spent here, and read what others spent. Raises StoreError. O(budgets)."""
        rows = [] if self.held is None else [BudgetRow(*row) for row in self.held.running()]
        self._sharing.budgets = len(rows)
        if not rows:
            return
        at = self._next if self._next < len(rows) else 0
        batch = rows[at : at + _BUDGETS_MAX]
        self._next = at + _BUDGETS_MAX
        spent = self._driver.change(
            lambda core, _: [core.budget_spent(row.name, row.which) for row in batch]
        )
        keys = [budget_key_of(self._cluster, row.name, row.period) for row in batch]
        found = await link.call("schedsvc_budgets", keys, self._member, *spent)
        try:
            others = [min(int(text), 1 << 60) for text in found]
            if len(others) != len(batch):
                raise ValueError
        except (ValueError, TypeError):
            raise StoreError(
                f"store {link.address.text}: unknown answer to schedsvc_budgets"
            ) from None
        for row, elsewhere in zip(batch, others, strict=True):
            if self._applied.get(row, 0) != elsewhere:
                self._apply(row, elsewhere)
        if len(self._applied) > 2 * len(rows):
            self._applied = {row: n for row, n in self._applied.items() if row in set(rows)}

    def _apply(self, row: BudgetRow, elsewhere: int) -> None:
        self._applied[row] = elsewhere
        values = row.name, row.which, row.turn, elsewhere
        try:
            self._driver.change(lambda core, now_ns: core.set_budget_elsewhere(now_ns, *values))
        except CallerError:
            self._applied.pop(row)  # its tenant was deleted meanwhile
