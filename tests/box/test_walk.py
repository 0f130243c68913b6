"""Runs the commands of docs/use/install.md in their order, on an empty Debian."""

import json
from pathlib import Path

import pytest

from deploy.release import DIST

from .conftest import BASE
from .tools import Containers, page_blocks, run

pytestmark = [pytest.mark.install, pytest.mark.timeout(900)]

COMMANDS_MAX = 10
[BLOCK] = page_blocks("docs/use/install.md", "sh", "Try it from nothing")
COMMANDS = BLOCK.splitlines()
# A person continues when the program has printed the line; a script has to wait for it.
WAIT = "until grep -q ready log-{0}; do kill -0 $!; sleep 0.1; done"


def script(commands: list[str]) -> str:
    lines = ["set -e"]
    for at, command in enumerate(commands):
        if command.endswith("&"):
            lines += [f"{command.removesuffix('&')}> log-{at} 2>&1 &", WAIT.format(at)]
        else:
            lines.append(command)
    return "\n".join(lines)


def test_page_needs_ten_commands_at_most() -> None:
    assert 0 < len(COMMANDS) <= COMMANDS_MAX
    assert not [line for line in COMMANDS if line.endswith("\\")]
    assert sum(line.endswith("&") for line in COMMANDS) == 2


def test_commands_lead_from_an_empty_debian_to_a_picture(
    containers: Containers, wheels: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    # The first command reads Debian's mirrors. The others run without a network: a folder replaces
    # the index.
    first, *others = COMMANDS
    assert first.startswith("apt-get")
    options = ("--env=DEBIAN_FRONTEND=noninteractive", "--name=walk")
    command = containers.command(BASE, "sh", "-c", script([first]), options=options)
    run([word for word in command if word not in ("--rm", "--read-only")])
    containers.podman("commit", "--quiet", "walk", "localhost/walked")
    containers.podman("rm", "walk")
    options = (
        *("--network=none", "--workdir=/walk", "--env=PIP_NO_INDEX=1"),
        *(f"--volume={wheels}:/wheels:ro", "--env=PIP_FIND_LINKS=/wheels"),
        *(f"--volume={DIST}:/walk/dist:ro", f"--volume={out}:/walk/out"),
    )
    command = containers.command("localhost/walked", "sh", "-c", script(others), options=options)
    shown = run([word for word in command if word not in ("--network=host", "--read-only")])
    result = json.loads((out / "result.json").read_text())
    assert {name: each["completed"] > 0 for name, each in result["tenants"].items()} == {
        "tenant-1": True,
        "tenant-2": True,
    }
    # As the page says.
    ttft = {name: each["median_ttft_ms"] for name, each in result["tenants"].items()}
    assert ttft["tenant-2"] < ttft["tenant-1"]
    assert (out / "load.png").stat().st_size > 10_000
    # `schedsvc stats` comes last, and shows that the scheduler charged both.
    table = shown.rpartition("quota left")[2].splitlines()
    rows = [line.split() for line in table if line.strip().startswith("tenant-")]
    charged = {row[0]: int(row[4].replace(",", "")) for row in rows}
    assert charged.keys() == {"tenant-1", "tenant-2"}
    assert all(charged.values())
