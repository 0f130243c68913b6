"""Messages as JSON and back, errors with their details, and Session streams read into queues."""

import asyncio
from collections import deque
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status
from schedsvc_client.v1 import explain_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from tests.waiting import until

SERVICE = "/schedsvc.v1.SchedulerService/"
#: Methods of other services.
ELSEWHERE = {"Explain": "/schedsvc.v1.ExplainService/"}
PATIENCE_S = 20.0
POLL_S = 0.02


def path_of(method: str) -> str:
    """Return the full name of a unary method."""
    return ELSEWHERE.get(method, SERVICE) + method


def message_class(name: str) -> type[Message]:
    """A message of the contract, in whichever file it is declared."""
    found: type[Message] = getattr(pb, name, None) or getattr(explain_pb2, name)
    return found


def to_message(name: str, value: dict[str, Any]) -> Message:
    """Make a message of the contract out of JSON; a misspelt field raises."""
    return json_format.ParseDict(value, message_class(name)())


def to_json(message: Message) -> dict[str, Any]:
    """Return a message as JSON, fields with default values included."""
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def error_as_json(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """Return a script's expectations for a failed call: code, message, fields, whether to retry."""
    fields, retry = [], False
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # aio's error serves as a call
    for detail in status.details if status else []:
        bad, info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad):
            fields += [violation.field for violation in bad.field_violations]
        retry = retry or detail.Unpack(info)
    return {"code": error.code().name, "message": error.details(), "field": fields, "retry": retry}


class Stream:
    """Holds one Session stream: numbers what it sends, and keeps what it receives by kind."""

    kinds = ("verdicts", "leases", "faults", "contests")

    def __init__(self, channel: grpc.aio.Channel, metadata: list[tuple[str, str]]) -> None:
        method = channel.stream_stream(
            SERVICE + "Session",
            request_serializer=pb.SessionRequest.SerializeToString,
            response_deserializer=pb.SessionResponse.FromString,
        )
        self._call: Any = method(metadata=metadata)  # type: ignore[call-arg]  # or write() it
        self._sent = 0
        self._acked = 0
        self._queues: dict[str, deque[Any]] = {kind: deque() for kind in (*self.kinds, "welcome")}
        self._reader = asyncio.create_task(self._read())

    async def send(self, events: list[dict[str, Any]], seq: int | None = None) -> None:
        """Send one message."""
        self._sent = self._sent + 1 if seq is None else seq
        request = {"seq": self._sent, "events": events}
        await self._call.write(to_message("SessionRequest", request))

    async def take(self, kind: str) -> Any:
        """Return the next thing of a kind."""
        await self._until(lambda: bool(self._queues[kind]), f"none of its {kind}")
        return self._queues[kind].popleft()

    async def acked(self) -> None:
        """Wait until the sent messages are acknowledged."""
        await self._until(lambda: self._acked >= self._sent, f"no ack of seq {self._sent}")

    def left(self) -> dict[str, list[Any]]:
        """Return messages that came and were not read."""
        return {kind: list(queue) for kind, queue in self._queues.items() if queue}

    async def close(self) -> None:
        """End the sending side."""
        await self._call.done_writing()

    def drop(self) -> None:
        """Cancel the call."""
        self._call.cancel()

    async def ended(self) -> dict[str, Any]:
        """Wait for the end; how it failed, or {} for OK."""
        return await asyncio.wait_for(asyncio.shield(self._reader), PATIENCE_S)

    async def _read(self) -> dict[str, Any]:
        try:
            async for response in self._call:
                value = to_json(response)
                for kind in self.kinds:
                    self._queues[kind] += value[kind]
                if "welcome" in value:
                    self._queues["welcome"].append(value["welcome"])
                self._acked = max(self._acked, response.ack_seq)
        except grpc.aio.AioRpcError as error:
            return error_as_json(error)
        except asyncio.CancelledError:
            return {"code": "CANCELLED", "message": "", "field": [], "retry": False}
        return {}

    async def _until(self, condition: Any, complaint: str) -> None:
        def told() -> str:
            end = self._reader.result() if self._reader.done() else "it is open"
            return f"the stream brought {complaint}; {end}; has {self.left()}"

        await until(lambda: condition() or self._reader.done(), told)
        assert condition(), told()
