"""Records what each ended lease used, exact over kills, for exports and budgets."""

from schedsvc.records.usage.budgets import Budgets
from schedsvc.records.usage.ledger import Ledger, UsageError
from schedsvc.records.usage.writer import UsageWriter

__all__ = ["Budgets", "Ledger", "UsageError", "UsageWriter"]
