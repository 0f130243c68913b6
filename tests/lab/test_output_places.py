"""Tests that an unwritable place is named before any work, with its option and what to do."""

import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from bench.cli import main as bench
from bench.overload import main as overload
from bench.waits import main as waits
from deploy.panels import main as panels
from schedsvc.cli import main
from tests.tidy.test_commands import below, commands

#: Commands with their other options; TRACE, CONFIG and HERE are files and a folder that exist.
INTO_FOLDERS = (
    "demo --out",
    "demo --failover --out",
    "demo --cluster --out",
    "load --url http://127.0.0.1:9 --trace TRACE --out",
    "advise --trace TRACE --profile fast --goal 'a p99 first token <= 2 s' --out",
    "sim --trace TRACE --policy vtc --out",
    "sim --suite vtc-paper --out",
    "sim --replay TRACE --out",
    "sim sweep --trace TRACE --policy vtc --vary scheduler.headroom=0,0.1 --out",
    "predict --trace TRACE --out",
    "workload describe --trace TRACE --out",
    "workload users --trace TRACE --out",
    "workload fetch --url http://127.0.0.1:9/trace.csv --out",
    "prefix --trace TRACE --out",
    "converse --url http://127.0.0.1:9 --trace TRACE --out",
)
INTO_FILES = (
    "workload convert --trace TRACE --out",
    "workload conversations --trace TRACE --tokenizer HERE --out",
    "workload prompts --trace TRACE --tokenizer HERE --out",
    "workload servegen HERE --duration 1 --out",
    "workload synth --requests 1 --rate 1 --out",
    "workload label --trace TRACE --tenants 2 --out",
    "workload scale --trace TRACE --speed 2 --out",
    "sim fit TRACE --like fast --out",
    "usage export --config CONFIG --out",
    "emulate --counts",
    "emulate --ready-file",
    "simtest --seed 1 --seeds 1 --totals",
)


@pytest.fixture
def words(tmp_path: Path) -> dict[str, str]:
    trace, config = tmp_path / "trace.csv", tmp_path / "schedsvc.yaml"
    trace.write_text("arrival_s,client,prompt_tokens,output_tokens\n0,a,10,10\n")
    config.write_text("listeners: [{tcp: 127.0.0.1:0}]\nusage: {path: ledger}\n")
    return {"TRACE": str(trace), "CONFIG": str(config), "HERE": str(tmp_path)}


def said(command: click.Command, line: str, place: Path, words: dict[str, str]) -> str:
    """Run a command whose last option gets this place; return what it says of it."""
    arguments = [words.get(word, word) for word in shlex.split(line)]
    result = CliRunner().invoke(command, [*arguments, str(place)])
    assert result.exit_code == 2, result.output
    text = " ".join(result.output.partition("Error: ")[2].split())
    start = f"Invalid value for {arguments[-1]}: "
    assert text.startswith(start), text
    return text.removeprefix(start)


@pytest.mark.parametrize("line", INTO_FOLDERS)
def test_a_folder_that_cannot_be_made(line: str, words: dict[str, str]) -> None:
    place = Path(words["TRACE"]) / "out"
    text = said(main, line, place, words)
    assert text == f"the folder {place} cannot be made: Not a directory; name another folder"


@pytest.mark.parametrize("line", INTO_FILES)
def test_a_file_whose_folder_is_missing(line: str, words: dict[str, str], tmp_path: Path) -> None:
    text = said(main, line, tmp_path / "no" / "file.yaml", words)
    assert text == f"the folder {tmp_path / 'no'} does not exist; make it"
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("command", [bench, overload, waits])
def test_a_bench_names_its_folder(command: click.Command, words: dict[str, str]) -> None:
    text = said(command, "--out", Path(words["TRACE"]) / "out", words)
    assert text.endswith("cannot be made: Not a directory; name another folder")


def test_the_picture_of_panels_names_its_file(words: dict[str, str], tmp_path: Path) -> None:
    text = said(panels, "http://127.0.0.1:9 --out", tmp_path / "no" / "a.png", words)
    assert text == f"the folder {tmp_path / 'no'} does not exist; make it"


def test_a_folder_that_takes_no_files(words: dict[str, str]) -> None:
    """Root cannot write there either, whatever the modes are."""
    for line, place, what in (
        ("demo --out", Path("/proc/self"), "nothing can be written into /proc/self: "),
        ("workload convert --trace TRACE --out", Path("/proc/f"), "/proc/f cannot be written: "),
    ):
        text = said(main, line, place, words)
        assert text.startswith(what)
        assert "; name another f" in text


def test_every_command_that_writes_is_here() -> None:
    here = [line.split() for line in (*INTO_FOLDERS, *INTO_FILES)]
    missing = []
    for path in commands(main):
        command: click.Command = main
        for name in path:
            command = below(command)[name]
        writes = any("--out" in parameter.opts for parameter in command.params)
        # The word behind a command's path is an option or an argument, and no command below it.
        if writes and not any(
            tuple(line[: len(path)]) == path and line[len(path)] not in below(command)
            for line in here
        ):
            missing.append(path)
    assert missing == []
