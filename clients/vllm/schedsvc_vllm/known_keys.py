"""Keeps the API keys that the scheduler has known, in a file that outlives the gate.

After a restart every key would be new, and new keys wait for turns (key_turns.py). The file holds
the SHA-256 of each key, its tenant, and when the scheduler said so last. A program that could write
it could name a tenant for a key of its own. So the gate uses the file only if it is this user's and
no other user may read or write it.

The gate processes of one engine share the file: each applies its own changes, under a lock on the
folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

KEYS_MAX = 65_536
BYTES_MAX = 16 << 20
#: A key that the scheduler has not confirmed for this time is dropped.
KEPT_S = 7 * 86_400
_MAGIC = b"schedky1"
# SHA-256, second of the wall clock, length of the tenant's name; then the name.
_ROW = struct.Struct("<32sQH")
_CRC = struct.Struct("<I")
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
# A process holds the lock for some milliseconds.
_LOCK_TRIES = 100
_LOCK_PAUSE_S = 0.01


class KnownKey(NamedTuple):
    """Says for whom a key stands, and when the scheduler said so, in seconds of the wall clock."""

    tenant: str
    said_s: int


class KnownKeys:
    """Keeps the keys in a file. Raises OSError if the file must not be used; its text says why."""

    def __init__(self, path: str, clock: Callable[[], float] = time.time) -> None:
        self._path = Path(path)
        self._clock = clock

    def __str__(self) -> str:
        return str(self._path)

    def read(self) -> dict[bytes, KnownKey]:
        """Return the keys, the oldest first; none if the file is damaged. O(keys)."""
        raw = self._raw()
        if not raw:
            return {}
        if not raw.startswith(_MAGIC):
            raise OSError(0, "it is no file of known keys; name another path")
        if zlib.crc32(raw[: -_CRC.size]) != _CRC.unpack(raw[-_CRC.size :])[0]:
            return {}
        now_s = int(self._clock())
        found: dict[bytes, KnownKey] = {}
        at, end = len(_MAGIC), len(raw) - _CRC.size
        while at < end:
            digest, said_s, length = _ROW.unpack_from(raw, at)
            at += _ROW.size
            if now_s - said_s < KEPT_S:
                tenant = raw[at : at + length].decode("utf-8", "replace")
                found[digest] = KnownKey(tenant, min(said_s, now_s))
            at += length
        return found

    def apply(self, changes: Mapping[bytes, str | None]) -> None:
        """Write tenants of keys that the scheduler has just named; None: it knows no such key.

        O(keys). Raises OSError, also if another process holds the lock.
        """
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked():
            rows = self.read()
            now_s = int(self._clock())
            for digest, tenant in changes.items():
                rows.pop(digest, None)
                if tenant is not None:
                    rows[digest] = KnownKey(tenant, now_s)
            self._write(_encoded(rows))

    def _raw(self) -> bytes:
        """Return the bytes of the file; b"": there is none."""
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            opened = os.open(self._path, flags)
        except FileNotFoundError:
            return b""
        with open(opened, "rb") as file:
            status = os.fstat(opened)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(0, "it is not a regular file")
            if status.st_uid != os.geteuid():
                raise OSError(0, f"it belongs to user {status.st_uid}; give it to {os.geteuid()}")
            if status.st_mode & _OTHERS:
                mode = stat.S_IMODE(status.st_mode)
                raise OSError(0, f"its mode is {mode:04o}; set 0600, for this user alone")
            if status.st_size > BYTES_MAX:
                raise OSError(0, f"it is larger than {BYTES_MAX >> 20} MiB")
            return file.read(BYTES_MAX)

    def _write(self, raw: bytes) -> None:
        partial = self._path.with_name(f".{self._path.name}.partial")
        partial.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(partial, flags, 0o600), "wb") as file:
            file.write(raw)
        partial.replace(self._path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for attempt in range(_LOCK_TRIES):
                try:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if attempt == _LOCK_TRIES - 1:
                        raise
                    time.sleep(_LOCK_PAUSE_S)
            yield
        finally:
            os.close(folder)


def _encoded(rows: Mapping[bytes, KnownKey]) -> bytes:
    """Return the newest rows that fit, the oldest of them first."""
    parts: list[bytes] = []
    left = BYTES_MAX - len(_MAGIC) - _CRC.size
    for digest, (tenant, said_s) in reversed(list(rows.items())):
        name = tenant.encode()
        part = _ROW.pack(digest, said_s, len(name)) + name
        left -= len(part)
        if left < 0 or len(parts) >= KEYS_MAX:
            break
        parts.append(part)
    body = _MAGIC + b"".join(reversed(parts))
    return body + _CRC.pack(zlib.crc32(body))
