"""Says which headers the proxy passes on: to the upstream, and back to the client."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit, urlunsplit

from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.asgi import Headers, Scope

_PORTS = {"http": 80, "https": 443}
# Headers of one connection, and those that must not be passed on as they are.
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_FORWARDED = b"x-forwarded-for"
# Both may be the upstream's own address, which clients cannot reach.
_LOCATIONS = frozenset({b"location", b"content-location"})
# These make some servers take another method or path than the request's.
_OVERRIDES = frozenset(
    {
        b"x-http-method",
        b"x-http-method-override",
        b"x-method-override",
        b"x-original-url",
        b"x-rewrite-url",
    }
)
# The proxy writes its own date, and names no server.
_NOT_ANSWERED = _HOP_BY_HOP | {b"date", b"server"}
# The proxy writes its own host and length. It has taken the body already, so that it needs no
# "100 Continue" of the upstream.
_NOT_ASKED = _HOP_BY_HOP | _OVERRIDES | {b"host", b"content-length", b"expect", _FORWARDED}


def _named_by_connection(fields: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Return the fields that belong to one connection because `Connection` names them. O(fields).

    Source: RFC 9110, 7.6.1.
    """
    words = [value for name, value in fields if name == b"connection"]
    if not words:
        return frozenset()
    return frozenset(word.strip().lower() for word in b",".join(words).split(b","))


def asked_headers(scope: Scope, kept: frozenset[bytes] = frozenset()) -> Headers:
    """Return the headers for the upstream: the caller's, but those of its connection. O(headers).

    `kept`: headers that a setting names, so that no caller can have them dropped on the way. The
    client's address is appended to x-forwarded-for. Raises BadRequestError for a value that is not
    UTF-8, which servers read differently.
    """
    fields, dropped = scope["headers"], _NOT_ASKED
    names = dict(fields)
    if b"connection" in names:
        dropped = dropped | (_named_by_connection(fields) - kept)
    forwarded = []
    if _FORWARDED in names:
        forwarded += [value for name, value in fields if name == _FORWARDED]
    if client := scope.get("client"):
        forwarded.append(str(client[0]).encode())
    headers = [pair for pair in fields if pair[0] not in dropped]
    if forwarded:
        headers.append((_FORWARDED, b", ".join(forwarded)))
    for name, value in headers:
        if not value.isascii() and not _is_utf_8(value):
            text = name.decode("latin-1")
            raise BadRequestError(f"{text}: the header has to be UTF-8", text)
    return headers


def _is_utf_8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def answer_headers(fields: Headers, origin: str) -> Headers:
    """Return an answer's headers, but those of its connection. O(headers).

    `fields`: with lower-case names. `origin`: a URL of the upstream. A location there becomes a
    path, which holds for the client.
    """
    names, dropped = dict(fields), _NOT_ANSWERED
    if b"connection" in names:
        dropped = dropped | _named_by_connection(fields)
    headers = [pair for pair in fields if pair[0] not in dropped]
    if _LOCATIONS.isdisjoint(names):
        return headers
    return [
        (name, _outside(value, origin) if name in _LOCATIONS else value) for name, value in headers
    ]


def _outside(location: bytes, origin: str) -> bytes:
    text = location.decode("latin-1")
    try:
        is_inner = _address(text) == _address(origin)
    except ValueError:
        return location
    if not is_inner:
        return location
    path = urlunsplit(("", "", *urlsplit(text)[2:]))
    return (path if path.startswith("/") else f"/{path}").encode("latin-1")


def _address(url: str) -> tuple[str, str | None, int | None]:
    """Return scheme, host and port. Raises ValueError for a port that is none."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)
