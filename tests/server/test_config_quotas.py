"""Tests quotas and shares in the configuration file: what reaches the core, named errors."""

from pathlib import Path

import pytest

from schedsvc.config import load
from schedsvc.config.apply import reconfigure
from schedsvc.driver import new_core

from .test_config import MINIMAL, found


def test_quotas_of_tenants_groups_and_models_reach_the_core(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        MINIMAL
        + "groups:\n"
        + "  - {name: inner, parent: outer, quota: {tokens_per_minute: 50}}\n"
        + "  - {name: outer, quota: {concurrency: 3}}\n"
        + "models: [{name: m, pools: [p], quota: {requests_per_minute: 2}}]\n"
        + "pools: [{name: p, capacity_tokens: 1000}]\n"
        + "tenants:\n"
        + "  - {name: a, group: inner, quota: {requests_per_minute: 9, over: refuse}}\n"
        + "  - {name: b, group: outer, mode: dry_run}\n"
        + "  - {name: c}\n"
    )
    core = new_core(load(file), 0)

    def limits(tenant: bytes) -> dict[int, int]:
        rows = core.flow_stats(0, core.flow_index(tenant))["quotas"]
        return {row["kind"]: row["limit"] for row in rows}

    assert limits(b"a") == {3: 9, 6: 50, 7: 3}
    assert limits(b"b") == {7: 3}
    assert limits(b"c") == {}
    assert core.flow_stats(0, core.flow_index(b"b"))["audit"]
    # A tenant that refuses is refused at once.
    a = core.flow_index(b"a")
    assert core.admit(0, a, b"r1", 20, 20) > 0
    assert core.admit(0, a, b"r2", 20, 20) == -22
    core.check()


def test_shares_of_tenants_and_groups_reach_the_core(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    text = (
        MINIMAL
        + "scheduler: {saturation: 0.5, expert: {saturation_band: 0.1}}\n"
        + "groups: [{name: g, share: {tokens_per_minute: 500}}]\n"
        + "pools: [{name: p, capacity_tokens: 1000}]\n"
        + "tenants:\n"
        + "  - {name: a, group: g, share: {tokens_per_minute: 300, lends: 100, borrows: 50}}\n"
        + "  - {name: b, group: g}\n"
        + "  - {name: c}\n"
    )
    file.write_text(text)
    before = load(file)
    core = new_core(before, 0)

    def shares() -> list[int]:
        rows = [core.flow_stats(0, core.flow_index(tenant)) for tenant in (b"a", b"b", b"c")]
        return [row["share_tokens_per_minute"] for row in rows]

    assert shares() == [300, 500, 0]
    for i in range(5):  # half of the pool, and what a may borrow
        core.admit(0, core.flow_index(b"a"), b"r%d" % i, 80, 80)
    assert len(core.poll(0)) == 4
    file.write_text(text.replace(", share: {tokens_per_minute: 300, lends: 100, borrows: 50}", ""))
    reconfigure(core, load(file), before, 0)
    assert shares() == [500, 500, 0]
    core.check()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "tenants:\n  - {name: x, quota: {requests_per_minute: 0}}\n",
            ["3:44 tenants[0].quota.requests_per_minute: is 0; it has to be at least 1"],
        ),
        (
            "tenants:\n  - {name: x, quota: {tokens_per_minute: 1, concurrency: 0.5}}\n",
            [
                "3:42 tenants[0].quota.tokens_per_minute: is 1; it has to be at least 2",
                "3:58 tenants[0].quota.concurrency: has to be a whole number, not a fraction",
            ],
        ),
        (
            "tenants:\n  - {name: x, quota: {over: sometimes}}\n",
            ["3:29 tenants[0].quota.over: has to be 'wait' or 'refuse'"],
        ),
        (
            "tenants:\n  - {name: x, weight: -1}\n",
            ["3:23 tenants[0].weight: is -1; it has to lie between 0.001 and 1000000"],
        ),
        (
            "scheduler: {policy: fair}\n",
            [
                "2:21 scheduler.policy: has to be 'vtc', 'dlpm' or 'fcfs'; other policies are the"
                " simulator's: schedsvc sim --policy"
            ],
        ),
        (
            "tenants:\n  - {name: x, quota: {tokens_a_minute: 5}}\n",
            [
                "3:23 tenants[0].quota.tokens_a_minute: unknown key 'tokens_a_minute';"
                " did you mean 'tokens_per_minute'?"
            ],
        ),
        (
            "groups: [{name: a}]\ntenants:\n  - {name: x, group: b}\n",
            ["4:22 tenants[0].group: 'b' is no group; add it to groups (known: 'a')"],
        ),
        (
            "groups:\n  - {name: a, parent: b}\n  - {name: b, parent: c}\n"
            "  - {name: c, parent: a}\n",
            [
                "3:23 groups[0].parent: the groups form a circle, a -> b -> c -> a; remove one",
                "4:23 groups[1].parent: the groups form a circle, b -> c -> a -> b; remove one",
                "5:23 groups[2].parent: the groups form a circle, c -> a -> b -> c; remove one",
            ],
        ),
        (
            "groups: [{name: a, parent: a}]\n",
            ["2:28 groups[0].parent: the groups form a circle, a -> a; remove one"],
        ),
        (
            "groups: [{name: a}, {name: b, parent: a}, {name: c, parent: b},"
            " {name: d, parent: c}, {name: e, parent: d}]\n",
            ["2:105 groups[4].parent: at most 4 groups may stand above one another"],
        ),
        (
            "models: [{name: m, pools: [p, q]}, {name: m, pools: [q]}]\n",
            [
                "2:43 models[1].name: this model stands twice, first at models[0].name; remove one",
                "2:54 models[1].pools[0]: this pool stands twice, first at models[0].pools[1];"
                " remove one",
            ],
        ),
        ("mode: off\n", ["2:7 mode: has to be 'enforce' or 'dry_run'"]),
        (
            "tenants:\n  - {name: x, share: {tokens_per_minute: 5, lends: 6}}\n",
            ["3:52 tenants[0].share.lends: is 6, more than its tokens_per_minute, 5"],
        ),
        (
            "tenants:\n  - {name: x, share: {tokens_per_minute: 5, borrows: -1}}\n",
            ["3:54 tenants[0].share.borrows: is -1; it has to be at least 0"],
        ),
        (
            "groups:\n  - {name: g, share: {tokens_per_minute: 9}}\n  - {name: h, parent: g}\n"
            "tenants:\n  - {name: x, group: g, share: {tokens_per_minute: 5}}\n"
            "  - {name: y, group: h, share: {tokens_per_minute: 6}}\n",
            [
                "3:42 groups[0].share.tokens_per_minute: is 9, but its members are promised 11;"
                " raise it, or lower theirs"
            ],
        ),
    ],
)
def test_wrong_quotas_are_named_by_place(text: str, expected: list[str], tmp_path: Path) -> None:
    assert found(tmp_path, MINIMAL + text) == expected


def test_weights_of_groups_reach_the_core_and_follow_a_reload(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    text = (
        MINIMAL
        + "groups: [{name: org, weight: 3}, {name: team, parent: org, weight: 0.5}]\n"
        + "pools: [{name: p, capacity_tokens: 32}]\n"
        + "tenants: [{name: a, group: team}, {name: b, group: org}, {name: c}]\n"
    )
    file.write_text(text)
    before = load(file)
    core = new_core(before, 0)
    flows = [core.flow_index(name) for name in (b"a", b"b", b"c")]
    for k in range(100):
        for flow in flows:
            core.admit(0, flow, b"%d" % k, 10, 10)

    def serve(count: int) -> list[int]:
        served = [0, 0, 0]
        for _ in range(count):
            (d,) = core.poll(0)
            served[flows.index(d.flow)] += 1
            core.complete(0, d.lease_id, d.pool_epoch, output_tokens=10)
        return served

    assert serve(60) == pytest.approx([15, 30, 15], abs=1)
    file.write_text(text.replace("weight: 0.5", "weight: 1"))
    config = load(file)
    reconfigure(core, config, before, 0)
    assert serve(60) == pytest.approx([22, 23, 15], abs=1)
    file.write_text(text.replace(", weight: 0.5", "").replace(", weight: 3", ""))
    reconfigure(core, load(file), config, 0)
    assert serve(60) == pytest.approx([20, 20, 20], abs=2)
    core.check()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "groups: [{name: g, weight: 1}]\n"
            + "pools:\n"
            + "".join(f"  - {{name: p{k}, capacity_tokens: 99}}\n" for k in range(65)),
            "2:28 groups[0].weight: needs a scheduler with at most 64 pools, but pools lists 65;"
            " run a second scheduler, or remove the weights of all groups",
        ),
        (
            "groups: [{name: g, weight: 1}]\n"
            "tenants:\n  - {name: a, share: {tokens_per_minute: 5}}\n",
            "4:22 tenants[0].share: does not go with groups that have a weight; remove one of them",
        ),
        (
            "groups:\n  - {name: all, quota: {requests_per_minute: 5}}\n"
            "  - {name: mid, parent: all}\n  - {name: g, parent: mid, weight: 1}\n",
            "5:36 groups[2].weight: stands below the quota of group 'all', which groups with"
            " weights cannot share; give each of them its own quota, or remove the weight",
        ),
    ],
)
def test_setting_that_excludes_group_weights_is_named(
    tmp_path: Path, text: str, expected: str
) -> None:
    assert found(tmp_path, MINIMAL + text) == [expected]


def test_weight_beside_and_above_quotas_is_valid(tmp_path: Path) -> None:
    text = (
        "groups:\n  - {name: org, weight: 2, quota: {requests_per_minute: 5}}\n"
        "  - {name: team, parent: org, quota: {requests_per_minute: 4}}\n"
    )
    assert found(tmp_path, MINIMAL + text) == []
