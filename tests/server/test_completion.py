"""Tests shell completion: scripts in real shells, and names from a real scheduler."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete

from schedsvc.cli import complete as complete_module
from schedsvc.cli import main
from schedsvc.server import Server

from .conftest import ask, calling, serving

SHELLS = ("bash", "zsh", "fish")


def complete(*words: str) -> list[str]:
    """Return the offers for the last of these words."""
    made = ShellComplete(main, {}, "schedsvc", "_SCHEDSVC_COMPLETE")
    return [item.value for item in made.get_completions(list(words[:-1]), words[-1])]


async def complete_at(server: Server, *words: str) -> list[str]:
    target = server.targets[0]
    return await asyncio.to_thread(complete, *words[:-1], "--target", target, words[-1])


@pytest.mark.parametrize(
    "words", [("drain",), ("leases", "list", "--pool"), ("leases", "revoke", "--pool")]
)
async def test_pools_are_completed(server: Server, words: tuple[str, ...]) -> None:
    before, last = (words, ()) if len(words) == 1 else (words[:-1], words[-1:])
    target = ("--target", server.targets[0])
    for start, expected in (("", ["pool"]), ("po", ["pool"]), ("x", [])):
        found = await asyncio.to_thread(complete, *before, *target, *last, start)
        assert found == expected


@pytest.mark.parametrize(
    "words", [("stats",), ("why", "r1"), ("mode", "enforce"), ("leases", "list")]
)
async def test_tenants_are_completed(server: Server, words: tuple[str, ...]) -> None:
    target = ("--target", server.targets[0])
    found = await asyncio.to_thread(complete, *words, *target, "--tenant", "")
    assert {"a", "b"} <= set(found)


async def test_leases_are_completed(tmp_path: Path) -> None:
    # Callers on a Unix socket may operate.
    async with serving(listeners=[{"unix": str(tmp_path / "s")}]) as running:
        async with calling(running.targets[0]) as stub:
            lease_id = (await stub.Admit(ask(100))).grant.lease_id
        assert await complete_at(running, "leases", "revoke", "") == [str(lease_id)]


async def test_request_ids_are_completed() -> None:
    async with serving() as running, calling(running.targets[0]) as stub:
        for name in ("chatcmpl-1", "chatcmpl-2", "r$(reboot)"):
            await stub.Admit(ask(100, request_id=name))
        assert await complete_at(running, "why", "chat") == ["chatcmpl-1", "chatcmpl-2"]
        assert await complete_at(running, "why", "") == ["chatcmpl-1", "chatcmpl-2"]


async def test_scheduler_of_the_environment_is_asked(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCHEDSVC_TARGET", server.targets[0])
    assert await asyncio.to_thread(complete, "drain", "") == ["pool"]


@pytest.mark.parametrize("name", ["x;reboot", "$(reboot)", "--undo", "a b", "`x`", "*"])
async def test_name_that_a_shell_would_run_is_left_out(name: str) -> None:
    pools: list[dict[str, Any]] = [
        {"name": name, "capacity_tokens": 1_600},
        {"name": "gpu-1/a@b:c", "capacity_tokens": 1_600},
    ]
    async with serving(pools=pools) as running:
        assert await complete_at(running, "drain", "") == ["gpu-1/a@b:c"]


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def nobody(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/nobody.sock"


@pytest.mark.parametrize("target", ["silent", "nobody"])
def test_without_a_scheduler_nothing_is_completed(
    target: str, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    assert complete_module._OPTIONS.call_deadline_s < 1  # other calls have 5 s
    assert complete("drain", "--target", request.getfixturevalue(target), "") == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("options", [("--token-env", "NO_SUCH_NAME"), ("--tls-cert", "/nowhere")])
def test_wrong_options_complete_nothing(options: tuple[str, str]) -> None:
    assert complete("drain", *options, "") == []


def test_commands_and_options_are_completed() -> None:
    assert complete("st") == ["stats", "state"]
    assert complete("--ver") == ["--version"]
    assert "--watch-config" in complete("serve", "--")
    assert complete("completion", "") == list(SHELLS)


def test_names_of_commands_import_none() -> None:
    environ = {"COMP_WORDS": "schedsvc ", "COMP_CWORD": "1", "_SCHEDSVC_COMPLETE": "bash_complete"}
    code = (
        "import sys; from schedsvc.cli import main\n"
        "try: main(prog_name='schedsvc')\n"
        "except SystemExit: print([m for m in ('grpc', 'pydantic', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert {"plain,serve", "plain,completion", "plain,demo"} <= set(lines)
    assert lines[-1] == "[]"


# In real shells.

ASK = {
    "bash": (
        "source {script}; COMP_WORDS=(schedsvc drain --target {target} po); COMP_CWORD=4;"
        " _schedsvc_completion schedsvc; echo ${{COMPREPLY[@]}}"
    ),
    # Without a terminal zsh has no completion system: these functions replace its commands.
    "zsh": (
        "compdef() {{ }}; compadd() {{ print ${{(P)@[-1]}} }}; source {script}; CURRENT=5;"
        " words=(schedsvc drain --target {target} po); _schedsvc_completion"
    ),
    "fish": "source {script}; complete -C 'schedsvc drain --target {target} po'",
}


@pytest.mark.parametrize("shell", SHELLS)
async def test_script_works_in_its_shell(shell: str, server: Server, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not on this machine")
    script = tmp_path / "script"
    command = [sys.executable, "-m", "schedsvc", "completion", shell]
    script.write_text(await asyncio.to_thread(subprocess.check_output, command, text=True))
    # The name that the script runs.
    program = tmp_path / "bin/schedsvc"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m schedsvc "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    code = ASK[shell].format(script=script, target=server.targets[0])
    process = await asyncio.create_subprocess_exec(
        shell, "-c", code, env=os.environ | {"PATH": path}, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert output.decode().strip() == "pool"


def test_unknown_shell_is_refused() -> None:
    with pytest.raises(click.BadParameter, match="powershell"):
        main(["completion", "powershell"], standalone_mode=False)
