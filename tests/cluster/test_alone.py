"""Tests that a scheduler without its store serves as one without a cluster, and reports it."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.cluster.admin import init_store, status_of
from schedsvc.cluster.store import Address
from schedsvc_lab.demo.processes import free_port
from tests.server.conftest import calling, serving
from tests.waiting import until

from .store_server import ADMIN_PASSWORD, StoreServer


def section(port: int, **store: Any) -> dict[str, Any]:
    return {
        "name": "prod",
        "member": "a",
        "store": {"urls": [f"redis://127.0.0.1:{port}"], **store},
        "sync_ms": 50,
    }


async def admitted(target: str) -> pb.AdmitResponse:
    async with calling(target) as stub:
        return await stub.Admit(
            pb.AdmitRequest(request_id="r", tenant="a", input_tokens=[10], max_output_tokens=5)
        )


async def test_a_scheduler_with_a_dead_store_serves() -> None:
    metrics = {"listen": "127.0.0.1:0"}
    async with serving(cluster=section(free_port()), metrics=metrics) as server:
        answer = await admitted(server.targets[0])
        assert answer.outcome == pb.OUTCOME_GRANTED
        sharing = server.driver.sharing
        assert sharing is not None
        await until(lambda: "cannot connect" in sharing.problem, "it has tried")
        assert server.driver.unsynced_ns() > 0
        page = (await server.metrics.page()).decode()
    lines = [line for line in page.splitlines() if line.startswith("schedsvc_cluster")]
    assert any(line.startswith("schedsvc_cluster_unsynced_seconds ") for line in lines), lines
    assert "schedsvc_cluster_members 0.0" in lines
    assert "schedsvc_cluster_quota_shared 0.0" in lines


async def test_over_refuse_waits_for_no_store_that_is_away() -> None:
    """A new scheduler refuses like one without `cluster`, and it is shown to be alone."""
    quota = {"requests_per_minute": 2, "concurrency": 2, "over": "refuse"}
    tenants = [{"name": "a", "quota": quota}]
    found = []
    for keys in ({}, {"cluster": section(free_port())}):
        async with serving(tenants=tenants, **keys) as server, calling(server.targets[0]) as stub:
            asks = [
                pb.AdmitRequest(
                    request_id=f"r{n}", tenant="a", input_tokens=[10], max_output_tokens=5
                )
                for n in range(4)
            ]
            answers = [await stub.Admit(ask, timeout=5) for ask in asks]
            found.append([(each.outcome, each.refusal.retry_after_ms // 1_000) for each in answers])
            shown = await stats(server.targets[0], "--cluster")
    assert found[0] == found[1]
    refused = pb.OUTCOME_REJECTED_QUOTA
    assert [outcome for outcome, _ in found[0]] == [pb.OUTCOME_GRANTED] * 2 + [refused] * 2
    assert "without the store this member spends the whole of each limit: store 127.0" in shown


async def test_over_refuse_with_hold_is_refused_without_the_store() -> None:
    tenants = [{"name": "a", "quota": {"requests_per_minute": 2, "over": "refuse"}}]
    cluster = section(free_port()) | {"outage": "hold"}
    async with serving(tenants=tenants, cluster=cluster) as server:
        answer = await admitted(server.targets[0])
        assert answer.outcome == pb.OUTCOME_REJECTED_QUOTA, answer
        assert 0 < answer.refusal.retry_after_ms < 10_000


async def test_a_scheduler_joins_and_leaves(store: StoreServer) -> None:
    (store.folder / "password").write_text(ADMIN_PASSWORD)
    admin = Address("127.0.0.1", store.port, None, ADMIN_PASSWORD)
    await init_store(admin, "prod", None, None)
    password_file = str(store.folder / "password")
    async with serving(cluster=section(store.port, password_file=password_file)) as server:
        sharing = server.driver.sharing
        assert sharing is not None
        await until(lambda: sharing.members == ("a",), "it has joined")
        [member] = (await status_of(admin, "prod")).members
        assert member.incarnation == f"{server._incarnation:016x}"
    assert (await status_of(admin, "prod")).members == []


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    file = tmp_path / "schedsvc.yaml"
    file.write_text(
        "listeners: [{tcp: 127.0.0.1:0}]\n"
        'cluster: {name: p, store: {urls: ["redis://127.0.0.1:1"]}}\n'
    )
    program = (
        "import sys; sys.modules['redis'] = None\n"
        "from schedsvc.cli import main\n"
        f"main(['serve', '--config', {str(file)!r}])\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "cluster needs the package redis: pip install 'schedsvc[cluster]'" in done.stderr


async def test_stats_show_members_and_unsynced_time(store: StoreServer) -> None:
    (store.folder / "password").write_text(ADMIN_PASSWORD)
    admin = Address("127.0.0.1", store.port, None, ADMIN_PASSWORD)
    await init_store(admin, "prod", None, None)
    password_file = str(store.folder / "password")
    async with serving(cluster=section(store.port, password_file=password_file)) as server:
        sharing = server.driver.sharing
        assert sharing is not None
        await until(lambda: sharing.members == ("a",), "it has joined")
        shown = await stats(server.targets[0], "--cluster")
        assert "cluster prod: member a of 1 (a); last exchange 0." in shown
        assert "shared quotas: 0 held here; 0 chunks drawn" in shown
        store.kill()
        await until(lambda: bool(sharing.problem and sharing.quota_problem), "it has noticed")
        shown = await stats(server.targets[0])
        assert "member a has served alone for " in shown
        plain = json.loads(await stats(server.targets[0], "--cluster", "--json"))
        assert "store 127.0.0.1" in plain["problem"]
        shown = await stats(server.targets[0], "--cluster")
        assert "without the store this member spends" in shown
    async with serving() as server:
        shown = await stats(server.targets[0], "--cluster")
        assert "this scheduler is no member of a cluster" in shown


async def stats(target: str, *options: str) -> str:
    """Ask in a process of its own: the servers of a test log to the same output."""
    words = ["-m", "schedsvc", "stats", "--target", target, *options]
    asking = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    shown, _ = await asking.communicate()
    return shown.decode()
