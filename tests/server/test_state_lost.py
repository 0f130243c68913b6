"""Tests a state file that is deleted, truncated or replaced under a running scheduler."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from schedsvc_client.v1 import operator_pb2
from schedsvc_client.v1.mode_pb2 import MODE_AUDIT
from schedsvc_client.v1.operator_pb2_grpc import OperatorServiceStub

from schedsvc.config import load
from schedsvc.records import held_file
from schedsvc.records.state import Store
from schedsvc.server import Server
from tests import forked
from tests.waiting import until

from .conftest import calling, open_channel, serving
from .test_cli import scheduler
from .test_metrics import of, scrape
from .test_state import kept, saved_since, served

#: Only `save()` of the test saves.
MANUAL = {"metrics": {"listen": "127.0.0.1:0"}}


def manual(file: Path) -> dict[str, Any]:
    keys = kept(file, **MANUAL, listeners=[{"tcp": "127.0.0.1:0", "operate": True}])
    return keys | {"state": {"file": str(file), "every_ms": 60_000}}


def delete(file: Path) -> None:
    for suffix in ("", "-wal"):
        file.with_name(file.name + suffix).unlink()


def delete_database(file: Path) -> None:
    file.unlink()


def delete_log(file: Path) -> None:
    file.with_name(file.name + "-wal").unlink()


def truncate(file: Path) -> None:
    os.truncate(file, 0)


def truncate_half(file: Path) -> None:
    os.truncate(file, 2_000)


def overwrite(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.write(b"x" * 3_000)


def replace(file: Path) -> None:
    other = Store(file.with_name("other"))
    other.write([(b"f\0\0a", b"\x08\x05", 0)], b"")
    other.close()
    file.with_name("other").replace(file)


DAMAGES = [delete, delete_database, delete_log, truncate, truncate_half, overwrite, replace]


def content(file: Path, folder: Path) -> tuple[dict[bytes, bytes], bytes, bytes]:
    """Return rows, hash key and modes of a copy, as a scheduler would find them after a crash."""
    folder.mkdir()
    for each in file.parent.glob(file.name + "*"):
        shutil.copy(each, folder)
    store = Store(folder / file.name)
    store.close()
    assert not store.set_aside_as, store.damage
    return {key: value for key, value, _ in store.rows}, store.hash_key, store.modes


@pytest.mark.parametrize("damage", DAMAGES)
async def test_lost_state_file_is_written_again(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    file = folder / "state.db"
    with structlog.testing.capture_logs() as logs:
        async with serving(**manual(file)) as server, calling(server.targets[0]) as stub:
            keeper = server._keeper
            assert keeper is not None
            async with open_channel(server.targets[0]) as channel:
                said = operator_pb2.SetModeRequest(mode=MODE_AUDIT, tenant="b")
                await OperatorServiceStub(channel).SetMode(said)
            await served(stub, 500)
            assert await keeper.save()
            before = content(file, tmp_path / "before")
            assert of(await scrape(server), "state_files_lost_total") == 0
            damage(file)
            assert await keeper.save()
            assert of(await scrape(server), "state_files_lost_total") == 1
            after = content(file, tmp_path / "after")
            assert await keeper.save()
            assert of(await scrape(server), "state_files_lost_total") == 1
    assert before[0].keys() <= after[0].keys()
    # Rows of other kinds hold ages.
    timeless = [key for key in before[0] if key.startswith((b"l", b"p"))]
    assert {key: after[0][key] for key in timeless} == {key: before[0][key] for key in timeless}
    assert b"f\0\0a" in before[0]
    assert after[1:] == before[1:]
    events = [entry["event"] for entry in logs if entry["event"].startswith("state_")]
    assert events == ["state_restored", "state_file_lost", "state_file_begun"]


async def test_file_that_a_second_process_took_is_left_to_it(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    with structlog.testing.capture_logs() as logs:
        async with serving(**manual(file)) as server, calling(server.targets[0]) as stub:
            keeper, saving = server._keeper, server.driver.saving
            assert keeper is not None
            assert saving is not None
            await served(stub, 500)
            assert await keeper.save()
            delete(file)
            other = held_file.lock(file)
            for _ in range(2):
                assert not await keeper.save()
            assert "held by another process" in saving.problem
            samples = await scrape(server)
            assert of(samples, "state_failing") == 1
            assert of(samples, "state_files_lost_total") == 1
            os.close(other)
            assert await keeper.save()
            assert saving.problem == ""
            assert len(content(file, tmp_path / "copy")[0]) > 3
    events = [entry["event"] for entry in logs if entry["event"].startswith("state_")]
    assert events == [
        "state_restored",
        "state_file_lost",
        "state_not_saved",
        "state_file_begun",
        "state_saved_again",
    ]


HOLD = """
import pathlib, sys
from schedsvc.records.state import Store
Store(pathlib.Path(sys.argv[1]))
"""


def try_to_hold(file: Path) -> str:
    """Open the file in another process; return its output."""
    done = forked.run([sys.executable, "-c", HOLD, str(file)], capture_output=True, text=True)
    return done.stderr


async def test_lock_follows_the_path_and_quotas_survive_a_kill(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        "listeners: [{unix: s.sock}]\nstate: {file: state.db, every_ms: 20}\n"
        "metrics: {listen: '127.0.0.1:0'}\npools: [{name: pool, capacity_tokens: 1600}]\n"
        "tenants: [{name: a, quota: {tokens_per_minute: 2000}}]\n"
    )
    file = tmp_path / "state.db"
    with scheduler(config) as (process, ready):
        async with calling(ready["targets"][0]) as stub:
            await served(stub, 1_000)
            await saved_since(stub, time.monotonic())
            delete(file)
            await until(file.exists, "the file is begun again")
            await saved_since(stub, time.monotonic())
        assert "held by another process" in try_to_hold(file)
        process.send_signal(signal.SIGKILL)
        process.wait()
    (tmp_path / "ready.json").unlink()
    server = Server(load(config))
    try:
        [quota] = server.driver.tenant_stats(b"a")[0]["quotas"]
        assert quota["remaining"] < 1_900
    finally:
        await server.stop(None)
