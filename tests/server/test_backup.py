"""Tests a backup of a live scheduler's files, and a scheduler that starts with it."""

import os
import sqlite3
import stat
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from schedsvc_client.v1 import operator_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1.mode_pb2 import MODE_AUDIT
from schedsvc_client.v1.operator_pb2_grpc import OperatorServiceStub

from schedsvc.cli import main
from schedsvc.cluster.term_file import TermFile
from schedsvc.records.usage.export import Span, plain_rows
from tests import forked
from tests.waiting import until

from .conftest import calling, open_channel
from .test_cli import scheduler
from .test_state import served
from .test_usage import use

CONFIG = """
listeners: [{unix: s.sock, operate: true}]
state: {file: state.db, every_ms: 20}
usage: {path: usage.db}
pools: [{name: pool, capacity_tokens: 16000}]
tenants: [{name: a, quota: {tokens_per_minute: 20000}}]
"""


def back_up(what: str, config: Path, target: Path) -> Result:
    return CliRunner().invoke(main, [what, "backup", "--config", str(config), str(target)])


def requests(path: Path) -> int:
    return int(next(iter(plain_rows(path, [], Span())))["requests"])


def saved_modes(path: Path) -> bytes:
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    found = connection.execute("SELECT value FROM meta WHERE name = 'modes'").fetchone()
    connection.close()
    return found[0] if found else b""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "c.yaml").write_text(CONFIG)
    return tmp_path / "c.yaml"


async def test_restored_backup_has_usage_and_state(config: Path) -> None:
    folder = config.parent
    with scheduler(config) as (process, ready):
        async with calling(ready["targets"][0]) as stub:
            await use(stub, "used1", 5)
            await use(stub, "used2", 5)
            await served(stub, 1_000)
            await until(lambda: requests(folder / "usage.db") == 3, "the usage is saved")
            async with open_channel(ready["targets"][0]) as channel:
                said = operator_pb2.SetModeRequest(mode=MODE_AUDIT, tenant="a")
                await OperatorServiceStub(channel).SetMode(said)
            await until(lambda: saved_modes(folder / "state.db"), "the mode is saved")
            for what in ("usage", "state"):
                made = back_up(what, config, folder / f"{what}.backup")
                assert made.exit_code == 0, made.output
            await use(stub, "used3", 5)
        process.terminate()
        process.wait()
    for name in folder.glob("*.db*"):
        name.unlink()
    for what in ("usage", "state"):
        (folder / f"{what}.backup").rename(folder / f"{what}.db")
    with scheduler(config) as (process, ready):
        assert requests(folder / "usage.db") == 3
        async with calling(ready["targets"][0]) as stub:
            [mode] = (await stub.Stats(pb.StatsRequest())).mode.tenants
            assert (mode.tenant, mode.mode) == ("a", MODE_AUDIT)
            await use(stub, "used4", 5)
            await until(lambda: requests(folder / "usage.db") == 4, "it is written")


def test_backup_takes_the_terms_along(config: Path) -> None:
    folder = config.parent
    TermFile(folder / "state.db", "main").keep(9, (7, "a/61"))
    started = forked.run(
        [sys.executable, "-c", "from pathlib import Path; from schedsvc.records.state import Store;"
         f"Store(Path({str(folder / 'state.db')!r})).close()"]
    )  # fmt: skip
    assert started.returncode == 0
    made = back_up("state", config, folder / "copy")
    assert made.exit_code == 0, made.output
    (folder / "moved").mkdir()
    (folder / "copy.term").rename(folder / "moved" / "state.db.term")
    found = TermFile(folder / "moved" / "state.db", "main")
    assert (found.number, found.led) == (9, (7, "a/61"))


def test_backup_is_its_owners_alone_and_replaces_no_file(config: Path) -> None:
    target = config.parent / "copy"
    with scheduler(config):
        assert back_up("usage", config, target).exit_code == 0
        assert stat.S_IMODE(target.stat().st_mode) == 0o600
        before = target.read_bytes()
        again = back_up("usage", config, target)
        assert (again.exit_code, again.output) == (
            1,
            f"Error: {target} exists; name another file\n",
        )
    assert target.read_bytes() == before
    assert not list(config.parent.glob("*.part"))


@pytest.mark.parametrize("what", ["usage", "state"])
def test_backup_of_another_programs_file_is_refused(config: Path, what: str) -> None:
    file = config.parent / f"{what}.db"
    made = back_up(what, config, config.parent / "copy")
    assert (made.exit_code, "cannot back up" in made.output) == (1, True), made.output
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    made = back_up(what, config, config.parent / "copy")
    assert made.exit_code == 1
    assert f"{file} is another program's database" in made.output
    os.truncate(file, 100)
    assert back_up(what, config, config.parent / "copy").exit_code == 1
    assert not (config.parent / "copy").exists()
