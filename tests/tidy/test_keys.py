"""Every key of the configuration that a text names exists."""

import re
import typing
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from pydantic import BaseModel
from schedsvc_client.v1.scheduler_pb2 import StatsResponse

from schedsvc.config import Config

from .sources import files, relative

TEXTS = [*files(".md", ".proto"), *(p for p in files(".py") if "schedsvc/cli/" in relative(p))]
_NAMED = re.compile(r"`([a-z_]+)\.([a-z_.]+)`")


def sections(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the sections that a field's type holds, in lists and optional ones too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from sections(part)


def keys(section: type[BaseModel]) -> dict[str, list[type[BaseModel]]]:
    """Return the keys of a section, as a file writes them, and the sections below each."""
    fields = section.model_fields.items()
    return {field.alias or name: list(sections(field.annotation)) for name, field in fields}


def has_key(below: list[type[BaseModel]], names: list[str]) -> bool:
    """Return whether a name stands in one of these sections, the next in those below, and so on."""
    found = [keys(section)[names[0]] for section in below if names[0] in keys(section)]
    return bool(found) and (len(names) == 1 or has_key([*chain(*found)], names[1:]))


def unknown(text: str) -> list[str]:
    """The keys that a text names and no configuration has; fields of Stats have such names too."""
    found = []
    for first, rest in _NAMED.findall(text):
        below = keys(Config).get(first)
        if below is None or has_key(below, rest.split(".")):
            continue
        shown = StatsResponse.DESCRIPTOR.fields_by_name.get(first)
        kind = shown and shown.message_type
        if kind is None or rest not in kind.fields_by_name:
            found.append(f"{first}.{rest}")
    return found


@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_the_keys_that_a_text_names_exist(path: Path) -> None:
    assert not unknown(path.read_text())


def test_a_wrong_key_is_found() -> None:
    text = "`scheduler.queue_max`, `limits.queue_max`, `state.unsaved_ms`, `state.file`, `a.b`,"
    text += " `cluster.store.urls`, `cluster.store.url`"
    assert unknown(text) == ["limits.queue_max", "cluster.store.url"]
