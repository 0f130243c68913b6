"""Builds the static graph of each file's needs from the sources, without running them.

A Python file needs what it imports, early or late, the packages above it, and for a test the
conftest.py files above it. A string counts as well: the dotted name of a module, the name of a
data file, or of a folder of data files.

A test that starts a program needs the program: a string with the name of a console script leads to
its module. From `schedsvc` the graph continues to the commands whose names are strings on the
tests' side, so a fixture that starts `serve` counts as an import of all that `serve` imports.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import tomllib

from tests.tidy.sources import PACKAGE_FOLDERS, PACKAGES, imports

from .rules import CLI, CLUSTER, COMPILED, LISTS, RULES, TESTS_SIDE, drives_core

MODULE = (".py", ".pyi", "/__init__.py")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
COMMAND = re.compile(r"\bschedsvc ([a-z]+)")
WORD = re.compile(r"[A-Za-z][\w-]*")


def is_python(path: str) -> bool:
    """Return whether a file is Python, or the types of a module."""
    return path.endswith((".py", ".pyi"))


@dataclass
class Source:
    """Holds the names in one Python file."""

    imports: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)  # dotted, in strings
    words: set[str] = field(default_factory=set)
    commands: set[str] = field(default_factory=set)  # words that stand alone, or after `schedsvc`
    strings: set[str] = field(default_factory=set)  # short ones, which may name a file


def read(text: str, module: str, *, is_package: bool) -> Source:
    """Read what a file's code names. Docstrings and comments name nothing."""
    tree = ast.parse(text)
    found = Source({name for _, name in imports(tree, module, is_package)})
    nodes = list(ast.walk(tree))
    prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            found.names |= set(DOTTED.findall(node.value))
            found.words |= set(WORD.findall(node.value))
            found.commands |= {node.value, *COMMAND.findall(node.value)}
            if len(node.value) < 120 and "\n" not in node.value:
                found.strings.add(node.value)
    return found


class Graph:
    """Holds the files of a tree, and what each needs."""

    def __init__(self, root: Path, paths: Iterable[str]) -> None:
        self.root = root
        self.paths = frozenset(paths)
        self._sources: dict[str, Source] = {}
        self._edges: dict[str, frozenset[str]] = {}
        self._data: dict[str, set[str]] = {}
        self._needs: dict[str, dict[str, str]] = {}
        for path in self.paths:
            pure = PurePosixPath(path)
            if any(rule.alone and rule.matches(path) for rule in RULES):
                continue
            parts = [pure] if path.startswith(TESTS_SIDE) or not is_python(path) else []
            # A folder is named with a slash in it: one word means too many things.
            if not is_python(path):
                parts += [folder for folder in pure.parents if folder.parts[1:]]
            for part in parts:
                self._data.setdefault(part.name, set()).add(path)
        self._scripts = self._console_scripts()
        self.commands = self._commands()

    def needs(self, start: str) -> dict[str, str]:
        """Return everything that a file needs, each with the file that leads to it."""
        if start not in self._needs:
            self._needs[start] = self._reached(start)
        return self._needs[start]

    def _reached(self, start: str) -> dict[str, str]:
        reached = {start: ""}
        words: set[str] = set()
        held: set[str] = set()  # of a cluster: a service without that key does not import it
        is_cluster = False
        waiting = [start]
        while waiting:
            path = waiting.pop()
            found = set(self.edges(path))
            if path.startswith(TESTS_SIDE):
                words |= self._source(path).commands
                is_cluster = is_cluster or "cluster" in self._source(path).words
            if CLI in reached or CLI in found:
                found |= {at for name, at in self.commands.items() if name in words}
            if not path.startswith((*TESTS_SIDE, CLUSTER)):
                held |= {other for other in found if other.startswith(CLUSTER)}
                found -= held
            if is_cluster:
                found |= held
            for other in found - reached.keys():
                reached[other] = path
                waiting.append(other)
        return reached

    @cached_property
    def named(self) -> frozenset[str]:
        """Return every file that another one needs."""
        return frozenset().union(*(self.edges(path) for path in self.paths))

    def edges(self, path: str) -> frozenset[str]:
        """Return the files that a file needs itself."""
        if path not in self._edges:
            self._edges[path] = frozenset(self._needed_by(path)) - {path}
        return self._edges[path]

    def _needed_by(self, path: str) -> Iterator[str]:
        pure = PurePosixPath(path)
        for folder in pure.parents:
            yield from self.paths & {f"{folder}/__init__.py"}
            if path.startswith("tests/"):
                yield from self.paths & {f"{folder}/conftest.py"}
        if not is_python(path):
            return
        source = self._source(path)
        is_tests_side = path.startswith(TESTS_SIDE)
        for name in source.imports:
            for found in self._resolve(name, pure):
                if not found.startswith(COMPILED) or drives_core(path):
                    yield found
        if path == CLI:
            return  # its strings are the commands, of which a program runs a few
        for name in source.names:
            yield from self._resolve_whole(name)
        if is_tests_side:
            for script in source.words & self._scripts.keys():
                yield from self._resolve(self._scripts[script], pure)
            for package in source.strings & set(PACKAGES):
                yield from self.paths & {f"{package}/__main__.py"}
        for string in source.strings:
            yield from self._named(string, is_tests_side=is_tests_side)

    def _named(self, string: str, *, is_tests_side: bool) -> Iterator[str]:
        """Return the data files that a string names."""
        string = string.strip("/")
        for path in self._data.get(string.rsplit("/", 1)[-1], ()):
            is_file = f"/{path}".endswith(f"/{string}")
            is_folder = "/" in string and f"/{string}/" in f"/{path}"
            if is_file or is_folder or (is_tests_side and string == path):
                yield path

    def _resolve(
        self, name: str, importer: PurePosixPath, ends: tuple[str, ...] = MODULE
    ) -> Iterator[str]:
        """Return the files of a dotted name: the module; if the name goes on, what holds it."""
        parts = name.split(".")
        # Programs of tests put their own folder on the path, and pytest does so for `tests`.
        for folder in (*PACKAGE_FOLDERS, importer.parent.as_posix(), "tests"):
            for count in range(len(parts), 0, -1):
                base = "/".join(filter(None, [folder, *parts[:count]]))
                found = self.paths & {base + end for end in ends}
                if found:
                    yield from found
                    return

    def _resolve_whole(self, name: str) -> Iterator[str]:
        """Return the files of a dotted name in a string, which may be anything: a module's, or of
        an attribute of it, as a path of `unittest.mock` or a console script is."""
        for base in (name, name.rpartition(".")[0]):
            for folder in PACKAGE_FOLDERS:
                at = "/".join(filter(None, [folder, *base.split(".")]))
                found = self.paths & {at + end for end in (*MODULE, "/__main__.py")}
                if found and "." in base:
                    yield from found
                    return

    def _source(self, path: str) -> Source:
        if path not in self._sources:
            # A file that the change deletes is needed by what still names it, and needs nothing.
            if not is_python(path) or not (self.root / path).exists():
                return Source()
            name = path
            for folder in filter(None, PACKAGE_FOLDERS):
                name = name.removeprefix(f"{folder}/")
            parts = PurePosixPath(name).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            module = ".".join(parts[:-1] if is_package else parts)
            text = (self.root / path).read_text()
            source = read(text, module, is_package=is_package)
            if path.startswith(LISTS):
                source = Source(source.imports)
            self._sources[path] = source
        return self._sources[path]

    def _console_scripts(self) -> dict[str, str]:
        """Return the module of each command that the packages install."""
        found = {}
        for project in self._projects():
            scripts = project.get("scripts", {})
            found |= {name: at.split(":")[0] for name, at in scripts.items()}
        return found

    def _commands(self) -> dict[str, str]:
        """Return the file of each command of `schedsvc`: its table and entry points name them."""
        if CLI not in self.paths:
            return {}
        found = {}
        pair = re.compile(r'"([a-z]+)":\s*\(\s*"([\w.]+):')
        modules = dict(pair.findall((self.root / CLI).read_text()))
        for project in self._projects():
            points = project.get("entry-points", {}).get("schedsvc.commands", {})
            modules |= {name: at.split(":")[0] for name, at in points.items()}
        for name, module in modules.items():
            found[name] = next(iter(self._resolve(module, PurePosixPath(CLI))))
        return found

    def _projects(self) -> Iterator[dict[str, Any]]:
        for folder in PACKAGE_FOLDERS:
            path = self.root / folder / "pyproject.toml"
            if path.exists():
                yield tomllib.loads(path.read_text())["project"]
