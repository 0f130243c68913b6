"""Tests files that are pipes, devices or folders, or have two uses: no hang, no loss.

A pipe without a writer held up the start, a reload and the end of a process; the ready file and a
damaged state file replaced whatever stood at their path.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from schedsvc.config import read
from tests import forked

from .test_auth import TOKEN
from .test_cli import scheduler
from .test_signals import read_until

UNIX = {"unix": "s.sock"}


def written(folder: Path, config: dict[str, Any]) -> Path:
    file = folder / "c.yaml"
    file.write_text(json.dumps({"listeners": [UNIX], **config}))
    return file


def with_token(source: str = "token") -> dict[str, Any]:
    return {
        "listeners": [{**UNIX, "auth": "token"}],
        "auth": {"principals": [{"name": "shim", "token_file": source}]},
    }


def with_tls(source: str) -> dict[str, Any]:
    return {"listeners": [{"tcp": "127.0.0.1:0", "tls": {"cert": source, "key": source}}]}


ROLES: dict[str, Callable[[str], dict[str, Any]]] = {
    "record": lambda name: {"record": name},
    "state": lambda name: {"state": {"file": name}},
    "token": with_token,
    "tls": with_tls,
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pipe", "a pipe"),
        ("folder", "a folder"),
        ("/dev/null", "a device"),
        ("a\0b", "NUL"),
        ("~no-such-user/file", "such"),
    ],
)
def test_file_of_another_kind_is_named(role: str, name: str, said: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    reading = read(written(tmp_path, ROLES[role](name)))
    assert reading.config is None
    assert said in " ".join(problem.message for problem in reading.problems)


@pytest.mark.parametrize("name", ["pipe", "/dev/zero"])
def test_configuration_of_another_kind_is_named(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    [problem] = read(tmp_path / name).problems
    assert "not a regular file" in problem.message


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"record": "c.yaml"}, "this configuration itself"),
        ({"state": {"file": "./c.yaml"}}, "this configuration itself"),
        ({"state": {"file": "link"}}, "this configuration itself"),
        ({"record": "a", "state": {"file": "./a"}}, "a file of record"),
        ({"record": "a", "state": {"file": "a.1"}}, "a file of record"),
        ({"record": "s.sock"}, "the file of listeners[0].unix"),
        (with_token() | {"record": "token"}, "the file of auth.principals[0].token_file"),
    ],
)
def test_file_with_two_uses_is_named(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "link").symlink_to("c.yaml")
    [problem] = read(written(tmp_path, config)).problems
    assert said in problem.message


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("c.yaml", "this configuration itself"),
        ("token", "the file of auth.principals[0].token_file"),
        ("state.db", "the file of state.file"),
        ("pipe", "is a pipe"),
    ],
)
def test_ready_file_replaces_no_other_file(name: str, said: str, tmp_path: Path) -> None:
    for other in ("token", "state.db"):
        (tmp_path / other).write_text(TOKEN if other == "token" else "")
    os.mkfifo(tmp_path / "pipe")
    file = written(tmp_path, with_token() | {"state": {"file": "state.db"}})
    before = (tmp_path / name).stat().st_ino
    command = [sys.executable, "-m", "schedsvc", "serve", "--config", str(file), "--ready-file"]
    done = forked.run([*command, str(tmp_path / name)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert (tmp_path / name).stat().st_ino == before


@pytest.mark.parametrize("name", ["c.yaml", "token"])
def test_reload_of_a_file_that_became_a_pipe_is_rejected(name: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    file = written(tmp_path, with_token())
    with scheduler(file) as (process, _):
        text = (tmp_path / name).read_text()
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        process.send_signal(signal.SIGHUP)
        assert "pipe" in read_until(process, "config_rejected")[-2]["problem"]
        (tmp_path / name).unlink()
        (tmp_path / name).write_text(text)
        process.send_signal(signal.SIGHUP)
        read_until(process, "config_unchanged")
        process.terminate()
        assert process.wait(timeout=30) == 0


def test_token_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"\xef\xbb\xbf" + TOKEN.encode() + b"\r\n")
    assert read(written(tmp_path, with_token())).problems == []
