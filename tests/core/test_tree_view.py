"""Tests that Stats and Explain know the tree of shares."""

from typing import Any

import pytest

from schedsvc import _core as core
from tests.seeds import fresh

from .support import admit
from .test_tree import TreeWalk, flood, group, make, member, serve


def rows(s: core.Scheduler, now_ns: int = 0) -> dict[str, dict[str, Any]]:
    return {row["name"].removeprefix("group:"): row for row in s.stats(now_ns)["groups"]}


def pool_of(s: core.Scheduler, request: str) -> dict[str, Any]:
    ((row,),) = ([*story["pools"]] for story in s.explain(0, request.encode()))
    return dict(row)


def company(s: core.Scheduler) -> dict[str, int]:
    """Make org 3 (team 1: a, b; and c of weight 3), other 1 (d), and the tenant e of weight 4."""
    org = group(s, "org", 3_000)
    team, other = group(s, "team", 1_000, org), group(s, "other", 1_000)
    return {
        "a": member(s, "a", team), "b": member(s, "b", team), "c": member(s, "c", org, 3_000),
        "d": member(s, "d", other), "e": member(s, "e", -1, 4_000),
    }  # fmt: skip


def test_groups_are_shown_with_their_place_and_their_part() -> None:
    s = make()
    flows = company(s)
    flood(s, 0, flows, 10)
    serve(s, 0, 16)
    s.poll(0)  # one more runs
    found = rows(s)
    assert list(found) == ["org", "team", "other"]
    places = {name: (row["parent"], row["level"]) for name, row in found.items()}
    assert places == {"org": ("", 1), "team": ("group:org", 2), "other": ("", 1)}
    assert {name: row["weight_milli"] for name, row in found.items()} == {
        "org": 3_000, "team": 1_000, "other": 1_000,
    }  # fmt: skip
    assert [row["entitled_ppm"] for row in found.values()] == [375_000, 93_750, 125_000]
    # 8 parts, of which e has 4: 16 grants are 6 of org, of which team has 1 or 2, and 2 of other.
    by_name = {f["tenant"]: f for f in s.stats(0)["flows"]}
    assert {name: by_name[name]["entitled_ppm"] for name in flows} == {
        "a": 46_875, "b": 46_875, "c": 281_250, "d": 125_000, "e": 500_000,
    }  # fmt: skip
    for name, members in {"org": "abc", "team": "ab", "other": "d"}.items():
        row = found[name]
        for key in ("granted", "queued", "live_leases", "input_tokens", "output_tokens"):
            assert row[key] == sum(by_name[m][key] for m in members), (name, key)
    assert found["org"]["granted"] in (6, 7)
    assert sum(row["live_leases"] for row in s.stats(0)["flows"]) == 1
    s.check()


def test_group_that_rests_is_due_nothing() -> None:
    s = make()
    flows = company(s)
    flood(s, 0, {"d": flows["d"], "e": flows["e"]}, 3)
    s.poll(0)
    found = rows(s)
    assert [row["entitled_ppm"] for row in found.values()] == [0, 0, 200_000]


def test_group_without_members_has_a_row() -> None:
    s = make()
    inner = group(s, "plain", 0, group(s, "top", 2_000))
    group(s, "leaf", 1_500, inner)
    s.poll(0)
    found = rows(s)
    assert list(found) == ["top", "leaf"]  # a group without a weight is no node
    leaf = found["leaf"]
    assert (leaf["parent"], leaf["level"], leaf["weight_milli"]) == ("group:top", 2, 1_500)
    assert leaf["request_class"] == "default"


def test_tenant_that_moves_leaves_what_it_was_served() -> None:
    s = make()
    flows = company(s)
    flood(s, 0, flows, 10)
    serve(s, 0, 30)
    before = rows(s)
    team, other = s.quota_index(b"group:team"), s.quota_index(b"group:other")
    s.set_flow_quota(0, flows["a"], other)
    s.poll(0)
    for name, row in rows(s).items():
        assert row["output_tokens"] == before[name]["output_tokens"], name
        assert row["granted"] - before[name]["granted"] in (0, 1), name  # the poll's own grant
    # A group that moves takes nothing along, either.
    s.set_quota(0, b"group:team", other, weight_milli=1_000)
    assert team == s.quota_index(b"group:team")
    s.poll(0)
    after = rows(s)
    assert after["team"]["parent"] == "group:other"
    for name, row in after.items():
        assert row["output_tokens"] == before[name]["output_tokens"], name
    s.check()


@pytest.mark.parametrize("seed", fresh(4))
def test_service_of_groups_never_falls_while_they_move(seed: int) -> None:
    walk = TreeWalk(seed, ("vtc",), pools=1 + seed % 3)
    last: dict[tuple[str, str], int] = {}
    for _ in range(40):
        walk.run(events=100, check_every=100)
        for row in walk.core.stats(walk.now_ns)["groups"]:
            key = row["name"], row["request_class"]
            assert row["granted"] >= last.get(key, 0)
            last[key] = row["granted"]
    assert last


def test_each_class_has_a_row_of_its_own() -> None:
    s = make()
    low = s.set_class(b"low", 5)
    org = group(s, "org", 1_000)
    flow = member(s, "a", org)
    s.set_flow_class(flow, 0, (0, low))
    admit(s, 0, "x", 10, 10, flow)
    admit(s, 0, "y", 10, 10, flow, request_class=b"low")
    s.poll(0)
    found = [(row["request_class"], row["queued"]) for row in s.stats(0)["groups"]]
    assert found == [("default", 0), ("low", 1)]


def test_why_names_the_group_that_goes_first() -> None:
    s = make()
    flows = company(s)
    flood(s, 0, flows, 6)
    serve(s, 0, 7)
    (d,) = s.poll(0)  # it runs, and the pool is full
    asked = [f"{name}{k}" for name in flows for k in range(6)]
    waiting = [id_ for id_ in asked if s.explain(0, id_.encode())[0].get("pools")]
    (head,) = (id_[0] for id_ in waiting if pool_of(s, id_)["is_next"])
    assert d.flow in flows.values()
    above = {"a": ["org", "team"], "b": ["org", "team"], "c": ["org"], "d": ["other"], "e": []}
    checked = 0
    for name in flows:
        if name == head:
            continue
        row = pool_of(s, f"{name}5")
        same = sum(x == y for x, y in zip(above[name], above[head], strict=False))
        mine, its = ([*above[n], ""][same] for n in (name, head))
        assert row["level"] == same + 1
        assert row["own_group"].removeprefix("group:") == mine
        assert row["next_group"].removeprefix("group:") == its
        assert row["next_lead_tokens"] >= 0
        checked += 1
    assert checked == 4


def test_lead_is_that_of_the_groups_that_part() -> None:
    s = make()
    left, right = group(s, "left", 1_000), group(s, "right", 1_000)
    a, b, c = member(s, "a", left), member(s, "b", right), member(s, "c", right)
    flood(s, 0, {"b": b}, 5)
    serve(s, 0, 4)
    admit(s, 0, "c0", 10, 10, c)
    admit(s, 0, "a0", 10, 10, a)
    (d,) = s.poll(0)
    assert d.flow == b  # left was lifted to the level, and b had asked before
    row = pool_of(s, "c0")
    counters = {name: group["vtc_micro"] for name, group in rows(s).items()}
    assert (row["own_group"], row["next_group"], row["level"]) == ("group:right", "group:left", 1)
    assert row["next_lead_tokens"] == (counters["right"] - counters["left"]) // 1_000_000 > 0


def test_why_says_nothing_of_groups_without_a_tree() -> None:
    s = make()
    flows = {"a": member(s, "a", -1), "b": member(s, "b", -1)}
    flood(s, 0, flows, 3)
    s.poll(0)
    rows_of = [pool_of(s, name) for name in ("a2", "b2")]
    assert all("level" not in row for row in rows_of)


def test_replay_before_the_first_round_charges_the_groups() -> None:
    s = make()
    flows = company(s)  # after a restart: no poll has placed the groups yet
    for name, lease_id in (("c", 7), ("d", 8)):
        replayed = (name.encode(), lease_id, 0, 1, 10, 5, 5)
        assert s.replay(0, flows[name], *replayed, input_tokens=5) == core.LEASE_LIVE
    s.complete(0, 7, 1, output_tokens=3)
    s.poll(0)
    found = rows(s)
    by_name = {f["tenant"]: f for f in s.stats(0)["flows"]}
    for group_name, name in (("org", "c"), ("other", "d")):
        row, flow = found[group_name], by_name[name]
        service = flow["vtc_micro"] * flow["weight_milli"]
        assert service > 0
        assert row["vtc_micro"] * row["weight_milli"] == service
        for key in ("granted", "live_leases", "input_tokens", "output_tokens"):
            assert row[key] == flow[key], (group_name, key)
    s.check()
