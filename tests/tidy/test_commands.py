"""Every command explains itself, and every command that a document shows exists."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from schedsvc.cli import main

from .sources import ROOT, files, relative

DOCUMENTS = [path for path in files(".md") if "clients/node" not in relative(path)]


def below(command: click.Command) -> dict[str, click.Command]:
    """Return the commands of a group, those that it imports when they are asked for included."""
    if not isinstance(command, click.Group):
        return {}
    context = click.Context(command)
    found = {name: command.get_command(context, name) for name in command.list_commands(context)}
    return {name: child for name, child in found.items() if child is not None}


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the argument path of a command and of everything below it."""
    yield path
    for name, child in below(command).items():
        yield from commands(child, (*path, name))


@pytest.mark.parametrize("path", list(commands(main)), ids=lambda path: " ".join(path) or "main")
def test_help_shows_an_example(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, [*path, "--help"])
    assert result.exit_code == 0, result.output
    assert "Example" in result.output


def undescribed(command: click.Command) -> list[str]:
    """Return the options of a command whose help does not state the default that they have."""
    found, context = [], click.Context(command, **command.context_settings)
    for option in command.params:
        if not isinstance(option, click.Option) or option.hidden or option.is_flag:
            continue
        default = option.get_default(context)
        has_one = isinstance(default, (int, float, str, Path)) and default != ""
        is_shown = option.show_default or context.show_default
        if has_one and not is_shown and "efault" not in (option.help or ""):
            found.append(option.opts[0])
    return found


@pytest.mark.parametrize("path", list(commands(main)), ids=lambda path: " ".join(path) or "main")
def test_help_states_defaults(path: tuple[str, ...]) -> None:
    command: click.Command = main
    for name in path:
        command = below(command)[name]
    assert undescribed(command) == []


def test_missing_default_is_found() -> None:
    @click.command()
    @click.option("--rate", default=2.0, help="Requests per second.")
    @click.option("--seed", default=0, show_default=True, help="Seed of all draws.")
    def command(rate: float, seed: int) -> None:
        pass

    assert undescribed(command) == ["--rate"]


#: Words with which a help text would be a part of a sentence that is not there.
FRAGMENTS = ("By", "For", "Held", "How", "In", "Its", "Of", "On", "Whether")
#: Options that mean different things to different commands.
DIFFERENT = ("--block-size", "--by", "--goodput", "--input", "--out", "--output", "--policy")
#: The name in the usage of a number of these.
UNITS = {"seconds": "SECONDS", "ms": "MS", "minutes": "MINUTES"}


def options() -> Iterator[tuple[tuple[str, ...], click.Option]]:
    """Yield the options of all commands that are shown, each with its command's path."""
    for path in commands(main):
        command: click.Command = main
        for name in path:
            command = below(command)[name]
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                yield path, option


def fault_of_help(option: click.Option) -> str:
    """Return the fault of an option's help text; "" if it is a sentence, or an ended phrase."""
    text = re.sub(r"\s+\[(default|env): .*\]$", "", option.help or "")
    if not text:
        return "no help"
    if not text[0].isupper():
        return "begins with a small letter"
    if text.split()[0] in FRAGMENTS:
        return f"begins with {text.split()[0]}"
    return "" if text.endswith((".", ".)")) else "does not end with a period"


def test_option_help_is_written_as_sentences() -> None:
    found = {
        f"{' '.join(path)} {option.opts[0]}": fault_of_help(option) for path, option in options()
    }
    assert {name: fault for name, fault in found.items() if fault} == {}


def test_an_option_takes_the_same_value_in_all_commands() -> None:
    found: dict[str, set[str]] = {}
    for path, option in options():
        if not option.is_flag and option.opts[0] not in DIFFERENT:
            metavar = option.make_metavar(click.Context(click.Command(path[-1])))
            if metavar.startswith("[") and "|" in metavar:
                metavar = "CHOICE"
            found.setdefault(option.opts[0], set()).add(metavar.strip("[]"))
    assert {name: metavars for name, metavars in found.items() if len(metavars) > 1} == {}


def test_an_option_shows_what_it_takes() -> None:
    wrong = []
    for path, option in options():
        if option.is_flag:
            continue
        metavar = option.make_metavar(click.Context(click.Command(path[-1])))
        if metavar in ("TEXT", "PATH", "INTEGER RANGE", "FLOAT RANGE") and option.opts[0] not in (
            *("--filter", "--source", "--uds"),
        ):
            wrong.append(f"{' '.join(path)} {option.opts[0]} {metavar}")
    assert wrong == []


def test_an_option_of_time_shows_its_unit() -> None:
    wrong = []
    for path, option in options():
        named = re.match(r"(Seconds|Mean seconds)\b", option.help or "")
        unit = (
            "seconds"
            if named
            else next((unit for unit in UNITS if (option.help or "").endswith(f"in {unit}.")), "")
        )
        if unit and isinstance(option.type, click.FloatRange | click.IntRange):
            metavar = option.make_metavar(click.Context(click.Command(path[-1])))
            if metavar != UNITS[unit]:
                wrong.append(f"{' '.join(path)} {option.opts[0]} {metavar}")
    assert wrong == []


@pytest.mark.parametrize("path", list(commands(main)), ids=lambda path: " ".join(path) or "main")
def test_help_fits_80_columns(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, [*path, "--help"], terminal_width=80, prog_name="schedsvc")
    assert [line for line in result.output.splitlines() if len(line) > 80] == []


def test_numbers_are_read_by_types_that_explain_themselves() -> None:
    wrong = [
        f"{' '.join(path)} {option.opts[0]}"
        for path, option in options()
        if isinstance(option.type, click.IntRange | click.FloatRange)
        and type(option.type).__module__ != "schedsvc.text.option_types"
    ]
    assert wrong == []


def test_poor_help_is_found() -> None:
    helps = {"": "no help", "of it.": "begins with a small letter", "Of it.": "begins with Of"}
    helps |= {"How many": "begins with How", "A name": "does not end with a period", "A name.": ""}
    for text, fault in helps.items():
        assert fault_of_help(click.Option(["--x"], help=text)) == fault


def test_an_unknown_command_fails() -> None:
    result = CliRunner().invoke(main, ["no-such-command"])
    assert result.exit_code != 0
    assert "no-such-command" in result.output


def shown(text: str) -> Iterator[list[str]]:
    """The command lines in the indented or fenced shell blocks and code spans of a document."""
    blocks = re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`((?:make|schedsvc) [^`\n]+)`", text)
    for line in lines:
        line = line.removeprefix("$ ").removeprefix(".venv/bin/")
        if line.startswith(("make", "schedsvc ")):
            yield shlex.split(line, comments=True)


def targets() -> set[str]:
    """Return the targets of make."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def unknown(words: list[str]) -> str:
    """Return the fault of a command line that a document shows; "" if there is none."""
    arguments = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    if words[0] == "make":
        return next((f"no target {name}" for name in arguments if name not in targets()), "")
    command: click.Command = main
    for name in words[1:]:
        if not isinstance(command, click.Group) or name.startswith("-"):
            break
        children = below(command)
        if name not in children:
            return f"no command {name}"
        command = children[name]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    options = [word.split("=")[0] for word in words if word.startswith("--")]
    return next((f"no option {name}" for name in options if name not in known), "")


def test_there_is_a_readme() -> None:
    assert (ROOT / "README.md").exists()


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_commands_in_documents_exist(path: Path) -> None:
    wrong = [
        f"{' '.join(words)}: {what}"
        for words in shown(path.read_text())
        if (what := unknown(words))
    ]
    assert not wrong, "\n".join(wrong)


def test_a_wrong_command_is_found() -> None:
    text = (
        "```sh\n$ make no-such-target\nmake demo  # fine\nschedsvc nothing\n```\nand `make bad-one`"
    )
    assert [unknown(words) for words in shown(text)] == [
        "no target no-such-target",
        "",
        "no command nothing",
        "no target bad-one",
    ]
