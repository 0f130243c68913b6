"""Runs shards in virtual time: fair over both shards of a tenant, also after an outage."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from bench.virtual_shards.__main__ import main
from bench.virtual_shards.bars import bars
from bench.virtual_shards.fair import fair_parts
from bench.virtual_shards.measures import measure
from bench.virtual_shards.plan import Plan
from bench.virtual_shards.world import World, store_cost_ns
from schedsvc.cluster.member import Member

PLAN = Plan(members=5, tenants=1_000, active=250, rate=80, seconds=90)
SMALL = [
    *("--members", "5", "--tenants", "1000", "--active", "250"),
    *("--rate", "80", "--seconds", "90"),
]


def run(plan: Plan) -> dict[str, Any]:
    world = World(plan)
    world.run()
    return measure(world)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """Return the command's result, and its folder."""
    out = tmp_path_factory.mktemp("shards") / "out"
    return CliRunner().invoke(main, [*SMALL, "--json", "--out", str(out)]), out


@pytest.fixture
def found(done: tuple[Result, Path]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((done[1] / "result.json").read_text())
    return read


def test_small_fleet_reaches_every_bar(found: dict[str, Any]) -> None:
    assert [name for name, *_, holds in bars(found) if not holds] == []
    assert found["holds"]
    assert all(outage["catch_up_s"] <= 20 for outage in found["outages"])


def test_tenants_with_little_demand_at_a_shard_get_their_part(found: dict[str, Any]) -> None:
    apart, shared = found["apart"]["all"], found["all"]
    assert apart["thin"] < 0.8 < 1.1 < apart["full"]
    assert shared["thin"] == pytest.approx(1.0, abs=0.01)
    assert shared["full"] == pytest.approx(1.0, abs=0.01)
    assert shared["error_p99"] < apart["error_p99"] / 5


def test_outages_show_and_are_repaid(found: dict[str, Any]) -> None:
    series = found["series"]
    thin = dict(zip(series["at_s"], series["thin"], strict=True))
    for outage in found["outages"]:
        assert outage["unsynced_s"] > 9
        from_s, until_s = int(outage["from_s"]), int(outage["until_s"])
        assert min(thin[at] for at in range(from_s, until_s + 1)) < 0.9
        assert max(thin[at] for at in range(until_s, until_s + 15)) > 1.05


def test_store_load_is_what_the_members_exchanged(found: dict[str, Any]) -> None:
    store = found["store"]
    # Five members with an exchange of at most 200 totals every 0.25 s, and one call for quotas.
    assert 5 * 4 < store["calls_per_s"] < 5 * 7
    assert 100 < store["totals_per_s"] < 5 * 4 * 200
    assert store["totals_per_s_peak"] > 2 * store["totals_per_s"]  # all were sent again
    least = store["totals_per_s"] * 9e-6
    assert least < store["core"] < least + store["calls_per_s"] * 100e-6


def test_equal_seeds_give_equal_results(found: dict[str, Any]) -> None:
    again = run(PLAN)
    assert all(again[name] == found[name] for name in again)
    world = World(replace(PLAN, seed=2, stop_s=20))
    world.run()
    other = World(replace(PLAN, stop_s=20))
    other.run()
    assert world.digest != other.digest


def test_growth_that_is_not_charged_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Member, "_charge", lambda self, grown: None)
    found = run(PLAN) | {"memory_mb": 0, "wall_minutes": 0}
    missed = [name for name, *_, holds in bars(found) if not holds]
    assert "share error of a kind of tenants" in missed
    assert "share error of the run, median" in missed
    assert found["all"]["thin"] < 0.8


def parts(*rows: tuple[int, int, float | None, float], served: list[float]) -> list[float]:
    """Fair parts of tenants: both shards, what it asks of the second at most, weight."""
    first, second, caps, weights = (np.array(column) for column in zip(*rows, strict=True))
    thin = np.array([cap is not None for cap in caps])
    cap = np.array([cap or 0.0 for cap in caps], float)
    found = fair_parts(first, second, thin, weights.astype(float), cap, np.array(served))
    return [round(float(part), 3) for part in found]


def test_fair_parts_follow_weights_over_all_shards() -> None:
    ring = ((0, 1, None, 1.0), (1, 2, None, 2.0), (2, 0, None, 1.0))
    assert parts(*ring, served=[4.0, 4.0, 4.0]) == [3.0, 6.0, 3.0]


def test_fair_parts_are_bounded_by_the_shards() -> None:
    # Only the first tenant reaches the large shard; it leaves the others theirs.
    chain = ((0, 1, None, 1.0), (1, 2, None, 1.0), (2, 1, None, 1.0))
    assert parts(*chain, served=[10.0, 2.0, 2.0]) == [10.0, 2.0, 2.0]


def test_fair_parts_are_bounded_by_little_demand() -> None:
    # Its first shard is the only one that others want too, and it asks for little of the second.
    rows = ((0, 1, 1.0, 1.0), (0, 2, None, 1.0), (1, 2, None, 1.0))
    assert parts(*rows, served=[2.0, 9.0, 9.0]) == [3.0, 8.5, 8.5]


def test_store_takes_time_for_calls_and_totals() -> None:
    none = ("FCALL", "schedsvc_sync", 7, *["key"] * 7, *["word"] * 9)
    assert store_cost_ns(none, 16) == pytest.approx(88_000, rel=0.02)
    assert store_cost_ns(none, 100) == pytest.approx(375_000, rel=0.02)
    assert store_cost_ns((*none, *["row", "totals"] * 200), 100) == pytest.approx(2_175_000, 0.01)
    assert store_cost_ns(("INFO",), 100) < 50_000


def test_command_prints_result_and_draws_it(
    done: tuple[Result, Path], found: dict[str, Any]
) -> None:
    result, out = done
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["all"] == found["all"]
    assert len(found["series"]["core"]) == 90
    assert (out / "virtual_shards.png").read_bytes().startswith(b"\x89PNG")
    assert "90 of 90 virtual seconds" in result.stderr


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--tenants", "100", "--active", "200"], "--active 200 is more than --tenants 100"),
        (["--active", "99"], "--active 99 leaves shards without queues"),
        (["--rate", "2"], "--rate 2 leaves too little for active tenants"),
    ],
)
def test_plans_that_cannot_be_measured_are_refused(options: list[str], problem: str) -> None:
    done = CliRunner().invoke(main, [*SMALL, *options])
    assert done.exit_code == 2
    assert problem in done.output
