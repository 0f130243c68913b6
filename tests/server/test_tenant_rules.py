"""Tests tenants that the configuration does not list: flows of their own, by `tenant_rules`."""

from pathlib import Path
from typing import Any

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import tenants_pb2

from schedsvc._core import Scheduler
from schedsvc.config import change_modes, configure, needs_restart, reconfigure
from schedsvc_lab.sim.replay.exact import Exact
from schedsvc_lab.sim.replay.reader import Recording

from .conftest import ask, calling, config_of, serving
from .test_config import MINIMAL, found, reading
from .test_metrics import of, scrape
from .test_unknown_tenants import limits_of

PROVED = {"tenant_proof": tenants_pb2.TENANT_PROOF_TOKEN}
RULES: list[dict[str, Any]] = [
    {"match": "acme/*", "weight": 2, "quota": {"tokens_per_minute": 2_000}},
    {"match": "*", "weight": 0.5},
]


async def weights(stub: Any) -> dict[str, int]:
    stats = await stub.Stats(pb.StatsRequest())
    return {flow.tenant: flow.weight_milli for flow in stats.flows}


async def test_a_proved_name_gets_what_its_rule_says() -> None:
    async with (
        serving(tenant_rules=RULES, tenants=[]) as server,
        calling(server.targets[0]) as stub,
    ):
        for tenant in ("acme/ann", "bob"):
            assert (
                await stub.Admit(ask(10, tenant=tenant, **PROVED))
            ).outcome == pb.OUTCOME_GRANTED
        await stub.Admit(ask(10, tenant="eve"))
        assert await weights(stub) == {"unknown": 100, "acme/ann": 2000, "bob": 500}
        stats = await stub.Stats(pb.StatsRequest())
        assert stats.tenants == tenants_pb2.TenantsStats(first_sight=2, flows_max=200_000)
        server.reconfigure(config_of(tenant_rules=[], tenants=[{"name": "bob", "weight": 7}]))
        assert await weights(stub) == {"unknown": 100, "acme/ann": 1000, "bob": 7000}
        server.reconfigure(config_of(unknown_tenants="share", tenants=[]))
        await stub.Admit(ask(10, tenant="bob", **PROVED))
        unknown = (await stub.Stats(pb.StatsRequest(tenants=["unknown"]))).flows[0]
        assert unknown.received == 2


def test_an_operators_mode_reaches_tenants_at_first_sight() -> None:
    enforcing, auditing = (
        config_of(tenant_rules=RULES),
        config_of(tenant_rules=RULES, mode="dry_run"),
    )
    core = Scheduler(**enforcing.core_options())
    configure(core, enforcing, 0)
    flow = core.first_sight(0, b"acme/ann")
    for before, now, audit in ((enforcing, auditing, True), (auditing, enforcing, False)):
        change_modes(core, now, before, 0)
        later = core.first_sight(0, b"acme/%d" % audit)
        assert [core.flow_stats(0, each)["audit"] for each in (flow, later)] == [audit, audit]
    assert limits_of(core, b"acme/ann") == {6: 2_000}


def test_a_reload_moves_tenants_between_file_and_rules() -> None:
    listed = config_of(
        tenants=[{"name": "acme/ann", "quota": {"concurrency": 3}}], tenant_rules=RULES
    )
    free = config_of(
        tenants=[], tenant_rules=RULES, scheduler={"headroom": 0, "expert": {"flows_max": 5}}
    )
    assert needs_restart(free, listed) == []
    core = Scheduler(**listed.core_options())
    configure(core, listed, 0)
    assert limits_of(core, b"acme/ann") == {7: 3}
    reconfigure(core, free, listed, 0)
    core.first_sight(0, b"acme/ann")
    assert limits_of(core, b"acme/ann") == {6: 2_000}
    reconfigure(core, listed, free, 0)
    assert limits_of(core, b"acme/ann") == {7: 3}
    assert core.stats(0)["tenants"]["first_sight"] == 0
    core.check()


async def test_a_recording_with_new_tenants_replays(tmp_path: Path) -> None:
    file = tmp_path / "events"
    async with (
        serving(tenant_rules=RULES, record=str(file)) as server,
        calling(server.targets[0]) as stub,
    ):
        for i in range(20):
            await stub.Admit(ask(10, tenant=f"acme/{i % 7}", **PROVED))
        server.reconfigure(config_of(tenant_rules=[]))
        await stub.Admit(ask(10, tenant="late", **PROVED))
        digest = server.driver._core.digest()
    replay = Exact(Recording(file))
    assert replay.run().digest == digest
    assert replay.core.stats(1 << 62)["tenants"]["first_sight"] == 8


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (
            "{match: a, parent: b}",
            "parent: belongs to a hierarchy of tenants, which this version does not have; remove"
            " it, or name a `group` for a quota that tenants share",
        ),
        (
            "{match: a, share: {tokens_per_minute: 5}}",
            "share: is for tenants that are listed; remove it, or list the tenant in `tenants`",
        ),
        ("{match: a, group: g}", "group: 'g' is no group; add it to groups (known: none)"),
        (
            "{match: a, classes: [x]}",
            "classes[0]: 'x' is no class; add it to classes (known: 'default')",
        ),
        ("{match: ' a'}", "match: ' a' begins with a space, which no HTTP header can carry;"),
        ("{match: '*'}, {match: a}", "match: is never reached, because tenant_rules[0] fits every"),
    ],
)
def test_wrong_rules_are_named_by_place(rule: str, expected: str, tmp_path: Path) -> None:
    problems = found(tmp_path, f"{MINIMAL}tenant_rules: [{rule}]\n")
    assert any(expected in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unknown_tenants: share\ntenant_rules: [{match: a}]", "has no effect, because"),
        ("unknown_tenants_limits: {quota: {concurrency: 1}}", "bounds only names without a proof"),
    ],
)
def test_rules_of_less_effect_than_one_may_think_are_warned_of(
    text: str, expected: str, tmp_path: Path
) -> None:
    read = reading(tmp_path, MINIMAL + text + "\n")
    assert read.config is not None
    assert [expected in warning.message for warning in read.warnings] == [True]


async def test_metrics_sum_up_unlisted_tenants_and_never_fall() -> None:
    keys: dict[str, Any] = {"metrics": {"listen": "127.0.0.1:0"}, "tenant_rules": RULES}
    async with serving(**keys, tenants=[]) as server, calling(server.targets[0]) as stub:
        for i in range(6):
            await stub.Admit(ask(10, tenant=f"acme/{i}", **PROVED))
        page = await scrape(server)
        for name in ("requests_received_total", "requests_granted_total", "live_leases"):
            assert of(page, name, tenant="other") == 6
        assert of(page, "first_sight_tenants") == 6
        server.reconfigure(config_of(**keys, tenants=[{"name": "acme/0"}]))
        page = await scrape(server)
        assert of(page, "requests_received_total", tenant="other") == 6
        assert of(page, "requests_received_total", tenant="acme/0") == 1
        assert of(page, "live_leases", tenant="other") == 5
