"""Rules about the files and folders that a configuration names, as they are on this machine."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

from schedsvc.config.rule_helpers import Finding, mapping
from schedsvc.config.yaml_positions import Path

__all__ = ["UNIX_PATH_BYTES_MAX", "file_advice", "file_findings", "socket_findings"]

UNIX_PATH_BYTES_MAX = 107


def file_findings(data: dict[str, Any], folder: FilePath) -> Iterator[Finding]:
    """Find files that cannot be written."""
    yield from _file_to_write(data.get("record"), ("record",), folder)
    state_file = mapping(data.get("state")).get("file")
    yield from _file_to_write(state_file, ("state", "file"), folder)
    if isinstance(state_file, str) and state_file == data.get("record"):
        yield ("state", "file"), "is the file of the recording; name another one"
    ledger = mapping(data.get("usage")).get("path")
    yield from _file_to_write(ledger, ("usage", "path"), folder)
    others = {"recording": data.get("record"), "state": state_file}
    for what, name in others.items():
        if isinstance(ledger, str) and ledger == name:
            yield ("usage", "path"), f"is the file of the {what}; name another one"


def file_advice(data: dict[str, Any], folder: FilePath) -> Iterator[Finding]:
    """Find a state file that others may read: it holds the key under which names are hashed."""
    name = mapping(data.get("state")).get("file")
    if not isinstance(name, str):
        return
    path = folder / FilePath(name).expanduser()
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return
    if mode & 0o077 and path.is_file():
        yield ("state", "file"), f"{path} is open to others (mode {mode:04o}); serve makes it 0600"


def socket_findings(name: str, where: Path, folder: FilePath) -> Iterator[Finding]:
    """Find a Unix socket that cannot be made."""
    path = folder / FilePath(name).expanduser()
    if len(bytes(path)) > UNIX_PATH_BYTES_MAX:
        yield where, f"is longer than {UNIX_PATH_BYTES_MAX} bytes; choose a shorter path"
    elif path.is_dir():
        yield where, f"{path} is a folder; name a socket in it"
    else:
        yield from _folder_to_write(path.parent, where)


def _file_to_write(name: object, where: Path, folder: FilePath) -> Iterator[Finding]:
    if not isinstance(name, str):
        return
    path = folder / FilePath(name).expanduser()
    if path.is_dir():
        yield where, f"{path} is a folder; name a file"
    elif path.exists() and not os.access(path, os.W_OK):
        yield where, f"cannot write to {path}; change its owner or mode, or name another file"
    else:
        yield from _folder_to_write(path.parent, where)


def _folder_to_write(parent: FilePath, where: Path) -> Iterator[Finding]:
    if not parent.is_dir():
        yield where, f"the folder {parent} does not exist; make it"
    elif not os.access(parent, os.W_OK):
        yield where, f"cannot write to the folder {parent}; change its owner or mode"
