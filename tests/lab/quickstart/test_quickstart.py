"""Tests what `schedsvc quickstart` writes and prints, and that this works as printed."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from schedsvc.cli import main
from schedsvc.config import load
from schedsvc_lab.quickstart.files import QuickstartError, make, read_tenants
from tests import forked
from tests.waiting import wait_for_start, wait_until


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


# The folder.


def test_folder_holds_a_valid_file_with_the_hash_of_each_key(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "try"
    made = make(folder, read_tenants("research, production=2.5"))
    config = load(made.config)
    assert [(each.name, each.weight_milli) for each in config.tenants] == [
        ("research", 1_000),
        ("production", 2_500),
    ]
    assert (folder / "keys").read_text() == "".join(f"{n} {k}\n" for n, k in made.keys.items())
    assert {mode(path) for path in folder.iterdir()} == {0o600}
    assert mode(folder) == 0o700
    assert len(set(made.keys.values())) == 2
    text = made.config.read_text()
    assert not [key for key in made.keys.values() if key in text]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_place_that_exists_is_left_as_it_is(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "try"
    place.mkdir() if kind == "folder" else place.write_text("mine")
    with pytest.raises(QuickstartError, match="exists, and is left as it is; name another folder"):
        make(place, read_tenants("a"))
    assert list(place.iterdir()) == [] if kind == "folder" else place.read_text() == "mine"


@pytest.mark.parametrize(
    ("folder", "tenants", "problem"),
    [
        ("x" * 120, "a", "listeners[0].unix"),
        ("try", "a" * 300, "tenants[0].name"),
    ],
)
def test_configuration_that_does_not_hold_leaves_no_folder(
    tmp_path: Path, folder: str, tenants: str, problem: str
) -> None:
    with pytest.raises(QuickstartError, match=re.escape(problem)):
        make(tmp_path / folder, read_tenants(tenants))
    assert list(tmp_path.iterdir()) == []


# The command line.


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["quickstart", *words])


@pytest.mark.parametrize(
    ("words", "status", "problem"),
    [
        ([], 2, "stdin is no terminal, so nothing can be asked; give --yes, or name tenants"),
        (["a=x"], 1, "'a=x' is no tenant; write NAME, or NAME=WEIGHT"),
        (["a=0"], 1, "'a=0' is no tenant; write NAME, or NAME=WEIGHT"),
        (["a a=2"], 1, "the tenant 'a' occurs twice; name it once"),
        ([" "], 1, "name 1 to 100 tenants, not 0"),
        (["--yes", "--folder", "/proc/no"], 1, "cannot be made: "),
    ],
)
def test_wrong_line_is_explained(words: list[str], status: int, problem: str) -> None:
    result = run(*words)
    assert result.exit_code == status
    assert problem in result.output.splitlines()[-1]


# The whole.


def section(shown: str, title: str) -> str:
    """Return the lines below a title of what it prints, without their indent."""
    [found] = re.findall(rf"^{title}.*:\n((?:  .*\n)+)", shown, re.MULTILINE)
    return textwrap.dedent(found)


def start(folder: Path, words: list[str], **options: Any) -> subprocess.Popen[Any]:
    command = [sys.executable, "-m", "schedsvc", "quickstart", "--folder", str(folder), *words]
    return forked.Popen(command, **options)


def printed(log: Path, process: subprocess.Popen[Any]) -> str:
    wait_for_start(process, lambda: "Ctrl-C ends all." in log.read_text())
    return log.read_text()


def completed(target: str) -> dict[str, int]:
    words = ["stats", "--json", "--target", target]
    stats = json.loads(CliRunner().invoke(main, words).output)
    return {flow["tenant"]: int(flow["completed"]) for flow in stats["flows"]}


def test_printed_lines_work_until_ctrl_c(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = start(tmp_path / "try", ["--yes"], stdout=output, stderr=output)
    shown = printed(log, process)
    key = dict(line.split() for line in (tmp_path / "try/keys").read_text().splitlines())
    curl = section(shown, "Send a request of the tenant research")
    assert key["research"] in curl
    done = subprocess.run(["sh", "-c", curl.replace("-s ", "-si ", 1)], capture_output=True)
    head, _, body = done.stdout.decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200")
    assert "x-schedsvc-mode: enforced" in head
    assert json.loads(body)["usage"]["completion_tokens"] > 0
    sdk = section(shown, "The same with OpenAI's SDK")
    exec(sdk.replace("client.chat", "answer = client.chat"), found := {})
    assert found["answer"].usage.completion_tokens > 0
    found["client"].close()
    console, top = section(shown, "Watch it").splitlines()
    with urllib.request.urlopen(console) as page:
        assert b"<html" in page.read()
    target = top.rpartition(" ")[2]
    wait_until(lambda: completed(target).get("research") == 2)  # an end follows its answer
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0
    assert log.read_text().endswith("stays.\n")
    left = {path.name for path in (tmp_path / "try").iterdir()}
    assert left == {"schedsvc.yaml", "keys", "scheduler.log", "engine.log"}


def test_tenants_are_asked_for_in_a_terminal(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ours, its = pty.openpty()
    with log.open("wb") as output:
        process = start(tmp_path / "try", [], stdin=its, stdout=output, stderr=output)
    os.close(its)
    os.write(ours, b"acme=3\n")
    shown = printed(log, process)
    assert shown.startswith("Tenants, as NAME or NAME=WEIGHT [research production=4]: ")
    assert "Send a request of the tenant acme:" in shown
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 1
    assert log.read_text().endswith("Error: ended by a signal\n")
    os.close(ours)
