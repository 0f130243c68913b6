"""Groups with a weight, in Stats, in the metrics and in `schedsvc why`."""

import asyncio
import json
from typing import Any

import pytest

from schedsvc.cli.stats_groups import GROUP_COLUMNS
from schedsvc.metrics.groups import GroupSeries
from schedsvc.metrics.rows import GROUP_ROWS

from .conftest import ask, calling, serving
from .test_cli import lines_of, run
from .test_explain import OPERATORS, explained, wait_for_two
from .test_metrics import metered, of, scrape, use

TREE: dict[str, Any] = {
    "groups": [
        {"name": "org", "weight": 3},
        {"name": "team", "parent": "org", "weight": 2},
        {"name": "other", "weight": 1},
    ],
    "tenants": [{"name": "a", "group": "team"}, {"name": "b", "group": "other"}],
}


async def test_stats_shows_groups_with_a_weight_as_a_tree() -> None:
    async with serving(**TREE) as server, calling(server.targets[0]) as stub:
        for tenant in ("a", "b"):
            await stub.Admit(ask(64, tenant=tenant))
        target = ("--target", server.targets[0])
        shown = await asyncio.to_thread(run, "stats", *target)
        plain = await asyncio.to_thread(run, "stats", *target, "--json")
    lines = [line.rstrip() for line in shown.output.splitlines()]
    at = next(k for k, line in enumerate(lines) if line.split()[:2] == ["group", "weight"])
    assert lines[at].split() == [*GROUP_COLUMNS]
    assert [line.split()[:5] for line in lines[at + 2 : at + 5]] == [
        ["org", "3", "75.0%", "0", "1"],
        ["team", "2", "75.0%", "0", "1"],
        ["other", "1", "25.0%", "0", "1"],
    ]
    first = lines[at + 2].index("org")
    assert lines[at + 3].index("team") == first + 2
    groups = {row["name"]: row for row in json.loads(plain.output)["groups"]}
    assert groups["group:team"]["parent"] == "group:org"
    assert groups["group:org"]["live_leases"] == 1
    assert groups["group:org"]["entitled_ppm"] == 750_000


async def test_stats_has_no_table_of_groups_without_weights() -> None:
    async with serving(tenants=[{"name": "a"}]) as server:
        shown = await asyncio.to_thread(run, "stats", "--target", server.targets[0])
    assert not [line for line in shown.output.splitlines() if line.split()[:1] == ["group"]]


async def test_stats_shows_groups_on_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("NO_COLOR", "1"), ("COLUMNS", "80")):
        monkeypatch.setenv(name, value)
    groups = [{"name": f"level-{k}", "weight": 12.5, "parent": f"level-{k - 1}"} for k in (1, 2)]
    groups = [{"name": "level-0", "weight": 1}, *groups]
    async with serving(groups=groups, tenants=[{"name": "a", "group": "level-2"}]) as server:
        shown = await asyncio.to_thread(run, "stats", "--target", server.targets[0])
    assert max(map(len, lines_of(shown))) <= 80
    assert [f"level-{k}" for k in range(3)] == [
        line.split()[0] for line in lines_of(shown) if line.startswith("level-")
    ]


async def test_group_that_goes_first_is_named() -> None:
    groups = [{"name": "lab", "weight": 1}, {"name": "sales", "weight": 1}]
    tenants = [{"name": "a", "group": "lab"}, {"name": "b", "group": "sales"}]
    async with serving(listeners=OPERATORS, groups=groups, tenants=tenants) as server:
        channel, calls = await wait_for_two(server)
        ((pool,),) = [story.pools for story in await explained(server.targets[0], "it")]
        assert (pool.level, pool.own_group, pool.next_group) == (1, "group:lab", "group:sales")
        shown = await asyncio.to_thread(run, "why", "it", "--target", server.targets[0])
        said = " ".join(shown.output.split())
        assert "group sales (flow b in it), at level 1 of the groups beside group lab, goes" in said
        for call in calls:
            call.cancel()
        await channel.close()


async def test_groups_with_a_weight_have_series_of_their_own() -> None:
    async with metered(**TREE) as server, calling(server.targets[0]) as stub:
        for tenant in ("a", "b"):
            await use(stub, tenant, 5)
        await stub.Admit(ask(1_500, tenant="a"))
        samples = await scrape(server)
    # A cap of two: the first ones, and the rest.
    for group in ("group:org", "group:team"):
        assert of(samples, "group_output_tokens_total", group=group) == 5
        assert of(samples, "group_requests_granted_total", group=group) == 2
        assert of(samples, "group_live_leases", group=group) == 1
        assert of(samples, "group_queued_requests", group=group) == 0
        assert of(samples, "group_entitled_ratio", group=group) == pytest.approx(0.75)
    assert of(samples, "group_weight", group="group:team") == 2
    assert of(samples, "group_output_tokens_total", group="other") == 5
    assert of(samples, "group_live_leases", group="other") == 0
    shown = {labels for name, labels in samples if name == "group_weight"}
    assert shown == {(("group", "group:org"),), (("group", "group:team"),)}


def group_row(name: str, granted: int, parent: str = "") -> dict[str, Any]:
    numbers = {row.key: 1 for row in GROUP_ROWS}
    return {**numbers, "name": name, "parent": parent, "granted": granted}


def test_sum_of_other_groups_counts_each_once_and_never_falls() -> None:
    series = GroupSeries(1, "other")
    found = [group_row("a", 7), group_row("b", 5), group_row("b2", 2, "b"), group_row("c", 1)]
    rows = series.rows(found)
    assert list(rows) == ["a", "other"]
    assert (rows["other"]["granted"], rows["other"]["queued"]) == (6, 2)  # b, with b2, and c
    rows = series.rows([found[0], found[3]])  # b has gone
    assert (rows["other"]["granted"], rows["other"]["queued"]) == (6, 1)
    rows = series.rows([found[3]])  # the place of a stays taken
    assert list(rows) == ["other"]
    rows = series.rows([group_row("a", 8), group_row("b", 6), group_row("c", 1)])
    assert (rows["a"]["granted"], rows["other"]["granted"]) == (8, 7)


def test_group_in_several_classes_has_one_series() -> None:
    series = GroupSeries(5, "other")
    low = {**group_row("a", 3), "request_class": "low"}
    (row,) = series.rows([group_row("a", 7), low]).values()
    assert (row["granted"], row["queued"], row["weight_milli"]) == (10, 2, 1)
