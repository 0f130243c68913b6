"""Session streams, to the scheduler and to the echo, that are never short of messages."""

import time
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

import grpc
import uvloop

from bench.messages import Traffic, zipf
from bench.peers import FLOWS, Peer
from schedsvc.service import SERVICE_NAME

__all__ = ["SESSION_METHOD", "Pump", "Stream"]

SESSION_METHOD = f"/{SERVICE_NAME}/Session"

#: Messages that are sent ahead of their answers.
_WINDOW = 16

T = TypeVar("T")


def _ack(answer: bytes) -> int:
    """Return `ack_seq`, the first field of a SessionResponse."""
    value = shift = 0
    for byte in answer[1:]:
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    return value


class Pump:
    """Runs an event loop for streams."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end."""
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        """Close the loop."""
        self._loop.close()


class Stream:
    """Holds one stream over a peer's Unix socket, and the traffic that goes over it."""

    def __init__(
        self, pump: Pump, peer: Peer, method: str, events: int, *, counts_acks: bool, series: int
    ) -> None:
        """Open a stream with `events` events a message.

        With `counts_acks` an answer acknowledges a number of messages; else one.
        """
        self._pump = pump
        self._peer = peer
        self._counts_acks = counts_acks
        self._traffic = Traffic(events, zipf(FLOWS), series)
        self._events = events
        self._acked = 0
        #: The last answer.
        self.answer = b""
        pump.run(self._open(method))

    async def _open(self, method: str) -> None:
        self._channel = grpc.aio.insecure_channel(self._peer.unix)
        # The stubs want serialisers; bytes need none.
        open_call: Any = self._channel.stream_stream
        self._call = open_call(method)()
        await self._call.wait_for_connection()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pump.run(self._close())

    async def _close(self) -> None:
        self._call.cancel()
        await self._channel.close(None)

    def greet(self) -> None:
        """Let the scheduler grant the first leases, and answer a whole message."""
        self._pump.run(self._exchange([self._traffic.hello()]))
        self._pump.run(self._exchange([self._traffic.asks()]))
        self._traffic.learn(self.answer)
        # With one event a message every second one is an Admit, with the longer answer.
        self._pump.run(self._exchange(self._traffic.take(2)))

    async def _exchange(self, messages: list[bytes]) -> None:
        call = self._call
        sent, answered = 0, 0
        answer: Any = b""
        for message in messages[:_WINDOW]:
            await call.write(message)
            sent += 1
        while answered < len(messages):
            answer = await call.read()
            if not isinstance(answer, bytes):
                raise RuntimeError(f"the stream ended: {await call.details()}")
            answered += self._answers(answer)
            for message in messages[sent : answered + _WINDOW]:
                await call.write(message)
                sent += 1
        self.answer = answer

    def _answers(self, answer: bytes) -> int:
        """Return how many messages an answer answers."""
        if not self._counts_acks:
            return 1
        before, self._acked = self._acked, _ack(answer)
        return self._acked - before

    def slice(self, messages: int) -> list[float]:
        """Return the server's CPU time and the time that passed, in ns an event."""
        prepared = self._traffic.take(messages)
        cpu_ns, began_ns = self._peer.cpu_ns(), time.perf_counter_ns()
        self._pump.run(self._exchange(prepared))
        spent_ns = time.perf_counter_ns() - began_ns
        cpu_ns = self._peer.cpu_ns() - cpu_ns
        events = len(prepared) * self._events
        return [cpu_ns / events, spent_ns / events]
