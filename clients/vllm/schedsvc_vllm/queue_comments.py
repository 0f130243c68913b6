"""Writes comments into a stream that still waits: load balancers close silent connections.

A comment (a line that begins with a colon) means nothing to a client that reads events. But the
first one has to come with a status, so a later error can only be sent as an event `error`.
"""

from __future__ import annotations

import asyncio

from schedsvc_vllm.asgi import Message, Send

_COMMENT = b": queued\n\n"
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class QueueComments:
    """Stands between one request and the server's `send`, from its arrival on."""

    def __init__(self, send: Send, period_s: float, request_id: str) -> None:
        self._send = send
        self._period_s = period_s
        self._headers = [*_HEADERS, (b"x-request-id", request_id.encode("latin-1"))]
        self._begun = False  # by a comment
        self._is_error = False
        self._error: list[bytes] = []
        self._task: asyncio.Task[None] | None = asyncio.ensure_future(self._comment())

    async def send(self, message: Message) -> None:
        """Pass on an answer's message, as what follows the comments."""
        await self.stop()
        if not self._begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._is_error = message["status"] != 200
        elif not self._is_error:
            await self._send(message)
        else:
            self._error.append(message.get("body", b""))
            if not message.get("more_body", False):
                text = b"".join(self._error)
                lines = b"".join(b"data: " + line + b"\n" for line in text.splitlines())
                body = b"event: error\n" + lines + b"\n"
                await self._send({**message, "body": body, "more_body": False})

    async def stop(self) -> None:
        """Write no more comments."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))

    async def _comment(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            if not self._begun:
                start = {"type": "http.response.start", "status": 200, "headers": self._headers}
                await self._send(start)
                self._begun = True  # behind it: a server that is cancelled here has sent nothing
            await self._send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
