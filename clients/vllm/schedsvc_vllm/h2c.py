"""Lets requests that offer HTTP/2 in passing (`Upgrade: h2c`, as Java's client does) be HTTP/1.1.

A server may ignore the offer (RFC 9110, 7.8), but httptools stops reading where it stands, so that
the request would seem to have no body.
"""

from __future__ import annotations

import re

_OFFER = b"h2c"
_LINES = re.compile(
    rb"\r\n(?:upgrade:[ \t]*h2c[ \t]*|http2-settings:[^\r\n]*)(?=\r\n)", re.IGNORECASE
)
_CONNECTION = re.compile(rb"(?<=\r\n)(connection:)([^\r\n]*)", re.IGNORECASE)
_START = re.compile(rb"[A-Z]+ [^ \r\n]+ HTTP/1\.1\r\n")
_GONE = (b"upgrade", b"http2-settings")


def without_h2c(data: bytes) -> bytes:
    """Return what came, without the offer if a request's head with one begins it. O(head)."""
    if _OFFER not in data or not _START.match(data):
        return data
    end = data.find(b"\r\n\r\n")
    head, rest = (data, b"") if end < 0 else (data[: end + 2], data[end + 2 :])
    kept = _LINES.sub(b"", head)
    if kept == head:
        return data
    return _CONNECTION.sub(_without_offer, kept) + rest


def _without_offer(match: re.Match[bytes]) -> bytes:
    words = [word.strip() for word in match[2].split(b",")]
    kept = [word for word in words if word and word.lower() not in _GONE]
    return match[1] + b" " + (b", ".join(kept) or b"keep-alive")
