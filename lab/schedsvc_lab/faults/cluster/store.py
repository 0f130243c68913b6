"""Runs the store of a world: the real functions over its keys, its wall clock, its failovers."""

import weakref
from collections.abc import Callable
from typing import Any

import redis.exceptions

from schedsvc.cluster.library import library_source
from schedsvc_lab.faults.cluster.keyspace import WRITES, Keyspace, ServerError
from schedsvc_lab.faults.cluster.scripts import Scripts

__all__ = ["ACL", "REFUSALS", "VirtualStore"]

_INFO = (
    b"redis_version:7.2.4\r\nrole:master\r\nmaxmemory_policy:noeviction\r\ncluster_enabled:0\r\n"
)
ACL = redis.exceptions.ResponseError(
    "ACL failure in script: User m has no permissions to run the 'set' command script: on"
    " @user_function:1."
)
#: How a server refuses a write, in the words of Valkey 9.1.
REFUSALS = (
    redis.exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
    redis.exceptions.ResponseError("NOREPLICAS Not enough good replicas to write."),
    ACL,
    redis.exceptions.ResponseError("MISCONF Errors writing to the AOF file: No space left"),
    redis.exceptions.ReadOnlyError("You can't write against a read only replica."),
)


class VirtualStore:
    """Runs as a server. Its data outlive its process."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self.data = Keyspace(now_ms)
        #: The server's answer to each write; None: it accepts them.
        self.refusal: redis.exceptions.ResponseError | None = None
        #: Whether the running function declares that it writes nothing.
        self._only_reads: bool | None = None
        #: The data of a replica or a file, which `fail_over()` takes.
        self._kept = self.data.copy()
        # Weakly: see Scripts.
        called = weakref.WeakMethod(self._called)
        self._scripts = Scripts(lambda name, args: called()(name, args))  # type: ignore[misc]
        self._scripts.load(library_source())

    def command(self, words: tuple[str | bytes | int, ...]) -> Any:
        """Answer a command, with texts as bytes. Raises ResponseError as the client's parser."""
        name, *rest = [
            word if isinstance(word, bytes)
            else word.encode() if isinstance(word, str)
            else b"%d" % word
            for word in words
        ]  # fmt: skip
        if name == b"INFO":
            return _INFO
        if name != b"FCALL":
            raise redis.exceptions.ResponseError(f"unknown command {name!r}")
        function, count = rest[0].decode(), int(rest[1])
        self._only_reads = self._scripts.only_reads(function)
        if self._only_reads is None:
            raise redis.exceptions.ResponseError("Function not found")
        # A server looks at a function's flags, and at permissions only when a command is called.
        if not (self._only_reads or self.refusal is None or self.refusal is ACL):
            raise self.refusal
        self.data.forget_expired()
        try:
            return self._scripts.run(function, rest[2 : 2 + count], rest[2 + count :])
        except ServerError as error:
            raise redis.exceptions.ResponseError(str(error).removeprefix("ERR ")) from None

    def _called(self, name: str, args: list[bytes]) -> Any:
        if name in WRITES and self._only_reads:
            raise ServerError("ERR Write commands are not allowed from read-only scripts.")
        if name in WRITES and self.refusal is ACL:
            raise ServerError(f"ERR {ACL}")
        return self.data.command(name, args)

    def keep(self) -> None:
        """Let a replica or a file have everything up to now. O(fields)."""
        self._kept = self.data.copy()

    def fail_over(self) -> None:
        """Continue with the data that was kept last. O(fields)."""
        self.data = self._kept.copy()

    def flush(self) -> None:
        """Lose everything. O(1)."""
        self.data = Keyspace(self.data.now_ms)
        self._kept = self.data.copy()
