"""Writes a man page for `schedsvc` and for each of its commands, from click's own help.

`make dist` runs `python deploy/man.py deploy/man`; pip installs the pages into share/man/man1. It
needs `schedsvc-lab`, because it imports each command.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import click

from schedsvc.cli import main


def roff(text: str) -> str:
    """Escape text, so that troff prints it as it is."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"(?m)^(?=[.'])", r"\\&", escaped)


def page(context: click.Context, version: str) -> str:
    """Return the page of a command. O(its options)."""
    command, path = context.command, context.command_path
    name = path.replace(" ", "-")
    records = (parameter.get_help_record(context) for parameter in command.get_params(context))
    lines = [
        f'.TH "{name.upper()}" "1" "" "schedsvc {version}" "schedsvc"',
        *(".SH NAME", roff(f"{name} - {_short(context)}")),
        *(
            ".SH SYNOPSIS",
            f".B {roff(path)}",
            roff(" ".join(command.collect_usage_pieces(context))),
        ),
        *(".SH DESCRIPTION", *_paragraphs(command.help or "")),
        *_terms("OPTIONS", filter(None, records)),
        *_terms("COMMANDS", ((child.command_path, _short(child)) for child in _children(context))),
        *(".SH NOTES", *_paragraphs(command.epilog or "")),
    ]
    return "\n".join(lines) + "\n"


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.strip().split("\n\n"):
        # click prints a paragraph as it is behind this mark, and wraps any other one.
        as_it_is = paragraph.startswith("\b\n")
        body = roff(paragraph.removeprefix("\b\n"))
        yield from (".PP", ".nf", body, ".fi") if as_it_is else (".PP", body)


def _terms(title: str, rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    for at, (term, text) in enumerate(rows):
        yield from (() if at else (f".SH {title}",))
        yield from (".TP", f".B {roff(term)}", roff(text))


def _short(context: click.Context) -> str:
    return context.command.get_short_help_str(limit=100).rstrip(".")


def _children(context: click.Context) -> Iterator[click.Context]:
    if isinstance(group := context.command, click.Group):
        for name in group.list_commands(context):
            if child := group.get_command(context, name):
                yield click.Context(child, info_name=name, parent=context)


def root() -> click.Context:
    """Return the context of `schedsvc` itself."""
    return click.Context(main, info_name="schedsvc", **main.context_settings)


def below(context: click.Context) -> Iterator[click.Context]:
    """Yield the contexts of a command and of everything below it. O(commands)."""
    yield context
    for child in _children(context):
        yield from below(child)


def write(folder: Path, version: str) -> None:
    """Write the page of each command. O(options of all commands)."""
    for context in below(root()):
        name = context.command_path.replace(" ", "-")
        (folder / f"{name}.1").write_text(page(context, version))


if __name__ == "__main__":
    (pages := Path(sys.argv[1])).mkdir(parents=True, exist_ok=True)
    write(pages, metadata.version("schedsvc"))
