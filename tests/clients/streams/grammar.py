"""Makes streams of HTTP/1: sound ones, ones with a few oddities, and ones with damaged bytes."""

from __future__ import annotations

import json
import re
from random import Random

from tests.fuzz.mutate import mutated

from .world import Stream

#: Bodies and fields that mislead a reader which looks for heads in bodies, or edits them.
OFFER = (
    b"GET /x HTTP/1.1\r\nUpgrade: h2c\r\nConnection:\r\nConnection: \r\nHTTP2-Settings: A\r\n\r\n"
)
VICTIM = b"POST /tokenize HTTP/1.1\r\nhost: x\r\nx-tenant-id: victim\r\ncontent-length: 0\r\n\r\n"
ASK = json.dumps({"prompt": [1, 2], "max_tokens": 3}).encode()
BODIES = (
    b"", b"x", b"\r\n", b"\r\n\r\n", b"0\r\n\r\n", b"5\r\nabcde\r\n0\r\n\r\n", OFFER, OFFER[:-2],
    VICTIM, VICTIM[:30], ASK, bytes(range(256)), b"\0" * 9,
)  # fmt: skip
_METHODS = (*[b"POST"] * 3, *[b"GET"] * 2, b"PUT", b"HEAD", b"OPTIONS", b"DELETE", b"PATCH")
_PATHS = (b"/a", b"/tokenize", b"/v1/things?b=1&c=%20", b"/a/b?x=//y", b"/", b"/a?")
_COMPLETIONS = b"/v1/completions"
_OFFERS = (b"h2c", b"H2C", b"HTTP/2.0", b"TLS/1.2", b"websocket", b"h2c, websocket", b"x")
_FIELDS = (
    b"X-Tenant-Id: own", b"Accept: */*",
    b"X-Own: a", b"x-own: b , c", b"Cookie: a=1; b=2", b"X-Empty:", b"X-Wide: \t a \t b \t",
    b"Content-Type: application/json", b"User-Agent: f", b"X-Name: J\xc3\xb6rg",
    b"Expect: 100-continue", b"TE: trailers", b"Trailer: X-Own", b"Keep-Alive: timeout=5",
    b"Proxy-Connection: keep-alive", b"HTTP2-Settings: AAMAAABk", b"X-HTTP-Method-Override: DELETE",
    b"X-Original-URL: /sleep", b"X-Forwarded-For: 10.0.0.1", b"Connection: keep-alive",
    b"Connection: x-own", b"Connection: x-tenant-id, x-own", b"Connection: , ,",
    b"connection: X-Own , keep-alive", b"Transfer-Encodings: chunked",
)  # fmt: skip
_TRAILERS = (
    b"X-Tenant-Id: b", b"Host: b", b"X-Own: trailer", b"Upgrade: h2c", b"Authorization: Bearer k",
)  # fmt: skip
_EXTENSIONS = (b";a", b";a=b", b';a="b c"', b";a=1;b=2", b';a="\\""')
# From here on: not every reader takes these, or takes them alike.
_LENGTHS = (
    b"+5", b"-1", b"-0", b"0x5", b"05", b"0000000000000000000000005", b"5, 5", b"5,6", b"5 5",
    b"5;", b"", b"5\t", b"5\x0b", b"1e1", b"18446744073709551616", b"18446744073709551621",
    b"4294967301", b"99999999999999999999999", b"5_0", b"\xd9\xa5", b"0", b"1", b"200000",
)  # fmt: skip
_CODINGS = (
    b"chunked, identity", b"gzip, chunked", b"chunked, gzip", b"xchunked", b"chunkedx",
    b"chunked\x0b", b"\x0bchunked", b"\tchunked", b"chunked ", b"CHUNKED", b"chunked, chunked",
    b"identity", b"", b"\"chunked\"", b"chunked;q=1", b"\r\n chunked", b"ch\r\n unked",
    b", chunked", b"chunked,", b"\0chunked",
)  # fmt: skip
_ODD_FIELDS = (
    b"Host: y", b"Host : x", b"Host:", b"host: x, y", b"Host: x\r\n y", b" Host: x",
    b"X-A: a\r\n b", b"X-A:\r\n\tb", b"X\0: a", b"X: a\0b", b"X: a\rb", b"X: a\nb", b"X: a\x7f",
    b"X: \x01", b": a", b"no colon", b"X : a", b"X\t: a", b"X: \xff", b"X\xff: a", b"X(: a", b"",
    b" ", b"\t: x", b"Connection: content-length", b"Connection: transfer-encoding, host",
    b"Connection: close", b"Connection: close, keep-alive", b"Connection: Upgrade",
    b"Connection: \x01", b"X_Tenant_Id: b", b"X-Tenant-Id: b", b"X-Tenant-Id : b",
    b"X-Tenant-Id: b\r\n c", b"Expect: 200-ok", b"Expect:", b"Transfer_Encoding: chunked",
    b"Content_Length: 5", b"Content-Length\0: 5", b"X: " + b"a" * 5_000, b"Connection: expect",
    b"Expect: 100-Continue", b"Upgrade: h2c\r\nConnection: Upgrade",
    b"Upgrade: websocket\r\nConnection: Upgrade",
)  # fmt: skip
_LINES = (
    b"%m  %t HTTP/1.1", b"%m %t  HTTP/1.1", b"%m %t HTTP/1.1 ", b" %m %t HTTP/1.1",
    b"%m\t%t HTTP/1.1", b"%m %t HTTP/1.0", b"%m %t HTTP/0.9", b"%m %t HTTP/1.2", b"%m %t HTTP/2.0",
    b"%m %t HTTP/1.10", b"%m %t HTTP/01.1", b"%m %t http/1.1", b"%m %t", b"%m", b"%m %t HTTP",
    b"%m %t HTTP/1.1x", b"%m %t ICE/1.0", b"PRI * HTTP/2.0", b"CONNECT x:80 HTTP/1.1",
    b"CONNECT %t HTTP/1.1", b"%m * HTTP/1.1", b"%m http://x%t HTTP/1.1",
    b"%m http://y:80%t HTTP/1.1", b"%m x%t HTTP/1.1", b"%m %t#f HTTP/1.1", b"%m %t\xff HTTP/1.1",
    b"%m %t\0 HTTP/1.1", b"%m %t\x7f HTTP/1.1", b"%m /a/../b%t HTTP/1.1", b"%m /%2e%2e%t HTTP/1.1",
    b"%m /%00 HTTP/1.1", b"%m /%zz HTTP/1.1", b"%m @y%t HTTP/1.1", b"%m //y%t HTTP/1.1",
    b"%m /\\y HTTP/1.1", b"%m ?a HTTP/1.1", b"", b"%m /a|b HTTP/1.1", b"%m /a?b#c?d HTTP/1.1",
    b"FROB %t HTTP/1.1", b"get %t HTTP/1.1", b"%m: x", b"M-SEARCH %t HTTP/1.1",
    b"PURGE %t HTTP/1.1", b"QUERY %t HTTP/1.1", b"SOURCE %t HTTP/1.1", b"%m %t?x=%c3%a9 HTTP/1.1",
    b"%m %t%0d%0aX:1 HTTP/1.1", b"OPTIONS * HTTP/1.1",
)  # fmt: skip
_SIZES = (
    b"+%x", b"-%x", b"0x%x", b"%x ", b" %x", b"%x\t", b"000%x", b"0000000000000000000000000%x",
    b"%xg", b"", b"%x;", b"%x ;a", b"%x; a", b"%x;a =b", b"%x;a=", b"%x;=b", b"%x;a=\"b", b"%x;a\r",
    b"%x;a\nb", b"%x;\0", b"%x;\xff", b"ffffffffffffffff", b"fffffffffffffffffffff", b"%x,",
    b"%x\x0b", b"%x;a b", b"10000000000000000%x", b"%x;" + b"e" * 3_000, b"%x;a=b,c", b"%x;;",
)  # fmt: skip
_ODD_TRAILERS = (
    b"Content-Length: 9", b"Transfer-Encoding: chunked", b"Connection: close",
    b"Connection: Upgrade", b"Expect: 100-continue", b"Content-Length: 0",
    b"Transfer-Encoding: gzip", b"Content-Length: x",
)  # fmt: skip
_ENDS = (
    b"\n", b"\r", b"\r\r\n", b"\n\r", b"", b" \r\n", b"\r\n ", b"\r\n\r\n", b"\0\r\n", b"\x0b\r\n",
)  # fmt: skip
#: Mutations insert these.
WORDS = (
    b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"0\r\n\r\n",
    b"Content-Length: 3\r\n", b"\r\nHost: x", b"Transfer-Encoding: chunked\r\n", b"HTTP/1.1",
    b"HTTP/1.0", b" ", b"\t", b"\0", b":", b"x-tenant-id: b", b"\r\nConnection: close\r\n",
    b"Upgrade: h2c\r\n", b"Connection: Upgrade\r\n", b"5\r\n", b"1;a=b\r\n", VICTIM,
    b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n",
)  # fmt: skip
_EDGE = re.compile(rb"\r\n")
_EACH_BYTE_MAX = 400
# The offers in a body that the server reads in parts, and stops to read.
_LARGE = 1_000


class Grammar:
    """Makes streams out of a seed."""

    def __init__(self, rnd: Random) -> None:
        self.rnd = rnd
        self._earlier = [self._requests(True)]

    def stream(self) -> Stream:
        """Make one: a quarter are sound, a third have damaged bytes."""
        rnd = self.rnd
        draw = rnd.random()
        is_sound = draw < 0.25
        data = self._requests(is_sound or draw < 0.35)
        if not is_sound and (draw < 0.35 or draw > 0.75):
            data = mutated(rnd, data, self._earlier, WORDS)
        elif len(self._earlier) < 64:
            self._earlier.append(data)
        else:
            self._earlier[rnd.randrange(64)] = data
        if not is_sound and rnd.random() < 0.08:
            data = data[: rnd.randrange(len(data) + 1)]
        return Stream(data, self._cuts(data), is_sound)

    def _cuts(self, data: bytes) -> tuple[int, ...]:
        rnd = self.rnd
        draw = rnd.random()
        if draw < 0.4:
            return ()
        if draw < 0.43 and len(data) <= _EACH_BYTE_MAX:
            return tuple(range(len(data)))
        if draw < 0.7:
            return tuple(sorted(rnd.randrange(len(data) + 1) for _ in range(rnd.randrange(1, 6))))
        edges = [found.start() + rnd.randrange(-1, 4) for found in _EDGE.finditer(data)]
        chosen = [max(0, min(len(data), edge)) for edge in edges if rnd.random() < 0.2]
        return tuple(sorted(chosen))

    def _requests(self, is_sound: bool) -> bytes:
        rnd = self.rnd
        count = rnd.choice((1, 1, 2, 2, 3, 4))
        odd = -1 if is_sound else rnd.randrange(count)
        return b"".join(self._request(place == odd, place == count - 1) for place in range(count))

    def _request(self, is_odd: bool, is_last: bool) -> bytes:
        rnd = self.rnd
        oddities = rnd.choice((1, 1, 1, 2, 3)) if is_odd else 0
        chosen = {rnd.choice(("line", "field", "field", "length", "coding", "chunk", "end", "both",
                              "hosts", "twice")) for _ in range(oddities)}  # fmt: skip
        method, target = rnd.choice(_METHODS), rnd.choice(_PATHS)
        body = b"".join(rnd.choice(BODIES) for _ in range(rnd.choice((0, 1, 1, 2))))
        if method == b"POST" and rnd.random() < 0.35:
            target, body = _COMPLETIONS, ASK
        elif rnd.random() < 0.005:
            body = OFFER * _LARGE
        line = b"%b %b HTTP/1.1" % (method, target)
        if "line" in chosen:
            line = rnd.choice(_LINES).replace(b"%m", method).replace(b"%t", target)
        fields = self._fields(method, is_last)
        framing, end = self._body(method, body, chosen)
        fields += framing
        if "field" in chosen:
            fields += rnd.choices(_ODD_FIELDS, k=rnd.choice((1, 1, 2)))
        if "hosts" in chosen:
            fields = [each for each in fields if each != b"Host: x"]
            fields += [b"Host: x"] * rnd.choice((0, 2))
        if "twice" in chosen:
            fields.append(rnd.choice(fields))
        rnd.shuffle(fields)
        lines = [line, *fields, b""]
        ends = [b"\r\n"] * len(lines)
        if "end" in chosen:
            ends[rnd.randrange(len(ends))] = rnd.choice(_ENDS)
        if is_odd and rnd.random() < 0.05:
            ends = [b"\n"] * len(lines)
        return b"".join(each + end for each, end in zip(lines, ends, strict=True)) + end

    def _fields(self, method: bytes, is_last: bool) -> list[bytes]:
        rnd = self.rnd
        fields = [b"Host: x", *rnd.sample(_FIELDS, rnd.choice((0, 1, 1, 2, 4)))]
        if rnd.random() < 0.2:
            offer = rnd.choice(_OFFERS)
            if method != b"GET" or offer != b"websocket":
                words = [b"Upgrade", b"HTTP2-Settings", b"x-own"][: rnd.randrange(1, 4)]
                rnd.shuffle(words)
                fields += [b"Upgrade: " + offer, b"Connection: " + b", ".join(words)]
        if is_last and rnd.random() < 0.3:
            fields.append(b"Connection: close")
        return fields

    def _body(self, method: bytes, body: bytes, odd: set[str]) -> tuple[list[bytes], bytes]:
        """Return the fields that frame a body, and its bytes."""
        rnd = self.rnd
        length = [b"Content-Length: %d" % len(body)]
        coding = [b"Transfer-Encoding: " + rnd.choice((b"chunked", b"chunked", b"Chunked"))]
        if "length" in odd:
            length = [b"Content-Length: " + rnd.choice(_LENGTHS)]
        if "coding" in odd:
            coding = [b"Transfer-Encoding: " + rnd.choice(_CODINGS)]
        is_chunked = rnd.random() < 0.5 or not odd.isdisjoint({"coding", "chunk"})
        if "length" in odd or not is_chunked:
            fields = length
            if not odd and not body and rnd.random() < 0.5:
                fields = []
        else:
            fields = coding
        if "both" in odd:
            fields = length + coding
        return list(fields), self._chunks(body, odd) if is_chunked else body

    def _chunks(self, body: bytes, oddities: set[str]) -> bytes:
        rnd = self.rnd
        size = rnd.randrange(1, 300) if len(body) < _LARGE else rnd.randrange(5_000, 70_000)
        pieces = [body[at : at + size] for at in range(0, len(body), size)]
        odd = rnd.randrange(len(pieces) + 1) if "chunk" in oddities else -1
        out = []
        for place, piece in enumerate([*pieces, b""]):
            head, end = b"%x" % len(piece), b"\r\n"
            if rnd.random() < 0.2:
                head += rnd.choice(_EXTENSIONS)
            if rnd.random() < 0.1:
                head = b"00" + head.upper()
            if place == odd and rnd.random() < 0.7:
                head = rnd.choice(_SIZES).replace(b"%x", b"%x" % len(piece))
            elif place == odd:
                end = rnd.choice(_ENDS)
            out.append(head + b"\r\n" + piece + (end if piece else b""))
        trailers = rnd.choices(_TRAILERS, k=rnd.choice((0, 0, 1, 2)))
        if oddities and rnd.random() < 0.2:
            closing = (b"Connection: close",)  # the parser reads no more then
            trailers += [rnd.choice(rnd.choice((_ODD_FIELDS, _ODD_TRAILERS, closing)))]
        return b"".join(out) + b"".join(each + b"\r\n" for each in trailers) + b"\r\n"
