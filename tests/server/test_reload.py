"""Tests the configuration of a running server: swapped whole, or not at all."""

import asyncio
import os
import signal
from pathlib import Path
from select import select
from typing import Any

import grpc
import pytest
import structlog
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from schedsvc._core import CallerError, Scheduler
from schedsvc.config import Config, configure, file_digest, load, needs_restart, reconfigure
from schedsvc.records.recording.start import Recording
from schedsvc.server.notify import Notifier
from schedsvc.server.reload import Reloader
from schedsvc.server.serve import _reload_on
from schedsvc_lab.sim.replay.exact import Exact
from schedsvc_lab.sim.replay.reader import Recording as Recorded
from tests.waiting import until, wait_until

from .conftest import ask, calling, config_of, serving, totals
from .test_cli import events_of, scheduler

MINIMAL = "listeners: [{tcp: '127.0.0.1:0'}]\n"


def limit(**quota: Any) -> dict[str, Any]:
    return {"name": "a", "quota": quota}


async def test_quotas_weights_and_tenants_change_under_load() -> None:
    async with serving() as server, calling(server.targets[0]) as stub:
        runs = await stub.Admit(ask(1_500))
        waiting = asyncio.ensure_future(stub.Admit(ask(1_500)))
        await until(lambda: totals(server)["queued"] == 1, "queued")
        server.reconfigure(
            config_of(
                tenants=[limit(requests_per_minute=3, over="refuse"), {"name": "c", "weight": 7}],
                scheduler={"headroom": 0, "policy": "fcfs", "flow_queue_max": 5},
            )
        )
        assert server.driver.stats(0)["policy"] == "fcfs"
        assert totals(server)["live_leases"] == 1  # leases keep theirs
        lease = {"lease_id": runs.grant.lease_id, "pool_epoch": 1}
        await stub.Complete(pb.CompleteRequest(**lease))
        assert (await waiting).outcome == pb.OUTCOME_GRANTED
        row = server.driver.tenant_stats(b"c")[0]
        assert row is not None
        assert row["weight_milli"] == 7_000
        # b is removed: it is unknown now, and shares the unknown tenants' flow.
        before = server.driver.tenant_stats(b"unknown")[0]
        answer = await stub.Admit(ask(1, tenant="b", queue_ttl_ms=20))
        after = server.driver.tenant_stats(b"unknown")[0]
        assert before is not None
        assert after is not None
        assert after["received"] == before["received"] + 1
        assert answer.outcome


async def test_the_order_inside_flows_is_reloaded() -> None:
    async with serving() as server, calling(server.targets[0]) as stub:
        assert (await stub.Stats(pb.StatsRequest())).flow_order == "arrival"
        server.reconfigure(config_of(scheduler={"flow_order": "deadline"}))
        assert (await stub.Stats(pb.StatsRequest())).flow_order == "deadline"


async def test_capacity_below_what_is_promised_overdraws_and_revokes_nothing() -> None:
    async with serving() as server, calling(server.targets[0]) as stub:
        runs = await stub.Admit(ask(1_500))
        small = {"name": "pool", "capacity_tokens": 800, "block_size_tokens": 16}
        server.reconfigure(config_of(pools=[small]))
        [pool] = server.driver.stats(0)["pools"]
        assert pool["overdrawn"]
        assert pool["live_leases"] == 1
        answer = await stub.Admit(ask(100, queue_ttl_ms=30))
        assert answer.outcome == pb.OUTCOME_EVICTED_TTL
        lease = {"lease_id": runs.grant.lease_id, "pool_epoch": 1}
        ended = await stub.Complete(pb.CompleteRequest(**lease, output_tokens=5))
        assert ended.outcome == pb.OUTCOME_COMPLETED
        assert (await stub.Admit(ask(100))).outcome == pb.OUTCOME_GRANTED


def test_limits_of_pools_change_and_end_while_it_runs() -> None:
    pools = [{"name": name, "capacity_tokens": 16_000} for name in ("p", "q")]
    old = config_of(pools=pools, pool_limits=[{"pools": ["q"], "max_running": 7}])
    core = Scheduler(**old.core_options())
    configure(core, old, 0)

    def most() -> list[int]:
        return [pool["max_running"] for pool in core.stats(0)["pools"]]

    assert most() == [1_000, 7]
    every = {"headroom": 0, "each_pool": {"max_running": 9}}
    new = config_of(pools=pools, scheduler=every, adapters=[{"name": "x", "tokens": 9}])
    assert needs_restart(new, old) == []
    reconfigure(core, new, old, 0)
    assert most() == [9, 9]
    core.admit(0, 0, b"r", 1, 1, adapter=b"x")
    core.poll(0)
    assert sum(pool["adapter_tokens"] for pool in core.stats(0)["pools"]) == 9
    reconfigure(core, old, new, 0)
    assert sum(pool["adapter_tokens"] for pool in core.stats(0)["pools"]) == 0
    assert most() == [1_000, 7]


async def test_classes_come_change_and_go_under_load() -> None:
    fast = {"name": "fast", "rank": -1}
    tenants = [{"name": "a", "class": "fast"}, {"name": "b"}]
    async with serving() as server, calling(server.targets[0]) as stub:
        await stub.Admit(ask(1_500))
        server.reconfigure(config_of(tenants=tenants, classes=[fast]))
        waiting = asyncio.ensure_future(stub.Admit(ask(1_500)))
        await until(lambda: totals(server)["queued"] == 1, "queued")
        server.reconfigure(config_of(tenants=tenants, classes=[{**fast, "rank": -7}]))
        answer = await stub.Stats(pb.StatsRequest(tenants=["a"]))
        assert [(c.name, c.rank, c.queued) for c in answer.classes] == [
            ("fast", -7, 1),
            ("default", 0, 0),
        ]
        assert [flow.request_class for flow in answer.flows] == ["default", "fast"]
        page = (await server.metrics.page()).decode()
        assert 'schedsvc_class_queued_requests{class="fast"} 1.0' in page
        assert 'schedsvc_queued_requests{tenant="other"} 1.0' in page  # of all classes
        server.reconfigure(config_of(tenants=[{"name": "a"}, {"name": "b"}]))
        with pytest.raises(grpc.aio.AioRpcError, match="unknown class"):
            await stub.Admit(ask(1, request_class="fast"))
        assert totals(server)["queued"] == 1
        waiting.cancel()


async def test_audit_begins_and_ends_while_it_runs() -> None:
    async with serving() as server, calling(server.targets[0]) as stub:
        server.reconfigure(config_of(mode="dry_run", unknown_tenants="refuse"))
        asks = [ask(1_500) for _ in range(3)] + [ask(100, tenant="stranger")]
        answers = [await stub.Admit(request) for request in asks]
        assert {answer.outcome for answer in answers} == {pb.OUTCOME_GRANTED}
        snapshot = await stub.Stats(pb.StatsRequest())
        rows = {flow.tenant: flow for flow in snapshot.flows}
        assert rows["a"].audit
        assert rows["a"].audited_waits == 2
        assert [c.outcome for c in rows["unknown"].audited_refusals] == [
            pb.OUTCOME_REJECTED_UNKNOWN_TENANT
        ]
        server.reconfigure(config_of(unknown_tenants="refuse"))
        refused = await stub.Admit(ask(100, tenant="stranger"))
        assert refused.outcome == pb.OUTCOME_REJECTED_UNKNOWN_TENANT


async def test_quotas_are_in_stats_refusals_and_metrics() -> None:
    tenants = [limit(tokens_per_minute=600, over="refuse"), {"name": "b"}]
    metrics = {"listen": "127.0.0.1:0"}
    async with (
        serving(tenants=tenants, metrics=metrics) as server,
        calling(server.targets[0]) as stub,
    ):
        assert (await stub.Admit(ask(400))).outcome == pb.OUTCOME_GRANTED
        refused = await stub.Admit(ask(400))
        assert refused.outcome == pb.OUTCOME_REJECTED_QUOTA
        snapshot = await stub.Stats(pb.StatsRequest(tenants=["a"]))
        [told] = snapshot.flows[0].quotas
        assert (told.kind, told.limit) == (6, 600)
        # The bucket gains 10 tokens a second; 184 are left at first, and 232 are missing.
        gained = told.remaining - 184
        assert 0 <= gained < 416
        assert 23_200 - 100 * (gained + 1) <= refused.refusal.retry_after_ms <= 27_000
        page = (await server.metrics.page()).decode()
        assert 'schedsvc_quota_limit{kind="tokens_per_minute",tenant="a"} 600.0' in page
        assert 'schedsvc_refusals_total{reason="rejected_quota",tenant="a"} 1.0' in page
        assert 'schedsvc_audit{tenant="a"} 0.0' in page


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("listeners: [{tcp: '127.0.0.1:1'}]\n", ["listeners"]),
        (
            MINIMAL + "limits: {message_max_bytes: 2000, drain_ms: 5}\n",
            ["limits.message_max_bytes"],
        ),
        (MINIMAL + "scheduler: {policy: fcfs, headroom: 0.5}\n", ["scheduler.headroom"]),
        (MINIMAL + "pools: [{name: p, capacity_tokens: 99}]\n", []),
        (MINIMAL + "classes: [{name: x, rank: 4}]\n", []),
        (MINIMAL + "tenants: [{name: x}]\nmode: dry_run\nlog: {level: error}\n", []),
    ],
)
def test_restart_only_setting_is_named(text: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "old").write_text(MINIMAL)
    (tmp_path / "new").write_text(text)
    found = needs_restart(load(tmp_path / "new"), load(tmp_path / "old"))
    assert found == expected


def test_a_pool_that_vanished_or_changed_its_blocks_needs_a_restart(tmp_path: Path) -> None:
    pool = "pools: [{{name: p, capacity_tokens: 999, block_size_tokens: {}}}]\n"
    for name, text in (("old", pool.format(16)), ("new", pool.format(8)), ("none", "")):
        (tmp_path / name).write_text(MINIMAL + text)
    old = load(tmp_path / "old")
    assert needs_restart(load(tmp_path / "new"), old) == ["pools (p).block_size_tokens"]
    assert needs_restart(load(tmp_path / "none"), old) == ["pools (p)"]


async def test_a_broken_file_changes_nothing_and_is_named(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(MINIMAL)
    taken: list[Config] = []
    reloader = Reloader(file, taken.append)
    file.write_text(MINIMAL + "tenants:\n  - {name: x, weight: -1}\n")
    with structlog.testing.capture_logs() as logs:
        assert not await reloader.reload()
    assert taken == []
    assert logs[0]["problem"].startswith(f"{file}:3:23: tenants[0].weight: is -1; it has to")
    assert logs[-1]["event"] == "config_rejected"
    file.write_text(MINIMAL + "tenants: [{name: x}]\n")
    assert await reloader.reload()
    assert [t.name for t in taken[0].tenants] == ["x"]


async def test_a_watched_file_is_reloaded_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(MINIMAL)
    taken: list[Config] = []
    reloader = Reloader(file, taken.append, digest=file_digest(file))
    watch = asyncio.ensure_future(reloader.watch(0.01))
    await asyncio.sleep(0.05)
    assert taken == []
    (tmp_path / "new").write_text(MINIMAL + "mode: dry_run\n")
    (tmp_path / "new").replace(file)
    await until(lambda: len(taken) == 1, "reloaded")
    file.unlink()
    await asyncio.sleep(0.05)
    assert not watch.done()
    watch.cancel()


def test_a_reload_is_recorded_and_replayed(tmp_path: Path) -> None:
    old = config_of(record=str(tmp_path / "recording"))
    new = config_of(
        record=str(tmp_path / "recording"),
        groups=[{"name": "g", "quota": {"concurrency": 1}}],
        tenants=[{"name": "b", "group": "g", "api_keys_sha256": ["ab" * 32]}],
        mode="dry_run",
    )
    recording = Recording(old, 5)
    recording.begin()
    core = recording.core
    core.admit_wire(10, 0, ask(100).SerializeToString())
    core.poll(10)
    reconfigure(core, new, old, 20)
    core.admit_wire(30, 0, ask(100, tenant="b").SerializeToString())
    core.poll(30)
    digest = core.digest()
    recording.close()
    assert Exact(Recorded(tmp_path / "recording")).run().digest == digest


def test_a_process_reloads_on_sighup(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    text = (
        "listeners: [{tcp: '127.0.0.1:0'}]\npools: [{name: p, capacity_tokens: 1600}]\n"
        "tenants: [{name: a, weight: WEIGHT}]\n"
    )
    file.write_text(text.replace("WEIGHT", "1"))
    with scheduler(file) as (process, ready):
        assert process.stderr is not None
        with grpc.insecure_channel(ready["targets"][0]) as channel:
            stub = stubs.SchedulerServiceStub(channel)

            def weight() -> int:
                found = stub.Stats(pb.StatsRequest(tenants=["a"])).flows[0].weight_milli
                return int(found)

            file.write_text(text.replace("WEIGHT", "[oops"))
            process.send_signal(signal.SIGHUP)
            said = ""
            while '"config_rejected"' not in said:
                assert weight() == 1_000
                assert select([process.stderr], [], [], 30)[0], said
                said += os.read(process.stderr.fileno(), 65_536).decode()
            assert weight() == 1_000
            file.write_text(text.replace("WEIGHT", "5"))
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: weight() == 5_000)
        process.terminate()
        names = [event["event"] for event in events_of(process)]
        assert process.returncode == 0
    assert '"config_problem"' in said
    assert "config_reloaded" in names


async def test_hangups_during_a_reload_cause_one_more(tmp_path: Path) -> None:
    file, taken = tmp_path / "c.yaml", []
    file.write_text(MINIMAL)
    hangups = asyncio.Event()

    def take(config: Config) -> None:
        taken.append(config)
        if len(taken) == 1:
            for _ in range(100):
                hangups.set()

    reloads = asyncio.ensure_future(_reload_on(hangups, Reloader(file, take), Notifier({})))
    hangups.set()
    await until(lambda: len(taken) == 2 and not hangups.is_set(), "it was read once more")
    await asyncio.to_thread(file.read_bytes)  # another reload would begin meanwhile
    assert len(taken) == 2
    reloads.cancel()


async def test_tenants_that_come_and_go_in_reloads_leave_nothing() -> None:
    flows, names = [], 300
    async with serving() as server:
        for wave in range(4):
            tenants = [{"name": f"w{wave}-{number}"} for number in range(names)]
            server.reconfigure(config_of(tenants=tenants))
            flows.append(totals(server)["flows"])
            assert server.driver.tenant_stats(f"w{wave}-0".encode())
            server.reconfigure(config_of())
            assert totals(server)["flows"] == flows[-1]
        # Later waves have the flows of the first one, under their own names.
        assert flows == [flows[0]] * 4
        for wave in range(3):
            gone = [server.driver.tenant_stats(f"w{wave}-{n}".encode()) for n in range(names)]
            assert sum(map(bool, gone)) <= 2
        server.driver._core.check()


async def test_a_reload_that_the_core_refuses_brings_gone_tenants_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as server:

        def refuse(*_: object) -> None:
            monkeypatch.undo()
            raise CallerError(3, "tenants", "no")

        monkeypatch.setattr("schedsvc.config.apply._apply", refuse)
        with pytest.raises(CallerError, match="no"):
            server.reconfigure(config_of(tenants=[{"name": "new"}]))
        known = [
            server.driver.change(lambda core, _, name=name: core.is_known(name))
            for name in (b"a", b"b", b"new")
        ]
        assert known == [True, True, False]
