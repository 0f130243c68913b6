"""Tests the auditor's rule of fair service in each of several pools, on hand-made charges."""

from dataclasses import replace

import pytest

from schedsvc_lab.faults.auditor import LEAD_AUTO, Tree, ViolationError
from schedsvc_lab.faults.auditor.fair_pools import PoolFairness
from schedsvc_lab.faults.auditor.records import Request
from schedsvc_lab.faults.duel import duel_options
from schedsvc_lab.faults.options import draw
from schedsvc_lab.faults.terms import terms_of
from tests.lab.faults.test_auditor import TERMS

BOUND = 100
DUEL, EVENTS = 844424930161057, 2_000


class Ledger:
    """Holds the rule alone, while flow b waits for any pool."""

    def __init__(self, lead_max: int) -> None:
        self.pools = PoolFairness(replace(TERMS, pools=2, lead_max=lead_max))
        self.served: dict[str, int] = {}
        b = Request(None, ("b", "", "1", 0), "b", 0, 1, 0, 0, 1, 0, True, 1, 1, 1, 1)
        self.pools.arrived(b)
        self.charge("a", "p", 0)
        self.pools.check(self.served, {"b": BOUND}, {})

    def charge(self, flow: str, pool: str, more: int) -> None:
        self.served[flow] = self.served.get(flow, 0) + more
        self.pools.charge(flow, pool, more)
        self.pools.check(self.served, {"b": BOUND}, {})


@pytest.mark.parametrize("lead_max", [0, 30, LEAD_AUTO])
def test_without_service_elsewhere_the_bound_holds(lead_max: int) -> None:
    ledger = Ledger(lead_max)
    ledger.charge("a", "p", BOUND + max(0, lead_max))
    with pytest.raises(ViolationError, match="served too little beside another"):
        ledger.charge("a", "p", 1)


def test_groups_are_held_to_the_bound_beside_their_siblings_alone() -> None:
    tree = Tree({"org": 1_000, "other": 1_000}, {"b": "org"})
    pools = PoolFairness(replace(TERMS, pools=2, lead_max=0, tree=tree))
    pools.arrived(Request(None, ("b", "", "1", 0), "b", 0, 1, 0, 0, 1, 0, True, 1, 1, 1, 1))
    served = {"a": 0, "org": 0, "other": 0}
    allowed = {"b": BOUND, "org": BOUND}
    for name in served:
        pools.charge(name, "p", 0)
    pools.check(served, allowed, {})
    for name in ("a", "other"):  # siblings of the group, not of the tenant in it
        served[name] += BOUND
        pools.charge(name, "p", BOUND)
        pools.check(served, allowed, {})
    pools.charge("other", "p", 1)
    with pytest.raises(ViolationError, match="more in p than org"):
        pools.check(served, allowed, {})


def test_auto_lead_allows_what_the_waiting_flow_got_elsewhere() -> None:
    ledger = Ledger(LEAD_AUTO)
    ledger.charge("b", "q", 500)
    ledger.charge("a", "p", 500 + BOUND)
    with pytest.raises(ViolationError, match="lead 500"):
        ledger.charge("a", "p", 1)


def test_auto_lead_refund_elsewhere_takes_nothing_back() -> None:
    ledger = Ledger(LEAD_AUTO)
    ledger.charge("b", "q", 500)
    ledger.charge("a", "p", 500 + BOUND)
    ledger.charge("b", "q", -500)  # replayed leases expire without usage
    with pytest.raises(ViolationError, match="lead 500"):
        ledger.charge("a", "p", 1)


def test_auto_lead_allows_what_the_other_was_refunded() -> None:
    ledger = Ledger(LEAD_AUTO)
    ledger.charge("a", "q", 500)
    ledger.charge("b", "p", 500)  # catches up
    ledger.charge("a", "q", -200)
    ledger.charge("a", "p", 200 + BOUND)
    with pytest.raises(ViolationError, match="lead 200"):
        ledger.charge("a", "p", 1)


def test_terms_without_a_lead_have_the_default_of_the_core() -> None:
    options, _, _ = duel_options(draw(DUEL, EVENTS))
    assert "lead_max_micro" not in options.core
    assert terms_of(options).lead_max == LEAD_AUTO
