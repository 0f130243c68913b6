"""Tests how the auditor counts output that final counts state above the limit of a request."""

from schedsvc_lab.faults.auditor.fair import Fairness
from schedsvc_lab.faults.auditor.overstated import Overstated
from tests.lab.faults.test_auditor import Desk, S

PRICE = 2_000_000


def test_ends_between_two_grants_add_up() -> None:
    overstated = Overstated()
    overstated.add("a", "gpu-0", 5)
    overstated.add("a", "gpu-0", 7)
    assert overstated.most() == {"a": 12}


def test_a_grant_begins_again_in_its_pool_alone() -> None:
    overstated = Overstated()
    overstated.add("a", "gpu-0", 5)
    overstated.add("a", "gpu-1", 4)
    overstated.granted("a", "gpu-0")
    overstated.add("a", "gpu-0", 1)
    assert overstated.most() == {"a": 9}
    overstated.add("a", "gpu-0", 6)
    assert overstated.most() == {"a": 11}


def fairness(desk: Desk) -> Fairness:
    return desk.auditor.books.fairness


def test_a_final_count_above_the_limit_of_its_request_counts_and_others_do_not() -> None:
    desk = Desk()
    asked = desk.ask(0, "r")
    desk.grant(0, asked, 1)
    lease = desk.auditor.books.live[1]
    limit = lease.request.max_output_tokens
    lease.output_tokens = limit
    fairness(desk).charge(lease, final=True)
    assert fairness(desk)._overstated.most() == {}
    lease.output_tokens = limit + 3
    fairness(desk).charge(lease, final=False)
    assert fairness(desk)._overstated.most() == {}
    fairness(desk).charge(lease, final=True)
    assert fairness(desk)._overstated.most() == {"a": 3 * PRICE}


def test_the_next_grant_of_the_flow_begins_again() -> None:
    desk = Desk()
    desk.grant(0, desk.ask(0, "r"), 1)
    lease = desk.auditor.books.live[1]
    lease.output_tokens = lease.request.max_output_tokens + 3
    fairness(desk).charge(lease, final=True)
    desk.grant(S, desk.ask(S, "next"), 2)
    lease.output_tokens += 2
    fairness(desk)._overstated.add("a", lease.pool.name, 2 * PRICE)
    assert fairness(desk)._overstated.most() == {"a": 3 * PRICE}
