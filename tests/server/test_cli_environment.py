"""Tests that commands read addresses and tokens from the environment, and explain themselves."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import Result

from schedsvc.cli import main, starting

from .certificates import Authority
from .conftest import serving, token_of
from .test_cli import run
from .test_config import MINIMAL

TOKEN = "ops-token-of-16"
AUTH = {"auth": {"principals": [token_of("ops", TOKEN, operator=True)]}}
READERS = (("serve",), ("edge",), ("check",), ("usage", "export"), ("state", "backup", "b.db"))


def commands(command: click.Command, *words: str) -> Iterator[tuple[str, ...]]:
    yield words
    for name, below in command.commands.items() if isinstance(command, click.Group) else ():
        yield from commands(below, *words, name)


@pytest.mark.parametrize("words", list(commands(main)), ids=" ".join)
def test_command_takes_h_and_version(words: tuple[str, ...]) -> None:
    assert run(*words, "-h").output == run(*words, "--help").output
    assert "-h, --help" in run(*words, "-h").output
    assert run(*words, "--version").output == run("--version").output == "schedsvc 0.1.0\n"


# Tokens and TLS.


async def ask(target: str, *words: object) -> Result:
    return await asyncio.to_thread(run, "stats", "--target", target, *words)


async def test_commands_take_their_token_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    async with serving(listeners=[{"tcp": "127.0.0.1:0"}], **AUTH) as server:
        target = server.targets[0]
        assert "UNAUTHENTICATED" in (await ask(target)).output
        assert (await ask(target, "--token-file", file)).exit_code == 0
        monkeypatch.setenv("SCHEDSVC_TOKEN_FILE", str(file))
        assert (await ask(target)).exit_code == 0
        monkeypatch.setenv("SCHEDSVC_TOKEN", "another-token-of-16")
        both = await ask(target)
        assert both.exit_code == 2
        assert "SCHEDSVC_TOKEN and SCHEDSVC_TOKEN_FILE exclude each other" in both.output
        assert (await ask(target, "--token-file", file)).exit_code == 0  # an option precedes both
        monkeypatch.delenv("SCHEDSVC_TOKEN_FILE")
        assert "UNAUTHENTICATED" in (await ask(target)).output
        monkeypatch.setenv("SCHEDSVC_TOKEN", TOKEN)
        assert (await ask(target)).exit_code == 0


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot read {}: No such file or directory"),
        (b" \n", "{} is empty; write the token into it"),
        (b"\xff", "{} is no text in UTF-8; write the token into it"),
    ],
)
@pytest.mark.parametrize("hint", ["--token-file", "SCHEDSVC_TOKEN_FILE"])
def test_token_file_that_holds_no_token_is_named(
    content: bytes | None, problem: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    words = ("--token-file", file) if hint.startswith("--") else ()
    monkeypatch.setenv("SCHEDSVC_TOKEN_FILE", str(file))
    result = run("stats", *words)
    assert result.exit_code == 2
    assert f"Invalid value for {hint}: {problem.format(file)}" in result.output


async def test_commands_take_tls_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("scheduler", "localhost")
    tls = {"cert": str(own.cert_file), "key": str(own.key_file), "client_ca": str(authority.file)}
    async with serving(listeners=[{"tcp": "localhost:0", "tls": tls}], **AUTH) as server:
        target = f"localhost:{server.targets[0].rpartition(':')[2]}"
        client = authority.issue("ops", "spiffe://a/ops")
        monkeypatch.setenv("SCHEDSVC_TOKEN", TOKEN)
        monkeypatch.setenv("SCHEDSVC_TLS_CERT_FILE", str(client.cert_file))
        monkeypatch.setenv("SCHEDSVC_TLS_KEY_FILE", str(client.key_file))
        assert (await ask(target)).exit_code == 1  # the system does not know the CA
        monkeypatch.setenv("SCHEDSVC_TLS_CA_FILE", str(authority.file))
        result = await ask(target)
        assert result.exit_code == 0, result.output
        monkeypatch.setenv("SCHEDSVC_TLS", "off")
        result = await ask(target)
        assert result.exit_code == 2
        assert "--no-tls (SCHEDSVC_TLS) excludes the files of TLS" in result.output


# The configuration.


@pytest.mark.parametrize("words", READERS, ids=" ".join)
def test_command_reads_the_configuration_that_the_environment_names(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("listeners: [{tcp: x}]\n")
    monkeypatch.setenv("SCHEDSVC_CONFIG", str(file))
    result = run(*words)
    assert result.exit_code == 1
    assert f"{file}:1:19: listeners[0].tcp: has to be HOST:PORT" in result.output


@pytest.fixture
def usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the place of the usual configuration; nothing is there."""
    monkeypatch.delenv("SCHEDSVC_CONFIG", raising=False)
    monkeypatch.setattr(starting, "USUAL_CONFIG", tmp_path / "schedsvc.yaml")
    return tmp_path / "schedsvc.yaml"


@pytest.mark.parametrize("words", READERS, ids=" ".join)
def test_command_without_a_configuration_says_how_to_give_one(
    words: tuple[str, ...], usual: Path
) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert result.output.splitlines()[-1] == (
        f"Error: no configuration is given, and {usual} does not exist; give --config FILE, or set"
        " SCHEDSVC_CONFIG"
    )


def test_check_without_a_file_checks_the_usual_one(usual: Path) -> None:
    usual.write_text(MINIMAL)
    result = run("check")
    assert result.exit_code == 0
    assert f"{usual} is valid" in result.output


# Tables in files.


async def test_tables_in_a_pipe_have_no_blanks_at_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(MINIMAL)
    tenants = [{"name": name} for name in ("a", "a-long-name")]
    async with serving(
        listeners=[{"tcp": "127.0.0.1:0", "operate": True}], tenants=tenants
    ) as server:
        for words in (["stats"], ["stats", "--all"], ["tenants", "list"], ["leases", "list"]):
            target = server.targets[0]
            shown = await asyncio.to_thread(run, *words, "--target", target)
            assert shown.exit_code == 0
            assert not [line for line in shown.output.splitlines() if line.endswith(" ")]
    assert not [line for line in run("check", file).output.splitlines() if line.endswith(" ")]
