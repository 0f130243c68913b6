"""Tests mistyped input: messages name the option or key, the value, and what to do."""

import sys
from pathlib import Path

import pytest

from schedsvc.config import load
from tests import forked

from .test_cli import run
from .test_config import MINIMAL, found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["why"], "Missing argument 'REQUEST_ID'."),
        (
            ["stats", "--flows", "10 k"],
            "Invalid value for '--flows': '10 k' is not a whole number;"
            " write all its digits, without a unit or separators.",
        ),
        (
            ["stats", "--flows", "100k"],
            "Invalid value for '--flows': 100000 is not in the range 1<=x<=10000.",
        ),
        (
            ["leases", "list", "--limit", "1e6"],
            "Invalid value for '--limit': '1e6' is not a whole number; write 1000000.",
        ),
        (
            ["drain", "gpu-1", "--wait", "5m"],
            "Invalid value for '--wait': '5m' is not a number;"
            " write all its digits, without a unit or separators.",
        ),
        (
            ["health", "--timeout", "soon"],
            "Invalid value for '--timeout': 'soon' is not a number.",
        ),
        (
            ["tenants", "keys", "create", "a", "--expires-in", "nan"],
            "Invalid value for '--expires-in': nan is not a number up to 1000000000.",
        ),
        (
            ["tenants", "set", "a", "--weight", "nan"],
            "Invalid value for '--weight': 'nan' is not a number",
        ),
        (
            ["stats", "--all", "--flows", "3"],
            "--all and --flows exclude each other; give one of them",
        ),
        (
            ["stats", "--cluster", "--tenant", "a"],
            "--cluster and --tenant exclude each other; give one of them",
        ),
        (
            ["leases", "revoke", "1", "--pool", "gpu-1"],
            "lease ids and options that say which leases are meant exclude each other; give one",
        ),
        (
            ["stats", "--target", "/run/s.sock"],
            "Invalid value for --target or SCHEDSVC_TARGET: target '/run/s.sock' must be host:port"
            " or unix:/path; write unix:/run/s.sock",
        ),
        (
            ["stats", "--token-env", "SCHEDSVC_NO_SUCH_TOKEN"],
            "Invalid value for --token-env: the environment variable SCHEDSVC_NO_SUCH_TOKEN is not"
            " set; put the token into it",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_command_line_that_is_wrong_is_explained(words: list[str], said: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert result.output.splitlines()[-1] == f"Error: {said}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "scheduler: {queue_max: 10kB}",
            "scheduler.queue_max: has to be a whole number, not 10kB, which YAML reads as text;"
            " write all its digits, without a unit or separators",
        ),
        ("scheduler: {queue_max: 10M}", "scheduler.queue_max: is 10000000; it has to be at most"),
        ("limits: {drain_ms: 30s}", "not 30s, which YAML reads as text; write all its digits"),
        ("scheduler: {queue_max: '1,000'}", "not 1,000, which YAML reads as text; write all"),
        ("scheduler: {queue_max: 12345678secret}", "has to be a whole number, not text"),
        (
            "scheduler: {queue_max: }",
            "scheduler.queue_max: is empty; give a whole number, or remove the key",
        ),
        ("scheduler: {queue_max: yes}", "has to be a whole number, not true or false"),
        ("metrics: {listen: 9090}", "has to be text, not a number; write it in quotes"),
        ("scheduler:\n\tqueue_max: 5", "not valid YAML: a tab stands here; indent with spaces"),
    ],
)
def test_value_that_is_wrong_is_explained(tmp_path: Path, text: str, problem: str) -> None:
    [found_here] = found(tmp_path, MINIMAL + text + "\n")
    assert problem in found_here


@pytest.mark.parametrize("words", [("usage", "export"), ("cluster", "status")])
def test_command_that_starts_nothing_does_not_say_so(words: tuple[str, ...]) -> None:
    result = run(*words, "--config", "nowhere.yaml")
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == "Error: nowhere.yaml is not valid"


def test_check_breaks_no_path_where_it_is_piped(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    file = folder / "c.yaml"
    file.write_text("listeners: [{tcp: '127.0.0.1:0'}]\nstate: {file: state.db}\n")
    command = [sys.executable, "-m", "schedsvc", "check", str(file)]
    done = forked.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert f"{folder}/state.db, every" in done.stdout


def test_k_and_m_are_read_as_numbers_only_where_keys_take_numbers(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        MINIMAL + "tenants: [{name: 100k, weight: 2k, quota: {tokens_per_minute: 100k}},"
        " {name: b, mode: dry-run, quota: {tokens_per_minute: 2M, requests_per_minute: 9}}]\n"
    )
    a, b = load(file).tenants
    assert (a.name, a.weight_milli, a.quota.tokens_per_minute) == ("100k", 2_000_000, 100_000)
    assert (b.mode, b.quota.tokens_per_minute) == ("dry_run", 2_000_000)
