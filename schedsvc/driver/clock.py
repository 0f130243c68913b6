"""Reads the clock of a scheduler process: monotonic, and blind to the process's own pauses."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["HEARTBEAT_NS", "PAUSE_NS", "SteadyClock", "boot_ns", "boot_source", "wall_ms"]

#: How often the event loop has to ask the clock, whatever else it does.
HEARTBEAT_NS = 250_000_000
#: A gap between two askings that is longer than this is a pause of the process.
PAUSE_NS = 1_000_000_000


class SteadyClock:
    """Counts monotonic nanoseconds that stand still while the process is paused.

    While the process was stopped (SIGSTOP, a suspended machine, a long stall of the event loop)
    renewals waited unread in the sockets. Were the pause counted, leases would expire before those
    are read. So of a gap longer than `PAUSE_NS` only `PAUSE_NS` counts. The event loop has to ask
    at least every `HEARTBEAT_NS`, so that idling is no pause.
    """

    def __init__(self, source: Callable[[], int] = time.monotonic_ns) -> None:
        self._source = source
        self._last_ns = source()
        #: Time that was left out so far, in ns.
        self.skipped_ns = 0

    def now_ns(self) -> int:
        """Return the time in ns; never goes back. O(1)."""
        raw_ns = self._source()
        gap_ns = raw_ns - self._last_ns
        if gap_ns > PAUSE_NS:
            self.skipped_ns += gap_ns - PAUSE_NS
        self._last_ns = raw_ns
        return raw_ns - self.skipped_ns


def wall_ms() -> int:
    """Return the time of day for people, in ms since 1970; nothing is decided by it."""
    return time.time_ns() // 1_000_000


def _machine_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


_boot = _machine_ns


def boot_ns() -> int:
    """Return ns since the machine's start; goes on while the process or the machine is paused."""
    return _boot()


@contextmanager
def boot_source(source: Callable[[], int]) -> Iterator[None]:
    """Let `boot_ns()` of this process read virtual time: for a simulator."""
    global _boot
    before, _boot = _boot, source
    try:
        yield
    finally:
        _boot = before
