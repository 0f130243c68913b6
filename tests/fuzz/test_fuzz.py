"""Tests that the fuzzers work: old finds hold, a bug is found and made small, short runs."""

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.fuzz import __main__ as program
from tests.fuzz import http, sanitised
from tests.fuzz.mutate import SIZE_MAX, mutated
from tests.fuzz.targets import TARGETS, Target

SEEDS = 120


@pytest.fixture(autouse=True)
def _no_gate_is_left() -> Iterator[None]:
    yield
    http.close()


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_made_from_a_seed_break_nothing(name: str) -> None:
    target, rnd = TARGETS[name], Random(7)
    begin = target.corpus()
    for data in begin:
        target.run(data)
    for _ in range(SEEDS // target.times):
        target.run(mutated(rnd, rnd.choice(begin), begin, target.words))


@pytest.mark.parametrize(
    "path", sorted(sanitised.FOUND.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_input_that_broke_something_once_holds(path: Path) -> None:
    TARGETS[path.parent.name].run(path.read_bytes())


def easily_broken(data: bytes) -> None:
    if b"\xff" in data and b"a" in data:
        raise KeyError(data)


def test_a_bug_is_found_made_small_and_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Target("breaks", easily_broken, lambda: [b"abc" * 9], (b"\xff",))
    monkeypatch.setitem(program.TARGETS, "broken", broken)
    monkeypatch.setattr(sanitised, "FOUND", tmp_path)
    monkeypatch.setattr(sys, "argv", ["fuzz", "broken", "--seconds", "30", "--seed", "1"])
    assert program.main() == 1
    (path,) = (tmp_path / "broken").iterdir()
    assert sorted(path.read_bytes()) == sorted(b"a\xff")
    shown = capsys.readouterr().out
    assert "broken: KeyError in easily_broken" in shown
    assert f"python -m tests.fuzz broken --input {path}" in shown
    monkeypatch.setattr(sys, "argv", ["fuzz", "broken", "--input", str(path)])
    with pytest.raises(KeyError):
        program.main()


def test_input_that_ends_the_process_is_kept_and_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    current = tmp_path / "current"
    current.write_bytes(b"an earlier, longer input")
    monkeypatch.setenv("SCHEDSVC_FUZZED_INPUT", str(current))
    monkeypatch.setattr(sanitised, "FOUND", tmp_path)
    sanitised.Noted().note("admit", b"a\nb")
    sanitised.keep(current.read_bytes(), "core.c:1: runtime error: overflow\n")
    (path,) = (tmp_path / "admit").iterdir()
    assert path.read_bytes() == b"a\nb"
    shown = capsys.readouterr().out
    assert "runtime error: overflow" in shown
    assert f"python -m tests.fuzz admit --sanitised --input {path}" in shown


def test_inputs_come_from_the_seed_alone_and_stay_small() -> None:
    def made(seed: int) -> list[bytes]:
        rnd = Random(seed)
        data = [b"a" * SIZE_MAX, b""]
        return [mutated(rnd, rnd.choice(data), data, (b"word",)) for _ in range(200)]

    assert made(1) == made(1) != made(2)
    assert max(len(data) for data in made(1)) <= SIZE_MAX


def test_an_unknown_target_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fuzz", "nonsense"])
    with pytest.raises(SystemExit):
        program.main()
    assert "unknown: nonsense; known: admit" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_sanitised_build_reports_signed_overflow(tmp_path: Path) -> None:
    """Python's own flags have -fwrapv, which switches these checks of UBSan off."""
    source, program = tmp_path / "overflow.c", tmp_path / "overflow"
    source.write_text("int main(int n, char **v) { return (n + 0x7fffffff) == 0; }\n")
    flags = [*sysconfig.get_config_var("CFLAGS").split(), *sanitised.FLAGS]
    flags = [flag for flag in flags if "coverage" not in flag]  # the runtime has none
    command = ["gcc", *flags, str(source), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    if "-lasan" in built.stderr or "-lubsan" in built.stderr:
        pytest.skip("gcc has no sanitisers here")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True)
    assert "signed integer overflow" in ran.stderr
