"""Tests bounded credit: where an idle or light flow begins, and levels over a restart."""

import pytest

from tests.seeds import fresh

from .support import SECOND, admit, grant, make, totals, vtc
from .test_restart import FLOWS, reborn, serve
from .tree_histories import TreeHistory

INPUT, OUTPUT = 1_000_000, 2_000_000  # micro-tokens of service, the default prices


@pytest.mark.parametrize("weight", [1_000, 2_000])
def test_idleness_earns_no_more_than_the_credit(weight: int) -> None:
    for credit in (0, 7 * INPUT, -1):
        s = make(("busy", 1000), ("late", weight), capacity=20, credit_max_micro=credit)
        for i in range(50):
            d = grant(s, i, f"b{i}", 10, 10)
            s.complete(i, d.lease_id, 1, output_tokens=10)
        admit(s, 60, "b", 10, 10, 0)  # one runs and one waits when the other flow comes
        s.poll(60)
        admit(s, 60, "bw", 10, 10, 0)
        before = vtc(s, 60, 0)
        admit(s, 60, "l0", 10, 10, 1)
        # The average of equal charges is one of them, except for the rest of a division by 32.
        mine = 10 * INPUT + 10 * OUTPUT if credit < 0 else credit
        assert vtc(s, 60, 1) == pytest.approx(before - mine, abs=50 * 32)
        assert totals(s, 60)["fairness_bound_micro"] == pytest.approx(
            2 * OUTPUT * 20 + mine, abs=50 * 32
        )


def test_idle_pool_lifts_to_the_level_that_was_reached_before() -> None:
    s = make(("a", 1000), ("b", 1000), credit_max_micro=0)
    for i in range(2):
        level = vtc(s, 0, 0)
        d = grant(s, 0, f"a{i}", 10, 10, 0)
        s.complete(0, d.lease_id, 1, output_tokens=10)
    assert vtc(s, 0, 1) == 0
    admit(s, SECOND, "b", 10, 10, 1)
    assert vtc(s, SECOND, 1) == level == 10 * INPUT + 10 * OUTPUT


def test_a_flow_that_trickles_saves_up_no_more_than_the_credit() -> None:
    """A running request does not keep its flow active, so a trickle earns no right to catch up."""
    credit = 20 * INPUT
    s = make(("busy", 1000), ("trickle", 1000), capacity=1_000, credit_max_micro=credit)
    runs = 0
    for i in range(40):  # 990 tokens of each round are busy's; a request of trickle runs always
        admit(s, i, f"b{i}", 989, 1, 0)
        admit(s, i, f"t{i}", 1, 1, 1)
        admit(s, i, f"w{i}", 1, 1, 0)  # busy waits all along
        for d in s.poll(i):
            ends, runs = (runs, d.lease_id) if d.flow == 1 else (d.lease_id, runs)
            if ends:
                s.complete(i, ends, 1, output_tokens=1)
    admit(s, 100, "b", 999, 1, 0)
    admit(s, 100, "t", 999, 1, 1)
    assert vtc(s, 100, 1) >= vtc(s, 100, 0) - credit - 989 * INPUT


def test_the_level_does_not_fall_with_newcomers_below_it() -> None:
    """With the least counter instead, each newcomer would begin one credit below the last."""
    names = [(f"n{i}", 1000) for i in range(100)]
    credit = 30 * INPUT
    s = make(("busy", 1000), *names, capacity=20, credit_max_micro=credit)
    for i in range(200):
        d = grant(s, i, f"b{i}", 10, 10, 0)
        s.complete(i, d.lease_id, 1, output_tokens=10)
    admit(s, 300, "busy", 10, 10, 0)
    for i in range(1, 101):
        admit(s, 300, "x", 10, 10, i)
    assert {vtc(s, 300, i) for i in range(1, 101)} == {vtc(s, 300, 0) - credit}


def test_thousand_newcomers_delay_a_flow_by_one_request_each() -> None:
    names = [(f"n{i}", 1000) for i in range(1_000)]
    s = make(("busy", 1000), *names, capacity=20)
    for i in range(20):
        d = grant(s, i, f"b{i}", 10, 10, 0)
        s.complete(i, d.lease_id, 1, output_tokens=10)
    busy = admit(s, 30, "busy", 10, 10, 0)
    for i in range(1_000):
        for k in range(3):
            admit(s, 30, f"x{k}", 10, 10, i + 1)
    before = []
    while busy not in before:
        (d,) = s.poll(30)
        before.append(d.handle)
        s.complete(30, d.lease_id, 1, output_tokens=10)
    assert len(before) <= 1_001


def test_random_histories_keep_the_promise_of_bounded_credit() -> None:
    for seed in fresh(400):
        TreeHistory(seed, flat=True).play()


@pytest.mark.parametrize("credit", [-1, 0])
def test_a_newcomer_is_lifted_to_the_level_of_before_the_restart(credit: int) -> None:
    s = make(*FLOWS, capacity=100, credit_max_micro=credit)
    for k in range(5):
        serve(s, 0, f"a{k}", flow=0)
    level = vtc(s, 0, 0)  # at the pick of the next one
    grant(s, 0, "a", flow=0)
    new = reborn(s, 0, capacity=100, credit_max_micro=credit)
    admit(new, 0, "b", flow=1)
    assert vtc(new, 0, 1) == level + credit * level // 5  # the average of five equal charges
    admit(s, 0, "b", flow=1)
    assert vtc(s, 0, 1) == vtc(new, 0, 1)
