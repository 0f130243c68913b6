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
from schedsvc.lab.faults.cluster.keyspace import Keyspace
from schedsvc.lab.faults.cluster.store_escrow import ESCROW_FUNCTIONS
from schedsvc.lab.faults.cluster.store_limits import LIMITS_FUNCTIONS, SETTINGS_FUNCTIONS
from schedsvc.lab.faults.cluster.store_totals import TERM_FUNCTIONS, TOTALS_FUNCTIONS

__all__ = ["VirtualStore"]

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


class VirtualStore:
    """A server. Its data outlive its process."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._data = Keyspace(now_ms)
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
        self._data.forget_expired()
        return _FUNCTIONS[function](self._data, rest[2 : 2 + count], rest[2 + count :])

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
