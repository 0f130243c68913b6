"""Every known bug is caught, and the same build without a bug is not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from schedsvc_lab.faults.options import FAULTS

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

from bugs import MUTANTS  # noqa: E402 - a program
from wrong_core import StaleMutantError, edited  # noqa: E402 - a program


def run(name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER), name], capture_output=True, text=True, timeout=300
    )


def test_every_bug_has_its_place_in_the_source() -> None:
    texts = edited()
    for number, mutant in enumerate(MUTANTS, 1):
        used = sum(text.count(f"MUTANT == {number}") for text in texts.values())
        assert used >= len(mutant.insertions), mutant.name


def test_every_bug_is_sought_among_faults_that_exist() -> None:
    for mutant in MUTANTS:
        assert mutant.only is None or mutant.only <= FAULTS.keys(), mutant.name


def test_every_test_that_has_to_catch_a_bug_is_there() -> None:
    for mutant in MUTANTS:
        for name in mutant.tests:
            file, _, function = name.partition("[")[0].partition("::")
            text = (FOLDER.parents[1] / file).read_text()
            assert not function or re.search(rf"def {function}\b", text), (mutant.name, name)


def test_a_place_that_has_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import wrong_core

    gone = MUTANTS[0].__class__("gone", "", (("lifecycle/lease.pxi", "no such line", ""),), 1)
    monkeypatch.setattr(wrong_core, "MUTANTS", (gone,))
    monkeypatch.setitem(wrong_core.NUMBERS, "gone", 99)
    with pytest.raises(StaleMutantError, match=r"gone: _core/lifecycle/lease\.pxi"):
        edited()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["none", *(mutant.name for mutant in MUTANTS)])
def test_it_is_caught(name: str) -> None:
    result = run(name)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_wrong_name_is_refused() -> None:
    assert run("no-such-bug").returncode == 2
