"""Tests `schedsvc cluster` against a real store."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from schedsvc.cli import main
from schedsvc.cluster.library import library_source

from .store_server import ADMIN_PASSWORD, StoreServer


@pytest.fixture
def config_file(tmp_path: Path, store: StoreServer) -> Path:
    (tmp_path / "password").write_text("secret\n")
    (tmp_path / "admin").write_text(ADMIN_PASSWORD + "\n")
    file = tmp_path / "schedsvc.yaml"
    file.write_text(
        "listeners: [{tcp: 127.0.0.1:0}]\n"
        "cluster:\n  name: prod\n  member: a\n"
        f'  store: {{urls: ["redis://members@127.0.0.1:{store.port}"], password_file: password}}\n'
    )
    return file


def run(command: str, config_file: Path, *options: str) -> Result:
    arguments = ["cluster", command, "--config", str(config_file), *options]
    return CliRunner().invoke(main, arguments)


def init(config_file: Path) -> Result:
    admin = str(config_file.parent / "admin")
    return run("init", config_file, "--admin-password-file", admin)


def test_init_makes_a_store_ready(config_file: Path, store: StoreServer) -> None:
    before = run("status", config_file)
    assert before.exit_code == 1
    assert "check cluster.store.password_file" in before.output  # there is no such user yet
    for _ in range(2):
        done = init(config_file)
        assert done.exit_code == 0, done.output
        assert f"127.0.0.1:{store.port}: functions loaded, user members may use" in done.output
    shown = run("status", config_file, "--json")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.output) == {
        "store": f"127.0.0.1:{store.port}",
        "change_number": 0,
        "rows": 0,
        "members": [],
        "sets": [],
    }


def test_init_says_which_version_it_replaces(config_file: Path, store: StoreServer) -> None:
    assert b"schedsvc" in store.ask("FUNCTION", "LOAD", library_source("3"))
    assert "functions loaded in place of version 3 (now upgrade" in init(config_file).output


def test_init_needs_an_operator(config_file: Path) -> None:
    refused = run("init", config_file)
    assert refused.exit_code == 1
    assert "Error: store 127.0.0.1" in refused.output
    assert "give an operator's password with --admin-password-file" in refused.output
    assert "cluster.store.password_file" not in refused.output


@pytest.mark.parametrize("options", [(), ("--admin-user", "nobody")])
def test_init_with_a_wrong_password_names_its_file(
    config_file: Path, options: tuple[str, ...]
) -> None:
    wrong = config_file.parent / "wrong"
    wrong.write_text("not it\n")
    refused = run("init", config_file, "--admin-password-file", str(wrong), *options)
    assert refused.exit_code == 1
    assert f"check --admin-user and --admin-password-file {wrong}\n" in refused.output
    assert "cluster.store.password_file" not in refused.output


def test_init_without_a_password_is_refused(config_file: Path) -> None:
    text = config_file.read_text().replace(", password_file: password", "")
    config_file.write_text(text)
    refused = init(config_file)
    assert refused.exit_code == 1
    assert "user members needs a password; name a file" in refused.output


def test_check_shows_the_cluster(config_file: Path, store: StoreServer) -> None:
    shown = CliRunner().invoke(main, ["check", str(config_file), "--json"])
    summary = json.loads(shown.output)["summary"]
    url = f"redis://members@127.0.0.1:{store.port}"
    assert summary["cluster"] == (
        f"prod, as member a; store {url}; without it a member spends its part of each quota"
    )


def test_check_names_what_outage_allows(config_file: Path) -> None:
    text = config_file.read_text().replace("member: a\n", "member: a\n  outage: wait\n")
    assert "outage: wait" in text
    config_file.write_text(text)
    refused = CliRunner().invoke(main, ["check", str(config_file)])
    assert refused.exit_code == 1
    assert "outage" in refused.output
    assert "'share' or 'hold'" in refused.output


def test_a_file_without_a_cluster_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "alone.yaml"
    file.write_text("listeners: [{tcp: 127.0.0.1:0}]\n")
    refused = run("status", file)
    assert refused.exit_code == 1
    assert "has no section `cluster`" in refused.output
