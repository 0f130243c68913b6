"""Fences the gate processes of one engine by a file that they share, or keeps to one process.

`SCHEDSVC_FENCE` names the file, which the launcher makes. It holds the highest leadership that any
of them has seen. A process writes it under a lock, and compares before it obeys a scheduler, which
costs one system call. The file is not mapped into memory: if another program truncated it, each
access would end the process.

A process writes what it has seen again if another program emptied the file. It opens the path again
within a second if the file is gone from there, and so all processes find one file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
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
#: The path is compared with the open file this often.
_LOOK_S = 1.0
_log = logging.getLogger("schedsvc_vllm")


class FenceFile:
    """Keeps the highest leadership in a file. Raises OSError if the file cannot be used."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = self._open()
        self._raw: bytes | None = None  # of the last reading or writing
        self._rank = Rank()
        self._look_at_s = time.monotonic() + _LOOK_S
        self._problem = ""

    def _open(self) -> int:
        """Open or make the file. Another program's file is refused, not overwritten."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(self._path, flags, 0o600)
        size = os.fstat(file).st_size
        if size not in (0, _BYTES):
            os.close(file)
            raise OSError(f"{self._path} has {size} bytes: it is no fence file; name another path")
        return file

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def read(self) -> Rank:
        """Return the highest leadership. O(1)."""
        if time.monotonic() >= self._look_at_s:
            self._look()
        raw = os.pread(self._file, _BYTES, 0)
        if raw == self._raw:
            return self._rank
        rank = _decoded(raw)
        if rank is None:
            # A process writes it now, or was killed while it did.
            with contextlib.suppress(OSError), self._locked():
                raw = os.pread(self._file, _BYTES, 0)
                rank = _decoded(raw)
        if rank is not None and rank.term >= self._rank.term:
            self._raw, self._rank = raw, rank
        else:
            # Another program emptied it. A process that starts has to find this one's highest term.
            with contextlib.suppress(OSError):
                self.raise_to(self._rank)
        return self._rank

    def raise_to(self, rank: Rank) -> Rank:
        """Write a leadership if its term is higher; return what is there then.

        Raises OSError if another process holds the lock, or the leader's name is too long.
        """
        size = len(rank.leader.encode())
        if size > LEADER_BYTES_MAX:
            raise OSError(f"the leader's name has {size} bytes, more than {LEADER_BYTES_MAX}")
        with self._locked():
            there = _decoded(os.pread(self._file, _BYTES, 0))
            # If terms are equal, the one in the file counts.
            highest = max(there or Rank(), self._rank, rank, key=lambda each: each.term)
            raw = _encoded(highest)
            if there != highest:
                os.pwrite(self._file, raw, 0)
            self._raw, self._rank = raw, highest
        return highest

    def _look(self) -> None:
        """Open the path again if another program took the file away from there. O(1)."""
        self._look_at_s = time.monotonic() + _LOOK_S
        try:
            with contextlib.suppress(FileNotFoundError):
                at_path = os.stat(self._path, follow_symlinks=False)
                if os.path.samestat(at_path, os.fstat(self._file)):
                    self._problem = ""
                    return
            fresh = self._open()
        except OSError as error:
            problem = error.strerror or str(error)
            if problem != self._problem:
                _log.warning("the fence file %s is lost: %s", self._path, problem)
            self._problem = problem
            return
        # Other threads read by this number meanwhile.
        os.dup2(fresh, self._file, inheritable=False)
        os.close(fresh)
        self._raw = None
        _log.warning("the fence file %s was deleted or replaced; it is written again", self._path)

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


def _encoded(rank: Rank) -> bytes:
    leader = rank.leader.encode()
    head = _HEAD.pack(_MAGIC, rank.term, len(leader)) + leader.ljust(LEADER_BYTES_MAX, b"\0")
    return head + _CRC.pack(zlib.crc32(head))


def _decoded(raw: bytes) -> Rank | None:
    """Return the leadership in the file's bytes; None if they are torn."""
    if not raw.strip(b"\0"):
        return Rank()
    if len(raw) != _BYTES:
        return None
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
