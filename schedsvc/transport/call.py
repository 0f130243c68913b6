"""Holds one call: its messages in both directions, its deadline, and how it ends.

A call is also the context that its handler gets. It has what handlers use of the context of
grpc.aio, and raises what that raises.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, NoReturn

import grpc
import structlog
from grpc.aio import AbortError, BaseError

from schedsvc.transport.link import Link
from schedsvc.transport.steps import begin
from schedsvc.transport.wire import Fields, Metadata, Values, fields_of, length_prefix, metadata_of

__all__ = ["Call", "Details"]

_log = structlog.get_logger("schedsvc.transport")

_EOF = grpc.aio.EOF  # type: ignore[attr-defined] # the stubs lack it
_PREFIX = 5
#: For the first message of a client whose call fails before it.
_HOLD_S = 0.1
_IS_OVER = "the call is over"
_CUT = "the stream ended in the middle of a message"
_OK, _CANCELLED, _UNKNOWN, _DEADLINE, _EXHAUSTED, _UNIMPLEMENTED, _INTERNAL = 0, 1, 2, 4, 8, 12, 13


class _OverError(BaseError):
    """The call is over: its peer left, or its deadline passed."""


class _WrongMessageError(Exception):
    """A message of the peer cannot be read."""

    def __init__(self, code: int, description: str) -> None:
        super().__init__(description)
        self.code = code


class Call:
    """Serves one call on one stream of HTTP/2."""

    def __init__(self, connection: Link, stream_id: int, fields: Fields, path: bytes):
        self._connection = connection
        self.stream_id = stream_id
        self.fields = fields
        #: The path, as /schedsvc.v1.SchedulerService/Admit.
        self.method = path.decode("latin-1")
        self.handler: Any = None
        #: Its status is sent, or its peer has left.
        self.is_over, self.over_s = False, 0.0
        self._is_unary = False  # the handler gets one message
        self._is_ended = False  # by the peer
        #: The part of the next message that has arrived.
        self._buffer = bytearray()
        self._message, self._messages = b"", 0  # of a unary call
        #: Bytes for which the peer has no new window yet.
        self._unread = 0
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._deadline_s: float | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._metadata: Metadata | None = None
        self._initial: Fields = ()
        self._trailing: Sequence[tuple[str, Values]] = ()
        self._wrote_headers = False
        self._has_data = False  # of the peer
        #: The end of the call, until the peer hears of it.
        self._held: tuple[int, str, Sequence[tuple[str, Values]]] | None = None
        self._status: tuple[int, str, Sequence[tuple[str, Values]]] | None = None

    # For the connection.

    def open(self, handler: Any, timeout_s: float | None) -> None:
        """Begin with the handler of the method."""
        self.handler = handler
        self._is_unary = not handler.request_streaming
        if timeout_s is not None:
            loop = self._connection.loop
            self._deadline_s = loop.time() + timeout_s
            if not self._is_unary:
                self._expiry = loop.call_later(timeout_s, self._expire)
        if not self._is_unary:
            self._run(self._serve_stream())

    def receive(self, data: bytes, is_last: bool) -> None:
        """Take bytes of the peer. O(bytes)."""
        if self.is_over:
            self._connection.consumed(self.stream_id, len(data))
            self._is_ended = self._is_ended or is_last
            self._send_held()
            return
        self._has_data = True
        self._unread += len(data)
        self._is_ended = is_last
        if is_last and self._is_unary and not self._buffer and not self._messages:
            message = _only_message(data, self._connection.bounds.message_bytes_max)
            if message is not None:
                self._messages, self._message = 1, message
                self._give_window(self._unread)
                self._begin_unary()
                return
        self._buffer += data
        if not self._is_unary:
            # It is read on demand: a handler that refuses the call reads nothing.
            if self._reader is not None and not self._reader.done():
                self._reader.set_result(None)
            return
        self._give_window(self._unread)
        if is_last or len(self._buffer) >= _PREFIX:
            self._receive_unary(is_last)

    def _receive_unary(self, is_last: bool) -> None:
        try:
            message = self._next_message()
        except _WrongMessageError as error:
            self.fail(error.code, str(error))
            return
        if message is not None:
            self._messages += 1
            self._message = message
        if self._buffer and self._messages:
            self.fail(_UNIMPLEMENTED, "the method takes exactly one message")
        elif is_last:
            self._begin_unary()

    def closed(self) -> None:
        """Hear that the stream is closed. O(1)."""
        self._give_window(self._unread)
        if self._held is not None and self._expiry is not None:
            self._held = None
            self._expiry.cancel()
        if not self.is_over:
            self.end()
            self._stop_handler()

    def fail(self, code: int, message: str) -> None:
        """End the call with an error of the protocol, whatever its handler does."""
        if not self.is_over:
            self._finish(code, message, ())
            self._stop_handler()

    def resume(self) -> None:
        """Let a write go on. O(1)."""
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    # Messages.

    def _next_message(self) -> bytes | None:
        """Take a message from the buffer; None: it is not whole yet. O(its bytes).

        Raises _WrongMessageError.
        """
        buffer = self._buffer
        if len(buffer) < _PREFIX:
            if buffer and self._is_ended:
                raise _WrongMessageError(_INTERNAL, _CUT)
            return None
        if buffer[0]:
            what = "a message is compressed, and grpc-encoding names no coding"
            raise _WrongMessageError(_INTERNAL, what)
        size = int.from_bytes(buffer[1:_PREFIX], "big")
        most = self._connection.bounds.message_bytes_max
        if size > most:
            what = f"SERVER: Received message larger than max ({size} vs. {most})"
            raise _WrongMessageError(_EXHAUSTED, what)
        end = _PREFIX + size
        if len(buffer) < end:
            if self._is_ended:
                raise _WrongMessageError(_INTERNAL, _CUT)
            return None
        message = bytes(buffer[_PREFIX:end])
        del buffer[:end]
        return message

    def _give_window(self, size: int) -> None:
        size = min(size, self._unread)
        if size:
            self._unread -= size
            self._connection.consumed(self.stream_id, size)

    # Handlers.

    def _begin_unary(self) -> None:
        if not self._messages:
            self.fail(_UNIMPLEMENTED, "the method takes exactly one message")
            return
        data, self._message = self._message, b""
        read = self.handler.request_deserializer
        try:
            request = data if read is None else read(data)
        except Exception:
            self.fail(_INTERNAL, "the message cannot be read")
            return
        if self.handler.response_streaming:
            self._set_expiry()
            self._run(self._serve_answers(self.handler.unary_stream(request, self)))
            return
        try:
            task, answer = begin(self._connection.loop, self.handler.unary_unary(request, self))
        except BaseException as error:
            self._on_error(error)
            return
        if task is None:
            self._answer(answer)
            return
        self._task = task
        self._set_expiry()
        task.add_done_callback(self._on_unary_done)

    def _set_expiry(self) -> None:
        if self._deadline_s is not None:
            loop = self._connection.loop
            self._expiry = loop.call_at(self._deadline_s, self._expire)

    def _on_unary_done(self, task: "asyncio.Task[Any]") -> None:
        if task.cancelled():
            self._on_error(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self._on_error(error)
        else:
            self._answer(task.result())
        self._connection.flush()

    def _answer(self, answer: Any) -> None:
        if self.is_over:
            return
        write = self.handler.response_serializer
        self._send(answer if write is None else write(answer))
        self._finish(_OK, "", self._trailing)

    def _run(self, work: Any) -> None:
        self._task = self._connection.loop.create_task(work)
        self._task.add_done_callback(self._on_stream_done)

    def _on_stream_done(self, task: "asyncio.Task[Any]") -> None:
        if task.cancelled():
            self._on_error(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self._on_error(error)
        else:
            self._finish(_OK, "", self._trailing)
        self._connection.flush()

    async def _serve_stream(self) -> None:
        handler = self.handler
        if handler.response_streaming:
            await self._serve_answers(handler.stream_stream(_Messages(self), self))
            return
        answer = await handler.stream_unary(_Messages(self), self)
        write = handler.response_serializer
        self._send(answer if write is None else write(answer))

    async def _serve_answers(self, answers: Any) -> None:
        """Send what a handler yields; one that is a coroutine writes by itself."""
        if not hasattr(answers, "__aiter__"):
            await answers
            return
        async for answer in answers:
            await self.write(answer)

    def _on_error(self, error: BaseException) -> None:
        """End the call as its handler's exception says."""
        if self.is_over:
            return
        if self._status is not None:
            code, details, metadata = self._status
            self._finish(code, details, metadata)
        elif isinstance(error, asyncio.CancelledError | BaseError):
            self._finish(_CANCELLED, "the call was cancelled", ())
        else:
            _log.error("defect", method=self.method, exc_info=error)
            self._finish(_UNKNOWN, "unexpected error; the log says more", ())

    def _expire(self) -> None:
        self.fail(_DEADLINE, "the deadline passed")
        self._connection.flush()

    def _stop_handler(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()

    # Answers.

    def _begin_answer(self) -> None:
        if not self._wrote_headers:
            self._wrote_headers = True
            self._connection.send_headers(self.stream_id, self._initial)

    def _send(self, data: bytes) -> None:
        self._begin_answer()
        self._connection.send_data(self.stream_id, length_prefix(len(data)) + data)

    def _finish(self, code: int, message: str, metadata: Sequence[tuple[str, Values]]) -> None:
        if self.is_over:
            return
        self.end()
        if code and not self._is_ended and not self._has_data:
            # A client of grpcio that is about to write its first message would lose the status.
            self._held = code, message, metadata
            self._expiry = self._connection.loop.call_later(_HOLD_S, self._send_held_late)
        else:
            self._connection.finish(
                self.stream_id, not self._is_ended, code, message, metadata, self._wrote_headers
            )

    def _send_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            code, message, metadata = held
            self._connection.finish(
                self.stream_id, not self._is_ended, code, message, metadata, self._wrote_headers
            )

    def _send_held_late(self) -> None:
        self._send_held()
        self._connection.flush()

    def end(self) -> None:
        """Wake what waits for this call, and let nothing wait any more. O(1)."""
        self.is_over, self.over_s = True, self._connection.loop.time()
        if self._expiry is not None:
            self._expiry.cancel()
        self._buffer.clear()
        for future in (self._reader, self._writer):
            if future is not None and not future.done():
                future.set_result(None)

    # For handlers.

    async def read(self) -> Any:
        """Return the next message, or EOF. Raises BaseError once the call is over."""
        while (data := self._read()) is None:
            if self._is_ended:
                return _EOF
            # A part of a message that is waited for takes no window.
            self._give_window(self._unread)
            self._connection.flush()
            self._reader = self._connection.loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        self._give_window(_PREFIX + len(data))
        self._connection.flush()
        read = self.handler.request_deserializer
        return data if read is None else read(data)

    def _read(self) -> bytes | None:
        if self.is_over:
            raise _OverError(_IS_OVER)
        try:
            return self._next_message()
        except _WrongMessageError as error:
            self.fail(error.code, str(error))
            raise _OverError(_IS_OVER) from None

    async def write(self, message: Any) -> None:
        """Send a message; wait while the peer gives no window. Raises BaseError as `read`."""
        if self.is_over:
            raise _OverError(_IS_OVER)
        write = self.handler.response_serializer
        data = message if write is None else write(message)
        self._begin_answer()
        rest = length_prefix(len(data)) + data
        # nghttp2 gets no more than it can send: a status cannot pass what waits there.
        while (room := self._connection.room(self.stream_id)) < len(rest):
            if room:
                self._connection.send_data(self.stream_id, rest[:room])
                rest = rest[room:]
            self._connection.flush()
            await self._wait_for_room()
        self._connection.send_data(self.stream_id, rest)
        self._connection.flush()

    async def _wait_for_room(self) -> None:
        if not self.is_over and not self._connection.room(self.stream_id):
            self._writer = self._connection.loop.create_future()
            self._connection.writers.add(self)
            try:
                await self._writer
            finally:
                self._connection.writers.discard(self)
                self._writer = None
        if self.is_over:
            raise _OverError(_IS_OVER)

    async def send_initial_metadata(self, metadata: Iterable[tuple[str, Values]]) -> None:
        """Send metadata before the first message. Raises WireError, or BaseError as `read`."""
        if self.is_over or self._wrote_headers:
            raise _OverError("the metadata is sent already, or the call is over")
        self._initial = fields_of(metadata)
        self._begin_answer()
        self._connection.flush()

    def set_trailing_metadata(self, metadata: Iterable[tuple[str, Values]]) -> None:
        """Send metadata with the status. Raises WireError."""
        trailing = tuple(metadata)
        fields_of(trailing)
        self._trailing = trailing

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Iterable[tuple[str, Values]] = (),
    ) -> NoReturn:
        """End the call with a status. Raises AbortError, and WireError for wrong metadata."""
        trailing = (*self._trailing, *trailing_metadata)
        fields_of(trailing)
        if self.is_over:
            raise _OverError(_IS_OVER)
        self._status = (code.value[0], details, trailing)
        raise AbortError("Locally aborted.")

    def peer(self) -> str:
        """Return the peer, as gRPC names it."""
        return self._connection.peer

    def auth_context(self) -> dict[str, Sequence[bytes]]:
        """Return what the client's certificate says of it, as gRPC does."""
        return self._connection.auth_context

    def time_remaining(self) -> float | None:
        """Return the seconds to the deadline; None: there is none."""
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - self._connection.loop.time())

    def invocation_metadata(self) -> Metadata:
        """Return the caller's metadata. O(bytes) at first."""
        if self._metadata is None:
            self._metadata = metadata_of(self.fields)
        return self._metadata


def _only_message(data: bytes, most: int) -> bytes | None:
    """Return the message that these bytes are, with its prefix; None: they are not just one."""
    if len(data) < _PREFIX or data[0]:
        return None
    size = data[1]  # wider than a byte of C before it is shifted
    size = size << 24 | data[2] << 16 | data[3] << 8 | data[4]
    return data[_PREFIX:] if size == len(data) - _PREFIX and size <= most else None


class _Messages(AsyncIterator[Any]):
    """Iterates over the messages of a peer."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def __anext__(self) -> Any:
        message = await self._call.read()
        if message is _EOF:
            raise StopAsyncIteration
        return message


class Details:
    """Describes a call to those who find its handler, as grpc.HandlerCallDetails does."""

    def __init__(self, call: Call) -> None:
        self._call = call

    @property
    def method(self) -> str:
        """Return the path."""
        return self._call.method

    @property
    def invocation_metadata(self) -> Metadata:
        """Return the caller's metadata."""
        return self._call.invocation_metadata()
