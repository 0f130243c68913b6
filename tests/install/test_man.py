"""Tests man pages from click's help."""

import os
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from deploy.man import page, roff, write
from schedsvc.cli import main


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("man")
    write(folder, "1.2.3")
    return folder


def test_every_command_has_a_page(pages: Path) -> None:
    names = {file.stem for file in pages.iterdir()}
    commands = main.list_commands(click.Context(main))
    assert names >= {"schedsvc", "schedsvc-leases-revoke", *(f"schedsvc-{c}" for c in commands)}


def test_page_shows_what_help_shows(pages: Path) -> None:
    text = (pages / "schedsvc-serve.1").read_text()
    assert text.startswith('.TH "SCHEDSVC-SERVE" "1" "" "schedsvc 1.2.3"')
    assert "schedsvc\\-serve \\- Serve admission over gRPC" in text
    assert ".B \\-\\-watch\\-config SECONDS" in text
    assert ".B \\-h, \\-\\-help" in text
    # An example stays unchanged, and other paragraphs are wrapped.
    assert ".nf\nExample:\n  schedsvc serve \\-\\-config schedsvc.yaml\n.fi" in text
    assert "\x08" not in text


def test_page_of_a_group_lists_its_commands(pages: Path) -> None:
    assert ".B schedsvc leases revoke" in (pages / "schedsvc-leases.1").read_text()


def test_text_never_becomes_a_request_of_troff() -> None:
    assert roff(".so /etc/passwd\n'x\na\\fB-b") == "\\&.so /etc/passwd\n\\&'x\na\\efB\\-b"
    command = click.Command("x", help=".hidden\n\n\b\n'quoted")
    text = page(click.Context(command, info_name="x"), "1")
    assert "\n\\&.hidden\n" in text
    assert "\n\\&'quoted\n" in text


def test_pages_have_no_warnings(pages: Path) -> None:
    if shutil.which("man") is None:
        pytest.skip("man is not on this machine")
    for file in sorted(pages.iterdir()):
        command = ["man", "--warnings", "--local-file", str(file)]
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"MANWIDTH": "100"}
        )
        assert (done.returncode, done.stderr) == (0, ""), file.name
        assert "SYNOPSIS" in done.stdout
