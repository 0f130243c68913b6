"""Tests the fault simulator: seeds hold, one seed is one run, and its command reports it."""

import json
from random import Random

import pytest
from click.testing import CliRunner

from schedsvc.cli import main
from schedsvc_lab.faults import cli, run
from schedsvc_lab.faults.auditor import CREDIT_AUTO, LEAD_AUTO
from schedsvc_lab.faults.cluster_options import CLUSTER_FAULTS
from schedsvc_lab.faults.disk import Disk, fields
from schedsvc_lab.faults.event_queue import EventQueue
from schedsvc_lab.faults.hostile_options import CLOSING_FAULTS, HOSTILE_FAULTS
from schedsvc_lab.faults.leaver_options import LEAVER_FAULTS
from schedsvc_lab.faults.marathon import run_marathon
from schedsvc_lab.faults.options import (
    FAULTS,
    FIFTH,
    NEWEST,
    OPERATOR_FAULTS,
    SIXTH,
    STATE_FAULTS,
    draw,
)
from schedsvc_lab.faults.phases import Outcome
from schedsvc_lab.faults.run import Case, Tally, run_case, run_cases, shrink
from tests.core.encoding import message
from tests.core.support import make


def test_seeds_hold_and_every_fault_happens() -> None:
    tally = Tally()
    for _ in run_cases((Case(seed) for seed in range(16)), tally):
        pass
    assert tally.failures == []
    assert tally.seeds == 16
    assert tally.events > 16 * 2_000
    missing = {name for name, times in tally.faults.items() if not times}
    later = (STATE_FAULTS, OPERATOR_FAULTS, LEAVER_FAULTS, HOSTILE_FAULTS, CLOSING_FAULTS)
    assert missing == set().union(*later, CLUSTER_FAULTS)


def test_seeds_with_quotas_hold() -> None:
    first = 1 << 22
    seeds = range(first, first + 10)
    assert sum(draw(seed, 2_000).quotas is not None for seed in seeds) > 1
    tally = Tally()
    for _ in run_cases((Case(seed) for seed in seeds), tally):
        pass
    assert tally.failures == []


def test_seeds_with_state_classes_limits_and_adapters_hold() -> None:
    first = 1 << 23
    drawn = [draw(seed, 2_000) for seed in range(first, first + 100)]
    for what in ("state", "classes", "limits", "adapters", "quotas"):
        assert sum(getattr(options, what) is not None for options in drawn) > 5, what
    assert any(q.tenants and max(t.share for t in q.tenants.values()) for o in drawn
        if (q := o.quotas) is not None)  # fmt: skip
    tally = Tally()
    cases = [Case(seed) for seed in range(first, first + 8)]
    kept = [seed for seed in range(first, first + 40) if draw(seed, 2_000).state]
    cases += [Case(seed, only=frozenset(STATE_FAULTS)) for seed in kept[:5]]
    for _ in run_cases(cases, tally):
        pass
    assert tally.failures == []
    assert all(tally.faults[name] for name in STATE_FAULTS)


def test_a_disk_loses_writes_and_fails() -> None:
    disk = Disk()
    one, two = {b"k": (b"k", b"1", 0)}, {b"k": (b"k", b"2", 0), b"m": (b"m", b"3", 0)}
    assert disk.write(one, "first", is_first=True)
    assert disk.write(two, "second", is_first=False)
    disk.is_full = True
    assert not disk.write({}, "third", is_first=True)
    assert (disk.rows, disk.known) == (two, "second")
    disk.lose(1)
    assert (disk.rows, disk.known) == (one, "first")
    disk.lose(9)
    assert (disk.rows, disk.known) == ({}, None)


def test_fields_of_a_row_have_no_order() -> None:
    assert fields(b"\x08\x80\x01\x12\x02ab\x12\x01c") == fields(b"\x12\x01c\x08\x80\x01\x12\x02ab")
    assert fields(b"\x08\x01") != fields(b"\x08\x02")
    assert fields(b"\x2a\x02\x08\x07\x08\x01") == fields(b"\x08\x01")  # a lift


def test_seeds_with_deadlines_and_early_refusal_hold() -> None:
    seeds = range(1 << 24, (1 << 24) + 12)
    assert sum(draw(seed, 2_000).core.get("early_refusal", 0) for seed in seeds) >= 3
    tally = Tally()
    for _ in run_cases((Case(seed) for seed in seeds), tally):
        pass
    assert tally.failures == []


def test_seeds_with_an_operator_order_by_deadline_and_prefixes_hold() -> None:
    drawn = {seed: draw(seed, 2_000) for seed in range(NEWEST, NEWEST + 100)}
    assert sum("lease-revoked" in options.faults for options in drawn.values()) > 20
    by_deadline = [s for s, o in drawn.items() if o.core.get("flow_order") == "deadline"]
    by_prefix = [s for s, o in drawn.items() if o.core["policy"] == "dlpm"]
    kept = [s for s, o in drawn.items() if o.state is not None]
    alike = [s for s, o in drawn.items() if o.alike]
    assert len(alike) > 10
    assert min(len(by_deadline), len(by_prefix), len(kept)) > 5
    tally = Tally()
    cases = [Case(seed) for seed in range(NEWEST, NEWEST + 5)]
    cases += [Case(seed) for seed in (*by_deadline[:2], *by_prefix[:2])]
    only = frozenset(OPERATOR_FAULTS) | {"scheduler-restarted"}
    cases += [Case(seed, only=only) for seed in kept[:4]]
    for _ in run_cases(cases, tally):
        pass
    assert tally.failures == []
    assert all(tally.faults[name] for name in OPERATOR_FAULTS)


def test_older_seeds_draw_nothing_newer() -> None:
    for seed in (0, 1 << 22, 1 << 23, 1 << 24, FIFTH - 1):
        options = draw(seed, 2_000)
        assert not options.faults & (set(OPERATOR_FAULTS) | set(HOSTILE_FAULTS))
        assert options.hostile is None
        assert not options.prefixes
        assert "flow_order" not in options.core
    assert not any(draw(seed, 2_000).core["credit_max_micro"] for seed in (0, FIFTH, SIXTH - 1))


def test_newest_seeds_draw_the_credit() -> None:
    drawn = [draw(seed, 2_000).core for seed in range(NEWEST, NEWEST + 200)]
    credits = [core["credit_max_micro"] for core in drawn]
    assert min(credits.count(CREDIT_AUTO), credits.count(0), sum(c > 0 for c in credits)) > 20


def test_newest_seeds_compare_service_in_several_pools() -> None:
    drawn = {seed: draw(seed, 2_000) for seed in range(NEWEST, NEWEST + 200)}
    several = [seed for seed, o in drawn.items() if o.fair and len(o.pools) > 1]
    assert len(several) > 15
    assert all(drawn[seed].core["lead_max_micro"] >= 0 for seed in several)
    assert any(o.core.get("lead_max_micro") == LEAD_AUTO for o in drawn.values())
    assert {o.core.get("fairness_domain", 1) for o in drawn.values()} == {0, 1, 2}
    tally = Tally()
    for _ in run_cases((Case(seed) for seed in several[:4]), tally):
        pass
    assert tally.failures == []


def test_seeds_that_failed_once_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only some are run here: `make test-faults` runs all."""
    kept = cli._regressions()
    assert len(kept) >= 14
    monkeypatch.setattr(cli, "_regressions", lambda: kept[-2:])
    result = CliRunner().invoke(main, ["simtest", "--regressions", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["seeds"] == 2


def test_one_seed_is_one_run() -> None:
    first, second = run_case(Case(7)), run_case(Case(7))
    assert first == second
    assert first != run_case(Case(8))
    assert draw(7, 2_000) == draw(7, 2_000)


def test_only_the_faults_that_are_asked_for_happen() -> None:
    asked = frozenset({"stream-cut", "admit-twice"})
    faults = run_case(Case(3, 3_000, asked)).faults
    assert {name for name, times in faults.items() if times} - {"message-reordered"} == asked


def test_without_faults_nothing_goes_wrong() -> None:
    for seed in range(5):
        assert run_case(Case(seed, 1_000, frozenset())).violation == ""


def test_the_agenda_keeps_order() -> None:
    event_queue, seen = EventQueue(Random(1)), []
    for time_ns, name in ((5, "c"), (3, "a"), (3, "b")):
        event_queue.at(time_ns, seen.append, name)
    event_queue.at(4, lambda _: event_queue.after(1, seen.append, "d"))
    while event_queue.step():
        pass
    assert seen == ["a", "b", "c", "d"]
    assert event_queue.now_ns == 5
    assert event_queue.events == 5


def broken(case: Case) -> Outcome:
    """Return a wrong core: 300 events and one kind of fault show it."""
    faults = draw(case.seed, case.events, case.only).faults
    fails = case.events >= 300 and "stream-cut" in faults
    return Outcome(case.events, "a promise: 1, 2" if fails else "", dict.fromkeys(FAULTS, 1), 0)


def test_a_failing_seed_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run_case", broken)
    seed = next(s for s in range(50) if "stream-cut" in draw(s, 2_000).faults)
    small = shrink(Case(seed), "a promise: 7, 8")
    assert small == Case(seed, 500, frozenset({"stream-cut"}))
    assert small.command() == f"schedsvc simtest --seed {seed} --events 500 --only stream-cut"
    assert Case(4, 2_000, frozenset()).command() == "schedsvc simtest --seed 4 --only none"


def test_a_broken_promise_is_shown_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run_case", broken)
    result = CliRunner().invoke(main, ["simtest", "--seeds", "40", "--json"])
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["violations"] == len(report["failures"]) == 5
    assert report["failures"][0]["violation"] == "a promise: 1, 2"
    assert "--only stream-cut" in report["failures"][0]["reproduce"]
    shown = CliRunner().invoke(main, ["simtest", "--seeds", "40"]).stdout
    assert "a promise: 1, 2" in shown
    assert "schedsvc simtest --seed" in shown


def test_the_report_has_its_keys() -> None:
    result = CliRunner().invoke(main, ["simtest", "--seed", "5", "--seeds", "2", "--json"])
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert {"seeds", "events", "violations", "events_per_s"} <= set(report)
    assert (report["seeds"], report["violations"], report["first_seed"]) == (2, 0, 5)
    assert set(report["faults"]) == set(FAULTS)


def test_minutes_begin_at_a_fresh_seed() -> None:
    reports = [
        json.loads(CliRunner().invoke(main, ["simtest", "--minutes", "0.003", "--json"]).stdout)
        for _ in range(2)
    ]
    assert reports[0]["first_seed"] != reports[1]["first_seed"]
    assert all(report["seeds"] >= 1 for report in reports)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "give --seed N"),
        (["--seed", "-1"], "--seed"),
        (["--minutes", "0"], "--minutes"),
        (["--seed", "1", "--only", "stream-cut,nonsense"], "unknown: nonsense"),
        (["--regressions", "--seed", "1"], "cannot be given with"),
        (["--regressions", "--marathon", "1"], "cannot be given with"),
        (["--marathon", "5", "--minutes", "1"], "--marathon cannot be given with"),
        (["--seed", "1", "--events", "0"], "--events"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(main, ["simtest", *arguments])
    assert result.exit_code == 2
    assert complaint in result.output


def test_the_faults_are_listed() -> None:
    result = CliRunner().invoke(main, ["simtest", "--faults"])
    assert result.exit_code == 0
    assert all(name in result.output for name in FAULTS)


def test_nothing_is_left_of_a_marathon() -> None:
    found = run_marathon(30_000, seed=3)
    assert (found.promised_tokens, found.live_leases, found.queued) == (0, 0, 0)
    assert found.cancelled == pytest.approx(0.20 * 30_000, rel=0.05)
    assert found.lost == pytest.approx(0.05 * 0.80 * 30_000, rel=0.15)
    assert found.expired == found.lost
    assert found.completed + found.cancelled + found.expired + found.refused == 30_000
    result = CliRunner().invoke(main, ["simtest", "--marathon", "2000", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["promised_tokens"] == 0
    assert "0 tokens promised" in CliRunner().invoke(main, ["simtest", "--marathon", "500"]).stdout


def owing(tokens: int, open_output: int = 0) -> bytes:
    """Return the row of a quota of 500 output tokens a minute that owes `tokens`."""
    level = 2 * tokens * 10**6 - 1  # zigzag of a negative number
    bucket = message([(1, 0, 2), (2, 0, 500), (3, 0, level)])
    return message([(1, 2, bucket)] + [(4, 0, open_output)] * bool(open_output))


@pytest.mark.parametrize(
    ("open_output", "limit", "left"), [(0, 500, 1_000), (300, 500, 1_300), (0, 400, 400)]
)
def test_restart_believes_two_minutes_of_a_debt(open_output: int, limit: int, left: int) -> None:
    core = make(capacity=1_000)
    core.set_flow_quota(0, 0, output_tokens=limit)
    core.set_saved(0, [(b"tf", owing(1_000_000, open_output), 0)])
    after = dict(core.save(0, 1_000))[b"tf"]
    if limit == 500:
        assert fields(owing(1_000_000, open_output), quota=True) == fields(after, quota=True)
        assert fields(owing(900, open_output), quota=True) != fields(after, quota=True)
    [row] = core.flow_stats(0, 0)["quotas"]
    assert row["reset_ms"] == -(-(left + limit) * 60_000 // limit)
