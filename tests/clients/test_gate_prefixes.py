"""Prefix hashes of a gate: blocks, their hashes, and when they are sent."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from schedsvc_client.session_notices import PrefixUse
from schedsvc_client.testing import FakeScheduler
from schedsvc_client.v1 import pool_pb2
from schedsvc_vllm.prefixes import BLOCK_BYTES, BLOCK_TOKENS, BLOCKS_MAX, block_hashes
from schedsvc_vllm.routes import ROUTES
from schedsvc_vllm.settings import Settings

from tests.waiting import until

from .asgi import ask
from .bench import Bench

USE = PrefixUse(hashes_max=512, order=True, key=7)
CHAT = ROUTES["/v1/chat/completions"]
COMPLETION = ROUTES["/v1/completions"]
IDS = list(range(10 * BLOCK_TOKENS))
TEXT = "".join(f"word {number} " for number in range(1_000))


def hashes(body: dict[str, Any], path: str = "", use: PrefixUse = USE) -> list[int]:
    default = CHAT if "messages" in body else COMPLETION
    return block_hashes(ROUTES[path] if path else default, body, use)


def common(one: list[int], other: list[int]) -> int:
    """Count the blocks in which two prompts begin alike."""
    pairs = zip(one, other, strict=False)
    return next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def said(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


def test_full_blocks_of_token_ids_are_named_each_with_all_before_it() -> None:
    named = hashes({"prompt": IDS})
    assert len(set(named)) == len(named) == 10
    assert all(0 <= value < 1 << 64 for value in named)
    assert hashes({"prompt": IDS[:-1]}) == named[:9]
    assert hashes({"prompt": [IDS]}) == named
    changed = IDS.copy()
    changed[3 * BLOCK_TOKENS + 1] += 1
    assert common(hashes({"prompt": changed}), named) == 3
    assert not set(hashes({"prompt": changed})[3:]) & set(named)


def test_full_blocks_of_text_are_named_likewise() -> None:
    named = hashes({"prompt": TEXT})
    assert len(named) == len(TEXT) // BLOCK_BYTES
    at = 5 * BLOCK_BYTES
    assert common(hashes({"prompt": TEXT[:at] + "!" + TEXT[at:]}), named) == 5
    assert hashes({"prompt": "é" * BLOCK_BYTES}, "/v1/completions") != []
    assert len(hashes({"prompt": "\ud800" * BLOCK_BYTES})) == 3


def test_no_more_are_named_than_count() -> None:
    assert len(hashes({"prompt": "x" * 1_000_000})) == BLOCKS_MAX
    assert len(hashes({"prompt": [1] * 100_000})) == BLOCKS_MAX
    few = replace(USE, hashes_max=4)
    assert hashes({"prompt": TEXT}, use=few) == hashes({"prompt": TEXT})[:4]
    assert hashes({"prompt": TEXT}, use=PrefixUse()) == []


def test_a_conversation_that_goes_on_keeps_its_beginning() -> None:
    messages = [said("system", TEXT[:1_000])]
    before: list[int] = []
    for turn in range(5):
        messages = [*messages, said("user", f"{turn} {TEXT[:700]}")]
        named = hashes({"messages": messages, "max_tokens": turn})
        assert common(before, named) == len(before) < len(named)
        before = named
        messages = [*messages, said("assistant", TEXT[turn : turn + 400])]
    assert common(hashes({"messages": [said("system", "You are."), *messages[1:]]}), before) == 0


def test_equal_text_of_a_template_has_equal_names() -> None:
    plain = hashes({"messages": [said("user", TEXT)]})
    part: dict[str, object] = {"type": "text", "text": TEXT}
    marked = part | {"cache_control": {"type": "ephemeral"}}
    messages = [said("user", [part])], [said("user", [marked])]
    one, other = (hashes({"messages": m}, "/v1/messages") for m in messages)
    assert one == other
    assert len(one) == len(plain)
    # Parts that precede all messages do so at any place in the body.
    tools = [{"type": "function", "function": {"name": "f", "description": TEXT[:1_000]}}]
    with_tools = hashes({"messages": [said("user", TEXT)], "tools": tools})
    others = hashes({"tools": tools, "messages": [said("user", TEXT[::-1])]})
    assert common(with_tools, others) >= 1_000 // BLOCK_BYTES
    assert common(with_tools, plain) == 0


def test_pictures_count_by_what_they_are() -> None:
    def shown(data: str) -> list[int]:
        picture = {"type": "image_url", "image_url": {"url": data}}
        return hashes({"messages": [said("user", [picture, {"type": "text", "text": TEXT}])]})

    large = "a" * 30_000_000
    tracemalloc.start()
    one, same, other = shown(large), shown(large), shown("b" * 9_000)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < len(large) // 10, "a picture is not copied"
    assert one == same
    assert len(one) < 2 * len(TEXT) // BLOCK_BYTES
    assert common(one, other) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"cache_salt": "mine"},
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"thinking": True}},
    ],
)
def test_salts_and_templates_part_what_is_alike(change: dict[str, Any]) -> None:
    body = {"messages": [said("user", TEXT)]}
    assert not set(hashes(body | change)) & set(hashes(body))
    assert hashes(body | change) == hashes(body | change)


def test_hashes_need_the_key() -> None:
    body = {"prompt": TEXT}
    assert not set(hashes(body, use=replace(USE, key=8))) & set(hashes(body))
    assert hashes(body, use=replace(USE, key=(1 << 64) - 1)) != []


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"prompt": [TEXT, TEXT]}, "/v1/completions"),
        ({"prompt": [IDS, IDS]}, "/v1/completions"),
        ({"input": TEXT, "previous_response_id": "r"}, "/v1/responses"),
        ({}, "/v1/completions"),
        ({"prompt": 5}, "/v1/completions"),
        ({"messages": {"role": TEXT}}, "/v1/chat/completions"),
        ({"messages": [[], 5, None, True]}, "/v1/chat/completions"),
    ],
)
def test_prefix_that_cannot_be_named_is_not(body: dict[str, Any], path: str) -> None:
    assert hashes(body, path) == []


def test_odd_bodies_are_the_apps_to_judge() -> None:
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    for prompt in ([1, *([None] * 500)], [1, deep] * 500, [1 << 80] * 500, [1.5] * 900, [deep]):
        assert isinstance(hashes({"prompt": prompt}), list)
    assert isinstance(hashes({"messages": [said("user", [deep, {"text": deep}, 5])]}), list)
    assert isinstance(hashes({"messages": [said(TEXT, None), {"content": TEXT}]}), list)


@pytest.fixture
async def telling(fake: FakeScheduler) -> AsyncIterator[Bench]:
    fake.prefix_use = pool_pb2.PrefixUse(hashes_max=512, order=True, key=99)
    made = Bench(fake, Settings(target=fake.target, tenant_headers=("x-tenant-id",)))
    yield made
    await made.gate._close()


async def connected(bench: Bench) -> None:
    """The first request may come before the Welcome; from the second on the policy is known."""
    assert (await bench.ask()).status == 200


async def test_hashes_are_sent_if_the_order_uses_prefixes(telling: Bench) -> None:
    await connected(telling)
    assert (await telling.ask(ask(prompt=TEXT))).status == 200
    (request,) = telling.fake.admits[1:]
    told = PrefixUse(hashes_max=512, order=True, key=99)
    assert list(request.prefix_block_hashes) == hashes({"prompt": TEXT}, use=told)
    await telling.settled()


async def test_hashes_are_not_sent_if_they_help_only_placement(telling: Bench) -> None:
    """The requests of a gate are run in its own engine."""
    telling.fake.prefix_use = pool_pb2.PrefixUse(hashes_max=512, placement=True, key=99)
    await connected(telling)
    assert (await telling.ask(ask(prompt=TEXT))).status == 200
    assert not any(request.prefix_block_hashes for request in telling.fake.admits)


async def test_another_scheduler_that_says_nothing_wants_none(telling: Bench) -> None:
    await connected(telling)
    assert telling.gate._runtime is not None
    session = telling.gate._runtime.session
    assert session.prefix_use.order
    telling.fake.prefix_use = None
    await telling.fake.restart()
    await until(lambda: not session.prefix_use.order)
    assert (await telling.ask(ask(prompt=TEXT))).status == 200
    assert not telling.fake.admits[-1].prefix_block_hashes


async def test_it_can_be_switched_off(fake: FakeScheduler) -> None:
    fake.prefix_use = pool_pb2.PrefixUse(hashes_max=512, order=True, key=99)
    bench = Bench(fake, Settings(target=fake.target, prefix_hashes=False))
    await connected(bench)
    assert (await bench.ask(ask(prompt=json.dumps(IDS)))).status == 200
    assert not any(request.prefix_block_hashes for request in fake.admits)
    await bench.gate._close()
