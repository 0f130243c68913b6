"""Passes the bytes of one Session stream between a gRPC context and the core's session."""

import asyncio
import math
import time
from collections.abc import Awaitable
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc.aio import BaseError
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc._core import CallerError
from schedsvc._core import Session as CoreSession
from schedsvc.driver import Broken, Driver, NotLeading
from schedsvc.service.lead_gate import check_report, term_seen
from schedsvc.service.pace import Paces
from schedsvc.service.status import Failure, caller_failure, internal_failure, not_leading_failure
from schedsvc.service.turns import Turns

__all__ = ["Stream"]

_EOF = grpc.aio.EOF  # type: ignore[attr-defined] # the stubs lack it
_log = structlog.get_logger("schedsvc.session")


class Stream:
    """Feeds what the peer sends to the core, and sends what the core has for the peer.

    The reader answers inline what a message brought about; a verdict that falls between messages
    starts a writer, which lives as long as there is something to send. Only one of them writes at
    a time, and nothing is read while a write is blocked, so what can pile up is bounded by the
    requests that are open on the stream. A write that is blocked too long ends the stream.
    """

    def __init__(
        self,
        driver: Driver,
        context: Any,
        write_stall_s: float,
        principal: int,
        paces: Paces,
        turns: Turns,
    ) -> None:
        #: Whose stream it is.
        self.principal = principal
        self._driver = driver
        self._paces, self._turns = paces, turns
        self._context = context
        self._write_stall_s = write_stall_s
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[Failure | None] = self._loop.create_future()
        self._session: CoreSession | None = None
        self._writer: asyncio.Task[None] | None = None
        self._is_first = True  # the next message
        #: A task is about to send all that the core has.
        self.writing = False
        #: When the write began that is under way; never, where none is.
        self._write_began_s = math.inf

    async def run(self) -> Failure | None:
        """Serve until the peer or `end()` ends the stream; return how it failed, or None."""
        try:
            self._session = session = self._driver.open_session(self.principal, self._wake)
        except CallerError as error:
            return caller_failure(error)
        # One timer for all writes: one for each would cost more than the core does.
        self._watch()
        reader = self._loop.create_task(self._guard(self._read(session)))
        try:
            return await self._ended
        finally:
            self._watcher.cancel()
            tasks = [reader] if self._writer is None else [reader, self._writer]
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:  # also where the call is cancelled in this very moment
                self._driver.close_session(session)

    def end(self, failure: Failure | None) -> None:
        """End the stream from our side. Idempotent."""
        if not self._ended.done():
            self._ended.set_result(failure)

    async def _guard(self, work: Awaitable[None]) -> None:
        """Do some work of the stream; end the stream where it fails."""
        try:
            await work
        except CallerError as error:
            self.end(caller_failure(error))
        except NotLeading as error:
            self.end(not_leading_failure(str(error), error.target))
        except Broken:
            self.end(internal_failure())
        except BaseError:
            self.end(None)  # The call is over: the peer left, or the server stops.
        except Exception:
            _log.exception("session_defect")
            self.end(internal_failure())

    async def _read(self, session: CoreSession) -> None:
        read = self._context.read
        await self._wait_for_budget()
        while (data := await read()) is not _EOF:
            if self._is_first and self._driver.leading is not None:
                check_report(self._driver, term_seen(data))
            self._is_first = False
            answers = not self.writing
            self.writing = True
            has_more, pause_s = self._receive(session, data)
            while has_more:
                await asyncio.sleep(pause_s)  # other callers are served between two parts
                has_more, pause_s = self._receive(session, None)
            if answers:
                await self._write(session)
            elif self._writer is not None:
                await self._writer
            if pause_s:
                await asyncio.sleep(pause_s)
            await self._wait_for_budget()
        self.end(None)

    def _receive(self, session: CoreSession, data: bytes | None) -> tuple[bool, float]:
        """Apply a message, or (None) its rest.

        Returns whether something is left of it, and how long to let others have the loop, in s.
        """
        began_ns = time.monotonic_ns()
        has_more = self._apply(session, data)
        work_ns = time.monotonic_ns() - began_ns
        size = 0 if data is None else len(data)
        return has_more, self._turns.spend_on_message(self.principal, work_ns, size)

    def _apply(self, session: CoreSession, data: bytes | None) -> bool:
        if not self._paces.is_limited(self.principal):
            return self._driver.receive(session, data)
        began_ns = time.thread_time_ns()
        try:
            return self._driver.receive(session, data)
        finally:
            work_ns = time.thread_time_ns() - began_ns
            events = 0 if data is None else _count_events(data)
            self._paces.charge(self.principal, events, work_ns)

    async def _wait_for_budget(self) -> None:
        """Read nothing more while the caller has used up what it may take."""
        pause_s = self._paces.pause_s(self.principal)
        if pause_s:
            await asyncio.sleep(pause_s)

    async def _write(self, session: CoreSession) -> None:
        write, take = self._context.write, self._driver.take
        try:
            while (data := take(session)) is not None:
                self._write_began_s = self._loop.time()
                await write(data)
                self._turns.spend_on_message(self.principal, 0, len(data))
        finally:
            self._write_began_s = math.inf
            self.writing = False

    def _watch(self) -> None:
        """End the stream where a write has been blocked too long; else look again later."""
        blocked_s = max(0.0, self._loop.time() - self._write_began_s)
        if blocked_s >= self._write_stall_s:
            self._stalled()
        else:
            self._watcher = self._loop.call_later(self._write_stall_s - blocked_s, self._watch)

    def _wake(self) -> None:
        """Hear from the driver that the core has something to send, or that it is broken."""
        if self._driver.broken:
            self.end(internal_failure())
        elif not self.writing and self._session is not None:
            self.writing = True
            self._writer = self._loop.create_task(self._guard(self._write(self._session)))

    def _stalled(self) -> None:
        what = f"the peer did not read for {self._write_stall_s:g} s"
        self.end(Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, what))


def _count_events(data: bytes) -> int:
    try:
        return len(pb.SessionRequest.FromString(data).events)
    except DecodeError:
        return 1
