"""Runs the cases of gRPC's interop descriptions by grpcio's clients: asyncio, and in threads."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.server.certificates import Authority

from .interop import (
    ECHO_INITIAL,
    ECHO_TRAILING,
    EOF,
    SERVICE,
    UNIMPLEMENTED_SERVICE,
    TestService,
    echo_status,
    field,
    fields_of,
    payload,
    served,
    simple_request,
    stream_request,
)

SIZES = (31_415, 9, 2_653, 58_979)
BODIES = (27_182, 8, 1_828, 45_904)


class Caller:
    """Makes calls of one method of the service; has what the cases need of either client."""

    def __init__(self, service: TestService, target: str, credentials: Any, *, sync: bool) -> None:
        self.service = service
        self._target, self._credentials, self._is_sync = target, credentials, sync

    def _channel(self, made: Any) -> Any:
        options = [("grpc.use_local_subchannel_pool", 1)]
        if self._credentials is None:
            return made.insecure_channel(self._target, options)
        return made.secure_channel(self._target, self._credentials, options)

    async def unary(self, method: str, data: bytes, **given: Any) -> Any:
        """Return answer, initial and trailing metadata, or raise an RpcError."""
        if self._is_sync:
            return await asyncio.to_thread(self._unary_in_thread, method, data, given)
        async with self._channel(grpc.aio) as channel:
            call = channel.unary_unary(method)(data, **given)
            answer = await call
            return answer, await call.initial_metadata(), await call.trailing_metadata()

    def _unary_in_thread(self, method: str, data: bytes, given: dict[str, Any]) -> Any:
        with self._channel(grpc) as channel:
            answer, call = channel.unary_unary(method).with_call(data, **given)
            return answer, call.initial_metadata(), call.trailing_metadata()

    async def stream(self, talk: Callable[[Any], Any], **given: Any) -> Any:
        """Let `talk(calls)` run in a thread or here; `calls` has write, read, done and cancel."""
        method = f"/{SERVICE}/FullDuplexCall"
        if self._is_sync:
            return await asyncio.to_thread(self._stream_in_thread, talk, method, given)
        async with self._channel(grpc.aio) as channel:
            return await talk(AioStream(channel.stream_stream(method)(**given)))

    def _stream_in_thread(self, talk: Any, method: str, given: dict[str, Any]) -> Any:
        with self._channel(grpc) as channel:
            stream = SyncStream(channel.stream_stream(method), given)
            return asyncio.run(talk(stream))


class AioStream:
    def __init__(self, call: Any) -> None:
        self.call = call

    async def write(self, data: bytes) -> None:
        await self.call.write(data)

    async def read(self) -> Any:
        found = await self.call.read()
        return None if found is EOF else found

    async def done(self) -> None:
        await self.call.done_writing()

    async def code(self) -> grpc.StatusCode:
        code: grpc.StatusCode = await self.call.code()
        return code

    def cancel(self) -> None:
        self.call.cancel()

    async def metadata(self) -> Any:
        return await self.call.initial_metadata(), await self.call.trailing_metadata()


class SyncStream:
    def __init__(self, method: Any, given: dict[str, Any]) -> None:
        from queue import SimpleQueue

        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self.call = method(iter(self._queue.get, None), **given)

    async def write(self, data: bytes) -> None:
        self._queue.put(data)

    async def read(self) -> Any:
        return next(self.call, None)

    async def done(self) -> None:
        self._queue.put(None)

    async def code(self) -> grpc.StatusCode:
        code: grpc.StatusCode = self.call.code()
        return code

    def cancel(self) -> None:
        self._queue.put(None)
        self.call.cancel()

    async def metadata(self) -> Any:
        return self.call.initial_metadata(), self.call.trailing_metadata()


@asynccontextmanager
async def _calling(folder: Path, where: str, kind: str) -> AsyncIterator[Caller]:
    context = credentials = None
    address = "127.0.0.1:0"
    if where == "unix":
        address = f"unix:{folder}/s.sock"
    if where == "tls":
        authority = Authority(folder)
        pair = authority.issue("localhost")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["h2"])
        context.load_cert_chain(pair.cert_file, pair.key_file)
        credentials = grpc.ssl_channel_credentials((folder / "authority.pem").read_bytes())
    async with served(address, context) as (service, target):
        if where == "tls":
            target = f"localhost:{target.rpartition(':')[2]}"
        yield Caller(service, target, credentials, sync=kind == "sync")


@pytest.fixture(
    params=[(w, k) for w in ("tcp", "tls", "unix") for k in ("aio", "sync")], ids="-".join
)
async def caller(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Caller]:
    async with _calling(tmp_path, *request.param) as found:
        yield found


def path(method: str, service: str = SERVICE) -> str:
    return f"/{service}/{method}"


async def test_empty_unary(caller: Caller) -> None:
    answer, _, _ = await caller.unary(path("EmptyCall"), b"")
    assert answer == b""


async def test_large_unary(caller: Caller) -> None:
    request = simple_request(314_159, bytes(271_828))
    answer, _, _ = await caller.unary(path("UnaryCall"), request)
    assert answer == payload(314_159)


async def test_a_compressed_call_is_refused(caller: Caller) -> None:
    with pytest.raises(grpc.RpcError) as error:
        await caller.unary(
            path("UnaryCall"), simple_request(9, bytes(1_000)), compression=grpc.Compression.Gzip
        )
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_client_streaming(caller: Caller) -> None:
    async def talk() -> bytes:
        async with caller._channel(grpc.aio) as channel:
            bodies = (field(1, field(2, bytes(size))) for size in BODIES)
            data: bytes = await channel.stream_unary(path("StreamingInputCall"))(bodies)
            return data

    assert dict(fields_of(await talk())) == {1: sum(BODIES)}


async def test_server_streaming(caller: Caller) -> None:
    async with caller._channel(grpc.aio) as channel:
        call = channel.unary_stream(path("StreamingOutputCall"))(stream_request(*SIZES))
        assert [data async for data in call] == [payload(size) for size in SIZES]


async def test_ping_pong(caller: Caller) -> None:
    async def talk(stream: Any) -> Any:
        for size, body in zip(SIZES, BODIES, strict=True):
            await stream.write(stream_request(size, body=bytes(body)))
            assert await stream.read() == payload(size)
        await stream.done()
        assert await stream.read() is None
        return await stream.code()

    assert await caller.stream(talk) is grpc.StatusCode.OK


async def test_empty_stream(caller: Caller) -> None:
    async def talk(stream: Any) -> Any:
        await stream.done()
        assert await stream.read() is None
        return await stream.code()

    assert await caller.stream(talk) is grpc.StatusCode.OK


async def test_cancel_after_begin(caller: Caller) -> None:
    async def talk(stream: Any) -> Any:
        stream.cancel()
        return await stream.code()

    assert await caller.stream(talk) is grpc.StatusCode.CANCELLED


async def test_cancel_after_first_response(caller: Caller) -> None:
    async def talk(stream: Any) -> Any:
        await stream.write(stream_request(SIZES[0], body=bytes(BODIES[0])))
        assert await stream.read() == payload(SIZES[0])
        stream.cancel()
        return await stream.code()

    assert await caller.stream(talk) is grpc.StatusCode.CANCELLED
    await caller.service.cancelled.acquire()


async def test_timeout_on_sleeping_server(caller: Caller) -> None:
    with pytest.raises(grpc.RpcError) as error:
        await caller.unary(path("Sleep"), b"", timeout=0.2)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await caller.service.cancelled.acquire()


async def test_status_code_and_message(caller: Caller) -> None:
    status = echo_status(2, "test status message")
    with pytest.raises(grpc.RpcError) as error:
        await caller.unary(path("UnaryCall"), simple_request(status=status))
    assert error.value.code() is grpc.StatusCode.UNKNOWN
    assert error.value.details() == "test status message"

    async def talk(stream: Any) -> Any:
        await stream.write(stream_request(status=status))
        await stream.done()
        return await stream.code()

    assert await caller.stream(talk) is grpc.StatusCode.UNKNOWN


async def test_special_status_message(caller: Caller) -> None:
    message = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈 100%\t\n"
    with pytest.raises(grpc.RpcError) as error:
        await caller.unary(path("UnaryCall"), simple_request(status=echo_status(2, message)))
    assert error.value.code() is grpc.StatusCode.UNKNOWN
    assert error.value.details() == message


@pytest.mark.parametrize("service", [SERVICE, UNIMPLEMENTED_SERVICE])
async def test_unimplemented(caller: Caller, service: str) -> None:
    with pytest.raises(grpc.RpcError) as error:
        await caller.unary(path("UnimplementedCall", service), b"")
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_custom_metadata(caller: Caller) -> None:
    sent = ((ECHO_INITIAL, "test_initial_metadata_value"), (ECHO_TRAILING, b"\xab\xab\xab"))
    _, initial, trailing = await caller.unary(
        path("UnaryCall"), simple_request(9, bytes(9)), metadata=sent
    )
    assert sent[0] in list(map(tuple, initial))
    assert sent[1] in list(map(tuple, trailing))

    async def talk(stream: Any) -> Any:
        await stream.write(stream_request(9, body=bytes(9)))
        assert await stream.read() == payload(9)
        await stream.done()
        assert await stream.read() is None
        return await stream.metadata()

    initial, trailing = await caller.stream(talk, metadata=sent)
    assert sent[0] in list(map(tuple, initial))
    assert sent[1] in list(map(tuple, trailing))


async def test_a_defect_of_a_handler_says_nothing_of_it(caller: Caller) -> None:
    with pytest.raises(grpc.RpcError) as error:
        await caller.unary(path("Fails"), b"")
    assert error.value.code() is grpc.StatusCode.UNKNOWN
    assert "secret" not in error.value.details()
