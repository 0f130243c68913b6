"""Takes gzip's and deflate's compression off an answer, so that it can be read.

A caller feeds every piece, and `last` with the end: only then is an answer that was cut short known
as one. Source: RFC 1950 to 1952; RFC 9110, 8.4.1. Sans-IO; O(bytes).
"""

from __future__ import annotations

import zlib

_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
_DEFLATED = 8
# A header of zlib: two bytes that together are a multiple of this.
_ZLIB_HEADER_BYTES, _ZLIB_CHECK = 2, 31


class DecodingError(Exception):
    """The answer is damaged, or was cut short."""


class Decoder:
    """Decodes one answer. `encoding`: its content-encoding, one of KNOWN."""

    __slots__ = ("_has_member", "_head", "_inflate", "_is_gzip", "bytes_in", "bytes_out")

    #: Values of content-encoding.
    KNOWN = frozenset((b"gzip", b"x-gzip", b"deflate"))

    def __init__(self, encoding: bytes) -> None:
        self._is_gzip = encoding != b"deflate"
        self._inflate: zlib._Decompress | None = None  # between members: none
        self._has_member = False
        self._head = b""  # of a deflate stream of unknown kind
        self.bytes_in = 0
        self.bytes_out = 0

    def feed(self, body: bytes, last: bool) -> bytes:
        """Take a piece (`last`: nothing follows); return its text. Raises DecodingError."""
        self.bytes_in += len(body)
        try:
            text = self._members(body) if self._is_gzip else self._deflate(body, last)
        except zlib.error as error:
            raise DecodingError(str(error)) from None
        self.bytes_out += len(text)
        if last and self._inflate is not None and not self._inflate.eof:
            raise DecodingError("the compressed answer was cut short")
        return text

    def _members(self, body: bytes) -> bytes:
        """Read members of gzip one after the other, and zeros between them."""
        texts = []
        while body:
            if self._inflate is None:
                body = body.lstrip(b"\0") if self._has_member else body
                if not body:
                    break
                self._inflate = zlib.decompressobj(_GZIP)
            texts.append(self._inflate.decompress(body))
            body = self._inflate.unused_data
            if self._inflate.eof:
                self._inflate, self._has_member = None, True
        return b"".join(texts)

    def _deflate(self, body: bytes, last: bool) -> bytes:
        """Read one stream: with zlib's header as the standard has it, or without, as some send."""
        if self._inflate is None:
            body, self._head = self._head + body, b""
            if len(body) < _ZLIB_HEADER_BYTES and not last:
                self._head = body
                return b""
            if not body:
                return b""
            self._inflate = zlib.decompressobj(_ZLIB if _is_zlib(body) else _RAW)
        elif self._inflate.eof and body:
            raise DecodingError("data follows the end of the compressed answer")
        text = self._inflate.decompress(body)
        if self._inflate.unused_data:
            raise DecodingError("data follows the end of the compressed answer")
        return text


def _is_zlib(head: bytes) -> bool:
    """Return whether zlib's header begins an answer.

    A stream without it that began with these bits would have set bits that compressors leave zero.
    """
    return (
        head[0] & 0x0F == _DEFLATED
        and len(head) >= _ZLIB_HEADER_BYTES
        and int.from_bytes(head[:_ZLIB_HEADER_BYTES], "big") % _ZLIB_CHECK == 0
    )
