"""Tests runs of a cluster: seeds hold, one seed is one run, and each fault happens."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from schedsvc.cli import main
from schedsvc_lab.faults import cli
from schedsvc_lab.faults.cluster.options import draw_cluster
from schedsvc_lab.faults.cluster_options import (
    CLUSTER,
    CLUSTER_ENDED,
    CLUSTER_FAULTS,
    CLUSTER_REFUSES,
    CLUSTER_SETS,
    ENDED,
    REFUSING,
    SETS,
    STRICT,
)
from schedsvc_lab.faults.run import Case, Tally, run_case, run_cases


def held(first: int, count: int) -> Tally:
    tally = Tally()
    for _ in run_cases((Case(seed) for seed in range(first, first + count)), tally):
        pass
    assert tally.failures == []
    return tally


def test_seeds_hold() -> None:
    assert held(CLUSTER, 2).events > 2 * 2_000


def test_seeds_with_ends_and_other_sets_hold() -> None:
    faults = held(STRICT, 3).faults
    assert min(faults[CLUSTER_ENDED], faults[CLUSTER_SETS]) > 0


def test_seeds_whose_store_refuses_writes_hold() -> None:
    assert held(REFUSING, 3).faults[CLUSTER_REFUSES] > 0


def test_a_flushed_store_grants_no_bucket_more() -> None:
    """If nothing else happens, all that was drawn is known to its members."""
    tally = Tally()
    seeds = range(REFUSING, REFUSING + 3)
    for _ in run_cases((Case(s, only=frozenset({"store-flushed"})) for s in seeds), tally):
        pass
    assert tally.failures == []
    assert tally.faults["store-flushed"] > 50


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_many_seeds_hold_and_every_fault_happens() -> None:
    tally = held(REFUSING, 60)
    assert {name for name in CLUSTER_FAULTS if not tally.faults[name]} == set()


def test_options_differ() -> None:
    drawn = [draw_cluster(CLUSTER + seed, 2_000, None) for seed in range(200)]
    assert {len(options.members) for options in drawn} == {2, 3, 4, 5}
    assert {options.outage for options in drawn} == {"share", "hold"}
    assert 50 < sum(options.has_quotas for options in drawn) < 150
    assert draw_cluster(CLUSTER, 2_000, frozenset({"store-killed", "burst"})).faults == {
        "store-killed"
    }


def test_only_later_seeds_draw_an_end() -> None:
    drawn = [draw_cluster(ENDED + seed, 2_000, None) for seed in range(200)]
    assert 80 < sum(CLUSTER_ENDED in options.faults for options in drawn) < 160
    before = [draw_cluster(CLUSTER + seed, 2_000, None) for seed in range(200)]
    assert not any(CLUSTER_ENDED in options.faults for options in before)
    assert not any(CLUSTER_SETS in options.faults for options in before + drawn)
    strict = [draw_cluster(STRICT + seed, 2_000, None) for seed in range(200)]
    assert not any(CLUSTER_REFUSES in options.faults for options in before + drawn + strict)
    refusing = [draw_cluster(REFUSING + seed, 2_000, None) for seed in range(200)]
    assert 80 < sum(CLUSTER_REFUSES in options.faults for options in refusing) < 160
    with_sets = [draw_cluster(SETS + seed, 2_000, None) for seed in range(200)]
    assert 80 < sum(CLUSTER_SETS in options.faults for options in with_sets) < 160
    assert {options.dispatch for options in with_sets} == {"backfill"}


def test_books_on_shares_are_kept_where_nothing_passes() -> None:
    drawn = [draw_cluster(STRICT + seed, 2_000, None) for seed in range(200)]
    assert {(options.is_set, options.dispatch) for options in drawn} == {
        (True, "backfill"),
        (False, "strict"),
    }


@pytest.mark.parametrize(("seed", "events"), [(CLUSTER + 3, 500), (CLUSTER + 7, 2_000)])
def test_one_seed_is_one_run(seed: int, events: int) -> None:
    """The second run is one of a set: its leader hands over while requests wait."""
    first, second = run_case(Case(seed, events)), run_case(Case(seed, events))
    assert first == second
    assert first.digest != run_case(Case(seed + 1, events)).digest


def test_the_command_counts_from_the_first_and_goes_on(tmp_path: Path) -> None:
    file = str(tmp_path / "totals.json")
    command = ["simtest", "--cluster", "--seed", "5", "--totals", file, "--json", "--seeds"]
    result = CliRunner().invoke(main, [*command, "1"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["first_seed"] == CLUSTER + 5
    assert json.loads(Path(file).read_text())["next_seed"] == CLUSTER + 6
    report = json.loads(CliRunner().invoke(main, [*command, "2"]).stdout)
    assert (report["seeds"], report["violations"]) == (2, 0)


def test_the_command_names_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "lupa" else name)
    result = CliRunner().invoke(main, ["simtest", "--cluster", "--seeds", "1"])
    assert result.exit_code == 2
    assert "needs the package lupa: pip install 'schedsvc-lab[cluster]'" in result.output


def test_cluster_goes_with_seeds_only() -> None:
    result = CliRunner().invoke(main, ["simtest", "--cluster", "--regressions"])
    assert result.exit_code == 2
    assert "--regressions cannot be given with --cluster" in result.output
