"""Tests the auditor's peak form: the least and the greatest load, and grants held to it."""

from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from schedsvc_lab.faults.auditor import ViolationError
from schedsvc_lab.faults.auditor.classes import ClassOrder
from schedsvc_lab.faults.auditor.peak import Run, greatest_load, least_load, peak_of
from schedsvc_lab.faults.auditor.records import PriorityClass
from tests.lab.faults.test_auditor import Desk, S
from tests.seeds import fresh


def step_by_step(runs: list[Run]) -> int:
    """Return the same peak, by letting every sequence make one token after the other."""
    most = 0
    for step in range(1 + max((run.left for run in runs), default=0)):
        load = sum(run.held for run in runs if not run.width)
        load += sum(run.held + run.width * step for run in runs if run.width and run.left >= step)
        most = max(most, load)
    return most


@pytest.mark.parametrize("seed", fresh(30))
def test_the_peak_is_that_of_every_single_step(seed: int) -> None:
    rnd = Random(seed)
    runs = [
        Run(rnd.randrange(20), rnd.randrange(50), rnd.choice((0, 1, 1, 4)))
        for _ in range(rnd.randrange(8))
    ]
    assert peak_of(runs) == step_by_step(runs)


def granted(desk: Desk, *sizes: tuple[int, int]) -> None:
    """Grant requests of such prompts and outputs, each reserved in full."""
    for number, (prompt, output) in enumerate(sizes, 1):
        tag = desk.ask(0, f"r{number}", prompt, output=output)
        desk.grant(0, tag, number, tokens=prompt + output)
    desk.auditor.settled(0)


def by_peak(**terms: bool) -> Desk:
    return Desk(sum_form=False, **({"reports": True} | terms))


def test_early_end_leaves_room_for_other_leases() -> None:
    granted(by_peak(), (10, 60), (50, 1))  # 62 tokens when the second ends, 70 in the end
    with pytest.raises(ViolationError, match="above the capacity"):
        granted(Desk(reports=True), (10, 60), (50, 1))  # 121 in the sum form


def test_joint_growth_is_too_much() -> None:
    granted(by_peak(), (10, 30), (10, 30))
    with pytest.raises(ViolationError, match="above the capacity: p, 120, 100"):
        granted(by_peak(), (10, 30), (10, 30), (10, 30))


def test_lease_of_a_silent_shim_counts_in_full() -> None:
    with pytest.raises(ViolationError, match="above the capacity: p, 121, 100"):
        granted(by_peak(reports=False), (10, 60), (50, 1))


def test_suspect_lease_counts_in_full() -> None:
    desk = by_peak()
    granted(desk, (10, 60))
    desk.auditor.settled(2 * S)
    tag = desk.ask(2 * S + 1, "late", 50, output=1)
    desk.grant(2 * S + 1, tag, 9, tokens=51)
    with pytest.raises(ViolationError, match="above the capacity: p, 121, 100"):
        desk.auditor.settled(2 * S + 1)


def test_between_the_least_and_the_greatest_lies_what_a_block_hides() -> None:
    desk = by_peak()
    granted(desk, (10, 30))
    pool = desk.auditor.books.pools["p"]
    assert least_load(pool, -1) == greatest_load(pool, -1) == 40
    pool.block = 16  # with 3 blocks, one sequence may use 33 to 48 tokens
    lease = pool.leases[1]
    lease.low, lease.high, lease.reserved_tokens, lease.told = 3, 3, 48, None
    lease.request.max_output_tokens = 100
    assert least_load(pool, -1) == 10 + 23
    assert greatest_load(pool, -1) == 10 + 15 + 38
    lease.request.max_output_tokens, lease.told = 30, None
    assert greatest_load(pool, -1) == 10 + 15 + 30
    assert greatest_load(pool, 0) == 48  # it may be suspect by now


def waits(name: str, rank: int, seq: int) -> Any:
    """Stand for a request that waits for any pool."""
    return SimpleNamespace(
        cls=PriorityClass(name=name, rank=rank, ageing_ns=2 * S, exempt=False),
        ask=SimpleNamespace(),
        target=(),
        seq=seq,
        due_ns=100 * S,
        withdrawn=False,
        lease=SimpleNamespace(lease_id=1),
    )


@pytest.mark.parametrize(
    ("lags", "waited_s", "holds"),
    [(False, 1, False), (False, 2, True), (True, 1, True)],
)
def test_ageing_is_held_to_what_is_known(lags: bool, waited_s: int, holds: bool) -> None:
    """The served requests, and the waits of others, are unknown while a stream does not read."""
    order = ClassOrder(cast("Any", SimpleNamespace(strict_classes=True, has_sessions=False)))
    better, worse = waits("default", 0, 1), waits("batch", 1, 2)
    books: Any = SimpleNamespace(lagging=set(), fresh=[], seq=2)
    books.queues = {("a", ""): {1: better}, ("b", ""): {2: worse}}
    order.settle(0, books)
    if lags:
        books.lagging = {1}
        order.settle(S // 2, books)
    books.lagging, books.fresh = set(), [worse]
    books.queues = {("a", ""): {1: better}}
    if holds:
        order.settle(waited_s * S, books)
    else:
        with pytest.raises(ViolationError, match="granted before a better class"):
            order.settle(waited_s * S, books)
