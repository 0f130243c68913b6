"""Writes the messages of a Session to its stream."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc

from schedsvc_client.session_protocol import SessionProtocol


class Alarm:
    """Wakes the writer of a session: at once, or when something of the protocol is due.

    `asyncio.Event` and a timer for each wait would cost a request more than its message.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_ns = 0

    def set(self) -> None:
        """Wake the writer, now or when it next waits."""
        self._is_set = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def at(self, due_ns: int | None) -> None:
        """Wake it at a time, unless it wakes earlier; a time that has moved later wakes it twice.

        None: nothing is due.
        """
        if due_ns is None or (self._timer is not None and due_ns >= self._due_ns):
            return
        self.cancel()
        self._due_ns = due_ns
        delay_s = (due_ns - time.monotonic_ns()) / 1e9
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._ring)

    def cancel(self) -> None:
        """Let no time wake it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def wait(self) -> None:
        """Wait for the next waking, and forget those before."""
        if not self._is_set:
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            try:
                await waiter
            finally:
                if self._waiter is waiter:  # and not that of the next stream's writer
                    self._waiter = None
        self._is_set = False

    def _ring(self) -> None:
        self._timer = None
        self.set()


async def send_all(call: Any, protocol: SessionProtocol, alarm: Alarm) -> None:
    """Send what the protocol has, whenever something is new or due.

    Waking takes one round of the event loop, in which everything that happened in the last one
    gathers into one message; more gathers while a message is being written.
    """
    while True:
        data = protocol.data_to_send(time.monotonic_ns())
        if data is not None:
            try:
                await call.write(data)
            except (grpc.RpcError, asyncio.InvalidStateError):
                return  # the reader learns why
            if protocol.has_more:
                continue
        alarm.at(protocol.next_deadline_ns())
        await alarm.wait()
