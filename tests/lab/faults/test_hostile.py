"""Tests a principal that acts against all others: its seeds pass, and each check can fail."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.cli import main
from schedsvc_lab.faults.auditor import NO_TREE, Tree, ViolationError
from schedsvc_lab.faults.auditor.records import Grants
from schedsvc_lab.faults.auditor.reference_state import Auditor
from schedsvc_lab.faults.auditor.shares import Rows, Shares
from schedsvc_lab.faults.duel import duel_options, parts_of
from schedsvc_lab.faults.hostile_options import HOSTILE, HOSTILE_FAULTS, HOSTILE_TREES, TENANT
from schedsvc_lab.faults.options import ALIVE, draw
from schedsvc_lab.faults.run import Case, Tally, run_cases

from .test_auditor import TERMS, Desk

MAL = 9
HELD = replace(
    TERMS, grants=Grants(MAL, ("mal-*",), ("mal",), 250_000), sessions_max=4, leases_max=4
)


def test_hostile_seeds_hold_and_every_act_happens() -> None:
    tally = Tally()
    for _ in run_cases((Case(seed) for seed in range(HOSTILE, HOSTILE + 12)), tally):
        pass
    assert tally.failures == []
    assert {name for name in HOSTILE_FAULTS if not tally.faults[name]} == set()


def test_sessions_beyond_the_share_are_found() -> None:
    shares = Shares(HELD)
    shares.opened(1, MAL)
    shares.opened(2, 0)
    with pytest.raises(ViolationError, match="more sessions than its share"):
        shares.opened(3, MAL)


def test_session_refused_within_the_share_is_found() -> None:
    shares = Shares(HELD)
    for principal in (0, MAL):
        with pytest.raises(ViolationError, match="refused within the share"):
            shares.refused(principal)
    shares.opened(1, MAL)
    shares.refused(MAL)


POOL = {
    "name": "p", "epoch": 1, "capacity_tokens": 1, "block_size_tokens": 1, "max_running": 0,
    "attached": True, "draining": False, "engine_running": 0, "engine_waiting": 0,
    "engine_used_tokens": 0, "engine_preemptions": 0,
}  # fmt: skip
LEASE = {"lease_id": 7, "principal": 0, "pool": "p", "state": 2}


@pytest.mark.parametrize(
    ("after", "what"),
    [
        (Rows({"flows": [], "pools": [POOL]}, []), "a lease of another"),
        (Rows({"flows": [], "pools": [POOL]}, [{**LEASE, "state": 3}]), "a lease of another"),
        (Rows({"flows": [], "pools": [{**POOL, "epoch": 2}]}, [LEASE]), "a pool of another"),
        (Rows({"flows": [], "pools": []}, [LEASE]), "a pool of another"),
    ],
)
def test_changed_row_of_another_principal_is_found(after: Rows, what: str) -> None:
    auditor = Auditor(HELD)
    before = Rows({"flows": [], "pools": [POOL]}, [LEASE])
    auditor.unchanged(before, before)
    with pytest.raises(ViolationError, match=what):
        auditor.unchanged(before, after)


@pytest.mark.parametrize("pattern", ["*", "mal-*"])
def test_refusal_of_a_pool_without_owner_names_who_may_offer_it(pattern: str) -> None:
    auditor = Auditor(replace(HELD, grants=Grants(MAL, (pattern,), ("mal",), 250_000)))
    auditor.drain("p", draining=True)
    report = pb.SessionEvent(telemetry=pool_pb2.EngineTelemetry(pool="p"))
    auditor.request(0, 1, MAL, pb.SessionRequest(seq=1, events=[report]).SerializeToString())
    if pattern == "*":
        auditor.settled(0)
        return
    with pytest.raises(ViolationError, match="wrong event was not reported"):
        auditor.settled(0)


@pytest.mark.parametrize(
    ("lease_id", "lags", "drawn", "told_ns", "is_found"),
    [
        (11, True, False, 0, False),
        (13, True, False, 0, False),
        (14, True, False, 0, True),  # three grants after 10 end at 13
        (11, False, False, 0, True),
        (11, True, True, 0, True),  # no caller can guess a drawn id
        (11, True, False, 1, True),  # it was live before
    ],
)
def test_replay_under_the_id_of_an_unread_grant(
    lease_id: int, lags: bool, drawn: bool, told_ns: int, is_found: bool
) -> None:
    desk = Desk(ids_tell_order=not drawn)
    desk.grant(0, desk.ask(0, "known"), 10)
    admits = []
    for tag in (1, 2, 3):
        ask = pb.AdmitRequest(
            request_id=f"r{tag}", tenant="b", input_tokens=[10], max_output_tokens=10
        )
        admits.append(pb.SessionEvent(admit=pb.SessionAdmit(tag=tag, request=ask)))
    desk.auditor.request(0, 2, 0, pb.SessionRequest(seq=1, events=admits).SerializeToString())
    if lags:
        desk.auditor.books.lagging.add(2)
    replay = pb.LeaseReplay(
        lease_id=lease_id, request_id="x", tenant="a", pool="p", pool_epoch=1,
        reserved_tokens=20, prompt_tokens=10, max_output_tokens=10, sequences=1,
    )  # fmt: skip
    desk.say(0, replay=replay)
    unknown = [pb.LeaseStatus(lease_id=lease_id, state=pb.LEASE_STATE_UNKNOWN)]
    if is_found:
        with pytest.raises(ViolationError, match="a live lease was called otherwise"):
            desk.hear(told_ns, leases=unknown)
    else:
        desk.hear(told_ns, leases=unknown)
    assert desk.auditor.is_asleep is not is_found


def test_totals_of_a_run_go_on_in_the_next_command(tmp_path: Path) -> None:
    def run(seeds: int, seed: int = HOSTILE) -> tuple[int, str]:
        file = str(tmp_path / "totals.json")
        words = ["simtest", "--seed", str(seed), "--seeds", str(seeds), "--events", "200"]
        result = CliRunner().invoke(main, [*words, "--totals", file, "--json"])
        return result.exit_code, result.stdout or result.output

    first, whole = json.loads(run(2)[1]), json.loads(run(5)[1])
    assert (first["seeds"], whole["seeds"]) == (2, 5)
    assert whole["events"] > first["events"]
    assert json.loads(run(5)[1])["events"] == whole["events"]  # nothing is left to do
    code, told = run(5, HOSTILE + 1)
    assert (code, "begun at seed" in told) == (2, True)


def test_hostile_seeds_with_groups_hold() -> None:
    drawn = {seed: draw(seed, 2_000) for seed in range(HOSTILE_TREES, HOSTILE_TREES + 60)}
    below = [s for s, o in drawn.items() if o.tree.parent(TENANT) and not o.fair]
    limited = [s for s in below if "group" in drawn[s].tree.weights]
    duels = [s for s, o in drawn.items() if o.fair and duel_options(o)[1].levels > 2]
    assert len(below) > 20
    chosen = {*below[:6], *limited[:3], *duels[:3]}
    assert len(chosen) >= 9
    tally = Tally()
    for _ in run_cases((Case(seed) for seed in sorted(chosen)), tally):
        pass
    assert tally.failures == []


def test_a_duel_below_groups_leaves_each_its_part() -> None:
    trees: Counter[tuple[int, int]] = Counter()
    for seed in range(HOSTILE_TREES, HOSTILE_TREES + 200):
        options = draw(seed, 2_000)
        if options.fair:
            played, sizes, _ = duel_options(options)
            assert sizes.levels == 1 + max(played.tree.heights().values())
            trees[sizes.levels, len(played.tenants)] += 1
    assert {levels for levels, _ in trees} == {2, 3}
    parents = {"lab": "org", "bob": "org", "mal": "lab", "ada": "lab"}
    tree = Tree({"lab": 1_000, "org": 1_000}, parents)
    flows = ("ada", "bob", "mal")
    assert [parts_of(tree, flows, name) for name in flows] == [4, 2, 4]
    assert [parts_of(NO_TREE, flows, name) for name in flows] == [3, 3, 3]


@pytest.mark.parametrize("seed", [HOSTILE, ALIVE, HOSTILE_TREES - 1])
def test_hostile_seeds_before_draw_no_groups(seed: int) -> None:
    assert draw(seed, 2_000).tree == NO_TREE
