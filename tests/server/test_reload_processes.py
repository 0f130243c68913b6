"""Tests reloads of a running process, one after the other, and its restart on the files."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from .conftest import ask
from .test_cli import events_of, scheduler
from .test_signals import read_until

POOL = {"name": "pool", "capacity_tokens": 1_600, "epoch": 1}
MINUTE_MS = 60_000


class Stand:
    """Runs a scheduler process whose file a test writes again and again."""

    def __init__(self, folder: Path, *, watches: bool = False) -> None:
        self.file = folder / "c.yaml"
        self._watches = watches
        self._process: subprocess.Popen[str] | None = None

    def write(self, **keys: Any) -> None:
        data = {
            "listeners": [{"tcp": "127.0.0.1:0"}],
            "scheduler": {"headroom": 0},
            "tenants": [{"name": "a"}],
            "pools": [POOL],
            "state": {"file": "state.db", "every_ms": 20},
            "limits": {"drain_ms": 0},
        }
        self.file.write_text(json.dumps(data | keys))

    @contextmanager
    def running(self) -> Iterator[stubs.SchedulerServiceStub]:
        """Run it; at the end it stops as SIGTERM stops it."""
        options = ("--watch-config", "0.1") if self._watches else ()
        with scheduler(self.file, *options) as (process, ready):
            self._process = process
            with grpc.insecure_channel(ready["targets"][0]) as channel:
                yield stubs.SchedulerServiceStub(channel)
            process.terminate()
            process.communicate(timeout=30)
            assert process.returncode == 0

    def reload(self, *waits: str, **keys: Any) -> None:
        """Write the file and have it loaded; the log says that these keys wait for a restart."""
        self.write(**keys)
        assert self._process is not None
        if not self._watches:
            self._process.send_signal(signal.SIGHUP)
        result = "config_needs_restart" if waits else "config_reloaded"
        entry = read_until(self._process, result, "config_rejected")[-1]
        assert (entry["event"], entry.get("keys", [])) == (result, list(waits))


def stats_of(stub: stubs.SchedulerServiceStub) -> pb.StatsResponse:
    return stub.Stats(pb.StatsRequest())


@pytest.mark.parametrize("watches", [False, True], ids=["sighup", "watch"])
def test_exempt_changed_waits_and_later_reloads_apply(watches: bool, tmp_path: Path) -> None:
    stand = Stand(tmp_path, watches=watches)
    stand.write(classes=[{"name": "ops", "exempt": False, "rank": 5}])
    exempt = [{"name": "ops", "exempt": True}]
    with stand.running() as stub:
        stand.reload("classes (ops)", classes=exempt)
        for policy, weight in (("fcfs", 7), ("dlpm", 9)):
            tenants = [{"name": "a", "weight": weight}, {"name": policy}]
            settings = {"headroom": 0, "policy": policy}
            stand.reload("classes (ops)", classes=exempt, scheduler=settings, tenants=tenants)
            stats = stats_of(stub)
            assert stats.policy == policy
            weights = {flow.tenant: flow.weight_milli for flow in stats.flows}
            assert (weights["a"], weights[policy]) == (weight * 1_000, 1_000)
            assert {entry.name: entry.exempt for entry in stats.classes}["ops"] is False
            assert list(stats.config.needs_restart) == ["classes (ops)"]
    with stand.running() as stub:
        stats = stats_of(stub)
        assert {entry.name: entry.exempt for entry in stats.classes}["ops"] is True
        assert stats.policy == "dlpm"
        assert not stats.config.needs_restart


def test_epoch_changed_waits_and_leases_stay_valid(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    stand.write()
    with stand.running() as stub:
        grant = stub.Admit(ask(100)).grant
        for capacity in (1_600, 3_200, 4_800):
            pool = POOL | {"epoch": 2, "capacity_tokens": capacity}
            tenants = [{"name": "a", "weight": capacity // 1_600}]
            stand.reload("pools (pool).epoch", pools=[pool], tenants=tenants)
            stats = stats_of(stub)
            assert (stats.pools[0].epoch, stats.pools[0].capacity_tokens) == (1, capacity)
            assert stats.totals.live_leases == 1
        ended = stub.Complete(pb.CompleteRequest(lease_id=grant.lease_id, pool_epoch=1))
        assert ended.outcome == pb.OUTCOME_COMPLETED
    with stand.running() as stub:
        assert stats_of(stub).pools[0].epoch == 2


def limited(tokens: int) -> dict[str, Any]:
    """Return a tenant with a quota and a share, and a pool that holds all that the quota allows."""
    limit = {"tokens_per_minute": tokens}
    tenant = {"name": "a", "quota": limit | {"over": "refuse"}, "share": limit}
    pool = {"name": "pool", "capacity_tokens": 2_000_000}
    return {"tenants": [tenant], "pools": [pool]}


@pytest.mark.parametrize("restarts", [False, True], ids=["reload", "restart"])
def test_quota_lowered_after_use_owes_one_window(restarts: bool, tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    stand.write(**limited(1_000_000))

    def use(stub: stubs.SchedulerServiceStub) -> None:
        grant = stub.Admit(ask(900_000)).grant
        stub.Complete(pb.CompleteRequest(lease_id=grant.lease_id, pool_epoch=1))

    def look(stub: stubs.SchedulerServiceStub) -> None:
        """One window of 10,000 tokens is owed, and the request takes 6 s more of refill."""
        [flow] = [flow for flow in stats_of(stub).flows if flow.tenant == "a"]
        [limit] = flow.quotas
        assert limit.limit == flow.share_tokens_per_minute == 10_000
        assert limit.reset_ms <= 2 * MINUTE_MS
        answer = stub.Admit(ask(1_000))
        assert answer.outcome == pb.OUTCOME_REJECTED_QUOTA
        assert answer.refusal.retry_after_ms <= MINUTE_MS + 7_000

    with stand.running() as stub:
        use(stub)
        if not restarts:
            stand.reload(**limited(10_000))
            look(stub)
    if restarts:
        stand.write(**limited(10_000))
        with stand.running() as stub:
            look(stub)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0", "0.0.0.0:0", "localhost:0"])
def test_chosen_ports_need_no_restart(address: str, tmp_path: Path) -> None:
    """The ports of the listener and the metrics are the system's choice; the file is unchanged."""
    stand, entries = Stand(tmp_path), list[dict[str, Any]]()
    stand.write(metrics={"listen": address})
    with scheduler(stand.file) as (process, ready):
        for weight in (1, 2, 2):
            stand.write(metrics={"listen": address}, tenants=[{"name": "a", "weight": weight}])
            process.send_signal(signal.SIGHUP)
            entries += read_until(process, "config_unchanged", "config_reloaded", "config_rejected")
        with grpc.insecure_channel(ready["targets"][0]) as channel:
            told = stats_of(stubs.SchedulerServiceStub(channel)).config
        process.terminate()
        entries += events_of(process)
    events = [entry["event"] for entry in entries]
    results = [event for event in events if event in ("config_unchanged", "config_reloaded")]
    assert results == ["config_unchanged", "config_reloaded", "config_unchanged"]
    assert "config_needs_restart" not in events
    assert not told.needs_restart
