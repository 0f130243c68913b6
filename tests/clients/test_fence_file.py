"""Tests the fence file between processes, and the claim of a gate process without one."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from schedsvc_client.fence import Fence, Rank
from schedsvc_vllm.fence_file import (
    LEADER_BYTES_MAX,
    FenceFile,
    claim_pool,
    fence_for,
    make_fence_file,
)
from schedsvc_vllm.launcher import prepare
from schedsvc_vllm.settings import PoolSettings, Settings, SettingsError

from tests.waiting import wait_until

RAISES = """
import sys
from schedsvc_client.fence import Fence, Rank
from schedsvc_vllm.fence_file import FenceFile
fence = Fence(shared=FenceFile(sys.argv[1]))
for term in range(int(sys.argv[2]), int(sys.argv[3]), 2):
    fence.obeys(Rank(term, f"{sys.argv[4]}/{term}"))
"""


def raises(path: str, first: int, end: int, leader: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", RAISES, path, str(first), str(end), leader])


def test_other_process_raises_the_fence(tmp_path: Path) -> None:
    path = str(tmp_path / "fence")
    fence = Fence(shared=FenceFile(path))
    assert fence.obeys(Rank(3, "a/1"))
    assert raises(path, 5, 6, "b").wait(60) == 0
    assert fence.highest == Rank(5, "b/5")
    assert not fence.obeys(Rank(3, "a/1"))
    assert not fence.obeys(Rank(5, "a/1"))
    assert fence.obeys(Rank(5, "b/5"))
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_processes_that_write_at_once_lose_no_term(tmp_path: Path) -> None:
    path = str(tmp_path / "fence")
    file = FenceFile(path)
    writers = [raises(path, 1, 4_001, "a"), raises(path, 2, 4_001, "b")]
    seen = [Rank()]
    while any(writer.poll() is None for writer in writers):
        rank = file.read()
        assert rank.term >= seen[-1].term
        if rank.term:
            assert rank.leader == f"{'ba'[rank.term % 2]}/{rank.term}"
        seen.append(rank)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert file.read() == Rank(4_000, "b/4000")


def test_torn_file_keeps_the_last_leadership(tmp_path: Path) -> None:
    path = tmp_path / "fence"
    file = FenceFile(str(path))
    file.raise_to(Rank(3, "a/1"))
    assert file.read() == Rank(3, "a/1")
    with path.open("r+b") as torn:
        torn.seek(8)
        torn.write(b"\xff" * 8)
    assert file.read() == Rank(3, "a/1")
    assert file.raise_to(Rank(2, "b/1")) == Rank(3, "a/1")
    assert file.raise_to(Rank(4, "b/1")) == file.read() == Rank(4, "b/1")


def found(path: Path) -> Rank:
    """Return the leadership that a process finds that starts now."""
    with closing(FenceFile(str(path))) as file:
        return file.read()


def empty(path: Path) -> None:
    os.truncate(path, 0)


def cut(path: Path) -> None:
    os.truncate(path, 100)


def restore_older(path: Path) -> None:
    older = path.with_name("older")
    FenceFile(str(older)).raise_to(Rank(2, "b/1"))
    older.replace(path)


def replace_by_nothing(path: Path) -> None:
    other = path.with_name("other")
    other.touch()
    other.replace(path)


@pytest.mark.parametrize(
    "attack", [empty, cut, Path.unlink, restore_older, replace_by_nothing], ids=lambda a: a.__name__
)
def test_file_that_another_program_took_is_written_again(
    tmp_path: Path, attack: Callable[[Path], None]
) -> None:
    path = tmp_path / "fence"
    fence = Fence(shared=FenceFile(str(path)))
    assert fence.obeys(Rank(3, "a/1"))
    attack(path)
    assert not fence.obeys(Rank(2, "b/1"))
    wait_until(lambda: fence.highest == found(path) == Rank(3, "a/1"))
    assert fence.obeys(Rank(4, "b/1"))
    assert found(path) == Rank(4, "b/1")


def test_file_of_another_kind_at_the_path_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "fence"
    fence = Fence(shared=FenceFile(str(path)))
    fence.obeys(Rank(3, "a/1"))
    path.unlink()
    path.write_text("mine")
    wait_until(lambda: fence.highest and "is lost" in caplog.text)
    assert fence.obeys(Rank(4, "b/1"))
    assert not fence.obeys(Rank(3, "a/1"))
    assert path.read_text() == "mine"


def test_leader_that_cannot_be_shared_is_not_obeyed(tmp_path: Path) -> None:
    path = tmp_path / "fence"
    fence = Fence(shared=FenceFile(str(path)))
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        wrong = fence.check(Rank(3, "a/1"))
        assert wrong is not None
        assert "cannot write the fence file" in wrong.message
    assert fence.check(Rank(3, "a/1")) is None
    with pytest.raises(OSError, match="more than"):
        fence.obeys(Rank(4, "x" * (LEADER_BYTES_MAX + 1)))


def test_file_of_another_kind_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(SettingsError, match=r"SCHEDSVC_FENCE: .*it is no fence file"):
        fence_for(Settings(target="a:1,b:2", fence=str(path)))
    assert path.read_text() == "mine"
    with pytest.raises(SettingsError, match="SCHEDSVC_FENCE: cannot use /nowhere/f: No such"):
        fence_for(Settings(target="a:1,b:2", fence="/nowhere/f"))


def test_second_gate_process_without_a_file_is_refused() -> None:
    def settings(epoch: int) -> Settings:
        pool = PoolSettings(name="gpu-1", epoch=epoch)
        return Settings(target=f"unix:/{os.getpid()},b:2", pool=pool)

    first = claim_pool(settings(7))
    assert first is not None
    with pytest.raises(SettingsError, match="another gate process of this host offers pool gpu-1"):
        claim_pool(settings(7))
    later = claim_pool(settings(8))  # the engine's next start
    assert later is not None
    later.close()
    first.close()
    again = claim_pool(settings(7))
    assert again is not None
    again.close()
    assert claim_pool(Settings(target="b:2")) is None
    assert claim_pool(Settings(target="a:1,b:2", fence="f")) is None


def test_several_processes_need_a_file() -> None:
    given = {"SCHEDSVC_TARGET": "a:1, b:2", "SCHEDSVC_POOL_GATES": "3"}
    with pytest.raises(SettingsError, match="SCHEDSVC_FENCE is not set: the 3 processes"):
        Settings.from_environment(given)
    settings = Settings.from_environment(given | {"SCHEDSVC_FENCE": "/f"})
    assert (settings.fence, settings.targets) == ("/f", ("a:1", "b:2"))
    assert (settings.unreachable_after_s, settings.failover_wait_s) == (1.5, 5.0)
    single = Settings.from_environment(given | {"SCHEDSVC_TARGET": "a:1"})
    assert (single.fence, single.unreachable_after_s) == ("", 3.0)


def test_launcher_makes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    left = tmp_path / f"schedsvc-fence-{ended.pid}-x"
    left.touch()
    alive = Path(make_fence_file())
    environment: dict[str, str] = {}
    prepare(["serve", "m", "--schedsvc-target", "a:1,b:2", "-asc", "4"], environment)
    made = Path(environment["SCHEDSVC_FENCE"])
    assert made.parent == tmp_path
    assert made.stat().st_mode & 0o777 == 0o600
    assert FenceFile(str(made)).read() == Rank()
    assert alive.exists()
    assert not left.exists()
    environment = {"SCHEDSVC_FENCE": "/mine"}
    prepare(["serve", "m", "--schedsvc-target", "a:1,b:2"], environment)
    assert environment["SCHEDSVC_FENCE"] == "/mine"
    environment = {}
    prepare(["serve", "m", "--schedsvc-target", "a:1"], environment)
    assert "SCHEDSVC_FENCE" not in environment
