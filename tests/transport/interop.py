"""Serves the TestService of gRPC's interop descriptions behind our transport, in bytes.

Its messages are protocol buffers of grpc.testing. The fields that the cases use are written by
hand, so no generated stubs are needed.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc

from schedsvc.transport import Bounds, Server

SERVICE = "grpc.testing.TestService"
UNIMPLEMENTED_SERVICE = "grpc.testing.UnimplementedService"
ECHO_INITIAL, ECHO_TRAILING = "x-grpc-test-echo-initial", "x-grpc-test-echo-trailing-bin"
EOF = grpc.aio.EOF  # type: ignore[attr-defined]

BOUNDS = Bounds(
    message_bytes_max=4 << 20,
    connections_max=64,
    streams_max=1_000,
    handshake_s=60,
    keepalive_s=600,
    keepalive_timeout_s=60,
    idle_s=600,
    write_stall_s=60,
)


def varint(value: int) -> bytes:
    """Return an unsigned number as protocol buffers write it."""
    data = b""
    while value > 127:
        data += bytes((value & 127 | 128,))
        value >>= 7
    return data + bytes((value,))


def field(number: int, value: int | bytes) -> bytes:
    """Return a field of a message: a number, or bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def fields_of(data: bytes) -> list[tuple[int, int | bytes]]:
    """Return the fields of a message."""
    found: list[tuple[int, int | bytes]] = []
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        tag = number()
        if tag & 7 == 0:
            found.append((tag >> 3, number()))
        else:
            size = number()
            found.append((tag >> 3, data[at : at + size]))
            at += size
    return found


def simple_request(size: int = 0, body: bytes = b"", status: bytes = b"") -> bytes:
    """Return a SimpleRequest: response_size, payload.body, response_status."""
    return (
        (field(2, size) if size else b"")
        + (field(3, field(2, body)) if body else b"")
        + (field(7, status) if status else b"")
    )


def echo_status(code: int, message: str) -> bytes:
    """Return an EchoStatus."""
    return field(1, code) + field(2, message.encode())


def payload(size: int) -> bytes:
    """Return a SimpleResponse, or a StreamingOutputCallResponse, with a body of zeros."""
    return field(1, field(2, bytes(size)))


def stream_request(*sizes: int, body: bytes = b"", status: bytes = b"") -> bytes:
    """Return a StreamingOutputCallRequest: response_parameters, payload.body, response_status."""
    return (
        b"".join(field(2, field(1, size)) for size in sizes)
        + (field(3, field(2, body)) if body else b"")
        + (field(7, status) if status else b"")
    )


class TestService:
    """Answers as the interop descriptions ask."""

    __test__ = False

    def __init__(self) -> None:
        #: Calls whose handler was cancelled.
        self.cancelled = asyncio.Semaphore(0)
        #: Calls of UnaryCall.
        self.unary_calls = 0
        #: Bytes of the messages that handlers read.
        self.read_bytes = 0

    def handler(self) -> Any:
        """Return the handler to add to a server."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        methods = {
            "EmptyCall": unary(self.empty),
            "UnaryCall": unary(self.unary),
            "FullDuplexCall": stream(self.duplex),
            "StreamingInputCall": grpc.stream_unary_rpc_method_handler(self.sum),
            "StreamingOutputCall": grpc.unary_stream_rpc_method_handler(self.many),
            "Sleep": unary(self.sleep),
            "Fails": unary(self.defect),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def empty(self, data: bytes, context: Any) -> bytes:
        return b""

    async def defect(self, data: bytes, context: Any) -> bytes:
        raise RuntimeError("a secret")

    async def sleep(self, data: bytes, context: Any) -> bytes:
        return await self._until_cancelled()

    async def _until_cancelled(self) -> bytes:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.release()
            raise
        return b""

    async def unary(self, data: bytes, context: Any) -> bytes:
        self.unary_calls += 1
        await self._echo_metadata(context)
        found = dict(fields_of(data))
        await self._echo_status(found.get(7), context)
        return payload(int(found.get(2, 0)))

    async def duplex(self, requests: Any, context: Any) -> None:
        await self._echo_metadata(context)
        try:
            while (data := await context.read()) is not EOF:
                self.read_bytes += len(data)
                for number, value in fields_of(data):
                    if number == 7:
                        await self._echo_status(value, context)
                    if number == 2:
                        assert isinstance(value, bytes)
                        size = dict(fields_of(value)).get(1, 0)
                        await context.write(payload(int(size)))
        except asyncio.CancelledError:
            self.cancelled.release()
            raise

    async def sum(self, requests: Any, context: Any) -> bytes:
        total = 0
        async for data in requests:
            found = dict(fields_of(data))
            body = found.get(1, b"")
            assert isinstance(body, bytes)
            total += len(dict(fields_of(body)).get(2, b""))  # type: ignore[arg-type]
        return field(1, total)

    async def many(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        for number, value in fields_of(data):
            if number == 2:
                assert isinstance(value, bytes)
                yield payload(int(dict(fields_of(value))[1]))

    async def _echo_metadata(self, context: Any) -> None:
        metadata = dict(context.invocation_metadata())
        if ECHO_INITIAL in metadata:
            await context.send_initial_metadata(((ECHO_INITIAL, metadata[ECHO_INITIAL]),))
        if ECHO_TRAILING in metadata:
            context.set_trailing_metadata(((ECHO_TRAILING, metadata[ECHO_TRAILING]),))

    async def _echo_status(self, status: int | bytes | None, context: Any) -> None:
        if isinstance(status, bytes):
            found = dict(fields_of(status))
            text = found.get(2, b"")
            assert isinstance(text, bytes)
            code = next(c for c in grpc.StatusCode if c.value[0] == found[1])
            await context.abort(code, text.decode())


@asynccontextmanager
async def served(
    address: str = "127.0.0.1:0", context: Any = None, **bounds: float
) -> AsyncIterator[tuple[TestService, str]]:
    """Run a TestService; give it and its target."""
    service, server = TestService(), Server(replace(BOUNDS, **bounds))  # type: ignore[arg-type]
    server.add_generic_rpc_handlers((service.handler(),))
    if context is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, lambda: context)
    await server.start()
    try:
        yield service, address if address.startswith("unix:") else f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
