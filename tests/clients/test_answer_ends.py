"""Tests how an answer ends: an error is no output, and each dialect has its last event."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import ClientSession
from schedsvc_client.testing import FakeScheduler
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm.stream_events import FORMS

from .test_compressed_answers import Packed, end_of, front, packed

__all__ = ["front", "packed"]
ERROR = {"message": "out of memory", "type": "server_error", "code": 500}
SAID = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 90}


def named(name: str, **data: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode()


def data(**fields: Any) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


TEXT = data(choices=[{"text": "a"}])
#: The path and a body of each form of stream.
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "x"}),
    "responses": ("/v1/responses", {"input": "Hi"}),
    "messages": ("/v1/messages", SAID),
    "cohere": ("/cohere/v2/chat", SAID),
}
#: Status, type and pieces of a failed answer, and the tokens of output before that.
FAILED: dict[str, tuple[int, str, list[bytes], int]] = {
    "error first": (200, "text/event-stream", [data(error=ERROR), b"data: [DONE]\n\n"], 0),
    "error later": (200, "text/event-stream", [TEXT, TEXT, data(error=ERROR)], 2),
    "named": (200, "text/event-stream", [TEXT, named("error", error=ERROR)], 1),
    "whole": (200, "application/json", [json.dumps({"error": ERROR}).encode()], 0),
    "responses": (
        200,
        "text/event-stream",
        [
            named("response.created"),
            named("response.output_text.delta", delta="a"),
            named("response.failed", response={"error": ERROR, "usage": {"output_tokens": 5}}),
        ],
        5,
    ),
    "messages": (200, "text/event-stream", [named("ping"), named("error", error=ERROR)], 0),
    "cohere": (200, "text/event-stream", [named("message-start"), named("error", error=ERROR)], 0),
    "error with usage": (
        200,
        "text/event-stream",
        [TEXT, TEXT, data(error=ERROR, usage={"completion_tokens": 2})],
        2,
    ),
    "error with no usage": (200, "text/event-stream", [TEXT, data(error=ERROR, usage=None)], 1),
    "named with usage": (200, "text/event-stream", [TEXT, named("error", usage=None)], 1),
    "page as JSON": (200, "application/json", [b" <html>" + b"x" * 80], 0),
    "text": (200, "text/plain", [b"upstream connect error"], 0),
    "null": (200, "application/json", [b"null"], 0),
    "whole by its object": (
        200,
        "application/json",
        [json.dumps({"object": "error", "message": "x", "code": 500}).encode()],
        0,
    ),
    "event by its type": (200, "text/event-stream", [TEXT, data(type="error", message="x")], 1),
    "failure by its type": (200, "text/event-stream", [TEXT, data(type="response.failed")], 1),
    "empty": (200, "application/json", [], 0),
    "page": (200, "text/html; charset=utf-8", [b"<html>" + b"x" * 80], 0),
    "moved": (301, "text/plain", [b"moved" * 40], 0),
}


async def post(front: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    async with (
        ClientSession() as session,
        session.post(front + path, json=body, allow_redirects=False) as answered,
    ):
        return answered.status, await answered.read()


@pytest.mark.parametrize("case", FAILED)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_an_error_ends_as_failed(
    fake: FakeScheduler, packed: tuple[Packed, str], front: str, case: str,
    stream: bool,
) -> None:  # fmt: skip
    status, kind, pieces, tokens = FAILED[case]
    server, _ = packed
    server.status, server.headers, server.pieces = status, {"content-type": kind}, pieces
    path, body = ASKED.get(case, ASKED["completions"])
    asked = {**body, "stream": stream or kind == "text/event-stream"}
    assert await post(front, path, asked) == (status, b"".join(pieces))
    end = await end_of(fake)
    assert (end.outcome, end.output_tokens) == (pb.OUTCOME_CANCELLED, tokens)


def responses(last: str) -> list[bytes]:
    """Return a stream with 5 tokens in 11 events that are no frames."""
    usage = {"input_tokens": 7, "output_tokens": 5}
    deltas = [named("response.output_text.delta", delta="a") for _ in range(10)]
    return [named("response.created"), *deltas, named(last, response={"usage": usage})]


MESSAGES = [
    named("message_start", message={"usage": {"input_tokens": 7, "output_tokens": 0}}),
    *(named("content_block_delta", delta={"text": "a"}) for _ in range(7)),
    named("message_delta", usage={"output_tokens": 5}),
    named("message_stop"),
]


COHERE = [
    named("message-start"),
    *(named("content-delta", delta={"message": {"content": {"text": "a"}}}) for _ in range(9)),
    named("message-end", delta={"usage": {"tokens": {"input_tokens": 7, "output_tokens": 5}}}),
]
COMPLETIONS = [*([TEXT] * 9), data(choices=[], usage={"completion_tokens": 5})]
#: Streams with 5 tokens in more events, by their form and last event; and how they end.
LAST_EVENTS: dict[tuple[str, str], tuple[list[bytes], int]] = {
    ("completions", "[DONE]"): ([*COMPLETIONS, b"data: [DONE]\n\n"], pb.OUTCOME_COMPLETED),
    ("completions", "[DONE] without a space"): (
        [*COMPLETIONS, b"data:[DONE]\n\n"],
        pb.OUTCOME_COMPLETED,
    ),
    ("responses", "response.completed"): (
        responses("response.completed"),
        pb.OUTCOME_COMPLETED,
    ),
    ("responses", "response.incomplete"): (
        responses("response.incomplete"),
        pb.OUTCOME_COMPLETED,
    ),
    ("responses", "response.failed"): (responses("response.failed"), pb.OUTCOME_CANCELLED),
    ("messages", "message_stop"): (MESSAGES, pb.OUTCOME_COMPLETED),
    ("cohere", "message-end"): (COHERE, pb.OUTCOME_COMPLETED),
}


def test_each_last_event_of_the_table_has_a_test() -> None:
    found = {(form, name.decode()) for form, events in FORMS.items() for name in events.last}
    done = {("completions", "[DONE]"), ("completions", "[DONE] without a space")}
    assert found | done == LAST_EVENTS.keys()


@pytest.mark.parametrize(("form", "last"), LAST_EVENTS)
async def test_a_client_that_leaves_at_the_last_event_is_charged_what_it_states(
    fake: FakeScheduler, packed: tuple[Packed, str], front: str, form: str, last: str
) -> None:
    events, outcome = LAST_EVENTS[form, last]
    path, body = ASKED[form]
    if form == "completions":
        body = {**body, "stream_options": {"include_usage": True}}
    server, _ = packed
    server.headers = {"content-type": "text/event-stream"}
    server.pieces = [b"".join(events)]
    server.go_on.clear()  # the server does not end its answer
    async with ClientSession() as session:
        async with session.post(front + path, json={**body, "stream": True}) as answered:
            got = b""
            while got != server.pieces[0]:
                got += await answered.content.readany()
            answered.close()
        end = await end_of(fake)
    assert (end.outcome, end.output_tokens) == (outcome, 5)
