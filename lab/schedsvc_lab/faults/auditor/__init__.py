"""Audits independently: keeps books from the messages alone, by the rules of the contract.

It imports nothing of the core, and trusts no report of the core on itself: its knowledge is the
messages between clients and scheduler.
"""

from schedsvc_lab.faults.auditor.comparison import Granted, Sizes, compare_runs
from schedsvc_lab.faults.auditor.implied_state import UNKNOWN_FLOW
from schedsvc_lab.faults.auditor.records import (
    CREDIT_AUTO,
    DEFAULT_CLASS,
    LEAD_AUTO,
    Classes,
    Grants,
    Limits,
    PoolLimits,
    PriorityClass,
    Quotas,
    Terms,
    ViolationError,
)
from schedsvc_lab.faults.auditor.reference_state import Auditor
from schedsvc_lab.faults.auditor.resume import Known
from schedsvc_lab.faults.auditor.shares import Rows
from schedsvc_lab.faults.auditor.tree import NO_TREE, Tree

__all__ = [
    "CREDIT_AUTO",
    "DEFAULT_CLASS",
    "LEAD_AUTO",
    "NO_TREE",
    "UNKNOWN_FLOW",
    "Auditor",
    "Classes",
    "Granted",
    "Grants",
    "Known",
    "Limits",
    "PoolLimits",
    "PriorityClass",
    "Quotas",
    "Rows",
    "Sizes",
    "Terms",
    "Tree",
    "ViolationError",
    "compare_runs",
]
