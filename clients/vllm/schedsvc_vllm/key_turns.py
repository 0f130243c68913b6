"""Turns to ask the scheduler about API keys that the gate does not know, shared by client.

Each question counts in the gate's `events_per_second`, so there are few of them in a second. A
client that invents keys must not take them all. So each network has a line of its own, and the
networks have their turns one after the other.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

from schedsvc_client.gcra import SECOND_NS, Bucket

# Questions at once, and in a second.
AT_ONCE_MAX = 256
PER_S = 200
# Requests that wait for a turn: of one network, of all together, and how many networks.
OF_ONE_MAX = 256
WAITING_MAX = 2_048
NETWORKS_MAX = 512
# The longest wait for a turn.
WAIT_S_MAX = 10.0


class NoTurnError(Exception):
    """Reports that too many others wait."""


class KeyTurns:
    """Gives the turns to one network after the other. Use it inside one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Lines of the networks in the order of their turns; none is empty.
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._waiting = 0
        self._asking = 0
        self._bucket = Bucket(SECOND_NS // PER_S, PER_S)
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, network: str) -> None:
        """Wait for a turn; `release()` it when the question is answered. Raises NoTurnError."""
        future = self._queue(network)
        self._serve()
        is_taken = False
        try:
            async with asyncio.timeout(WAIT_S_MAX):
                await future
            is_taken = True
        except TimeoutError:
            raise NoTurnError from None
        finally:
            if not is_taken:
                self._give_up(network, future)

    def release(self) -> None:
        """End a turn."""
        self._asking -= 1
        self._serve()

    def close(self) -> None:
        """Give no further turn."""
        if self._timer is not None:
            self._timer.cancel()
        for line in self._lines.values():
            for future in line:
                future.cancel()

    def _queue(self, network: str) -> asyncio.Future[None]:
        line = self._lines.get(network)
        if line is None:
            if len(self._lines) >= NETWORKS_MAX:
                raise NoTurnError
            if self._waiting >= WAITING_MAX:
                self._shorten()
            line = self._lines[network] = deque()
        elif len(line) >= OF_ONE_MAX or self._waiting >= WAITING_MAX:
            raise NoTurnError
        future = asyncio.get_running_loop().create_future()
        line.append(future)
        self._waiting += 1
        return future

    def _shorten(self) -> None:
        """Take the last one out of the longest line, for a network without one. O(networks)."""
        network = max(self._lines, key=lambda name: len(self._lines[name]))
        future = self._lines[network][-1]
        self._leave(network, future)
        future.set_exception(NoTurnError())

    def _give_up(self, network: str, future: asyncio.Future[None]) -> None:
        """Stop waiting; a turn that has come meanwhile goes to the next one."""
        self._leave(network, future)
        if future.done() and not future.cancelled() and future.exception() is None:
            self.release()

    def _leave(self, network: str, future: asyncio.Future[None]) -> None:
        line = self._lines.get(network)
        if line is None or future not in line:
            return
        line.remove(future)
        self._waiting -= 1
        if not line:
            del self._lines[network]

    def _serve(self) -> None:
        """Give the turns that may follow now, and set a timer for the next one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_ns = int(self._clock() * SECOND_NS)
        while self._lines and not self._bucket.wait_ns(now_ns) and self._asking < AT_ONCE_MAX:
            network, line = next(iter(self._lines.items()))
            future = line[0]
            self._lines.move_to_end(network)
            self._leave(network, future)
            if not future.done():
                future.set_result(None)
                self._bucket.take(now_ns)
                self._asking += 1
        if self._lines and self._asking < AT_ONCE_MAX:
            after_s = self._bucket.wait_ns(now_ns) / SECOND_NS
            self._timer = asyncio.get_running_loop().call_later(after_s, self._serve)
