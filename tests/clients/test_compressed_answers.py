"""Tests an answer that an upstream compresses: read in each form, and broken when damaged."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import random
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from schedsvc_client.testing import FakeScheduler
from schedsvc_client.v1 import scheduler_pb2 as pb

from tests.waiting import until

from .upstreams import POOL, listening, proxy

USAGE = {"prompt_tokens": 2_000, "total_tokens": 2_012, "completion_tokens": 12}
PLAIN = json.dumps({"choices": [{"text": "word " * 300}], "usage": USAGE}).encode()
EVENTS = [
    b"data: %s\n\n" % json.dumps({"choices": [{"text": f"word {number}"}]}).encode()
    for number in range(300)
]
STREAM = b"".join(EVENTS) + b"data: [DONE]\n\n"


def raw_deflate(data: bytes) -> bytes:
    made = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return made.compress(data) + made.flush()


def members(data: bytes) -> bytes:
    """Compress as several members, one of them empty, with zeros at the end."""
    third = len(data) // 3
    parts = data[:third], b"", data[third : 2 * third], data[2 * third :]
    return b"".join(map(gzip.compress, parts)) + bytes(7)


WHOLE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-GZIP", gzip.compress),
    "members": ("gzip", members),
    "zlib": ("deflate", zlib.compress),
    "raw": ("deflate", raw_deflate),
    "zlib stored": ("deflate", lambda data: zlib.compress(data, 0)),
}


def flipped(data: bytes) -> bytes:
    """Damage the checksum of the last member."""
    return data[:-8] + bytes([data[-8] ^ 1]) + data[-7:]


BROKEN: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "cut": ("gzip", lambda data: gzip.compress(data)[:-20]),
    "no trailer": ("gzip", lambda data: gzip.compress(data)[:-8]),
    "cut in the second member": (
        "gzip",
        lambda data: gzip.compress(data) + gzip.compress(b"x")[:9],
    ),
    "checksum": ("gzip", lambda data: flipped(gzip.compress(data))),
    "text behind": ("gzip", lambda data: gzip.compress(data) + b"more"),
    "no gzip": ("gzip", lambda data: data),
    "zlib cut": ("deflate", lambda data: zlib.compress(data)[:-5]),
    "zlib twice": ("deflate", lambda data: zlib.compress(data) + zlib.compress(data)),
    "raw cut": ("deflate", lambda data: raw_deflate(data)[:-5]),
    "one byte": ("deflate", lambda data: b"\x78"),
    "no deflate": ("deflate", lambda data: b"\xff" + data),
}


class Packed:
    """Sends the same bytes, in pieces, to every POST request."""

    def __init__(self) -> None:
        self.status = 200
        self.headers: dict[str, str] = {}
        self.pieces: list[bytes] = []
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method != "POST":
            return web.Response(text="")
        answer = web.StreamResponse(status=self.status, headers=self.headers)
        await answer.prepare(request)
        for piece in self.pieces:
            await answer.write(piece)
            await self.go_on.wait()
        await answer.write_eof()
        return answer


@pytest.fixture
async def packed() -> AsyncIterator[tuple[Packed, str]]:
    made = Packed()
    async with listening(made.handle) as url:
        yield made, url
        made.go_on.set()


@pytest.fixture
async def front(fake: FakeScheduler, packed: tuple[Packed, str]) -> AsyncIterator[str]:
    variables = {
        "SCHEDSVC_TARGET": fake.target,
        **POOL,
        "SCHEDSVC_POOL_CAPACITY_TOKENS": "65536",
        "SCHEDSVC_POOL_MAX_MODEL_TOKENS": "16384",
    }
    async with proxy(variables, packed[1]) as url:
        yield url


async def ask(front: str, stream: bool) -> tuple[int, dict[str, str], bytes, bool]:
    """Return status, headers, what came of the body, and whether it broke off."""
    body = {"prompt": "x", "stream": stream}
    got = b""
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.post(f"{front}/v1/completions", json=body) as answered,
    ):
        headers = {name.lower(): value for name, value in answered.headers.items()}
        try:
            async for piece in answered.content.iter_any():
                got += piece
        except aiohttp.ClientPayloadError:
            return answered.status, headers, got, True
        return answered.status, headers, got, False


async def end_of(fake: FakeScheduler) -> Any:
    await until(lambda: fake.books and fake.books[1].completes)
    return fake.books[1].end


def pieces_of(data: bytes, rnd: random.Random) -> list[bytes]:
    cuts = sorted(rnd.randrange(len(data) + 1) for _ in range(rnd.randrange(6)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def serve(server: Packed, encoding: str, stream: bool) -> None:
    kind = "text/event-stream" if stream else "application/json"
    server.headers = {"content-type": kind, "content-encoding": encoding}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", WHOLE)
async def test_each_form_of_compression_is_read(
    fake: FakeScheduler,
    packed: tuple[Packed, str],
    front: str,
    form: str,
    stream: bool,
) -> None:
    encoding, compress = WHOLE[form]
    plain = STREAM if stream else PLAIN
    serve(packed[0], encoding, stream)
    packed[0].pieces = pieces_of(compress(plain), random.Random(form))
    status, headers, got, broke = await ask(front, stream)
    assert (status, got, broke) == (200, plain, False)
    assert "content-encoding" not in headers
    end = await end_of(fake)
    assert end.outcome == pb.OUTCOME_COMPLETED
    assert end.output_tokens == (300 if stream else 12)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", BROKEN)
async def test_a_broken_answer_ends_as_broken_and_counts_by_bytes(
    fake: FakeScheduler,
    packed: tuple[Packed, str],
    front: str,
    caplog: pytest.LogCaptureFixture,
    form: str,
    stream: bool,
) -> None:
    encoding, compress = BROKEN[form]
    sent = compress(STREAM if stream else PLAIN)
    serve(packed[0], encoding, stream)
    packed[0].pieces = [sent]
    with caplog.at_level(logging.WARNING):
        status, _, got, broke = await ask(front, stream)
    assert broke or status == 502
    if status == 502:
        assert json.loads(got)["error"]["code"] == "bad_gateway"
    end = await end_of(fake)
    assert end.outcome == pb.OUTCOME_CANCELLED
    assert end.output_tokens >= -(-len(sent) // 4) or end.output_tokens == 300
    assert [record for record in caplog.records if record.exc_info] == []
    assert "cannot be decoded" in caplog.text


async def test_an_answer_that_breaks_later_breaks_its_clients_connection(
    fake: FakeScheduler, packed: tuple[Packed, str], front: str
) -> None:
    server, _ = packed
    serve(server, "gzip", True)
    server.pieces = [gzip.compress(b"".join(EVENTS)), b"no member of gzip"]
    server.go_on.clear()
    asking = asyncio.ensure_future(ask(front, True))
    await until(lambda: fake.books and fake.books[1].progress)
    server.go_on.set()
    status, _, got, broke = await asking
    assert (status, got, broke) == (200, b"".join(EVENTS), True)
    end = await end_of(fake)
    assert (end.outcome, end.output_tokens) == (pb.OUTCOME_CANCELLED, 300)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_an_empty_answer_is_empty(
    fake: FakeScheduler, packed: tuple[Packed, str], front: str, encoding: str
) -> None:
    serve(packed[0], encoding, False)
    packed[0].pieces = []
    status, _, got, broke = await ask(front, False)
    assert (status, got, broke) == (200, b"", False)
