"""The store of a world: its functions, its wall clock, and what a crash or a failover takes."""

from collections.abc import Callable
from typing import Any

import redis.exceptions

from schedsvc.cluster.library import (
    ESCROW_VERSION,
    FUNCTIONS_VERSION,
    LIMITS_VERSION,
    SETTINGS_VERSION,
    TERMS_VERSION,
)
from schedsvc_lab.faults.cluster.keyspace import Keyspace
from schedsvc_lab.faults.cluster.store_escrow import ESCROW_FUNCTIONS
from schedsvc_lab.faults.cluster.store_limits import LIMITS_FUNCTIONS, SETTINGS_FUNCTIONS
from schedsvc_lab.faults.cluster.store_totals import TERM_FUNCTIONS, TOTALS_FUNCTIONS

__all__ = ["ACL", "REFUSALS", "VirtualStore"]

_INFO = (
    b"redis_version:7.2.4\r\nrole:master\r\nmaxmemory_policy:noeviction\r\ncluster_enabled:0\r\n"
)
_VERSIONS = {
    "schedsvc_version": FUNCTIONS_VERSION,
    "schedsvc_escrow_version": ESCROW_VERSION,
    "schedsvc_limits_version": LIMITS_VERSION,
    "schedsvc_settings_version": SETTINGS_VERSION,
    "schedsvc_terms_version": TERMS_VERSION,
}
_FUNCTIONS = (
    TOTALS_FUNCTIONS | TERM_FUNCTIONS | ESCROW_FUNCTIONS | LIMITS_FUNCTIONS | SETTINGS_FUNCTIONS
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
    """A server. Its data outlive its process."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._data = Keyspace(now_ms)
        #: Its answer to each write; None: it takes them.
        self.refusal: redis.exceptions.ResponseError | None = None
        #: The data of a replica or a file, which `fail_over()` takes.
        self._kept = self._data.copy()

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
        if function in _VERSIONS:
            return _VERSIONS[function].encode()
        if function not in _FUNCTIONS:
            raise redis.exceptions.ResponseError("Function not found")
        keys, args = rest[2 : 2 + count], rest[2 + count :]
        if self.refusal is not None and not self._only_reads(function, keys, args):
            raise self.refusal
        self._data.forget_expired()
        return _FUNCTIONS[function](self._data, keys, args)

    def _only_reads(self, function: str, keys: list[bytes], args: list[bytes]) -> bool:
        """Return whether a call succeeds while writes are refused.

        A server looks at a function's flags, and at permissions only when a command is called.
        """
        if self.refusal is not ACL:
            return False
        is_look = function == "schedsvc_term_look" and not args[1]
        return is_look or (function == "schedsvc_escrow" and len(keys) == 1)

    def keep(self) -> None:
        """Let a replica or a file have everything up to now. O(fields)."""
        self._kept = self._data.copy()

    def fail_over(self) -> None:
        """Go on with what was kept last. O(fields)."""
        self._data = self._kept.copy()

    def flush(self) -> None:
        """Lose everything. O(1)."""
        self._data = Keyspace(self._data.now_ms)
        self._kept = self._data.copy()
