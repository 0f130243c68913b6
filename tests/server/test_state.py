"""Tests a scheduler that is killed and starts again: it knows who had how much."""

import asyncio
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import structlog
from schedsvc_client.v1 import operator_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.mode_pb2 import MODE_AUDIT, MODE_CONFIGURED, MODE_ENFORCE
from schedsvc_client.v1.operator_pb2_grpc import OperatorServiceStub
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

from schedsvc.cli.stats_files import file_lines
from schedsvc.driver import Driver
from schedsvc.records.state import Store
from schedsvc.server import Server, StateError
from tests.waiting import until

from .conftest import ask, calling, config_of, open_channel, serving
from .test_cli import scheduler
from .test_config import MINIMAL, found
from .test_drain import health
from .test_operator_cli import typed

TENANTS: list[dict[str, Any]] = [
    {"name": "a", "quota": {"tokens_per_minute": 100_000}},
    {"name": "b", "weight": 2.5},
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "state: {file: /nowhere/at/all/state.db}\n",
            ["2:15 state.file: the folder /nowhere/at/all does not exist; make it"],
        ),
        (
            "record: /tmp/r\nstate: {file: /tmp/r, every_ms: 9}\n",
            [
                "3:15 state.file: would write to /tmp/r, which is a file of record; "
                "name another file",
                "3:33 state.every_ms: is 9; it has to be at least 10",
            ],
        ),
        (
            "state: {every_ms: 100}\n",
            ["2:8 state: the key 'file' is missing; add it"],
        ),
    ],
)
def test_a_wrong_state_is_named(tmp_path: Path, text: str, expected: list[str]) -> None:
    assert found(tmp_path, MINIMAL + text) == expected


def kept(file: Path, **keys: Any) -> dict[str, Any]:
    return {"state": {"file": str(file), "every_ms": 20}, "tenants": TENANTS} | keys


async def served(stub: Any, tokens: int, **fields: Any) -> None:
    answer = await stub.Admit(ask(tokens, **fields))
    assert answer.outcome == pb.OUTCOME_GRANTED
    lease_id = answer.grant.lease_id
    await stub.Complete(pb.CompleteRequest(lease_id=lease_id, pool_epoch=1, output_tokens=10))


def counters(driver: Driver) -> dict[str, int]:
    return {row["tenant"]: row["vtc_micro"] for row in driver.stats(100)["flows"]}


async def test_counters_and_quotas_outlive_a_stop(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    async with serving(**kept(file)) as server, calling(server.targets[0]) as stub:
        await served(stub, 500)
        await served(stub, 100, tenant="b")
        before = counters(server.driver)
        assert len(set(before.values())) == 3
    async with serving(**kept(file)) as server, calling(server.targets[0]) as stub:
        assert counters(server.driver) == before
        (row,) = server.driver.tenant_stats(b"a")
        assert row["quotas"][0]["remaining"] < 100_000
        stats = await stub.Stats(pb.StatsRequest())
        assert stats.HasField("state")
        assert not stats.state.problem
        page = await server.metrics.page()
        assert b"schedsvc_state_failing 0.0" in page


async def test_without_a_file_nothing_is_kept(server: Server) -> None:
    async with calling(server.targets[0]) as stub:
        stats = await stub.Stats(pb.StatsRequest())
    assert not stats.HasField("state")
    assert server.driver.unsaved_ns() == 0


async def test_a_failing_disk_is_reported_and_serving_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "state.db"
    with structlog.testing.capture_logs() as logs:
        async with serving(**kept(file)) as server, calling(server.targets[0]) as stub:
            keeper = server._keeper
            assert keeper is not None
            await until(lambda: keeper._store._is_old is False, "the first write")

            def full(*_: object) -> None:
                raise StateError(f"cannot write {file}: database or disk is full")

            with monkeypatch.context() as patch:
                patch.setattr(keeper._store, "write", full)
                await served(stub, 500)
                saving = server.driver.saving
                assert saving is not None
                await until(lambda: bool(saving.problem), "the problem is told")
                await served(stub, 500)
                stats = await stub.Stats(pb.StatsRequest())
                assert "disk is full" in stats.state.problem
                [line] = file_lines(stats)
                assert line.startswith("the state has not been saved for ")
                assert line.endswith(stats.state.problem)
                page = await server.metrics.page()
                assert b"schedsvc_state_failing 1.0" in page
            await until(lambda: not saving.problem, "it is saved again")
            before = counters(server.driver)
    events = [entry["event"] for entry in logs]
    assert events.count("state_not_saved") == 1
    assert events.count("state_saved_again") == 1
    async with serving(**kept(file)) as server:
        assert counters(server.driver) == before


OPEN = {"listeners": [{"tcp": "127.0.0.1:0", "operate": True}]}


async def test_operators_settings_outlive_a_restart(tmp_path: Path) -> None:
    """Drains and modes are saved at once, logged at the start, and undone by an operator alone."""
    keys = kept(tmp_path / "state.db", **OPEN)
    keys["state"]["every_ms"] = 60_000
    async with serving(**keys) as server, open_channel(server.targets[0]) as channel:
        operator = OperatorServiceStub(channel)
        await operator.Drain(operator_pb2.DrainRequest(pool="pool"))
        await operator.SetMode(operator_pb2.SetModeRequest(mode=MODE_AUDIT))
        await operator.SetMode(operator_pb2.SetModeRequest(mode=MODE_ENFORCE, tenant="a"))
        keeper = server._keeper
        assert keeper is not None
        await until(lambda: b'"a": "enforce"' in keeper._store.modes, "it is saved at once")
    with structlog.testing.capture_logs() as logs:
        async with serving(**keys) as server, open_channel(server.targets[0]) as channel:
            stats = await SchedulerServiceStub(channel).Stats(pb.StatsRequest())
            assert [pool.draining for pool in stats.pools] == [True]
            shown = await typed(server.targets[0], "drain", "pool", "--json")
            assert json.loads(shown.stdout)["outlives_restart"]
            assert stats.mode.overlay == MODE_AUDIT
            audits = {flow.tenant: flow.audit for flow in stats.flows}
            assert (audits["a"], audits["b"]) == (False, True)
            operator = OperatorServiceStub(channel)
            await operator.Drain(operator_pb2.DrainRequest(pool="pool", undo=True))
            await operator.SetMode(operator_pb2.SetModeRequest(mode=MODE_CONFIGURED))
            await operator.Drain(operator_pb2.DrainRequest())
    (told,) = [entry for entry in logs if entry["event"] == "operator_resumed"]
    assert (told["draining"], told["pools_draining"]) == (False, ["pool"])
    assert (told["mode"], told["tenant_modes"]) == ("dry_run", {"a": "enforce"})
    async with serving(**keys) as server, open_channel(server.targets[0]) as channel:
        assert server.driver.stats(0)["draining"]
        assert await health(server) == await health(server, "schedsvc.v1.SchedulerService") == 2
        assert (await health(server, "liveness"), await health(server, "readiness")) == (1, 2)
        await OperatorServiceStub(channel).Drain(operator_pb2.DrainRequest(undo=True))
        assert await health(server) == 1
    async with serving(**keys) as server:
        stats = server.driver.stats(0)
        assert not stats["draining"]
        assert not stats["pools"][0]["draining"]
        assert server.driver.mode_overlay.saved() == b""


async def test_a_write_that_waits_when_the_server_stops_is_not_lost(tmp_path: Path) -> None:
    keys, gate = kept(tmp_path / "state.db", **OPEN), threading.Event()
    async with serving(**keys) as server, open_channel(server.targets[0]) as channel:
        keeper = server._keeper
        assert keeper is not None
        keeper._thread.submit(gate.wait)
        await OperatorServiceStub(channel).Drain(operator_pb2.DrainRequest())
        await until(lambda: keeper._thread._work_queue.qsize() > 0, "a write waits")
        asyncio.get_running_loop().call_later(0.05, gate.set)
    async with serving(**keys) as server:
        assert server.driver.stats(0)["draining"]


async def test_modes_of_tenants_that_are_gone_are_void_after_a_restart(tmp_path: Path) -> None:
    keys = kept(tmp_path / "state.db", **OPEN)
    async with serving(**keys) as server, open_channel(server.targets[0]) as channel:
        said = operator_pb2.SetModeRequest(mode=MODE_AUDIT, tenant="b")
        await OperatorServiceStub(channel).SetMode(said)
    async with serving(**keys | {"tenants": TENANTS[:1]}) as server:
        assert not server.driver.mode_overlay.tenants
        assert not any(row["audit"] for row in server.driver.stats(9)["flows"])


@pytest.mark.parametrize("modes", [b"{", b"[]", b'{"tenants": {"a": "off"}}', b"\xff"])
async def test_modes_without_an_operator_are_damage(tmp_path: Path, modes: bytes) -> None:
    file = tmp_path / "state.db"
    store = Store(file)
    store.write([(b"f\0\0a", b"\x08\x05", 0)], modes)
    store.close()
    async with serving(**kept(file)) as server:
        assert counters(server.driver)["a"] == 0
    assert (tmp_path / "state.db.damaged").exists()


async def test_a_damaged_file_is_set_aside_and_serving_begins(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    file.write_bytes(os.urandom(9_000))
    with structlog.testing.capture_logs() as logs:
        async with serving(**kept(file)) as server, calling(server.targets[0]) as stub:
            await served(stub, 500)
    (entry,) = [entry for entry in logs if entry["event"] == "state_damaged"]
    assert entry["kept_as"] == str(file) + ".damaged"
    assert "state.db.damaged" in os.listdir(tmp_path)


async def test_rows_that_the_core_refuses_are_damage(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    store = Store(file)
    store.write([(b"f\0\0a", b"\xff", 0)])
    store.close()
    with structlog.testing.capture_logs() as logs:
        async with serving(**kept(file)):
            pass
    (entry,) = [entry for entry in logs if entry["event"] == "state_damaged"]
    assert "rows" in entry["reason"]
    assert "state.db.damaged" in os.listdir(tmp_path)


async def test_a_file_of_another_scheduler_ends_the_start(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    async with serving(**kept(file)):
        with pytest.raises(StateError, match="held by another process"):
            Server(config_of(**kept(file)))


async def saved_since(stub: Any, began_s: float) -> None:
    """Wait until Stats reports that events before a moment are saved."""
    for _ in range(2_000):
        asked_s = time.monotonic()  # before the answer, which may take its time
        state = (await stub.Stats(pb.StatsRequest())).state
        if state.unsaved_ms < (asked_s - began_s) * 1_000 - 1:
            return
        await asyncio.sleep(0.005)
    pytest.fail("nothing was saved")


async def test_a_killed_process_loses_no_more_than_it_says(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        "listeners: [{unix: s.sock}]\nstate: {file: state.db, every_ms: 20}\n"
        "pools: [{name: pool, capacity_tokens: 1600}]\ntenants: [{name: a}, {name: b}]\n"
    )
    found = []
    for _ in range(2):
        with scheduler(config) as (process, ready):
            async with calling(ready["targets"][0]) as stub:
                if not found:
                    await served(stub, 700)
                    await served(stub, 700)  # at this pick a's counter becomes the level
                    await served(stub, 50, tenant="b")
                    await saved_since(stub, time.monotonic())
                rows = (await stub.Stats(pb.StatsRequest())).flows
                found.append({row.tenant: row.vtc_micro for row in rows})
            process.send_signal(signal.SIGKILL)
            process.wait()
        (tmp_path / "ready.json").unlink()
    assert found[0] == found[1]
    assert 0 < found[0]["b"] < found[0]["a"]


async def test_sessions_go_on_in_their_order_after_a_kill(tmp_path: Path) -> None:
    """The session that was served least before the kill is first after it, though it asks last."""
    config = tmp_path / "c.yaml"
    config.write_text(
        "listeners: [{unix: s.sock}]\nstate: {file: state.db, every_ms: 20}\n"
        "pools: [{name: pool, capacity_tokens: 160}]\ntenants: [{name: a}, {name: b}]\n"
    )
    with scheduler(config) as (process, ready):
        async with calling(ready["targets"][0]) as stub:
            for session in ("ahead", "behind", "ahead", "ahead"):
                await served(stub, 100, session=session)
            await saved_since(stub, time.monotonic())
        process.send_signal(signal.SIGKILL)
        process.wait()
    (tmp_path / "ready.json").unlink()
    with scheduler(config) as (_, ready):
        async with calling(ready["targets"][0]) as stub:
            first = (await stub.Admit(ask(100, tenant="b"))).grant
            waiting = {}
            for session in ("ahead", "behind"):
                waiting[session] = asyncio.ensure_future(stub.Admit(ask(100, session=session)))
                while (await stub.Stats(pb.StatsRequest())).totals.queued < len(waiting):
                    pass
            await stub.Complete(pb.CompleteRequest(lease_id=first.lease_id, pool_epoch=1))
            await asyncio.wait(waiting.values(), return_when=asyncio.FIRST_COMPLETED)
            assert {name: each.done() for name, each in waiting.items()} == {
                "ahead": False,
                "behind": True,
            }
            waiting["ahead"].cancel()
