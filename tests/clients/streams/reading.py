"""Reads a stream of bytes by h11, which shares no code with the parser of the proxy."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

import h11

Field = tuple[bytes, bytes]
#: A request with one of these fields has no body behind the proxy.
BODILESS = frozenset({b"GET", b"HEAD", b"OPTIONS"})
# RFC 9110, 7.6.1, and the fields that docs/use/vllm.md names. The proxy writes its own Host, length
# and request id.
_NOT_PASSED = frozenset(
    b"connection http2-settings keep-alive proxy-authenticate proxy-authorization proxy-connection"
    b" te trailer transfer-encoding upgrade expect host content-length x-request-id"
    b" x-http-method x-http-method-override x-method-override x-original-url x-rewrite-url".split()
)
_FORWARDED = b"x-forwarded-for"
_HELD_BYTES_MAX = 1 << 24
_REPAIRS_MAX = 8
_ORIGIN = re.compile(rb"\A[a-z]+://[^/?]*", re.IGNORECASE)
_SPACES = re.compile(rb"\A([^ \r\n]+) +([^ \r\n]+) +(?=HTTP/)")
_LENGTH_ZEROS = re.compile(rb"^(content-length:[ \t]*)0+(?=[0-9])", re.IGNORECASE | re.MULTILINE)
_CHUNK_ZEROS = re.compile(r"illegal chunk header: bytearray\(b'(0+)[0-9a-fA-F]")


@dataclass
class Read:
    """Holds a request as one of the two readers found it. `is_whole`: its body has ended."""

    method: bytes
    target: bytes
    fields: list[Field]
    body: bytes = b""
    is_whole: bool = False
    # The deviations without which h11 would not have read it.
    deviations: tuple[str, ...] = ()


@dataclass
class Reading:
    """Holds what h11 read of a stream; its last request may be cut. `error`: why it stopped."""

    requests: list[Read] = field(default_factory=list)
    error: str = ""


class Deviation(NamedTuple):
    """Bytes that h11 refuses and the proxy serves.

    `repaired` writes them as h11 takes them, and the proxy has to serve just that. It gets the
    bytes from the begin of a request on, and h11's error. If it does not apply, it returns them.
    """

    name: str
    reason: str
    repaired: Callable[[bytes, str], bytes]


def _without_blank_lines(stream: bytes, _: str) -> bytes:
    return stream.lstrip(b"\r\n")


def _with_one_space(stream: bytes, error: str) -> bytes:
    return _SPACES.sub(rb"\1 \2 ", stream) if "request line" in error else stream


def _with_short_length(stream: bytes, error: str) -> bytes:
    if "Content-Length" not in error:
        return stream
    head, end, rest = stream.partition(b"\r\n\r\n")
    return _LENGTH_ZEROS.sub(rb"\1", head) + end + rest


def _with_short_size(stream: bytes, error: str) -> bytes:
    found = _CHUNK_ZEROS.search(error)
    return stream.replace(b"\n" + found[1].encode(), b"\n", 1) if found else stream


DEVIATIONS = (
    Deviation(
        "blank lines",
        "RFC 9112, 2.2: a server ignores an empty line before a request line",
        _without_blank_lines,
    ),
    Deviation(
        "spaces in a request line",
        "RFC 9112, 3: a reader may part a request line at any whitespace; no part can hold a space",
        _with_one_space,
    ),
    Deviation(
        "zeros before a Content-Length",
        "RFC 9110, 8.6: 1*DIGIT. h11 takes 20 digits at most; every reader finds the same number",
        _with_short_length,
    ),
    Deviation(
        "zeros before the size of a chunk",
        "RFC 9112, 7.1: 1*HEXDIG. h11 takes 20 digits at most; every reader finds the same number",
        _with_short_size,
    ),
)


def read(stream: bytes) -> Reading:
    """Return the requests of a stream. O(bytes * requests)."""
    reading = Reading()
    while stream:
        found, rest, error = _read_one(stream)
        if error:
            found, rest, error = _read_repaired(stream, found, rest, error)
        reading.error = error
        if found is None:
            break
        reading.requests.append(found)
        if not found.is_whole or _is_last(found):
            break
        stream = rest
    return reading


def _read_repaired(stream: bytes, *read: Any) -> tuple[Read | None, bytes, str]:
    """Read a request that h11 refuses once more, in the form in which it takes it."""
    names: list[str] = []
    found, rest, error = read
    while error and len(names) < _REPAIRS_MAX:
        for deviation in DEVIATIONS:
            repaired = deviation.repaired(stream, error)
            if repaired != stream:
                break
        else:
            break
        stream = repaired
        names.append(deviation.name)
        found, rest, error = _read_one(stream)
    if found is not None:
        found.deviations = tuple(names)
    return found, rest, error


def _read_one(stream: bytes) -> tuple[Read | None, bytes, str]:
    """Return the first request, the bytes behind it, and h11's error."""
    reader = h11.Connection(h11.SERVER, max_incomplete_event_size=_HELD_BYTES_MAX)
    reader.receive_data(stream)
    found: Read | None = None
    body: list[bytes] = []
    error = ""
    try:
        while True:
            event = reader.next_event()
            if isinstance(event, h11.Request):
                found = Read(event.method, event.target, list(event.headers))
                if event.http_version < b"1.1":
                    found.fields.append((b"connection", b"close"))
            elif isinstance(event, h11.Data):
                body.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                assert found is not None
                found.is_whole = True
                break
            else:
                break
    except h11.RemoteProtocolError as refused:
        error = str(refused)
    if found is not None:
        found.body = b"".join(body)
    return found, reader.trailing_data[0], error


def words_of_connection(fields: Iterable[Field]) -> frozenset[bytes]:
    """Return what `Connection` lists, in lower case."""
    lists = [value for name, value in fields if name == b"connection"]
    return frozenset(word.strip(b" \t").lower() for word in b",".join(lists).split(b","))


def _is_last(request: Read) -> bool:
    return b"close" in words_of_connection(request.fields)


def passed_fields(request: Read, kept: frozenset[bytes]) -> list[Field]:
    """Return the fields that have to reach the upstream. `kept`: whatever `Connection` names."""
    dropped = _NOT_PASSED | (words_of_connection(request.fields) - kept)
    fields = [pair for pair in request.fields if pair[0] not in dropped]
    ways = [value for name, value in request.fields if name == _FORWARDED]
    if not ways:
        return fields
    return [pair for pair in fields if pair[0] != _FORWARDED] + [(_FORWARDED, b", ".join(ways))]


def passed_targets(request: Read) -> tuple[bytes, ...]:
    """Return the targets of which one has to reach the upstream: the path's one spelling.

    A request that only reads may keep its own. An empty query has no form in ASGI.
    """
    written, mark, query = _ORIGIN.sub(b"", request.target).partition(b"?")
    path = written
    while (decoded := unquote_to_bytes(path)) != path:
        path = decoded
    path = re.sub(rb"^/+", b"/", posixpath.normpath(path))
    paths = (written, path) if request.method in BODILESS else (path,)
    return tuple(each + mark + query if query else each for each in paths)
