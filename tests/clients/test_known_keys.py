"""Tests the file in which a gate keeps the keys that the scheduler has known."""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from schedsvc_client import api_key_hash
from schedsvc_client.aio import AsyncScheduler
from schedsvc_vllm import known_keys, scheduler_keys
from schedsvc_vllm.known_keys import KEPT_S, KnownKey, KnownKeys
from schedsvc_vllm.scheduler_keys import AGAIN_S, FRESH_S, SchedulerKeys
from schedsvc_vllm.settings import Settings

from tests.waiting import until

from .test_gate_keys import Keys, Time, scheduling

ONE, TWO, THREE = (bytes([n]) * 32 for n in (1, 2, 3))


@pytest.fixture
async def keys() -> AsyncIterator[Keys]:
    async with scheduling() as made:
        yield made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "known"


def made(path: Path, time: Time | None = None) -> KnownKeys:
    return KnownKeys(str(path), time or Time())


def bytes_of(path: Path) -> bytes:
    return path.read_bytes()


def open_to_others(path: Path) -> None:
    path.chmod(0o644)


def test_the_file_holds_what_was_applied(path: Path) -> None:
    assert made(path).read() == {}
    made(path).apply({ONE: "a", TWO: "é" * 128})
    made(path).apply({THREE: "c", ONE: None})
    assert made(path).read() == {TWO: KnownKey("é" * 128, 100), THREE: KnownKey("c", 100)}
    assert list(path.parent.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_processes_of_one_engine_share_the_file(path: Path) -> None:
    first, second = made(path), made(path)
    first.apply({ONE: "a", TWO: "b"})
    second.apply({THREE: "c", ONE: None})
    first.apply({})
    assert list(made(path).read()) == [TWO, THREE]


def test_a_key_of_which_nothing_is_said_is_dropped(path: Path) -> None:
    time = Time()
    made(path, time).apply({ONE: "a"})
    time.now_s += KEPT_S - 1
    made(path, time).apply({TWO: "b"})
    assert list(made(path, time).read()) == [ONE, TWO]
    time.now_s += 1
    assert list(made(path, time).read()) == [TWO]
    time.now_s = 0  # a clock that was set back keeps them
    assert made(path, time).read()[TWO].said_s == 0


def test_the_file_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_keys, "KEYS_MAX", 2)
    made(path).apply({ONE: "a", TWO: "b"})
    made(path).apply({THREE: "c"})
    assert list(made(path).read()) == [TWO, THREE]
    monkeypatch.setattr(known_keys, "BYTES_MAX", 100)
    made(path).apply({ONE: "a" * 40})
    assert list(made(path).read()) == [ONE]
    path.write_bytes(path.read_bytes() + bytes(100))
    with pytest.raises(OSError, match="larger than"):
        made(path).read()


@pytest.mark.parametrize("damage", [slice(0, 20), slice(0, -1), slice(0, 8), slice(0, 0)])
def test_a_damaged_file_is_replaced(path: Path, damage: slice) -> None:
    made(path).apply({ONE: "a"})
    path.write_bytes(path.read_bytes()[damage])
    assert made(path).read() == {}
    made(path).apply({TWO: "b"})
    assert list(made(path).read()) == [TWO]


def _symlink(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to(path.with_name("other"))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


REFUSED = {
    "readable by others": (lambda path: path.chmod(0o604), "its mode is 0604; set 0600"),
    "writable by its group": (lambda path: path.chmod(0o620), "its mode is 0620; set 0600"),
    "a link": (_symlink, "symbolic links"),
    "a pipe": (_pipe, "not a regular file"),
    "of another program": (lambda path: path.write_bytes(b"x" * 99), "no file of known keys"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_file_that_others_could_write_is_not_used(path: Path, what: str) -> None:
    change, problem = REFUSED[what]
    made(path).apply({ONE: "a"})
    change(path)
    before = path.lstat()
    for use in (lambda: made(path).read(), lambda: made(path).apply({TWO: "b"})):
        with pytest.raises(OSError, match=problem):
            use()
    assert path.lstat() == before or path.is_fifo()


def test_a_file_of_another_user_is_not_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(path).apply({ONE: "a"})
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    with pytest.raises(OSError, match=f"belongs to user {path.stat().st_uid}; give it to 12345"):
        made(path).read()


async def test_known_keys_outlive_a_restart_as_hashes_alone(keys: Keys, path: Path) -> None:
    key, key_id = await keys.create()
    digest = api_key_hash(key)
    first = SchedulerKeys(AsyncScheduler(keys.target), Time(), str(path))
    assert await first.owner(digest) == "a"
    assert await first.owner(b"k" * 32) is None
    await first.close()
    assert list(KnownKeys(str(path)).read()) == [digest]
    assert key.encode() not in bytes_of(path)
    second = SchedulerKeys(AsyncScheduler(keys.target), Time(), str(path))
    await keys.revoke(key_id)
    assert await second.owner(digest) is None  # it asks, also for a key of the file
    await second.close()
    assert KnownKeys(str(path)).read() == {}


async def test_known_keys_work_after_a_restart_while_the_scheduler_is_away(path: Path) -> None:
    async with scheduling() as keys:
        digest = api_key_hash((await keys.create())[0])
        first = SchedulerKeys(AsyncScheduler(keys.target), Time(), str(path))
        assert await first.owner(digest) == "a"
        await first.close()
    second = SchedulerKeys(AsyncScheduler(keys.target), Time(), str(path))
    assert await second.owner(digest) == "a"
    await second.close()


async def test_a_killed_gate_has_saved_its_keys(
    keys: Keys, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_keys, "SAVE_S", 0.01)
    digest = api_key_hash((await keys.create())[0])
    first = SchedulerKeys(AsyncScheduler(keys.target), Time(), str(path))
    await first.owner(digest)
    await until(lambda: digest in KnownKeys(str(path)).read())
    await first.close()


async def test_a_key_in_use_is_asked_again_in_the_background(keys: Keys) -> None:
    key, key_id = await keys.create()
    time = Time()
    made = SchedulerKeys(AsyncScheduler(keys.target), time)
    digest = api_key_hash(key)
    assert await made.owner(digest) == "a"
    time.now_s += FRESH_S - AGAIN_S
    assert await made.owner(digest) == "a"
    await until(lambda: not made._asking)
    time.now_s += FRESH_S - 1
    await keys.revoke(key_id)
    assert await made.owner(digest) == "a"  # fresh: the answer comes later
    await until(lambda: not made._asking)
    assert await made.owner(digest) is None
    await made.close()


async def test_a_gate_without_a_usable_file_says_so_and_works(
    keys: Keys, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made(path).apply({ONE: "a"})
    open_to_others(path)
    asked = SchedulerKeys(AsyncScheduler(keys.target), Time(), str(path))
    assert await asked.owner(api_key_hash((await keys.create())[0])) == "a"
    await asked.close()
    said = [record.message for record in caplog.records if "KNOWN_KEYS_FILE" in record.message]
    assert len(said) == 1
    assert str(path) in said[0]
    assert "its mode is 0644; set 0600" in said[0]


PATHS = [
    ({}, ""),
    ({"HOME": "/root"}, "/root/.local/state/schedsvc/known-keys-"),
    ({"HOME": "/root", "XDG_STATE_HOME": "/var/x"}, "/var/x/schedsvc/known-keys-"),
    ({"HOME": "/root", "SCHEDSVC_KNOWN_KEYS_FILE": "off"}, ""),
    ({"SCHEDSVC_KNOWN_KEYS_FILE": "/k"}, "/k"),
]


@pytest.mark.parametrize(("variables", "begins"), PATHS)
def test_where_the_file_is(variables: dict[str, str], begins: str) -> None:
    found = [
        Settings.from_environment({"SCHEDSVC_TARGET": "h:1", "SCHEDSVC_POOL": pool, **variables})
        for pool in ("x", "y")
    ]
    assert all(each.known_keys_file.startswith(begins) for each in found)
    # Engines may have other rights at the scheduler, so they do not share learned keys.
    told = "SCHEDSVC_KNOWN_KEYS_FILE" in variables or not variables
    assert (found[0].known_keys_file == found[1].known_keys_file) is told
    assert bool(found[0].known_keys_file) is bool(begins)
