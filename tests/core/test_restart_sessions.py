"""Tests sessions of agents over a restart: their counters go on, and none gains by it."""

import re
from collections import Counter
from typing import Any

import pytest

from schedsvc import _core as core
from tests.seeds import fresh

from .session_histories import SessionHistory
from .support import SECOND, admit, grant, make
from .test_restart import saved

FLOW = b"f\0\0f"
SESSIONS = re.compile(rb"\x50[\x80-\xff]*[\x00-\x7f](\x58[\x80-\xff]*[\x00-\x7f])?$")
"""Fields 10 and 11 at the end of a flow's row."""


def one_by_one(**options: Any) -> core.Scheduler:
    """Return a scheduler that runs one request at a time, each of 10 and 10 tokens."""
    return make(capacity=20, credit_max_micro=0, flow_queue_max=2_000, **options)


def turn(s: core.Scheduler, now_ns: int, request_id: str, session: str) -> int:
    return admit(s, now_ns, request_id, session=session.encode())


def serve(s: core.Scheduler, now_ns: int, names: dict[int, str], count: int) -> list[str]:
    """Return sessions in the order of their requests' grants, one after the other."""
    found: list[str] = []
    while len(found) < count:
        (d,) = s.poll(now_ns)
        found.append(names[d.handle])
        s.complete(now_ns, d.lease_id, 1, output_tokens=10)
    s.check()
    return found


def ask(s: core.Scheduler, now_ns: int, serial: str, **counts: int) -> dict[int, str]:
    return {
        turn(s, now_ns, f"{serial}{name}{k}", "" if name == "rest" else name): name
        for name, count in counts.items()
        for k in range(count)
    }


def reborn(rows: dict[bytes, bytes]) -> core.Scheduler:
    new = one_by_one(lease_id_base=1_000_000)
    assert new.set_saved(0, [(key, value, 0) for key, value in rows.items()]) == len(rows)
    new.check()
    return new


def served_unequally() -> core.Scheduler:
    """Serve `ahead` six times in all, `behind` once, requests without a session twice."""
    s = one_by_one()
    names = ask(s, 0, "early", ahead=6)
    serve(s, 0, names, 5)
    names |= ask(s, 0, "waits", behind=1, rest=2)
    serve(s, 0, names, 4)
    return s


def test_the_order_of_sessions_goes_on_after_a_kill() -> None:
    s = served_unequally()
    new, forgetful = reborn(saved(s, 0)), one_by_one()
    found = []
    for each in (s, new, forgetful):
        names = ask(each, 1, "late", ahead=6, behind=6, rest=6)
        found.append(serve(each, 1, names, 18))
    assert found[1] == found[0]
    assert found[2] != found[0]


def test_a_newcomer_after_a_restart_gains_nothing() -> None:
    s = one_by_one()
    names = ask(s, 0, "early", ahead=20, behind=20)
    serve(s, 0, names, 20)
    new = reborn(saved(s, 0))
    names = ask(new, 1, "late", fresh=10, ahead=10, behind=10)
    assert Counter(serve(new, 1, names, 12)) == {"fresh": 4, "ahead": 4, "behind": 4}


def test_rows_of_the_version_before_begin_all_alike() -> None:
    s = served_unequally()
    rows = saved(s, 0)
    rows = {key: value for key, value in rows.items() if key[:1] != b"s"}
    rows[FLOW], left_out = SESSIONS.subn(b"", rows[FLOW])
    assert left_out == 1
    new = reborn(rows)
    assert new.flow_stats(0, 0)["sessions"] == 0
    names = ask(new, 1, "late", ahead=4, behind=4)
    assert serve(new, 1, names, 8) == ["ahead", "behind"] * 4


def test_a_replayed_lease_is_charged_to_its_session_once() -> None:
    s = one_by_one()
    names = ask(s, 0, "early", a=2, b=2)
    (d,) = s.poll(0)
    assert names[d.handle] == "a"
    new = reborn(saved(s, 0))
    told = new.replay(0, 0, b"earlya0", d.lease_id, 0, 1, 20, 10, 10, session=b"a")
    assert told == core.LEASE_LIVE
    again = ask(new, 0, "again", a=1, b=2)
    found = []
    for each, waits in ((s, names), (new, again)):
        each.complete(0, d.lease_id, 1, output_tokens=10)
        found.append(serve(each, 0, waits, 3))
    assert found[0] == found[1] == ["b", "a", "b"]


def test_sessions_of_a_tenant_with_a_row_are_limited() -> None:
    s = one_by_one()
    for k in range(1_100):
        turn(s, 0, f"r{k}", f"s{k}")
    rows = saved(s, 0)
    assert sum(key[:1] == b"s" for key in rows) == 1_024
    new = reborn(rows)
    row = new.flow_stats(0, 0)
    assert (row["sessions"], row["sessions_sharing"]) == (1_024, 0)
    turn(new, 0, "other", "other")
    assert new.flow_stats(0, 0)["sessions_sharing"] == 1
    new.check()


def test_a_session_that_is_forgotten_loses_its_row() -> None:
    s = one_by_one()
    serve(s, 0, ask(s, 0, "early", a=1, b=1), 2)
    first = dict(s.save(0, 1_000))
    keys = {key for key in first if key[:1] == b"s"}
    assert len(keys) == 2
    s.poll(60 * SECOND)
    assert s.flow_stats(60 * SECOND, 0)["sessions"] == 0
    later = dict(s.save(60 * SECOND, 1_000))
    assert {key for key, value in later.items() if value is None} == keys


def test_a_session_that_was_never_saved_has_no_row_to_lose() -> None:
    s = one_by_one()
    saved(s, 0)
    serve(s, 0, ask(s, 0, "early", a=1), 1)
    s.poll(60 * SECOND)
    assert all(value is not None for _, value in s.save(60 * SECOND, 1_000))


def test_only_sessions_that_were_served_are_saved_again() -> None:
    s = one_by_one()
    names = ask(s, 0, "early", a=3, b=3, c=3)
    serve(s, 0, names, 6)
    assert saved(s, 0)
    assert not saved(s, 0)
    (d,) = s.poll(0)
    s.complete(0, d.lease_id, 1, output_tokens=10)
    assert [key[:1] for key in saved(s, 0)].count(b"s") == 1


def test_saving_changes_no_decision() -> None:
    """The least counter is above the level of its line: saving reads it, and raises nothing."""
    digests = []
    for saves in (False, True):
        s = one_by_one()
        names: dict[int, str] = {}
        for k in range(40):
            names |= ask(s, k, f"r{k}-", a=k % 3, b=k % 2, rest=1)
            (d,) = s.poll(k)
            if saves:
                s.save(k, 1_000)
            s.complete(k, d.lease_id, 1, output_tokens=1 + k % 9)
            if saves:
                s.save(k, 1_000)
        digests.append(s.digest())
    assert digests[0] == digests[1]


def test_a_lease_ends_after_a_restart_and_all_is_forgotten() -> None:
    """Nothing is queued, so there is no line: the restored level is kept until its time."""
    s = served_unequally()
    d = grant(s, 0, "runs", session=b"ahead")
    new = reborn(saved(s, 0))
    new.replay(0, 0, b"runs", d.lease_id, 0, 1, 20, 10, 10, session=b"ahead")
    new.complete(1, d.lease_id, 1, output_tokens=10)
    assert new.flow_stats(1, 0)["sessions"] == 2
    new.poll(61 * SECOND)
    assert new.flow_stats(61 * SECOND, 0)["sessions"] == 0
    new.check()


@pytest.mark.parametrize("pools", [1, 3])
@pytest.mark.parametrize("seed", fresh(20))
def test_random_histories_with_kills_follow_the_model(seed: int, pools: int) -> None:
    SessionHistory(seed, pools, killed=True).play()
