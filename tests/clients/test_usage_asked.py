"""Tests that a client gets the usage that it asked for, and not what the proxy asked for."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import aiohttp
import pytest
from schedsvc_client.testing import FakeScheduler
from schedsvc_client.v1 import scheduler_pb2 as pb

from .test_compressed_answers import Packed, end_of, front, packed

__all__ = ["front", "packed"]
SSE = "text/event-stream"
ODD_KINDS = ("application/octet-stream", "text/plain", "")


def usage(tokens: int) -> dict[str, Any]:
    return {"prompt_tokens": 7, "total_tokens": 7 + tokens, "completion_tokens": tokens}


def chunks(stated: str) -> list[dict[str, Any]]:
    """Return 4 tokens as servers state them: in the last chunk, in each, in one of its own."""
    made: list[dict[str, Any]] = [
        {"id": "x", "choices": [{"index": 0, "text": "a", "finish_reason": None}]} for _ in range(4)
    ]
    made[3]["choices"][0]["finish_reason"] = "stop"
    for number, chunk in enumerate(made):
        if stated != "last" or number == 3:
            chunk["usage"] = usage(number + 1)
    if stated == "own":
        made.append({"id": "x", "choices": [], "usage": usage(4)})
    return made


def events(stated: str, end: str, style: Any) -> list[bytes]:
    texts = [json.dumps(chunk, separators=style) for chunk in chunks(stated)]
    return [f"data: {text}{end}".encode() for text in [*texts, "[DONE]"]]


async def stream(front: str, asks: bool) -> bytes:
    body: dict[str, Any] = {"prompt": "x", "stream": True}
    if asks:
        body["stream_options"] = {"include_usage": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{front}/v1/completions", json=body) as answered,
    ):
        assert answered.status == 200
        return await answered.read()


def found_in(answer: bytes) -> list[dict[str, Any]]:
    """Return the chunks of an answer, which has to end with [DONE]."""
    data = [line[6:] for line in answer.splitlines() if line.startswith(b"data: ")]
    assert data.pop() == b"[DONE]"
    return [json.loads(each) for each in data]


FORMS = list(itertools.product(("last", "each", "own"), ("\n\n", "\r\n\r\n"), (None, (",", ":"))))


@pytest.mark.parametrize(("stated", "end", "style"), FORMS)
async def test_a_client_that_asks_gets_the_usage_once(
    fake: FakeScheduler, packed: tuple[Packed, str], front: str,
    stated: str, end: str, style: Any,
) -> None:  # fmt: skip
    packed[0].headers, packed[0].pieces = {"content-type": SSE}, events(stated, end, style)
    found = found_in(await stream(front, asks=True))
    assert [chunk["usage"] for chunk in found if chunk.get("usage")] == [usage(4)]
    assert [len(chunk["choices"]) for chunk in found] == [1, 1, 1, 1, 0]
    done = await end_of(fake)
    assert (done.outcome, done.output_tokens) == (pb.OUTCOME_COMPLETED, 4)


@pytest.mark.parametrize("kind", [SSE, *ODD_KINDS])
@pytest.mark.parametrize(("stated", "end", "style"), FORMS)
async def test_a_client_that_does_not_ask_sees_no_usage(
    fake: FakeScheduler, packed: tuple[Packed, str], front: str,
    stated: str, end: str, style: Any, kind: str,
) -> None:  # fmt: skip
    packed[0].headers, packed[0].pieces = {"content-type": kind}, events(stated, end, style)
    found = found_in(await stream(front, asks=False))
    assert [chunk for chunk in found if "usage" in chunk] == []
    assert len(found) == 4
    done = await end_of(fake)
    assert (done.outcome, done.output_tokens) == (pb.OUTCOME_COMPLETED, 4)


@pytest.mark.parametrize("kind", [SSE, *ODD_KINDS])
@pytest.mark.parametrize("asks", [False, True])
async def test_bytes_that_are_no_chunk_pass_unchanged(
    packed: tuple[Packed, str], front: str, kind: str, asks: bool
) -> None:
    pieces = [b"data: \x00\xff\xfe octets\n\n", b": note\r\r", b"id: 1\n\nevent: x\ndata: []\n\n"]
    pieces += [b'data: {"usage": not JSON}\n\n', b'data: "usage"\n\n', b"data: [DONE]\n\n"]
    packed[0].headers, packed[0].pieces = {"content-type": kind}, pieces
    assert await stream(front, asks) == b"".join(pieces)


@pytest.mark.parametrize("kind", ODD_KINDS)
async def test_a_stream_of_octets_passes_as_it_comes(
    packed: tuple[Packed, str], front: str, kind: str
) -> None:
    server, _ = packed
    server.headers, server.pieces = {"content-type": kind}, [b"RIFF\x00\x01\x02", b"\xff" * 9]
    server.go_on.clear()
    body = {"prompt": "x", "stream": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{front}/v1/completions", json=body) as answered,
    ):
        begun = await asyncio.wait_for(answered.content.readany(), 60)
        assert begun == server.pieces[0]  # while the server waits
        server.go_on.set()
        assert await answered.read() == server.pieces[1]


@pytest.mark.parametrize("kind", ODD_KINDS)
async def test_a_stream_whose_first_event_comes_in_bytes_is_known(
    packed: tuple[Packed, str], front: str, kind: str
) -> None:
    whole = b"".join(events("each", "\n\n", None))
    server, _ = packed
    server.headers = {"content-type": kind}
    server.pieces = [whole[at : at + 1] for at in range(len(whole))]
    found = found_in(await stream(front, asks=False))
    assert [chunk for chunk in found if "usage" in chunk] == []


TYPES_OF_ENDS = [(SSE, b""), (SSE, b"\xef\xbb\xbf"), ("application/json", b""), ("", b"\n")]


@pytest.mark.parametrize(("kind", "start"), TYPES_OF_ENDS)
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("is_one_piece", [False, True])
async def test_usage_is_given_as_asked_where_no_done_ends_the_stream(
    packed: tuple[Packed, str], front: str, kind: str, start: bytes, asks: bool, is_one_piece: bool
) -> None:
    pieces = events("each", "\n\n", (",", ":"))[:-1]
    pieces[0] = start + pieces[0]
    pieces = [b"".join(pieces)] if is_one_piece else pieces
    packed[0].headers, packed[0].pieces = {"content-type": kind}, pieces
    answer = await stream(front, asks)
    assert answer.startswith(start + b"data: ")
    found = found_in(answer.removeprefix(start) + b"data: [DONE]\n\n")
    assert [len(chunk["choices"]) for chunk in found] == [1, 1, 1, 1, *([0] if asks else [])]
    assert [chunk for chunk in found if chunk.get("usage")] == found[4:]
