"""An independent auditor: books kept from the messages alone, by the rules of the contract.

It imports nothing of the core, and believes nothing that the core says of itself: what it knows,
it saw on the wire between clients and scheduler.
"""

from schedsvc.sim.faults.auditor.books import Auditor
from schedsvc.sim.faults.auditor.records import Limits, Quotas, Terms, ViolationError

__all__ = ["Auditor", "Limits", "Quotas", "Terms", "ViolationError"]
