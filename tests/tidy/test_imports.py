"""Imports go one way, as rules.ROOMS says."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from .rules import CORE_CIMPORTS, CORE_IMPORTS, ROOMS
from .sources import (
    PACKAGES,
    ROOT,
    Module,
    files,
    imports,
    is_standard,
    modules,
    relative,
    room_of,
    room_of_import,
)


def violations(text: str, module: str, *, is_package: bool = False) -> Iterator[str]:
    """Imports of a module that its room may not have, one sentence each."""
    own = room_of(module)
    rule = ROOMS[own]
    for line, name in imports(ast.parse(text), module, is_package):
        top = name.split(".")[0]
        if top in PACKAGES:
            other = room_of_import(name)
            if other != own and other not in rule.rooms:
                yield f"{line}: {own} may not import {name} (room {other or 'unknown'})"
        elif is_standard(name):
            if top in rule.never or name in rule.never:
                yield f"{line}: {own} may never import {name}"
        elif top not in rule.packages:
            yield f"{line}: {own} may not use the package {top}"


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_imports_go_one_way(module: Module) -> None:
    assert module.room, f"{module.name} is in no room: add it to tests/tidy/rules.py"
    text = module.path.read_text()
    found = list(violations(text, module.name, is_package=module.is_package))
    assert not found, f"{relative(module.path)}:\n" + "\n".join(found)


def test_every_room_is_spelled_right() -> None:
    unknown = {edge for rule in ROOMS.values() for edge in rule.rooms} - set(ROOMS)
    assert not unknown, f"edges lead to no room: {sorted(unknown)}"


def test_no_room_of_the_service_leads_to_the_laboratory() -> None:
    lab = {name for name in ROOMS if (name + ".").startswith("schedsvc_lab.")}
    service = set(ROOMS) - lab - {"bench"}
    assert not {(name, edge) for name in service for edge in ROOMS[name].rooms & lab}


def test_no_module_of_the_service_names_the_laboratory() -> None:
    """A name in a string could be imported too; entry points are how commands are found."""
    service = [m.path for m in modules() if m.name.split(".")[0] == "schedsvc"]
    assert len(service) > 100
    assert not [relative(path) for path in service if "schedsvc_lab" in path.read_text()]


def test_rooms_form_no_cycle() -> None:
    finished: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, "rooms import in a circle: " + " -> ".join((*path, name))
        if name not in finished:
            for edge in ROOMS[name].rooms:
                visit(edge, (*path, name))
            finished.add(name)

    for name in ROOMS:
        visit(name, ())


def import_graph(texts: dict[str, tuple[str, bool]]) -> dict[str, set[str]]:
    """Return the modules that each module imports, also late or for its types alone.

    `texts` maps a module's name to its source and whether it is a package.
    """
    graph: dict[str, set[str]] = {}
    for module, (text, is_package) in texts.items():
        graph[module] = set()
        for _, name in imports(ast.parse(text), module, is_package):
            parts = name.split(".")
            prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
            imported = next((prefix for prefix in prefixes if prefix in texts), module)
            graph[module] |= {imported} - {module}
    return graph


def test_modules_form_no_cycle() -> None:
    texts = {m.name: (m.path.read_text(), m.is_package) for m in modules()}
    TopologicalSorter(import_graph(texts)).prepare()


def test_a_cycle_of_types_alone_is_found() -> None:
    late = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from bench.b import B"
    texts = {"bench": ("", True), "bench.a": (late, False), "bench.b": ("from .a import A", False)}
    with pytest.raises(CycleError, match="cycle"):
        TopologicalSorter(import_graph(texts)).prepare()


@pytest.mark.parametrize(
    ("module", "text", "complaint"),
    [
        ("schedsvc_lab.sim.world", "import asyncio", "may never import asyncio"),
        ("schedsvc_lab.sim.world", "def f():\n    from grpc import aio", "use the package grpc"),
        ("schedsvc_lab.sim.world", "from schedsvc import driver", "may not import schedsvc.driver"),
        ("schedsvc_lab.engine.cache", "from schedsvc_lab.sim import world", "may not import"),
        ("schedsvc_lab.load.runner", "from schedsvc.service import Service", "may not import"),
        (
            "schedsvc.records.recording.form",
            "import schedsvc_lab.sim",
            "may not import schedsvc_lab.sim",
        ),
        ("schedsvc_client.admission", "import schedsvc", "may not import schedsvc"),
        ("schedsvc_vllm.gate", "import starlette.types", "use the package starlette"),
    ],
)
def test_a_wrong_import_is_found(module: str, text: str, complaint: str) -> None:
    assert complaint in "\n".join(violations(text, module))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("schedsvc.driver", "from schedsvc._core import Scheduler\nimport asyncio"),
        ("schedsvc.cli", "from schedsvc import __version__"),
        ("schedsvc_lab.sim.world", "from ..engine.cache import Cache\nimport heapq"),
    ],
)
def test_a_right_import_passes(module: str, text: str) -> None:
    assert not list(violations(text, module))


_CIMPORT = re.compile(r"^\s*(?:from\s+([\w.]+)\s+cimport\b|cimport\s+([\w.]+))", re.MULTILINE)
_IMPORT = re.compile(r"^\s*(?:from\s+([\w.]+)\s+import\b|import\s+([\w.]+))", re.MULTILINE)
_INCLUDE = re.compile(r'^\s*cdef extern from "([^"]+)"', re.MULTILINE)


def core_violations(text: str) -> Iterator[str]:
    """Return modules that the compiled core may not use."""
    for pattern, allowed in ((_CIMPORT, CORE_CIMPORTS), (_IMPORT, CORE_IMPORTS)):
        for match in pattern.finditer(text):
            name = match[1] or match[2]
            if name.split(".")[0] not in allowed:
                yield f"the core may not import {name}"
    for header in _INCLUDE.findall(text):
        if not (ROOT / "_core" / header).exists():
            yield f"{header}: take C declarations from libc's or cpython's .pxd files"


CORE = [path for path in files(".pyx", ".pxi") if ROOT / "_core" in path.parents]


@pytest.mark.parametrize("path", CORE, ids=relative)
def test_the_core_stands_on_libc_alone(path: Path) -> None:
    assert not list(core_violations(path.read_text()))


@pytest.mark.parametrize(
    "text", ["from numpy cimport ndarray", "import time", 'cdef extern from "openssl/sha.h":']
)
def test_a_core_that_leans_on_more_is_found(text: str) -> None:
    assert list(core_violations(text))
