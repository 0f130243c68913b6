"""Finds the project's own files, and reads the subjects of the rules: imports, functions, names."""

import ast
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from spec.generate import OUTPUTS

from .rules import ROOMS

ROOT = Path(__file__).resolve().parents[2]

# Folders that hold the project's packages, and the dotted name of their contents.
PACKAGE_FOLDERS = ("", "clients/python", "clients/vllm", "clients/litellm", "lab")
PACKAGES = (
    "schedsvc", "schedsvc_client", "schedsvc_vllm", "schedsvc_litellm", "schedsvc_lab", "bench",
    "deploy", "spec",
)  # fmt: skip

_SKIPPED_FOLDERS = {"build", "dist", "out", "target", "node_modules", "__pycache__"}
_GENERATED = re.compile(
    r"_pb2(_grpc)?\.pyi?$|\.pb\.go$|^_core/.*\.c$|package-lock\.json$"
    r"|^docs/reference/(contract|metrics|commands)\.md$"
)


@cache
def files(*suffixes: str) -> tuple[Path, ...]:
    """Return all files of the project with these suffixes that a person wrote, sorted."""
    found = []
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in _SKIPPED_FOLDERS
            and not name.endswith(".egg-info")
            and (not name.startswith(".") or name == ".ci")
        ]
        found += [Path(folder, name) for name in names if name.endswith(suffixes)]
    return tuple(sorted(path for path in found if not is_generated(relative(path))))


def is_generated(name: str) -> bool:
    """Return whether a program writes the file of this name."""
    return name in OUTPUTS or _GENERATED.search(name) is not None


def relative(path: Path) -> str:
    """Return the path as a person names it."""
    return path.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Module:
    """Describes one Python module of the project's packages."""

    name: str
    path: Path
    is_package: bool

    @property
    def room(self) -> str:
        """The room it belongs to."""
        return room_of(self.name)


@cache
def modules() -> tuple[Module, ...]:
    """Return every module of the packages, without the stubs of proto/."""
    written = [ROOT / path for path in OUTPUTS if path.endswith((".py", ".pyi"))]
    paths = sorted([*files(".py", ".pyi"), *written])
    return tuple(module for path in paths if (module := _module(path)))


def _module(path: Path) -> Module | None:
    for folder in PACKAGE_FOLDERS:
        try:
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
        except ValueError:
            continue
        if parts[0] in PACKAGES:
            is_package = parts[-1] == "__init__"
            return Module(".".join(parts[:-1] if is_package else parts), path, is_package)
    return None


def room_of(module: str) -> str:
    """Return the room with the longest name that the module's name begins with, or ""."""
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    found = next((name for name in names if name in ROOMS), "")
    # This room holds the package's __init__ alone: a new module beside it has to be given a room.
    return "" if found == "schedsvc" and module != "schedsvc" else found


def room_of_import(name: str) -> str:
    """Return the room of what an import names, which may be something inside a module."""
    known = {module.name for module in modules()}
    parts = name.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return room_of(next((prefix for prefix in prefixes if prefix in known), name))


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import in any place, relative ones resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, is_package)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join(parts + ([node.module] if node.module else []))


def is_standard(name: str) -> bool:
    """Return whether a dotted name is of the standard library."""
    return name.split(".")[0] in sys.stdlib_module_names


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """Yield every call whose target is a dotted name, with that name as the imports spell it."""
    full: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            full |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            full |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _dotted(node.func)):
            first, _, rest = name.partition(".")
            yield node, ".".join(filter(None, [full.get(first, first), rest]))


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def python_functions(tree: ast.AST) -> Iterator[tuple[str, int, int]]:
    """(name, first line, number of lines) of every function, decorators not counted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1


_CYTHON_FUNCTION = re.compile(
    r"(?P<indent>\s*)(?:async )?(?:def|cdef|cpdef)\b"
    r"(?! (?:class|extern|struct|enum)\b).*?(?P<name>\w+)\s*\("
)


def cython_functions(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the same for Cython, which `ast` cannot read: a body is what is indented deeper."""
    lines = text.splitlines()
    for start, line in enumerate(lines):
        match = _CYTHON_FUNCTION.match(line)
        if not match:
            continue
        header_end = next((at for at in range(start, len(lines)) if _ends_header(lines[at])), start)
        indent = len(match["indent"])
        end = header_end
        for at in range(header_end + 1, len(lines)):
            if lines[at].strip():
                if len(lines[at]) - len(lines[at].lstrip()) <= indent:
                    break
                end = at
        yield match["name"], start + 1, end - start + 1


def _ends_header(line: str) -> bool:
    return line.split("#")[0].rstrip().endswith((":", ")"))
