"""Tests the count of lines: what it leaves out, and that a move changes no room."""

import subprocess
from pathlib import Path

import pytest

from .lines import count, main, summary


def git(root: Path, *arguments: str) -> None:
    author = ["-c", "user.name=a", "-c", "user.email=a@example.invalid"]
    subprocess.run(["git", *author, *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    written = {
        "Makefile": "a:\n\tb\n",
        "_core/api.pxi": "cdef int a\n",
        "schedsvc/driver/driver.py": "a\n\nb",
        "schedsvc/lab/sim/world.py": "a\nb\nc\n",
        # These have no line that counts.
        "schedsvc/lab/demo/trace.csv": "1,2\n",
        "clients/python/schedsvc_client/v1/pool_pb2.pyi": "a\n",
        "clients/node/package-lock.json": "{}\n",
        "clients/node/LICENSE": "Apache\n",
        "constraints.txt": "a==1\n",
        "docs/picture.png": "\0\n",
    }
    for path, text in written.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "docs/link.md").symlink_to(tmp_path / "Makefile")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "a")
    return tmp_path


def test_lines_that_people_wrote_count(tree: Path) -> None:
    wanted = {"(root)": 2, "_core": 1, "lab": 3, "schedsvc": 3}
    assert count("HEAD", tree) == count(None, tree) == wanted
    assert summary(wanted) == wanted | {"service": 4, "total": 9}


def test_a_moved_laboratory_has_the_lines_of_before(tree: Path) -> None:
    (tree / "lab").mkdir()
    git(tree, "mv", "schedsvc/lab", "lab/schedsvc_lab")
    assert count(None, tree) == count("HEAD", tree)


def test_the_work_tree_counts_as_it_lies(tree: Path) -> None:
    (tree / "spec").mkdir()
    (tree / "spec/new.py").write_text("a\nb\n")
    (tree / "schedsvc/driver/driver.py").unlink()
    assert count(None, tree) == {"(root)": 2, "_core": 1, "lab": 3, "spec": 2}


def test_a_commit_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["lines", "no-such-commit"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "commit 'no-such-commit': fatal: " in capsys.readouterr().err
