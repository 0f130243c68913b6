"""Replaces the connections of the client's library between processes and the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import redis.exceptions

from schedsvc_lab.faults.cluster.store import VirtualStore
from schedsvc_lab.faults.cluster.surroundings import Host, StoreWorld, Words

__all__ = ["StoreHost", "VirtualConnection"]

#: This part of the messages that a cut holds up arrives after it; the rest is lost.
_LATE = 0.5


class StoreHost:
    """Runs the store's process and its network."""

    def __init__(self, world: StoreWorld) -> None:
        self._world = world
        #: The difference between the wall clock of the store and the world's time.
        self.step_ns = 0
        self.store = VirtualStore(self.now_ms)
        self.is_up = True
        #: The end of the process's pause, and of the time in which no message passes.
        self.stopped_until_ns = self.hole_until_ns = 0
        #: Grows with each start: connections of an earlier life are broken.
        self.life = 1
        #: The server's time for a command, as it runs one at a time; None: none.
        self.cost_ns: Callable[[Words], int] | None = None
        self._free_ns = 0

    def busy_ns(self, words: Words) -> int:
        """Return the time until a command that arrives now has been carried out."""
        if self.cost_ns is None:
            return 0
        now_ns = self._world.queue.now_ns
        self._free_ns = max(now_ns, self._free_ns) + self.cost_ns(words)
        return self._free_ns - now_ns

    def now_ms(self) -> int:
        """Return the wall clock of the store."""
        return (self._world.queue.now_ns + self.step_ns) // 1_000_000

    def kill(self) -> None:
        """End the process; its connections break."""
        self.is_up = False
        self.life += 1

    def start(self) -> None:
        """Start the process, if it does not run."""
        self.is_up = True


class VirtualConnection:
    """Represents one connection of a process; the client's library calls it Connection."""

    def __init__(self, world: StoreWorld, process: Host, host: StoreHost) -> None:
        self._world, self._process, self._host = world, process, host
        self._life = 0
        self._is_open = False
        self._sent: Words = ()
        self._answer: asyncio.Future[Any] | None = None

    async def connect(self) -> None:
        """Connect; raises ConnectionError if no process listens."""
        await self._exchange(None)
        self._is_open = True

    async def send_command(self, *words: str | bytes | int, check_health: bool = True) -> None:
        """Send a command. Raises ConnectionError if the connection is known to be broken."""
        if not self._is_open or self._process.is_dead:
            raise redis.exceptions.ConnectionError("Connection closed")
        self._sent, self._answer = words, self._send(words)

    async def read_response(self, *, disable_decoding: bool = False) -> Any:
        """Wait for the answer."""
        assert self._answer is not None
        words, sent = self._sent, self._answer
        answer = await sent
        # Only now, because a call may have been given up at the moment of its answer.
        self._world.store_heard(self._process, words, answer)
        return answer

    async def disconnect(self, *, nowait: bool = False) -> None:
        """Hang up."""
        self._is_open = False

    async def _exchange(self, words: Words | None) -> Any:
        if self._process.is_dead:
            raise redis.exceptions.ConnectionError("the process is dead")
        return await self._send(words)

    def _send(self, words: Words | None) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = self._process.loop.create_future()
        self._travel(lambda _: self._arrive(words, answer))
        return answer

    def _travel(self, arrive: Any, busy_ns: int = 0) -> None:
        self._world.queue.after(busy_ns + self._process.delay_ns(), arrive)

    def _is_held_up(self, arrive: Any, words: Words | None) -> bool:
        """Return whether a cut takes a message now; it may still arrive later."""
        queue = self._world.queue
        until_ns = max(self._process.cut_until_ns, self._host.hole_until_ns)
        if until_ns <= queue.now_ns:
            return False
        if words is not None and queue.rnd.random() < _LATE:
            queue.at(until_ns + queue.soon(20_000_000), arrive)
        return True

    def _arrive(self, words: Words | None, answer: asyncio.Future[Any]) -> None:
        host, queue = self._host, self._world.queue
        again = lambda _: self._arrive(words, answer)  # noqa: E731 - it is short
        if self._is_held_up(again, words):
            return
        if not host.is_up or (words is not None and self._life != host.life):
            self._deliver(answer, None, redis.exceptions.ConnectionError("Connection reset"), words)
            return
        if host.stopped_until_ns > queue.now_ns and words is not None:
            # The kernel accepts connections and messages, and the process reads them later.
            queue.at(host.stopped_until_ns, again)
            return
        if words is None:
            self._life = host.life
            self._deliver(answer, None, None, words)
            return
        if self._process.is_dead and queue.rnd.random() < _LATE:
            return  # it died before the message left its host
        try:
            found = host.store.command(words)
        except redis.exceptions.ResponseError as error:
            self._deliver(answer, None, error, words, host.busy_ns(words))
            return
        self._world.store_took(self._process, words, found)
        self._deliver(answer, found, None, words, host.busy_ns(words))

    def _deliver(
        self,
        answer: asyncio.Future[Any],
        found: Any,
        error: Exception | None,
        words: Words | None,
        busy_ns: int = 0,
    ) -> None:
        def arrive(_: Any) -> None:
            if self._process.is_dead or self._is_held_up(arrive, words):
                return
            self._process.act(lambda: _resolve(answer, found, error))

        self._travel(arrive, busy_ns)


def _resolve(answer: asyncio.Future[Any], found: Any, error: Exception | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(found)
    else:
        answer.set_exception(error)
