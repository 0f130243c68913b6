"""Tests tiers and classes that HTTP requests name at a real scheduler, and what answers state."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from schedsvc_vllm.asgi import Message, Receive, Scope, Send
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.service_tier import ServedTier, with_tier
from schedsvc_vllm.settings import LLM_D_OBJECTIVE, Settings
from schedsvc_vllm.sse import EVENT_BYTES_MAX

from schedsvc.config import Config
from schedsvc.server import Server as Scheduler

from .asgi import Engine, Exchange, ask, owner, start
from .bench import TRUST

CLASSES = [{"name": "flex", "rank": 5}, {"name": "priority", "rank": -10}]
TENANTS = [{"name": "acme", "classes": ["flex"]}, {"name": "other"}]


@asynccontextmanager
async def gated(engine: Any, **keys: Any) -> AsyncIterator[tuple[Scheduler, Gate]]:
    """Run a scheduler with two classes, and a gate before an engine that reads tiers."""
    listeners = [{"tcp": "127.0.0.1:0"}]
    given = {"listeners": listeners, "classes": CLASSES, "tenants": TENANTS, **keys}
    scheduler = Scheduler(Config.model_validate(given))
    await scheduler.start()
    settings = Settings(
        target=scheduler.targets[0],
        tenant_headers=tuple(TRUST),
        class_from_service_tier=True,
        request_headers=(LLM_D_OBJECTIVE,),
        fail_open=False,
    )
    gate = Gate(engine, settings)
    try:
        yield scheduler, gate
    finally:
        await gate._close()
        await scheduler.stop(None)


def granted(scheduler: Scheduler) -> dict[str, int]:
    rows = scheduler.driver.stats(0)["classes"]
    return {row["name"]: row["granted"] for row in rows if row["granted"]}


async def asked(gate: Gate, body: bytes, **headers: str) -> Exchange:
    return await Exchange(gate, body, headers=TRUST | headers, owner=owner()).run()


def tiers(answer: bytes) -> list[Any]:
    """Return the tier that each event of a stream, or the whole answer, states; None: none."""
    events = [line[6:] for line in answer.splitlines() if line.startswith(b"data: {")]
    return [json.loads(event).get("service_tier") for event in events or [answer]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("tier", "cls", "stated"),
    [
        ("flex", "flex", "flex"),
        ("priority", "default", "default"),  # it exists, and is not the tenant's
        ("scale", "default", "default"),  # it does not exist
        ("auto", "default", "default"),
        ("default", "default", "default"),
        ("x" * 65, "default", "default"),
        ("a\nb", "default", "default"),
        ("", "default", "default"),
        (None, "default", None),
    ],
)
async def test_a_tier_that_is_not_the_tenants_counts_as_its_own(
    stream: bool, tier: str | None, cls: str, stated: str | None
) -> None:
    async with gated(Engine()) as (scheduler, gate):
        fields = {} if tier is None else {"service_tier": tier}
        done = await asked(gate, ask(stream=stream, **fields))
        assert done.status == 200, done.answer
        assert granted(scheduler) == {cls: 1}
        assert set(tiers(done.answer)) == {stated}
        size = done.answer_headers.get("content-length")
        assert size is None or int(size) == len(done.answer)


@pytest.mark.parametrize(("objective", "cls"), [("flex", "flex"), ("priority", "default")])
async def test_an_objective_that_is_not_the_tenants_counts_as_its_own(
    objective: str, cls: str
) -> None:
    async with gated(Engine()) as (scheduler, gate):
        done = await asked(gate, ask(), **{LLM_D_OBJECTIVE: objective})
        assert (done.status, tiers(done.answer)) == (200, [cls])
        assert granted(scheduler) == {cls: 1}


async def test_a_tier_that_the_gate_may_not_name_counts_as_the_tenants() -> None:
    """If the gate's own rights refused the tier, the request would run without the scheduler."""
    principals = [{"name": "gate", "listener": "127.0.0.1:0", "pools": ["*"], "classes": []}]
    async with gated(Engine(), auth={"principals": principals}) as (scheduler, gate):
        done = await asked(gate, ask(service_tier="flex"))
        assert done.status == 200, done.answer
        assert done.answer_headers["x-schedsvc-mode"] == "enforced"
        assert granted(scheduler) == {"default": 1}
        assert tiers(done.answer) == ["default"]


async def test_tenant_without_classes_has_its_own_class_alone() -> None:
    """A tenant could get the 84-fold service of another by a class of its choice."""
    tenants = [{"name": "acme", "class": "flex"}]
    async with gated(Engine(), tenants=tenants) as (scheduler, gate):
        for tier in ("priority", "default", "flex"):
            assert (await asked(gate, ask(service_tier=tier))).status == 200
        assert granted(scheduler) == {"flex": 3}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a":1}', '{"service_tier":"t","a":1}'),
        ("{ }", '{"service_tier":"t" }'),
        ('{"a":1, "service_tier" : null}', '{"a":1, "service_tier" : "t"}'),
        ('{"service_tier":"auto","a":1.50}', '{"service_tier":"t","a":1.50}'),
        # Only the field of the answer itself counts.
        (
            '{"a":"\\"service_tier\\":null","m":{"service_tier":null}}',
            '{"service_tier":"t","a":"\\"service_tier\\":null","m":{"service_tier":null}}',
        ),
        (
            '{"type":"response.created","response":{"service_tier":"auto"},"n":0}',
            '{"type":"response.created","response":{"service_tier":"t"},"n":0}',
        ),
        ('{"response":null}', '{"service_tier":"t","response":null}'),
    ],
)
def test_with_tier_sets_one_field_and_keeps_the_rest(text: str, expected: str) -> None:
    assert with_tier(text, "t") == expected
    assert json.loads(with_tier(text, "t"))


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a"}', '{"a":1', '{"a":1]', "null"])
def test_with_tier_refuses_what_is_no_object(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        with_tier(text, "t")


def sending(kind: bytes, pieces: Sequence[bytes], status: int = 200) -> Any:
    async def engine(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        length = (b"content-length", b"%d" % sum(map(len, pieces)))
        await send(start(status, kind, [length]))
        for number, piece in enumerate(pieces):
            more = number < len(pieces) - 1
            await send({"type": "http.response.body", "body": piece, "more_body": more})

    return engine


@pytest.mark.parametrize(
    ("kind", "pieces", "changed"),
    [
        (b"application/json", [b'{"a":', b"1}"], b'{"service_tier":"t","a":1}'),
        (b"application/json", [b'{"a":', b"\xff}"], None),
        (b"text/plain", [b'{"a":1}'], None),
        (b"text/event-stream", [b'data: {"a"', b":1}\n", b"\ndata: [DONE]\n\n"],
         b'data: {"service_tier":"t","a":1}\n\ndata: [DONE]\n\n'),
        (b"text/event-stream", [b": queued\n\nevent: x\ndata: {}\n\nda"],
         b': queued\n\nevent: x\ndata: {"service_tier":"t"}\n\nda'),
        (b"text/event-stream", [b'data: {"a":\ndata: 1}\n\n'], None),
        (b"application/json", [b'{"a":"' + b"x" * EVENT_BYTES_MAX, b"x", b'"}'], None),
        (b"text/event-stream", [b'data: {"a":"' + b"x" * EVENT_BYTES_MAX, b"x", b'"}\n\n'], None),
    ],
)  # fmt: skip
async def test_answer_is_whole_however_it_is_cut(
    kind: bytes, pieces: list[bytes], changed: bytes | None
) -> None:
    whole = b"".join(pieces)
    for status, expected in ((200, whole if changed is None else changed), (404, whole)):
        for cut in {1, 2, 7, len(whole)} if len(whole) < 1_000 else {0}:
            parts = [whole[i : i + cut] for i in range(0, len(whole), cut)] if cut else pieces
            sent: list[Message] = []

            async def keep(message: Message, sent: list[Message] = sent) -> None:
                sent.append(message)

            exchange = Exchange(sending(kind, parts, status))
            await exchange.app(exchange.scope, exchange.receive, ServedTier(keep, "t").send)
            assert b"".join(m.get("body", b"") for m in sent[1:]) == expected
            assert [m.get("more_body", False) for m in sent].count(False) == 2  # start and last
            told = dict(sent[0]["headers"]).get(b"content-length")
            assert told is None or int(told) == len(expected)
            assert told is not None or kind == b"text/event-stream"
