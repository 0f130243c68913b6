"""Writes docs/reference/contract.md from the descriptors of the .proto files.

`make proto` runs `python -m deploy.reference DESCRIPTORS PAGE`. The texts are the comments of the
files, so a change of a text belongs there.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

_HEAD = """\
# Reference of the contract

`make proto` writes this page from the [.proto files](../../proto/schedsvc/v1/). The rules that a
client has to keep are in [proto/README.md](../../proto/README.md). A field that is not set has the
default value of proto3: 0, an empty text, the first value of an enum. All names are in the package
`schedsvc.v1`. A text about several fields is beside the first of them.
"""
_FIRST = "schedsvc/v1/scheduler.proto"
# Places of comments consist of numbers of fields: of FileDescriptorProto, then of its parts.
_MESSAGE, _ENUM, _SERVICE, _SYNTAX, _PART = 4, 5, 6, 12, 2
_CODE = re.compile(r"(`[^`]*`)")
_TERM = re.compile(r" {2,}([A-Z_]+) +(.*)")

__all__ = ["cell", "page", "table"]

Place = tuple[int, ...]


def page(descriptors: FileDescriptorSet) -> str:
    """Return the page: services first, each file's messages in their order. O(its fields)."""
    files = sorted(
        (file for file in descriptors.file if file.package == "schedsvc.v1"),
        key=lambda file: (not file.service, file.name != _FIRST, file.name),
    )
    rows = [
        (_link(service.name), _file_link(file), cell(_Comments(file).at(_SERVICE, at)))
        for file in files
        for at, service in enumerate(file.service)
    ]
    services = table(("service", "file", "about"), rows)
    return "\n".join([_HEAD, *services, *(line for file in files for line in _file(file)), ""])


class _Comments:
    """Keeps the comments of one file, by the place of what they are about."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self.lines = {}
        self._texts: dict[Place, str] = {}
        for location in file.source_code_info.location:
            place = tuple(location.path)
            self.lines[place] = location.span[0]
            if text := location.leading_comments or location.trailing_comments:
                self._texts[place] = text

    def at(self, *place: int) -> str:
        return self._texts.get(place, "")


def _file(file: FileDescriptorProto) -> Iterator[str]:
    comments = _Comments(file)
    yield from ("", f"## {_short(file)}", *_paragraphs(comments.at(_SYNTAX)))
    parts: list[tuple[Place, ServiceDescriptorProto | DescriptorProto | EnumDescriptorProto]] = [
        *(((_SERVICE, at), service) for at, service in enumerate(file.service)),
        *(((_MESSAGE, at), message) for at, message in enumerate(file.message_type)),
        *(((_ENUM, at), enum) for at, enum in enumerate(file.enum_type)),
    ]
    for place, part in sorted(parts, key=lambda pair: comments.lines[pair[0]]):
        yield from ("", f"### {part.name}", *_paragraphs(comments.at(*place)))
        head: tuple[str, ...]
        if isinstance(part, DescriptorProto):
            head, rows = ("field", "number", "type", "about"), _fields(part)
        elif isinstance(part, EnumDescriptorProto):
            head, rows = ("value", "number", "about"), _values(part)
        else:
            head, rows = ("method", "request", "response", "about"), _methods(part)
        about = (comments.at(*place, _PART, at) for at in range(len(rows)))
        if rows:
            cells = ((*row, cell(text)) for row, text in zip(rows, about, strict=True))
            yield from ("", *table(head, cells))


def _fields(message: DescriptorProto) -> list[tuple[str, ...]]:
    entries = {entry.name: entry for entry in message.nested_type if entry.options.map_entry}
    return [
        (f"`{field.name}`", str(field.number), _type(field, message, entries))
        for field in message.field
    ]


def _type(
    field: FieldDescriptorProto, message: DescriptorProto, entries: dict[str, DescriptorProto]
) -> str:
    name = field.type_name.rpartition(".")[2]
    if name in entries:
        key, value = (_type(part, message, {}) for part in entries[name].field)
        return f"map of {key} to {value}"
    kind = _link(name) if name else FieldDescriptorProto.Type.Name(field.type)[5:].lower()
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list of {kind}"
    if field.proto3_optional:
        return f"optional {kind}"
    if field.HasField("oneof_index"):
        return f"{kind}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return kind


def _values(enum: EnumDescriptorProto) -> list[tuple[str, ...]]:
    return [(f"`{value.name}`", str(value.number)) for value in enum.value]


def _methods(service: ServiceDescriptorProto) -> list[tuple[str, ...]]:
    return [
        (
            f"`{method.name}`",
            "stream of " * method.client_streaming + _link(method.input_type.rpartition(".")[2]),
            "stream of " * method.server_streaming + _link(method.output_type.rpartition(".")[2]),
        )
        for method in service.method
    ]


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a table of Markdown. O(rows)."""
    for row in (head, ("---",) * len(head), *rows):
        yield f"| {' | '.join(row)} |"


def _short(file: FileDescriptorProto) -> str:
    return file.name.rpartition("/")[2]


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _file_link(file: FileDescriptorProto) -> str:
    return f"[{_short(file)}](../../proto/{file.name})"


def cell(comment: str) -> str:
    """Return a text in one line, as a cell of a table shows it. O(text)."""
    return _escaped(" ".join(comment.split())).replace("|", "\\|")


def _paragraphs(comment: str) -> Iterator[str]:
    """Yield the lines of a comment; indented names with a text are a list."""
    was_term = None
    for line in comment.rstrip().splitlines():
        term = _TERM.fullmatch(line)
        if bool(term) != was_term:
            yield ""
        yield f"- `{term[1]}`: {_escaped(term[2])}" if term else _escaped(line.strip())
        was_term = bool(term)


def _escaped(text: str) -> str:
    """Return a text that Markdown shows as it is; code between backticks is code there, too."""
    parts = _CODE.split(text)
    parts[::2] = [re.sub(r"([*<\[])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(FileDescriptorSet.FromString(source.read_bytes())))
