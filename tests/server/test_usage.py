"""Tests a server's usage ledger: each ended lease is saved once, also if the disk fails."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from schedsvc_client.v1 import operator_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

from schedsvc.cli.stats_files import file_lines
from schedsvc.records.usage import Ledger
from schedsvc.records.usage.export import Span, plain_rows
from schedsvc.server import Server, UsageError
from tests.waiting import until

from .conftest import ask, calling, config_of, serving
from .test_config import MINIMAL, found
from .test_operator import operating


def ledger_of(folder: Path, **more: Any) -> dict[str, Any]:
    return {"path": str(folder / "usage.db"), **more}


def sums(folder: Path, *by: str) -> list[tuple[object, ...]]:
    return [tuple(row.values()) for row in plain_rows(folder / "usage.db", by, Span())]


def saved(server: Server) -> int:
    assert server.driver.ledgering is not None
    return server.driver.ledgering.saved_rows


async def use(stub: SchedulerServiceStub, request_id: str, output: int, **more: Any) -> None:
    granted = await stub.Admit(ask(request_id=request_id, **more))
    grant = granted.grant
    await stub.Complete(
        pb.CompleteRequest(
            lease_id=grant.lease_id,
            pool_epoch=grant.pool_epoch,
            input_tokens=10,
            output_tokens=output,
        )
    )


async def test_completed_leases_are_saved_with_group_and_model(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "usage": ledger_of(tmp_path),
        "groups": [{"name": "org"}, {"name": "team", "parent": "org"}],
        "tenants": [{"name": "a", "group": "team"}],
        "models": [{"name": "llama", "pools": ["pool"]}],
        "tenant_rules": [{"match": "x-*", "group": "org"}],
    }
    async with serving(**keys) as server, calling(server.targets[0]) as stub:
        await use(stub, "r1", 5, tenant="a")
        await use(stub, "r2", 7, tenant="a")
        await until(lambda: saved(server) == 2, "2 rows saved")
        expected = [("org/team", "a", "llama", 2, 20, 0, 12)]
        assert sums(tmp_path, "groups", "tenant", "model") == expected


async def test_usage_counts_for_the_group_that_an_operator_set(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "usage": ledger_of(tmp_path),
        "state": {"file": str(tmp_path / "state.db")},
        "groups": [{"name": "org"}],
        "tenants": [{"name": "a"}],
        "tenant_rules": [{"match": "*"}],
    }
    async with operating(**keys) as (server, both):
        await both.operator.SetTenant(operator_pb2.SetTenantRequest(name="a", group="org"))
        await use(both.scheduler, "r1", 5, tenant="a")
        await until(lambda: saved(server) == 1, "1 row saved")
    async with operating(**keys) as (server, both):
        await use(both.scheduler, "r2", 7, tenant="a")
        await until(lambda: saved(server) == 1, "1 row saved")
        await both.operator.DeleteTenant(operator_pb2.DeleteTenantRequest(name="a"))
        await use(both.scheduler, "r3", 1, tenant="a")
        await until(lambda: saved(server) == 2, "2 rows saved")
    assert sums(tmp_path, "groups") == [("", 1, 10, 0, 1), ("org", 2, 20, 0, 12)]


async def test_a_stop_saves_what_waits(tmp_path: Path) -> None:
    async with serving(usage=ledger_of(tmp_path)) as server, calling(server.targets[0]) as stub:
        await use(stub, "r1", 5)
    assert sums(tmp_path) == [(1, 10, 0, 5)]


async def test_stats_show_the_ledger_and_its_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(usage=ledger_of(tmp_path)) as server, calling(server.targets[0]) as stub:
        stats = await stub.Stats(pb.StatsRequest())
        assert (stats.usage.saved_rows, stats.usage.problem) == (0, "")
        ledgering = server.driver.ledgering
        assert ledgering is not None
        with sqlite3.connect(tmp_path / "usage.db", isolation_level=None) as other:
            other.execute("BEGIN EXCLUSIVE")
            monkeypatch.setattr("schedsvc.records.usage.writer._RETRY_S", 0.05)
            await use(stub, "r1", 5)
            await until(lambda: bool(ledgering.problem), "a failed write")
            await use(stub, "r2", 6)  # serving goes on
            stats = await stub.Stats(pb.StatsRequest())
            assert "database is locked" in stats.usage.problem
            assert stats.usage.waiting_rows == 2
            [line] = file_lines(stats)
            assert line.startswith("usage ledger: 0 saved, 2 waiting; not saved: ")
            assert line.endswith(stats.usage.problem)
            other.execute("ROLLBACK")
        other.close()
        await until(lambda: saved(server) == 2, "2 rows saved")
        stats = await stub.Stats(pb.StatsRequest())
        assert stats.usage.problem == ""
        assert list(file_lines(stats)) == ["usage ledger: 2 saved, 0 waiting"]
    assert sums(tmp_path) == [(2, 20, 0, 11)]


async def test_rows_beyond_the_queue_are_counted(
    tmp_path: Path, failing: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(usage=ledger_of(tmp_path)) as server, calling(server.targets[0]) as stub:
        assert server._usage is not None
        monkeypatch.setattr(server._usage, "_queue_max", 2)
        failing()
        for i in range(4):
            await use(stub, f"r{i}", 5)
        stats = await stub.Stats(pb.StatsRequest())
        assert (stats.usage.waiting_rows, stats.usage.lost_rows) == (2, 2)
        assert next(file_lines(stats)).startswith("usage ledger: 0 saved, 2 waiting, 2 lost")
        monkeypatch.undo()
        await until(lambda: saved(server) == 2, "2 rows saved")
        # The streams do not wait for dropped rows.
        assert server._usage._taken == 4
    assert sums(tmp_path) == [(2, 10 * 2, 0, 10)]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let every write to a ledger fail as on a full disk."""

    def fail(*_: object) -> list[object]:
        raise UsageError("database or disk is full")

    monkeypatch.setattr("schedsvc.records.usage.writer._RETRY_S", 0.01)
    return lambda: monkeypatch.setattr(Ledger, "add", fail)


async def test_metrics_show_the_ledger(tmp_path: Path) -> None:
    async with serving(usage=ledger_of(tmp_path)) as server, calling(server.targets[0]) as stub:
        await use(stub, "r1", 5)
        await until(lambda: saved(server) == 1, "a row saved")
        page = (await server.metrics.page()).decode()
        assert "schedsvc_usage_rows_saved_total 1.0" in page
        assert "schedsvc_usage_rows_lost_total 0.0" in page
        assert "schedsvc_usage_failing 0.0" in page
        size = (tmp_path / "usage.db-wal").stat().st_size
        assert size > 0
        assert f"schedsvc_usage_log_bytes {float(size)}" in page
        assert (await stub.Stats(pb.StatsRequest())).usage.log_bytes == size


async def test_deleted_ledger_is_written_again_with_all_rows(tmp_path: Path) -> None:
    async with serving(usage=ledger_of(tmp_path)) as server, calling(server.targets[0]) as stub:
        await use(stub, "r1", 5)
        await until(lambda: saved(server) == 1, "a row saved")
        (tmp_path / "usage.db").unlink()
        await use(stub, "r2", 6)
        await until(lambda: saved(server) == 2, "2 rows saved")
        assert sums(tmp_path) == [(2, 20, 0, 11)]
        page = (await server.metrics.page()).decode()
        assert "schedsvc_usage_files_lost_total 1.0" in page
        with pytest.raises(UsageError, match="is held by another process"):
            Server(config_of(usage=ledger_of(tmp_path)))


async def test_deleted_ledger_is_written_again_without_requests(tmp_path: Path) -> None:
    async with serving(usage=ledger_of(tmp_path)) as server, calling(server.targets[0]) as stub:
        await use(stub, "r1", 5)
        await until(lambda: saved(server) == 1, "a row saved")
        (tmp_path / "usage.db").unlink()
        await until((tmp_path / "usage.db").exists, "the file at its path")
        with pytest.raises(UsageError, match="is held by another process"):
            Server(config_of(usage=ledger_of(tmp_path)))
    assert sums(tmp_path) == [(1, 10, 0, 5)]


async def test_a_second_scheduler_on_the_ledger_is_refused(tmp_path: Path) -> None:
    async with serving(usage=ledger_of(tmp_path)):
        with pytest.raises(UsageError, match="is held by another process"):
            Server(config_of(usage=ledger_of(tmp_path)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "usage: {path: /nowhere/at/all/usage.db}\n",
            ["2:15 usage.path: the folder /nowhere/at/all does not exist; make it"],
        ),
        (
            "state: {file: /tmp/r}\nusage: {path: /tmp/r, keep_days: 0}\n",
            [
                "3:15 usage.path: would write to /tmp/r, which is a file of state.file; "
                "name another file",
                "3:34 usage.keep_days: is 0; it has to be at least 1",
            ],
        ),
        ("usage: {keep_days: 1}\n", ["2:8 usage: the key 'path' is missing; add it"]),
        (
            "usage: {path: /tmp/u, currency: eur, prices: [{input: -1, output: 1}]}\n",
            [
                "2:33 usage.currency: has to be a code of three letters, such as USD",
                "2:55 usage.prices[0].input: is -1; it has to lie between 0 and 1000000",
            ],
        ),
    ],
)
def test_a_wrong_ledger_is_named(tmp_path: Path, text: str, expected: list[str]) -> None:
    assert found(tmp_path, MINIMAL + text) == expected
