"""Tests tenants that the configuration does not list: one flow, and what it may take."""

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from schedsvc_client.v1 import mode_pb2, operator_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc._core import Scheduler
from schedsvc.config import configure, needs_restart, reconfigure
from tests.waiting import until

from .conftest import ask, calling, config_of, serving, totals
from .test_config import MINIMAL, found, reading
from .test_operator import operating

LISTED = {
    "classes": [{"name": "flex", "rank": 5}, {"name": "fast", "rank": -5}],
    "groups": [{"name": "guests", "quota": {"concurrency": 3}}],
    "tenants": [{"name": "a"}, {"name": "guest", "group": "guests"}],
}
LIMITS = {
    "group": "guests",
    "class": "flex",
    "classes": ["flex"],
    "quota": {"requests_per_minute": 20, "concurrency": 2, "over": "refuse"},
}


def core_of(**keys: Any) -> Scheduler:
    config = config_of(**keys)
    core = Scheduler(**config.core_options())
    configure(core, config, 0)
    return core


def limits_of(core: Scheduler, tenant: bytes) -> dict[int, int]:
    """Return its limits, its own and its groups', by kind."""
    rows = core.flow_stats(0, core.flow_index(tenant))["quotas"]
    return {row["kind"]: row["limit"] for row in rows}


def test_the_limits_of_the_unknown_reach_the_core() -> None:
    core = core_of(**LISTED, unknown_tenants_limits=LIMITS)
    assert limits_of(core, b"unknown") == {3: 20, 7: 2}
    assert limits_of(core, b"guest") == {7: 3}
    assert limits_of(core, b"a") == {}
    core.check()


def test_without_limits_the_flow_of_the_unknown_is_bounded_by_its_queue_alone() -> None:
    core = core_of(scheduler={"headroom": 0, "flow_queue_max": 4})
    outcomes = [
        core.admit_wire(0, 0, ask(1_500, tenant=f"t{i}").SerializeToString()) for i in range(8)
    ]
    assert sum(isinstance(outcome, bytes) for outcome in outcomes) == 4
    assert core.stats(0)["totals"]["queued"] == 4


async def test_names_without_end_spend_no_more_than_one_quota() -> None:
    keys = {**LISTED, "unknown_tenants_limits": LIMITS}
    async with serving(**keys) as server, calling(server.targets[0]) as stub:
        asks = [stub.Admit(ask(10, tenant=f"stranger-{i}")) for i in range(100)]
        outcomes = [answer.outcome for answer in await asyncio.gather(*asks)]
        assert outcomes.count(pb.OUTCOME_GRANTED) == 2
        assert outcomes.count(pb.OUTCOME_REJECTED_QUOTA) == 98
        # The group has room for one more, and it is not a stranger's.
        assert (await stub.Admit(ask(10, tenant="stranger-9"))).outcome == pb.OUTCOME_REJECTED_QUOTA
        assert (await stub.Admit(ask(10, tenant="guest"))).outcome == pb.OUTCOME_GRANTED
        assert (await stub.Admit(ask(10))).outcome == pb.OUTCOME_GRANTED
        assert totals(server)["live_leases"] == 4


async def test_strangers_cannot_choose_a_better_class() -> None:
    keys = {**LISTED, "unknown_tenants_limits": {"class": "flex", "classes": ["flex"]}}
    async with serving(**keys) as server, calling(server.targets[0]) as stub:
        await stub.Admit(ask(1_500))
        waiting = asyncio.ensure_future(stub.Admit(ask(1_500, tenant="stranger")))
        await until(lambda: totals(server)["queued"] == 1, "queued")
        rows = (await stub.Stats(pb.StatsRequest())).classes
        assert {row.name: row.queued for row in rows} == {"fast": 0, "default": 0, "flex": 1}
        with pytest.raises(Exception, match="may not name this class"):
            await stub.Admit(ask(1, tenant="stranger", request_class="fast"))
        waiting.cancel()


def test_a_reload_gives_the_unknown_other_limits_or_none() -> None:
    free, bound = config_of(**LISTED), config_of(**LISTED, unknown_tenants_limits=LIMITS)
    core = core_of(**LISTED)
    assert needs_restart(bound, free) == []
    reconfigure(core, bound, free, 0)
    assert limits_of(core, b"unknown") == {3: 20, 7: 2}
    reconfigure(core, free, bound, 0)
    assert limits_of(core, b"unknown") == {}
    core.check()


def test_a_tenant_that_returns_has_none_of_its_old_limits() -> None:
    def listing(*tenants: dict[str, Any], **keys: Any) -> Any:
        return config_of(tenants=[{"name": "a"}, *tenants], **keys)

    limited = {"name": "b", "quota": {"concurrency": 1}}
    steps = [
        listing(limited, unknown_tenants_limits={"quota": {"concurrency": 1}}),
        listing(unknown_tenants="refuse"),
        listing({"name": "b"}),
    ]
    core = Scheduler(**steps[0].core_options())
    configure(core, steps[0], 0)
    for before, now in pairwise(steps):
        reconfigure(core, now, before, 0)
    assert limits_of(core, b"b") == limits_of(core, b"unknown") == {}


async def test_the_name_of_the_unknown_names_no_tenant() -> None:
    async with serving() as server, calling(server.targets[0]) as stub:
        assert (await stub.Admit(ask(1, tenant="unknown"))).outcome == pb.OUTCOME_GRANTED
        server.reconfigure(config_of(unknown_tenants="refuse"))
        for tenant in ("stranger", "unknown"):
            answer = await stub.Admit(ask(1, tenant=tenant))
            assert answer.outcome == pb.OUTCOME_REJECTED_UNKNOWN_TENANT


async def test_in_an_operators_audit_the_limits_are_counted() -> None:
    keys = {**LISTED, "unknown_tenants": "refuse", "unknown_tenants_limits": LIMITS}
    async with operating(**keys) as (_, both):
        await both.operator.SetMode(operator_pb2.SetModeRequest(mode=mode_pb2.MODE_AUDIT))
        for _ in range(4):
            answer = await both.admit(tenant="stranger")
            assert answer.outcome == pb.OUTCOME_GRANTED
        stats = await both.scheduler.Stats(pb.StatsRequest(tenants=["unknown"]))
        rows = [entry for flow in stats.flows for entry in flow.audited_refusals]
        counted = {entry.outcome: entry.count for entry in rows}
        assert counted == {pb.OUTCOME_REJECTED_UNKNOWN_TENANT: 4, pb.OUTCOME_REJECTED_QUOTA: 2}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "{quota: {requests_per_minute: 0}}",
            "2:55 unknown_tenants_limits.quota.requests_per_minute: is 0; it has to be at least 1",
        ),
        (
            "{weight: 2}",
            "2:26 unknown_tenants_limits.weight: unknown key 'weight';"
            " known here: group, quota, share, max_wait_ms, class, classes",
        ),
        (
            "{group: g}",
            "2:33 unknown_tenants_limits.group: 'g' is no group; add it to groups (known: none)",
        ),
        (
            "{classes: [x]}",
            "2:36 unknown_tenants_limits.classes[0]: 'x' is no class; add it to classes"
            " (known: 'default')",
        ),
        (
            "{share: {tokens_per_minute: 5, lends: 6}}",
            "2:63 unknown_tenants_limits.share.lends: is 6, more than its tokens_per_minute, 5",
        ),
    ],
)
def test_wrong_limits_of_the_unknown_are_named_by_place(
    text: str, expected: str, tmp_path: Path
) -> None:
    assert found(tmp_path, f"{MINIMAL}unknown_tenants_limits: {text}\n") == [expected]


def test_a_share_of_the_unknown_counts_as_promised_of_its_group(tmp_path: Path) -> None:
    text = (
        "groups: [{name: g, share: {tokens_per_minute: 9}}]\n"
        "unknown_tenants_limits: {group: g, share: {tokens_per_minute: 10}}\n"
    )
    [problem] = found(tmp_path, MINIMAL + text)
    assert "is 9, but its members are promised 10" in problem


def test_limits_of_tenants_without_access_are_warned_of(tmp_path: Path) -> None:
    text = "tenants: [{name: a}]\nunknown_tenants: refuse\nunknown_tenants_limits: {group: g}\n"
    read = reading(tmp_path, f"{MINIMAL}groups: [{{name: g}}]\n{text}")
    assert read.config is not None
    [warning] = read.warnings
    assert warning.message == "binds only in dry_run, because unknown_tenants says refuse"
