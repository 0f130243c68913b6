"""Tests how `make image` finds a builder, and what it asks of it."""

from pathlib import Path

import pytest

from deploy import image
from deploy.release import version


def installed(folder: Path, **status: int) -> None:
    for program, code in status.items():
        file = folder / program
        file.write_text(f"#!/bin/sh\nexit {code}\n")
        file.chmod(0o755)


def test_builder_is_the_first_one_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A client of docker without its engine.
    installed(tmp_path, docker=1, podman=0, buildah=0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert image.builder() == "podman"
    installed(tmp_path, docker=0)
    assert image.builder() == "docker"


def test_no_builder_is_an_error_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, docker=1)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="install one of docker, podman, buildah"):
        image.builder()


def test_wheels_of_another_python_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "PYTHON", (3, 99))
    with pytest.raises(SystemExit, match=r"PYTHON=python3\.11"):
        image.gather()


def test_build_command_names_stage_tag_and_base() -> None:
    words = image.build_command("lab", image.BUILDERS["docker"], "mine:1")
    assert words[:2] == ["docker", "build"]
    for pair in (["--target", "lab"], ["--tag", f"schedsvc-lab:{version()}"]):
        assert " ".join(pair) in " ".join(words)
    assert "BASE=mine:1" in words
    assert f"VERSION={version()}" in words


def test_every_stage_with_a_name_is_in_the_file() -> None:
    text = image.CONTAINERFILE.read_text()
    for stage in image.IMAGES:
        assert f" AS {stage}\n" in text
