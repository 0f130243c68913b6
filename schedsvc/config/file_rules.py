"""Checks the files and folders that a configuration names, as they are on this machine."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

from schedsvc.config.files import kind_of, path_in
from schedsvc.config.rule_helpers import Finding, items, mapping
from schedsvc.config.yaml_positions import Path, path_text

__all__ = [
    "UNIX_PATH_BYTES_MAX",
    "file_advice",
    "file_findings",
    "file_to_write",
    "socket_findings",
    "used_files",
    "written_files",
]

UNIX_PATH_BYTES_MAX = 107


def file_findings(data: dict[str, Any], file: FilePath) -> Iterator[Finding]:
    """Find files that cannot be written, or that have another use in the configuration `file`."""
    used = used_files(data, file)
    for where, name, suffixes in written_files(data):
        path = path_in(file.parent, name)
        problem = next(file_to_write(path, where), None)
        if problem is not None:
            yield problem
            continue
        names = [path, *(path.with_name(path.name + suffix) for suffix in suffixes)]
        uses = ((found, used.get(os.path.realpath(found))) for found in names)
        if clash := next((pair for pair in uses if pair[1]), None):
            yield where, f"would write to {clash[0]}, which is {clash[1]}; name another file"
        used.update((os.path.realpath(found), f"a file of {path_text(where)}") for found in names)


def written_files(data: dict[str, Any]) -> Iterator[tuple[Path, str, tuple[str, ...]]]:
    """Yield setting, name, and suffixes of the files beside it, of each written file. O(1)."""
    state, usage = mapping(data.get("state")), mapping(data.get("usage"))
    files: tuple[tuple[Path, Any, tuple[str, ...]], ...] = (
        (("record",), data.get("record"), (".1",)),
        (("state", "file"), state.get("file"), ("-wal", "-shm")),
        (("usage", "path"), usage.get("path"), ("-wal", "-shm")),
    )
    yield from (found for found in files if isinstance(found[1], str))


def used_files(data: dict[str, Any], file: FilePath) -> dict[str, str]:
    """Return the real paths that a configuration reads or listens on, and what each is. O(file).

    `data` is the configuration as plain data, `file` its own file.
    """
    folder = file.parent
    used = {os.path.realpath(file): "this configuration itself"}

    def use(name: object, where: Path) -> None:
        if isinstance(name, str) and "\0" not in name:
            path = path_in(folder, name)
            used.setdefault(os.path.realpath(path), f"the file of {path_text(where)}")

    for i, entry in items(mapping(data.get("auth")).get("principals")):
        use(entry.get("token_file"), ("auth", "principals", i, "token_file"))
    listeners = [(("listeners", i), entry) for i, entry in items(data.get("listeners"))]
    for where, entry in [*listeners, (("edge",), mapping(data.get("edge")))]:
        use(entry.get("unix"), (*where, "unix"))
        for key, name in mapping(entry.get("tls")).items():
            use(name, (*where, "tls", key))
    cluster = mapping(data.get("cluster"))
    use(cluster.get("secret_file"), ("cluster", "secret_file"))
    for part, secret in (("store", "password_file"), ("leader", "token_file")):
        section = mapping(cluster.get(part))
        use(section.get(secret), ("cluster", part, secret))
        for key, name in mapping(section.get("tls")).items():
            use(name, ("cluster", part, "tls", key))
    return used


def file_advice(data: dict[str, Any], folder: FilePath) -> Iterator[Finding]:
    """Find a state file that others may read: it holds the key under which names are hashed."""
    name = mapping(data.get("state")).get("file")
    if not isinstance(name, str):
        return
    path = path_in(folder, name)
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except (OSError, ValueError):
        return
    if mode & 0o077 and path.is_file():
        yield ("state", "file"), f"{path} is open to others (mode {mode:04o}); serve makes it 0600"


def socket_findings(name: str, where: Path, folder: FilePath) -> Iterator[Finding]:
    """Find a Unix socket that cannot be made."""
    path = path_in(folder, name)
    if len(bytes(path)) > UNIX_PATH_BYTES_MAX:
        yield where, f"is longer than {UNIX_PATH_BYTES_MAX} bytes; choose a shorter path"
    elif "\0" in name:
        yield where, "holds a NUL character; remove it"
    elif path.is_dir():
        yield where, f"{path} is a folder; name a socket in it"
    else:
        yield from _folder_to_write(path.parent, where)


def file_to_write(path: FilePath, where: Path) -> Iterator[Finding]:
    """Find why a file cannot be written."""
    try:
        kind = kind_of(path)
    except OSError as error:
        yield where, f"cannot use {path}: {error.strerror}"
        return
    if kind:
        yield where, f"{path} is {kind}; name a file"
    elif path.exists() and not os.access(path, os.W_OK):
        yield where, f"cannot write to {path}; change its owner or mode, or name another file"
    else:
        yield from _folder_to_write(path.parent, where)


def _folder_to_write(parent: FilePath, where: Path) -> Iterator[Finding]:
    if not parent.is_dir():
        yield where, f"the folder {parent} does not exist; make it"
    elif not os.access(parent, os.W_OK):
        yield where, f"cannot write to the folder {parent}; change its owner or mode"
