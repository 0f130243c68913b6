"""Tests the release script: one version in all packages, and what it prints."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml

from deploy import release

SCRIPT = release.ROOT / "deploy/release.py"
OLD = release.version()


def projects(root: Path) -> dict[str, dict[str, Any]]:
    folders = {name: folder.relative_to(release.ROOT) for name, folder in release.PROJECTS.items()}
    return {
        name: tomllib.loads((root / folder / "pyproject.toml").read_text())["project"]
        for name, folder in folders.items()
    }


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the files that state the version into a tree of their own."""
    folders = {name: folder.relative_to(release.ROOT) for name, folder in release.PROJECTS.items()}
    for folder in folders.values():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        text = (release.ROOT / folder / "pyproject.toml").read_text()
        (tmp_path / folder / "pyproject.toml").write_text(text)
    for path in {release.PAGE, *release.OTHERS, *release.IMAGE_FILES}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text((release.ROOT / path).read_text())
    monkeypatch.setattr(release, "ROOT", tmp_path)
    moved = {name: tmp_path / folder for name, folder in folders.items()}
    monkeypatch.setattr(release, "PROJECTS", moved)
    return tmp_path


def test_the_tree_states_one_version() -> None:
    assert release.stale() == [], "run deploy/release.py --set-version"


def test_set_version_changes_versions_and_pins(copy: Path) -> None:
    release.set_version("9.9.1")
    found = projects(copy)
    assert {project["version"] for project in found.values()} == {"9.9.1"}
    assert [name for name, project in found.items() if project["name"] != name] == []
    assert "schedsvc-client==9.9.1" in found["schedsvc"]["dependencies"]
    assert "schedsvc-client==9.9.1" in found["schedsvc-vllm"]["dependencies"]
    extras = found["schedsvc"]["optional-dependencies"]
    assert extras["lab"] == ["schedsvc-lab==9.9.1"]
    assert {"schedsvc==9.9.1", "schedsvc-vllm==9.9.1"} <= set(found["schedsvc-lab"]["dependencies"])
    page = (copy / release.PAGE).read_text()
    assert page.count("==9.9.1'") == page.count("'schedsvc") >= 3
    for path in (release.PAGE, *release.OTHERS):
        text = (copy / path).read_text()
        assert "9.9.1" in text
        assert OLD not in text
    assert release.version() == "9.9.1"
    assert release.stale() == []


def test_chart_states_the_version_of_the_packages() -> None:
    chart = yaml.safe_load((release.ROOT / release.CHART / "Chart.yaml").read_text())
    assert chart["version"] == release.chart_version(release.version())
    assert chart["appVersion"] == release.version()


@pytest.mark.parametrize(
    ("version", "chart"),
    [("1.2", "1.2.0"), ("1.2.3", "1.2.3"), ("1.2rc1", "1.2.0-rc1"), ("1.2.3.dev4", "1.2.3-dev4")],
)
def test_chart_version_is_semantic(version: str, chart: str, copy: Path) -> None:
    release.set_version(version)
    found = yaml.safe_load((copy / release.CHART / "Chart.yaml").read_text())
    assert (found["version"], found["appVersion"]) == (chart, version)
    assert release.stale() == []


@pytest.mark.parametrize("path", release.OTHERS)
def test_stale_names_a_deployment_of_another_version(copy: Path, path: str) -> None:
    file = copy / path
    text = file.read_text()
    file.write_text(text.replace(OLD, "0.0.9"))
    assert release.stale() == [path]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"schedsvc-client==', '"schedsvc-client>='),
        ('"schedsvc-client==', '"schedsvc-client==9'),
        ('version = "', 'version = "9'),
    ],
)
def test_stale_names_a_file_that_differs(copy: Path, old: str, new: str) -> None:
    file = copy / "clients/vllm/pyproject.toml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    assert release.stale() == ["clients/vllm/pyproject.toml"]


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("schedsvc", {"deploy/compose.yaml": 1, f"{release.CHART}/values.yaml": 1,
                      "deploy/kustomize/example/kustomization.yaml": 1}),
        ("schedsvc-lab", {"deploy/compose.yaml": 1}),
        ("prom/prometheus", {"deploy/compose.yaml": 1}),
        ("debian", {"deploy/Containerfile": 1}),
        ("vllm/vllm-openai", {"deploy/kustomize/example/vllm.yaml": 1}),
    ],
)  # fmt: skip
def test_an_image_is_named_by_its_digest(copy: Path, name: str, places: dict[str, int]) -> None:
    """A tag may be moved to another image after the release."""
    before = {path: (copy / path).read_text() for path in release.IMAGE_FILES}
    assert not release.images()[name]
    for digest in ("sha256:" + "a" * 64, "sha256:" + "b" * 64):
        for _ in range(2):
            release.set_digest(name, digest)
            counts = {path: (copy / path).read_text().count("sha256:") for path in before}
            grown = {path: counts[path] - text.count("sha256:") for path, text in before.items()}
            assert {path: more for path, more in grown.items() if more} == places
            assert release.images()[name]
            assert release.stale() == []
    texts = [yaml.safe_load((copy / path).read_text()) for path in places if path.endswith("yaml")]
    assert all("sha256:" + "b" * 64 in str(text) for text in texts)
    release.set_digest(name, "")
    assert {path: (copy / path).read_text() for path in before} == before


def test_a_new_version_has_no_digest_yet(copy: Path) -> None:
    release.set_digest("schedsvc", "sha256:" + "a" * 64)
    release.set_digest("prom/prometheus", "sha256:" + "c" * 64)
    release.set_version("9.9.1")
    assert not release.images()["schedsvc"]
    assert "a" * 64 not in (copy / release.CHART / "values.yaml").read_text()
    assert release.images()["prom/prometheus"]


def test_an_unknown_image_is_named_and_changes_nothing(copy: Path) -> None:
    with pytest.raises(ValueError, match="no file names the image nginx; write debian, prom/"):
        release.set_digest("nginx", "sha256:" + "a" * 64)


def test_help_names_what_the_script_does() -> None:
    shown = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "--set-version" in shown
    assert "dist/" in shown


def test_checklist_claims_requirements_first() -> None:
    names = list(release.PROJECTS)
    for name, project in projects(release.ROOT).items():
        pins = [line.split("==")[0] for line in project["dependencies"] if "==" in line]
        ours = [pin for pin in pins if pin in names]
        assert all(names.index(pin) < names.index(name) for pin in ours)
    gates = ["schedsvc-vllm", "schedsvc-litellm"]
    assert names == ["schedsvc-client", *gates, "schedsvc", "schedsvc-lab"]


@pytest.mark.parametrize("wrong", ["", "v1.2.3", "1.2.3-4", '1.2"', "latest"])
def test_wrong_version_is_refused(
    wrong: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = projects(copy)
    with pytest.raises(SystemExit, match="2"):
        release.main([f"--set-version={wrong}"])
    assert repr(wrong) in capsys.readouterr().err
    assert projects(copy) == before
