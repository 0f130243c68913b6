"""Tests the loops in C around the core: compiled as the core is, and deciding as it does."""

from pathlib import Path
from typing import Any

import pytest

from bench import inside
from bench.cores import Overload, Picks, Running
from bench.messages import INPUT_TOKENS, OUTPUT_TOKENS, OUTPUT_TOKENS_MAX, tenant
from bench.scan import DictScan
from schedsvc._core import Scheduler

from .test_ladder import measure

# It takes a minute to compile, once for all.
slow, alone = pytest.mark.slow, pytest.mark.alone


@pytest.fixture(scope="module")
def core() -> Any:
    return inside.load()


@slow
@alone
def test_decisions_in_c_equal_those_from_python(core: Any) -> None:
    usual, timed = (
        Overload(flows=50, queued=200, scheduler=scheduler)
        for scheduler in (Scheduler, core.Scheduler)
    )
    for world in (usual, timed):
        world.end_one()
    asks = [usual.next_ask() for _ in range(300)]
    assert asks == [timed.next_ask() for _ in range(300)]
    for now_ns, flow, request_id in asks:
        usual.core.admit(now_ns, flow, request_id, INPUT_TOKENS, OUTPUT_TOKENS_MAX)
        usual.core.poll(now_ns)
    took_ns = core.time_asks(timed.core, asks, INPUT_TOKENS, OUTPUT_TOKENS_MAX)
    assert len(took_ns) == 300
    assert min(took_ns) >= 0
    # The digest shows a queued request once it is granted.
    digests = []
    for world in (usual, timed):
        for _ in range(450):
            world.end_one()
        digests.append(world.core.digest())
        world.core.check()
    assert digests[0] == digests[1]


@slow
@alone
def test_pairs_in_c_are_decided_as_from_python(core: Any) -> None:
    usual, timed = (
        Running(flows=50, answers=10, scheduler=scheduler)
        for scheduler in (Scheduler, core.Scheduler)
    )
    asks = [usual.next_ask() for _ in range(300)]
    for ask in asks:
        usual.pair(*ask)
    core.time_asks(timed.core, asks, INPUT_TOKENS, OUTPUT_TOKENS_MAX, OUTPUT_TOKENS)
    assert timed.core.digest() == usual.core.digest()
    timed.core.check()


@slow
@alone
def test_a_pair_that_is_not_granted_is_an_error(core: Any) -> None:
    world = Overload(flows=5, queued=10, scheduler=core.Scheduler)
    with pytest.raises(ValueError, match="asks: one of them was not granted"):
        core.time_asks(world.core, [world.next_ask()], INPUT_TOKENS, OUTPUT_TOKENS_MAX, 1)


@slow
@alone
def test_it_picks_as_the_scan_does(core: Any) -> None:
    flows = 100
    world = Picks(flows, core.Scheduler)
    scan = DictScan([tenant(flow) for flow in range(flows)], INPUT_TOKENS)
    for _ in range(Picks.AT_ONCE):  # granted before
        scan.pick()
    # Among equal counters, the core serves in order of arrival, the scan in order of the dict.
    for picks in (flows - Picks.AT_ONCE, *(flows,) * 9):
        picked = [tenant(flow) for flow in core.pick(world.core, picks, INPUT_TOKENS)]
        assert sorted(picked) == sorted(scan.pick() for _ in range(picks))
        assert len(set(picked)) == picks


@slow
@alone
def test_its_rungs_are_measured(core: Any, tmp_path: Path) -> None:
    report = measure(tmp_path / "out", "--only=inside")
    assert {rung["name"] for rung in report["rungs"]} == {
        "inside.admit",
        "inside.pair",
        "inside.pick",
    }
    for rung in report["rungs"]:
        assert rung["median_ns"] > 0
        assert (rung["digest"] is None) == (rung["name"] == "inside.pick")
        assert (rung["p99_ns"] or rung["ratio"]) > 1
    assert {rung["name"] for rung in report["rungs"] if rung["target"]} == {"inside.pair"}
