"""Reports the state of a process to its service manager, as sd_notify(3) describes.

The manager names a Unix datagram socket in $NOTIFY_SOCKET; without it every report does nothing.
`WATCHDOG=1` comes from the event loop alone: a loop that is stuck sends none, and the manager
restarts the process.
"""

import asyncio
import os
import socket
import time
from collections.abc import Mapping

import structlog

__all__ = ["Notifier"]

_log = structlog.get_logger("schedsvc.server")


class Notifier:
    """Sends the state to the socket that the environment names. A report never raises."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Read NOTIFY_SOCKET, WATCHDOG_USEC, and WATCHDOG_PID.

        A value that is no number of microseconds above 0 turns the watchdog off.
        """
        path = environ.get("NOTIFY_SOCKET", "")
        # An address of the abstract namespace begins with "@" here, and with a zero byte in a call.
        self._address = f"\0{path[1:]}" if path.startswith("@") else path
        usec, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
        is_ours = pid in ("", str(os.getpid()))
        #: Seconds between two watchdog reports: half of what the manager allows; 0: none is wanted.
        self.watchdog_s = int(usec) / 2e6 if path and is_ours and usec.isdecimal() else 0.0

    def ready(self) -> None:
        """Report that the process serves, also after a reload."""
        self._send("READY=1")

    def reloading(self) -> None:
        """Report that a reload begins; `ready()` ends it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1_000}")

    def stopping(self, at_most_s: float) -> None:
        """Report that the process stops, and how long the manager has to wait for that."""
        self._send(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={int(at_most_s * 1e6)}")

    async def keep_watchdog(self) -> None:
        """Report that the event loop runs, until cancelled; return at once if it is not wanted."""
        while self.watchdog_s:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s)

    def _send(self, state: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                # A manager that does not read must not hold up the event loop.
                sender.setblocking(False)
                sender.sendto(state.encode(), self._address)
        except OSError as error:
            _log.warning("notify_failed", state=state, error=str(error))
