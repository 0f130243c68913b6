"""Notices when a process can open no file descriptor any more.

A listener whose descriptors are used up accepts no connection and logs nothing: gRPC waits until
one is free. So the process tries every second whether it can open one.
"""

import asyncio
import os
import resource

import structlog

__all__ = ["exhaustions", "try_descriptor", "watch_descriptors"]

_log = structlog.get_logger("schedsvc.server")
_LOOK_S = 1.0


class _Seen:
    """Holds the result of the last try, and how often the descriptors began to be used up."""

    is_exhausted = False
    count = 0


def exhaustions() -> int:
    """Return how often this process began to be without a free descriptor."""
    return _Seen.count


def try_descriptor() -> None:
    """Try to open a descriptor, and log the first failure and the first success after it. O(1)."""
    reason = ""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        reason = error.strerror or str(error)
    if reason and not _Seen.is_exhausted:
        _Seen.count += 1
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        effect = "no new connection is accepted, and no file opened"
        _log.error("descriptors_exhausted", reason=reason, limit=limit, effect=effect)
    elif _Seen.is_exhausted and not reason:
        _log.warning("descriptors_free_again")
    _Seen.is_exhausted = bool(reason)


async def watch_descriptors() -> None:
    """Try every second. Never returns."""
    while True:
        try_descriptor()
        await asyncio.sleep(_LOOK_S)
