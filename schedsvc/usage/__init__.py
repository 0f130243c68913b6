"""The usage ledger: what each ended lease used, exact over kills, for exports and budgets."""

from schedsvc.usage.budgets import Budgets
from schedsvc.usage.ledger import Ledger, UsageError
from schedsvc.usage.writer import UsageWriter

__all__ = ["Budgets", "Ledger", "UsageError", "UsageWriter"]
