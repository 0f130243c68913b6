"""Serves the endpoints that generate, as plain ASGI, and watches for a client that leaves."""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.types import Receive, Scope, Send

from schedsvc_lab.emulator.answers import Answer, UsageInfo
from schedsvc_lab.emulator.counts import CountsFile
from schedsvc_lab.emulator.errors import ApiError, stopping
from schedsvc_lab.emulator.generate import TokenAnswer
from schedsvc_lab.emulator.intake import Work
from schedsvc_lab.emulator.protocol import parse_json
from schedsvc_lab.emulator.realtime import Generation, RealTimeEngine

BODY_BYTES_MAX = 16 << 20

TakeIn = Callable[[Mapping[str, Any], Mapping[bytes, bytes]], Work]


@dataclass(slots=True)
class RequestMetadata:
    """Is the usage that the emulator leaves in `scope["state"]["request_metadata"]`, as vLLM does.

    `final_usage_info` is set when the generation is complete, before the last bytes of the answer
    are sent; it stays None after an abort.
    """

    request_id: str
    traceparent: str = ""
    final_usage_info: UsageInfo | None = None


class ClientGoneError(Exception):
    """The client left before its request was complete."""


class GenerateEndpoint:
    """Serves one kind of generation as an ASGI app."""

    def __init__(
        self,
        take_in: TakeIn,
        driver: RealTimeEngine,
        model: str,
        counts: CountsFile | None = None,
    ) -> None:
        self._take_in = take_in
        self._driver = driver
        self._model = model
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        headers = dict(scope["headers"])
        try:
            work = self._take_in(parse_json(await read_body(receive)), headers)
        except ClientGoneError:
            return
        except ApiError as error:
            await send_json(send, error.status, error.body())
            return
        traceparent = headers.get(b"traceparent", b"").decode("latin-1")
        metadata = RequestMetadata(work.request_id, traceparent)
        scope.setdefault("state", {})["request_metadata"] = metadata
        generation = self._driver.submit(work.plans, work.priority)
        watcher = asyncio.create_task(self._watch(receive, generation))
        try:
            answer = self._answer(work, generation)
            respond = self._stream if work.stream else self._whole
            await respond(send, answer, generation, metadata)
        except ClientGoneError:
            return
        finally:
            # It is set even if the response was cancelled or could not be sent.
            self._driver.abort(generation)
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher

    def _answer(self, work: Work, generation: Generation) -> Answer | TokenAnswer:
        if work.kind == "generate":
            return TokenAnswer(generation)
        return Answer(
            work.kind,
            generation,
            request_id=work.request_id,
            model=self._model,
            created_s=int(time.time()),
            include_usage=work.include_usage,
            continuous_usage=work.continuous_usage,
        )

    async def _watch(self, receive: Receive, generation: Generation) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.client_gone = True
        self._driver.abort(generation)

    async def _whole(
        self,
        send: Send,
        answer: Answer | TokenAnswer,
        generation: Generation,
        metadata: RequestMetadata,
    ) -> None:
        await generation.wait_finished()
        if generation.cut_off:
            error = _cause(generation)
            await send_json(send, error.status, error.body())
            return
        metadata.final_usage_info = UsageInfo.of(generation)
        self._note(metadata, generation)
        await send_json(send, HTTPStatus.OK, answer.whole())

    async def _stream(
        self,
        send: Send,
        answer: Answer | TokenAnswer,
        generation: Generation,
        metadata: RequestMetadata,
    ) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        finished = False
        while not finished:
            await generation.wait()
            if generation.cut_off:
                body = answer.cut(_cause(generation))
                finished = True
            else:
                body = answer.events(generation.take())
                finished = generation.finished
                if finished:
                    metadata.final_usage_info = UsageInfo.of(generation)
                    body += answer.end()
            self._note(metadata, generation)
            await send({"type": "http.response.body", "body": body, "more_body": not finished})

    def _note(self, metadata: RequestMetadata, generation: Generation) -> None:
        if self._counts is not None:
            self._counts.note(metadata.request_id, metadata.traceparent, generation)


def _cause(generation: Generation) -> ApiError:
    """Say to the client why its generation was cut off. Raises ClientGoneError if it left."""
    if generation.client_gone:
        raise ClientGoneError
    return stopping()


async def read_body(receive: Receive) -> bytes:
    """Read a request's body. Raises ApiError if it is too large, else ClientGoneError."""
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > BODY_BYTES_MAX:
            raise ApiError(
                f"the body has more than {BODY_BYTES_MAX} bytes",
                status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            )
        more = message.get("more_body", False)
    return b"".join(parts)


async def send_json(send: Send, status: int, body: bytes) -> None:
    """Send a whole JSON response."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": int(status), "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
