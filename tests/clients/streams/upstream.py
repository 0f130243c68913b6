"""Runs a server behind the proxy that keeps each request, and accepts only exact ones."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from .reading import BODILESS, Field, Read

#: Names a request in its answer.
NUMBER = b"x-number"
_HEAD = re.compile(
    rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) (/[!-~]*) HTTP/1\.1\r\n"
    rb"((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+: ?[^\x00-\x08\x0a-\x1f\x7f]*\r\n)+)\Z"
)
_LENGTH = re.compile(rb"0|[1-9][0-9]{0,17}")
# The proxy asks for these itself.
_CACHE = b'vllm:cache_config_info{block_size="16",kv_cache_size_tokens="4096"} 1.0\n'
_MODELS = b'{"data":[{"max_model_len":1024}]}'
_OWN = {b"/health": b"", b"/metrics": _CACHE, b"/v1/models": _MODELS}
# Turns of the loop: a hang-up is read in the turn after the one that reads the last bytes.
_TURNS = 3
_ANSWER = b"HTTP/1.1 200 OK\r\n" + NUMBER + b": %d\r\ncontent-length: %d\r\n\r\n%b"


class Upstream:
    """Keeps the requests of all connections in `asked`, under the numbers in its answers.

    It reads no body of a GET: like some servers, it reads that as the next request.
    """

    def __init__(self) -> None:
        self.asked: dict[int, Read] = {}
        self.faults: list[str] = []
        self.connections: set[_Connection] = set()
        self.count = 0
        self.events = 0

    async def start(self) -> str:
        """Listen; return the URL."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Close the listener."""
        self._server.close()

    def forget(self) -> None:
        """Begin with a new stream."""
        self.asked.clear()
        self.faults.clear()

    async def settle(self) -> None:
        """Wait until the sockets hold nothing: a turn of the loop reads all of them."""
        before = -1
        while before != self.events:
            before = self.events
            for _ in range(_TURNS):
                await asyncio.sleep(0)
        for connection in list(self.connections):
            if connection.held:
                connection.refuse("bytes that are no request")

    def keep(self, request: Read) -> bytes:
        """Keep a request; return its answer."""
        if request.target in _OWN and not request.body:
            body = _OWN[request.target]
            return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        self.count += 1
        self.asked[self.count] = request
        body = b"" if request.method in BODILESS else b"{}"
        return _ANSWER % (self.count, len(body), body)


class _Connection(asyncio.Protocol):
    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self.held = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._upstream.connections.add(self)

    def connection_lost(self, _: Exception | None) -> None:
        self._upstream.events += 1
        self._upstream.connections.discard(self)

    def refuse(self, why: str) -> None:
        """Note a fault of the proxy, and hang up."""
        self._upstream.faults.append(f"{why}: {self.held!r}")
        self._upstream.connections.discard(self)
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._upstream.events += 1
        self.held += data
        while self.held and not self._transport.is_closing():
            head, end, rest = self.held.partition(b"\r\n\r\n")
            if not end:
                return
            try:
                request, length = _parsed(head + b"\r\n")
            except ValueError as error:
                self.refuse(str(error))
                return
            if len(rest) < length:
                return
            request.body, self.held = rest[:length], rest[length:]
            request.is_whole = True
            self._transport.write(self._upstream.keep(request))


def _parsed(head: bytes) -> tuple[Read, int]:
    """Return a request without its body, and the length of that. Raises ValueError."""
    parts = _HEAD.match(head)
    if parts is None:
        raise ValueError("a head that is not exact")
    method, target, lines = parts.groups()
    fields: list[Field] = []
    for line in lines.split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        fields.append((name.lower(), value.strip(b" \t")))
    names = [name for name, _ in fields]
    if names.count(b"host") != 1:
        raise ValueError("not one Host")
    if b"transfer-encoding" in names:
        raise ValueError("a Transfer-Encoding of the proxy")
    lengths = [value for name, value in fields if name == b"content-length"]
    if len(lengths) > 1 or not all(map(_LENGTH.fullmatch, lengths)):
        raise ValueError("not one length")
    length = 0 if method in BODILESS or not lengths else int(lengths[0])
    return Read(method, target, fields), length
