"""Tests a second process on the files of a first one: it refuses, the first loses nothing."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from schedsvc.server.ready import ReadyFile, ReadyFileError
from tests import forked

from .test_cli import scheduler


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return inode and first bytes of each file but the state's; a recording grows at its end."""
    return {
        file.name: (file.stat().st_ino, file.read_bytes()[:500])
        for file in folder.iterdir()
        if file.is_file() and not file.name.startswith("state")
    }


def second_start(folder: Path, config: dict[str, Any], ready: Path, command: str = "serve") -> str:
    """Try to start another one, which has to fail; return its output."""
    file = folder.parent / "second.yaml"
    file.write_text(json.dumps(config))
    command_line = [sys.executable, "-m", "schedsvc", command, "--config", str(file)]
    done = forked.run(
        [*command_line, "--ready-file", str(ready)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_second_process_touches_nothing_of_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "first"
    folder.mkdir()
    (folder / "recording").write_text("of an earlier run")
    first = {
        "listeners": [{"tcp": "127.0.0.1:0"}],
        "record": str(folder / "recording"),
        "state": {"file": str(folder / "state.db"), "every_ms": 60_000},
    }
    (folder / "c.yaml").write_text(json.dumps(first))
    with scheduler(folder / "c.yaml") as (process, ready):
        ready_file, other_ready = folder / "ready.json", tmp_path / "ready.json"
        earlier = tmp_path / "earlier"
        earlier.write_text("a recording of the second one")
        taken = [{"tcp": ready["targets"][0]}]
        before = snapshot(folder)
        cases: list[tuple[dict[str, Any], Path, str]] = [
            ({**first, "state": None}, other_ready, "another process records to it"),
            ({**first, "state": None, "record": None}, ready_file, "--ready-file"),
            ({"listeners": taken, "record": str(earlier)}, other_ready, "cannot listen on"),
            (
                {
                    "listeners": first["listeners"],
                    "record": str(earlier),
                    "metrics": {"listen": ready["targets"][0]},
                },
                other_ready,
                "cannot listen on",
            ),
        ]
        for config, file, expected in cases:
            config = {key: value for key, value in config.items() if value is not None}
            assert expected in second_start(folder, config, file), config
            assert snapshot(folder) == before
        assert not other_ready.exists()
        assert earlier.read_text() == "a recording of the second one"
        assert (folder / "recording.1").read_text() == "of an earlier run"
        process.terminate()
        assert process.wait(timeout=30) == 0
    assert not (folder / "ready.json").exists()


def test_ready_file_of_an_earlier_run_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "ready"
    file.write_text("{}")
    (tmp_path / "ready.partial").write_text("longer than what will be written")
    with ReadyFile(file) as ready:
        assert not file.exists()
        ready.write(["unix:s"], None)
        assert json.loads(file.read_text()) == {"targets": ["unix:s"], "metrics": None}
        with pytest.raises(ReadyFileError, match="another process that runs holds it"):
            ReadyFile(file).__enter__()
        assert file.exists()
    assert list(tmp_path.iterdir()) == []


def test_ready_file_is_held_before_it_is_written(tmp_path: Path) -> None:
    with ReadyFile(tmp_path / "ready"), pytest.raises(ReadyFileError):
        ReadyFile(tmp_path / "ready").__enter__()
    assert list(tmp_path.iterdir()) == []


def test_ready_file_of_a_successor_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "ready"
    with ReadyFile(file) as ready:
        ready.write(["unix:s"], None)
        file.unlink()
        with ReadyFile(file) as successor:
            successor.write(["unix:t"], None)
            ready.__exit__()
            assert json.loads(file.read_text())["targets"] == ["unix:t"]
