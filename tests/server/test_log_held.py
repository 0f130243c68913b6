"""Tests another process in the middle of a query on a scheduler's files, and no more requests."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.scheduler_pb2_grpc import SchedulerServiceStub

from schedsvc.records import sqlite_files
from tests.waiting import until

from .conftest import calling, serving
from .test_metrics import of, scrape
from .test_state import kept, served
from .test_usage import ledger_of

#: A log of HELD_FACTOR times that is held.
SMALL = 16 << 10

READER = """
import sqlite3, sys
connection = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True, isolation_level=None)
connection.execute("BEGIN")
connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
print("reading", flush=True)
sys.stdin.read()
"""


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Let another process hold a file's log."""
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"reading\n"
        try:
            yield
        finally:
            reader.kill()


async def serve(stub: SchedulerServiceStub) -> None:
    while True:
        await served(stub, 1)


@pytest.mark.parametrize("part", ["state", "usage"])
async def test_held_log_is_reported_and_shrinks_after_its_reader(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_files, "LOG_BYTES_MAX", SMALL)
    file = tmp_path / f"{part}.db"
    keys: dict[str, Any] = {"metrics": {"listen": "127.0.0.1:0"}}
    keys |= {"usage": ledger_of(tmp_path)} if part == "usage" else kept(file)
    with structlog.testing.capture_logs() as logs:

        def seen() -> list[str]:
            return [row["event"] for row in logs if row["event"].startswith(f"{part}_log")]

        async with serving(**keys) as server, calling(server.targets[0]) as stub:
            kept_by = server.driver.saving if part == "state" else server.driver.ledgering
            assert kept_by is not None
            with reading(file):
                requests = asyncio.create_task(serve(stub))
                await until(lambda: bool(seen()), "the log is held")
                requests.cancel()
                assert seen() == [f"{part}_log_held"]
                limit = SMALL * sqlite_files.HELD_FACTOR
                await until(lambda: kept_by.log_bytes >= limit, "the size is known")
                assert of(await scrape(server), f"{part}_log_bytes") >= limit
                least = kept_by.log_bytes  # rows that wait still make it longer
                told = await stub.Stats(pb.StatsRequest())
                assert least <= getattr(told, part).log_bytes <= kept_by.log_bytes
            await until(lambda: len(seen()) == 2, "the log is truncated, without a request")
            await until(lambda: kept_by.log_bytes < SMALL, "the size is known")
            assert file.with_name(f"{file.name}-wal").stat().st_size < SMALL
            assert of(await scrape(server), f"{part}_log_bytes") < SMALL
    assert seen() == [f"{part}_log_held", f"{part}_log_truncated"]
    assert not [row for row in logs if row["event"].endswith("_lost")]


@pytest.mark.parametrize("part", ["state", "usage"])
async def test_full_log_is_left_to_its_reader(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_files, "LOG_BYTES_MAX", SMALL)
    monkeypatch.setattr(sqlite_files, "FULL_FACTOR", sqlite_files.HELD_FACTOR)
    file = tmp_path / f"{part}.db"
    keys: dict[str, Any] = {"usage": ledger_of(tmp_path)} if part == "usage" else kept(file)
    with structlog.testing.capture_logs() as logs:

        def left() -> list[Any]:
            return [row for row in logs if row["event"] == f"{part}_file_left"]

        async with serving(**keys) as server, calling(server.targets[0]) as stub:
            with reading(file):
                requests = asyncio.create_task(serve(stub))
                await until(lambda: bool(left()), "the file is left")
                requests.cancel()
                assert left()[0]["bytes"] >= SMALL * sqlite_files.FULL_FACTOR
                kept_by = server.driver.saving if part == "state" else server.driver.ledgering
                assert kept_by is not None
                assert not kept_by.problem
                log = file.with_name(f"{file.name}-wal")
                await until(lambda: log.stat().st_size < SMALL * 2, "the copy's log is short")
    assert not [row for row in logs if row["event"].endswith("_lost")]
