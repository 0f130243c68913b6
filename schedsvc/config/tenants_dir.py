"""Reads a folder with one file for each tenant, together with the configuration file.

A file of the folder holds one entry of `tenants`. The entries follow those of the configuration
file, so that every rule sees all tenants. Names that begin with a point are skipped, because a
ConfigMap keeps its versions under such names and swaps a symbolic link.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from schedsvc.config.files import read_file
from schedsvc.config.yaml_positions import Path, Place, Problem, YamlText, read_yaml

__all__ = ["TENANT_FILES_MAX", "TenantFiles", "content_of", "decoded", "folder_of"]

TENANT_FILES_MAX = 100_000
FILE_BYTES_MAX = 64 << 20
_SUFFIXES = (".yaml", ".yml")
_LISTED = re.compile(r"\btenants\[(\d+)\]\.?(\S*)")


def content_of(file: FilePath) -> bytes | str:
    """Return what a file holds, or why it cannot be read."""
    try:
        return read_file(file, FILE_BYTES_MAX)
    except OSError as error:
        return f"cannot read the file: {error.strerror}"


def decoded(content: bytes | str) -> str | Problem:
    """Return a file's text, or what is wrong with it as a whole."""
    if isinstance(content, str):
        return Problem(Place(1, 1), (), content)
    try:
        # As text files are read: each kind of line end is one.
        return content.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        return Problem(Place(1, 1), (), f"not UTF-8 text (byte {error.start})")


def folder_of(data: Any, folder: FilePath) -> FilePath | None:
    """Return the folder of a file's `tenants_dir`, None if it names none; relative to `folder`."""
    name = data.get("tenants_dir") if isinstance(data, dict) else None
    return folder / FilePath(name).expanduser() if isinstance(name, str) and name else None


@dataclass(frozen=True)
class _TenantFile:
    file: FilePath
    source: YamlText


class TenantFiles:
    """Holds the files of one folder, as they were at one moment."""

    def __init__(self, folder: FilePath) -> None:
        """Read a folder. O(files)."""
        #: Why the folder cannot be read; empty if it was.
        self.problem = ""
        self._contents: list[tuple[FilePath, bytes | str]] = []
        self._first = 0
        self._sources: list[_TenantFile] = []
        try:
            names = sorted(
                path.name
                for path in folder.iterdir()
                if path.suffix in _SUFFIXES and not path.name.startswith(".")
            )
        except OSError as error:
            self.problem = f"cannot read the folder {folder}: {error.strerror}"
            return
        if len(names) > TENANT_FILES_MAX:
            self.problem = f"{folder} has {len(names):,} files; at most {TENANT_FILES_MAX:,} can be"
            return
        self._contents = [(folder / name, content_of(folder / name)) for name in names]

    def digest(self) -> bytes:
        """Return a digest of all names and contents. O(content)."""
        found = hashlib.sha256(self.problem.encode())
        for file, content in self._contents:
            held = b"\0" + content.encode() if isinstance(content, str) else content
            for part in (file.name.encode(errors="surrogateescape"), held):
                found.update(len(part).to_bytes(8, "big") + part)
        return found.digest()

    def add_to(self, data: dict[str, Any]) -> list[Problem]:
        """Append the tenants of the files to those of the main file; return what is wrong."""
        problems = []
        entries = data.get("tenants") or []
        if not isinstance(entries, list):
            return []
        self._first = len(entries)
        added = []
        for file, content in self._contents:
            text = decoded(content)
            if isinstance(text, Problem):
                problems.append(Problem(text.place, text.path, text.message, file))
                continue
            source = read_yaml(text)
            problems += [Problem(p.place, p.path, p.message, file) for p in source.problems]
            if isinstance(source.data, dict):
                self._sources.append(_TenantFile(file, source))
                added.append(source.data)
            elif not source.problems:
                message = "has to be a mapping with the keys of one tenant, such as name and weight"
                problems.append(Problem(Place(1, 1), (), message, file))
        data["tenants"] = [*entries, *added]
        return problems

    def located(self, path: Path, message: str, main: FilePath, *, key: bool) -> Problem | None:
        """Return a problem at its place in the file of the folder that holds it, if one does.

        `main`: the configuration file, which the message may name beside it.
        """
        at = path[1] if len(path) > 1 and path[0] == "tenants" else -1
        if not isinstance(at, int) or at < self._first:
            return None

        def where(match: re.Match[str]) -> str:
            other = int(match[1]) - self._first
            return (
                f"{main}: {match[0]}" if other < 0 else f"{self._sources[other].file}: {match[2]}"
            )

        found = self._sources[at - self._first]
        told = _LISTED.sub(where, message)
        return Problem(found.source.place(path[2:], key=key), path[2:], told, found.file)
