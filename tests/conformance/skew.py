"""Relays between clients and a scheduler of another minor version of the contract.

The peer does not know what a newer side adds (fields, values of enumerations), and does without
what an older side lacks. The relay adds or takes away on the wire, so that both ends are the
real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from schedsvc_client.v1 import scheduler_pb2 as pb

from .wire import message_class

Change = Callable[[str, bytes], bytes]

# Fields that no version of ours has: a number, 64 bits, a text, 32 bits.
UNKNOWN = bytes.fromhex("c03e2ac93e0102030405060708d23e036e6577dd3e01020304")
# The newest parts of the contract: without them everything has to work as before.
LATEST = {
    "AdmitRequest": ("prefix_block_hashes", "request_class", "reports_progress"),
    "AdmitResponse": ("queue_duration_us",),
    "Grant": ("engine_priority",),
    "Refusal": ("quota", "queue_position", "message"),
    "LeaseReplay": ("sequences", "adapter"),
    "CompleteResponse": ("repeated_call",),
    "SessionWelcome": ("open_requests_max", "message_bytes_max"),
    "SessionFault": ("field", "description"),
    "PoolRegistration": ("max_model_tokens",),
}
ADDED_MAX = 256
# An outcome that a later version may add, for each of the contract's ranges.
NEW_REFUSAL, NEW_EVICTION = 31, 47


def parts(message: Message) -> list[Message]:
    """Yield a message and all that it holds. O(size)."""
    found = [message]
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for below in value if field.is_repeated else (value,):
            found += parts(below)
    return found


def newer(message: Message) -> None:
    """Add unknown fields at every level, in few enough places that the message stays small."""
    for part in parts(message)[:ADDED_MAX]:
        part.MergeFromString(UNKNOWN)


def older(message: Message) -> None:
    """Remove the last part."""
    for part in parts(message):
        for name in LATEST.get(part.DESCRIPTOR.name, ()):
            part.ClearField(name)


def other_outcomes(message: Message) -> None:
    """Give refusals and evictions unknown reasons."""
    for part in parts(message):
        if isinstance(part, pb.AdmitResponse) and part.outcome >= 16:
            number = NEW_REFUSAL if part.outcome < 32 else NEW_EVICTION
            part.outcome = number  # type: ignore[assignment] # a later version knows it


def changed(kind: str, *changes: Callable[[Message], None]) -> Change:
    """Make a change of the serialised requests or responses of each method."""

    def change(method: str, data: bytes) -> bytes:
        message = message_class(f"{method}{kind}")()
        try:
            message.ParseFromString(data)
        except DecodeError:
            return data  # it is no message in any version
        for apply in changes:
            apply(message)
        return message.SerializeToString()

    return change


def unchanged(_: str, data: bytes) -> bytes:
    return data


class Relay(grpc.GenericRpcHandler):
    """Listens at `target`, and passes every call on."""

    def __init__(
        self, upstream: str, request: Change = unchanged, response: Change = unchanged
    ) -> None:
        self.target = ""
        self.changed = 0
        self._upstream, self._request, self._response = upstream, request, response

    async def __aenter__(self) -> Relay:
        self._channel = grpc.aio.insecure_channel(self._upstream)
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((self,))
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)
        await self._channel.close()

    def service(self, handler_call_details: Any) -> Any:
        path = handler_call_details.method
        method = path.rpartition("/")[2]

        async def stream(_: Any, context: Any) -> None:
            await self._stream(path, method, context)

        async def unary(data: bytes, context: Any) -> bytes:
            return await self._unary(path, method, data, context)

        if method == "Session":
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)

    async def _unary(self, path: str, method: str, data: bytes, context: Any) -> bytes:
        call = self._channel.unary_unary(path)(
            self._changed(self._request, method, data),
            timeout=context.time_remaining(),
            metadata=_metadata(context),
        )
        try:
            answer: bytes = await call
        except grpc.aio.AioRpcError as error:
            await _abort(context, error)
        return self._changed(self._response, method, answer)

    async def _stream(self, path: str, method: str, context: Any) -> None:
        call = self._channel.stream_stream(path)(metadata=_metadata(context))

        async def up() -> None:
            while (data := await context.read()) is not grpc.aio.EOF:
                await call.write(self._changed(self._request, method, data))
            await call.done_writing()

        sending = asyncio.ensure_future(up())
        try:
            while (data := await call.read()) is not grpc.aio.EOF:
                await context.write(self._changed(self._response, method, data))
        except grpc.aio.AioRpcError as error:
            await _abort(context, error)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            call.cancel()

    def _changed(self, change: Change, method: str, data: bytes) -> bytes:
        out = change(method, data)
        self.changed += out != data
        return out


def _metadata(context: Any) -> list[tuple[str, str]]:
    given = context.invocation_metadata() or ()
    return [(key, value) for key, value in given if key == "authorization"]


async def _abort(context: Any, error: grpc.aio.AioRpcError) -> None:
    trailing = [(key, value) for key, value in error.trailing_metadata() or ()]
    await context.abort(error.code(), error.details() or "", tuple(trailing))
