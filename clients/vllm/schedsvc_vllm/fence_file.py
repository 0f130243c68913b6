"""Fencing between the gate processes of one engine: a file that they share, or a single process.

`SCHEDSVC_FENCE` names the file, which the launcher makes. It holds the highest leadership that any
of them has seen. A process writes it under a lock, and compares before it obeys a scheduler: the
file is mapped into memory, so a comparison costs a microsecond and no system call.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import re
import socket
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from schedsvc_client.fence import Fence, Rank, fence_of

from schedsvc_vllm.settings import Settings, SettingsError

# Magic, term, length of the leader's name; then the name, and at the end the CRC of it all.
_HEAD = struct.Struct("<8sQH")
_CRC = struct.Struct("<I")
_BYTES = 512
_MAGIC = b"schedfc1"
LEADER_BYTES_MAX = _BYTES - _HEAD.size - _CRC.size
# A writer holds the lock for microseconds; one that was stopped meanwhile must not stop the others.
_LOCK_TRIES = 20
_LOCK_PAUSE_S = 0.001
_PREFIX = "schedsvc-fence-"


class FenceFile:
    """The highest leadership in a file. Raises OSError if the file cannot be used."""

    def __init__(self, path: str) -> None:
        self._path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(path, flags, 0o600)
        try:
            self._grow()
            self._map = mmap.mmap(self._file, _BYTES)
        except BaseException:
            os.close(self._file)
            raise
        self._raw, self._rank = b"", Rank()

    def close(self) -> None:
        """Let go of the file."""
        self._map.close()
        os.close(self._file)

    def read(self) -> Rank:
        """Return the highest leadership. O(1), without a system call if it has not changed."""
        raw = self._map[:_BYTES]
        if raw == self._raw:
            return self._rank
        rank = _decoded(raw)
        if rank is None:
            # A process writes it now, or was killed while it did.
            with contextlib.suppress(OSError), self._locked():
                raw = self._map[:_BYTES]
                rank = _decoded(raw)
        if rank is not None and rank.term >= self._rank.term:
            self._raw, self._rank = raw, rank
        return self._rank

    def raise_to(self, rank: Rank) -> Rank:
        """Write a leadership if its term is higher; return what is there then.

        Raises OSError if another process holds the lock, or the leader's name is too long.
        """
        leader = rank.leader.encode()
        if len(leader) > LEADER_BYTES_MAX:
            raise OSError(
                f"the leader's name has {len(leader)} bytes, more than {LEADER_BYTES_MAX}"
            )
        with self._locked():
            there = _decoded(self._map[:_BYTES]) or self._rank
            if there.term >= rank.term:
                return there
            head = _HEAD.pack(_MAGIC, rank.term, len(leader)) + leader.ljust(
                LEADER_BYTES_MAX, b"\0"
            )
            self._map[:_BYTES] = head + _CRC.pack(zlib.crc32(head))
        return rank

    def _grow(self) -> None:
        """Give a new file its size. Another file is refused, not overwritten."""
        size = os.fstat(self._file).st_size
        if size == 0:
            with self._locked():
                os.ftruncate(self._file, _BYTES)
        elif size != _BYTES:
            raise OSError(f"{self._path} has {size} bytes: it is no fence file; name another path")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        for attempt in range(_LOCK_TRIES):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == _LOCK_TRIES - 1:
                    raise
                time.sleep(_LOCK_PAUSE_S)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def _decoded(raw: bytes) -> Rank | None:
    """Return the leadership in the file's bytes; None if they are torn."""
    if not raw.strip(b"\0"):
        return Rank()
    magic, term, length = _HEAD.unpack_from(raw)
    body, crc = raw[: -_CRC.size], _CRC.unpack(raw[-_CRC.size :])[0]
    if magic != _MAGIC or length > LEADER_BYTES_MAX or zlib.crc32(body) != crc:
        return None
    return Rank(term, raw[_HEAD.size : _HEAD.size + length].decode("utf-8", "replace"))


def make_fence_file() -> str:
    """Make the file of an engine that is about to start in this process; return its path.

    Removes the files of engines of this user that have ended.
    """
    folder = Path(tempfile.gettempdir())
    for path in folder.glob(f"{_PREFIX}*"):
        owner = re.match(rf"{_PREFIX}(\d+)-", path.name)
        with contextlib.suppress(OSError):
            if owner and path.lstat().st_uid == os.getuid() and not _runs(int(owner[1])):
                path.unlink()
    # The engine keeps the number of this process: the launcher becomes it.
    file, made = tempfile.mkstemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=folder)
    os.close(file)
    return made


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # of another user
    return True


def fence_for(settings: Settings) -> Fence:
    """Return the fence of this gate. Raises SettingsError if its file cannot be used."""
    if not settings.fence:
        return fence_of(settings.targets)
    try:
        return Fence(strict=len(settings.targets) > 1, shared=FenceFile(settings.fence))
    except OSError as error:
        cause = error.strerror or error
        raise SettingsError(f"SCHEDSVC_FENCE: cannot use {settings.fence}: {cause}") from None


def claim_pool(settings: Settings) -> socket.socket | None:
    """Claim an engine's pool for this gate process, until the returned socket is closed.

    With several targets and without a fence file, two processes of one engine could obey two
    leaders. Raises SettingsError if another process of this host has claimed the pool, with the
    same SCHEDSVC_POOL_EPOCH if that is set. None: one target, a fence file, or a system without
    abstract sockets.
    """
    if len(settings.targets) == 1 or settings.fence or sys.platform != "linux":
        return None
    pool = settings.pool
    named = "\0".join((*sorted(settings.targets), pool.name, str(pool.epoch)))
    name = hashlib.sha256(named.encode()).hexdigest()[:32]
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0schedsvc-gate/{name}")
    except OSError:
        claim.close()
        raise SettingsError(
            f"SCHEDSVC_FENCE is not set, and another gate process of this host offers pool"
            f" {pool.name}; with several targets start the engine with schedsvc-vllm serve, or set"
            " SCHEDSVC_FENCE to one file for all its processes"
        ) from None
    return claim
