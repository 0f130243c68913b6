"""Serves one stream of a Session: reads, writes, and finds out why it ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import grpc

from schedsvc_client.aio.heartbeat import Heartbeat
from schedsvc_client.aio.session_writer import Alarm, send_all
from schedsvc_client.errors import CallError, defect, from_rpc_error, silent, unavailable
from schedsvc_client.session_protocol import SessionProtocol
from schedsvc_client.v1 import scheduler_pb2 as pb

# A wait is cut into steps, and a step that comes late counts once. So a process that stood still
# does not blame the scheduler.
_STEPS = 12
_log = logging.getLogger("schedsvc_client.session")


class SessionStream:
    """Runs one stream, from its opening to its end.

    `take` handles a message; it returns why the stream is of no use, or None.
    """

    def __init__(
        self,
        protocol: SessionProtocol,
        heartbeat: Heartbeat,
        wake: Alarm,
        take: Callable[[pb.SessionResponse], CallError | None],
    ) -> None:
        self._protocol = protocol
        self._heartbeat = heartbeat
        self._wake = wake
        self._take = take
        self._heard = False

    async def serve(
        self, call: Any, *, welcome_s: float, sign_of_life_s: float, is_open: Callable[[], bool]
    ) -> CallError:
        """Serve the stream of `call`; return why it ended.

        `welcome_s`: the longest wait until `is_open`; `sign_of_life_s`: until the first message, 0
        for no such limit.
        """
        self._protocol.connected(time.monotonic_ns())
        reader = asyncio.create_task(self._read(call))
        writer = asyncio.create_task(self._write(call, reader))
        ends = (reader, writer, asyncio.create_task(self._heartbeat.death()))
        first = asyncio.FIRST_COMPLETED
        try:
            if sign_of_life_s and not await self._begins(ends, sign_of_life_s):
                return silent(f"no sign of life within {sign_of_life_s:g} s")
            # Not wait_for: before Python 3.12 it may swallow a cancellation.
            done, _ = await asyncio.wait(ends, timeout=welcome_s, return_when=first)
            if not done and not is_open():
                return unavailable(f"no Welcome within {welcome_s:g} s")
            done, _ = await asyncio.wait(ends, return_when=first)
            return done.pop().result()
        finally:
            self._heartbeat.end()
            self._protocol.disconnected()
            for task in ends:
                task.cancel()
            call.cancel()

    async def _begins(self, ends: tuple[asyncio.Task[CallError], ...], within_s: float) -> bool:
        """Wait until the first message or the end of the stream; False if neither comes."""
        for _ in range(_STEPS):
            done, _ = await asyncio.wait(
                ends, timeout=within_s / _STEPS, return_when=asyncio.FIRST_COMPLETED
            )
            if done or self._heard:
                return True
        return False

    async def _read(self, call: Any) -> CallError:
        """Take messages until the stream ends; why it did."""
        try:
            while True:
                response = await call.read()
                if not isinstance(response, pb.SessionResponse):
                    return unavailable("the scheduler ended the stream")
                self._heard = True
                wrong = self._take(response)
                if wrong is not None:
                    return wrong
        except grpc.RpcError as error:
            return from_rpc_error(error)
        except Exception as error:
            # A defect of ours or of a callback must not end the session for good.
            _log.exception("cannot handle a message of the scheduler")
            return defect(error)

    async def _write(self, call: Any, reader: asyncio.Task[CallError]) -> CallError:
        """Send until the stream ends; why it did."""
        try:
            await send_all(call, self._protocol, self._wake)
        except Exception as error:
            # A defect of ours must not leave a silent stream.
            _log.exception("cannot make a message for the scheduler")
            return defect(error)
        return await asyncio.shield(reader)
