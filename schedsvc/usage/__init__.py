"""The usage ledger: what each ended lease used, exact over kills, for exports and budgets."""

from schedsvc.usage.ledger import Ledger, UsageError
from schedsvc.usage.writer import UsageWriter

__all__ = ["Ledger", "UsageError", "UsageWriter"]
