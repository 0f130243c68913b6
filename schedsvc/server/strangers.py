"""Closes connections without a proof, so that strangers hold no place for long.

gRPC closes a connection that is one too many, also that of a shim, and does not say which
connections there are. So this looks at the sockets of the process. To shut a socket down is for
gRPC as if the client had left.
"""

import asyncio
import os
import socket
from contextlib import suppress

import structlog

__all__ = ["IDLE_MS", "Strangers"]

_log = structlog.get_logger("schedsvc.server")

#: gRPC closes a connection without a call after this time, and before twice this time. It bounds
#: strangers on Unix sockets too. A client connects again at its next call.
IDLE_MS = 5_000
#: For a connection to show a proof; if there are too many, the oldest have this time alone.
_PROOF_S, _PROOF_S_MIN = 10.0, 1.0
_LOOK_S = 1.0
_LOG_S = 60.0
#: Sockets that are looked at in one turn of the event loop.
_SLICE = 32
_SOCKETS = "/dev/fd"


class Strangers:
    """Counts the connections of a process to its ports on which no call had a proof yet."""

    def __init__(self, connections_max: int) -> None:
        """Close the oldest connections without a proof if a port has more than this."""
        self._connections_max = connections_max
        self._ports: set[int] = set()
        self._proven: set[str] = set()
        self._since: dict[str, float] = {}
        #: Connections that were closed.
        self.closed = 0
        self._logged, self._logged_s = 0, -_LOG_S
        #: Called with gRPC's name for the peer of a call that had a proof. O(1)
        self.prove = self._proven.add

    def watch(self, target: str) -> None:
        """Look after the port of a target; a Unix socket is guarded by its mode."""
        if not target.startswith("unix:"):
            self._ports.add(int(target.rpartition(":")[2]))

    async def run(self) -> None:
        """Look again and again. Never returns."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._ports:
                await self.look(asyncio.get_running_loop().time())

    async def look(self, now_s: float) -> None:
        """Close what has to go. O(descriptors), in slices between which others have their turn."""
        before, by_port = set(self._proven), dict[int, list[tuple[float, str, int]]]()
        live: set[str] = set()
        for i, number in enumerate(_descriptors()):
            if i % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            with suppress(OSError), _socket(number) as found:
                port, peer = _ends(found)
                if port in self._ports:
                    live.add(peer)
                    since = self._since.setdefault(peer, now_s)
                    by_port.setdefault(port, []).append((since, peer, number))
        # A later connection can have the same address, and needs a proof of its own.
        self._proven -= before - live
        self._since = {peer: since for peer, since in self._since.items() if peer in live}
        for connections in by_port.values():
            await self._close_strangers(connections, now_s)
        if self.closed > self._logged and now_s >= self._logged_s + _LOG_S:
            _log.info("strangers_closed", connections=self.closed - self._logged)
            self._logged, self._logged_s = self.closed, now_s

    async def _close_strangers(
        self, connections: list[tuple[float, str, int]], now_s: float
    ) -> None:
        excess = len(connections) - self._connections_max
        for since, peer, number in sorted(connections):
            if peer in self._proven:
                continue
            if now_s - since < (_PROOF_S_MIN if excess > 0 else _PROOF_S):
                break
            with suppress(OSError), _socket(number) as found:
                # The number may be another socket's now.
                if _ends(found)[1] == peer:
                    found.shutdown(socket.SHUT_RDWR)
                    self.closed += 1
                    excess -= 1
                    if self.closed % _SLICE == 0:
                        await asyncio.sleep(0)


def _descriptors() -> list[int]:
    with suppress(OSError):
        return [int(name) for name in os.listdir(_SOCKETS)]
    return []


def _socket(number: int) -> socket.socket:
    """Return a socket of a descriptor that stays open. Raises OSError if it is none."""
    own = os.dup(number)
    try:
        return socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise


def _ends(found: socket.socket) -> tuple[int, str]:
    """Return the own port of a TCP connection, and gRPC's name for its peer. Raises OSError."""
    if found.family not in (socket.AF_INET, socket.AF_INET6):
        return 0, ""
    host, port = found.getpeername()[:2]
    host = host.removeprefix("::ffff:").partition("%")[0]
    peer = f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
    return found.getsockname()[1], peer
