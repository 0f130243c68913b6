"""Tests that an exchange asks the same by fields as by bytes, for doors that have no bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from schedsvc_client.testing import FakeScheduler
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.exchange import Exchange
from schedsvc_vllm.settings import Settings

from .bench import TRUST, Bench

PATH = "/v1/completions"


async def exchange(fake: FakeScheduler) -> tuple[Bench, Exchange, Exchange]:
    """Return two exchanges with the same head, of a gate that serves."""
    bench = Bench(fake, Settings(target=fake.target, tenant_headers=("x-tenant-id",)))
    await bench.ask()
    scope = bench.exchange(path=PATH, headers=TRUST).scope
    made = Exchange(), Exchange()
    for each in made:
        place = each.head(scope, bench.gate._sources, frozenset())
        assert place is not None
        assert place.path == PATH
    return bench, *made


def asked(made: Exchange) -> pb.AdmitRequest:
    assert made.first_asked is not None
    message = made.first_asked.message
    message.request_id = ""
    return message


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "Tell me a story.", "max_tokens": 9},
        {"prompt": [1, 2, 3], "n": 2, "stream": True, "priority": 3},
    ],
    ids=["text", "tokens"],
)
async def test_fields_ask_the_same_as_bytes(fake: FakeScheduler, fields: dict[str, Any]) -> None:
    bench, by_bytes, by_fields = await exchange(fake)
    runtime, rules = bench.gate._runtime, bench.gate._rules
    assert runtime is not None
    by_bytes.body(rules, runtime, None, json.dumps(fields).encode(), b"application/json")
    by_fields.ask(rules, runtime, None, PATH, fields)
    assert asked(by_fields) == asked(by_bytes)
    assert asked(by_fields).tenant == TRUST["x-tenant-id"]
    assert by_fields.call.body == b"", "nothing is rewritten"
    assert by_fields.call.asked is None, "its door reads the usage"
    await bench.gate._close()


async def test_wrong_fields_are_refused(fake: FakeScheduler) -> None:
    bench, made, _ = await exchange(fake)
    assert bench.gate._runtime is not None
    with pytest.raises(BadRequestError, match="max_tokens"):
        made.ask(
            bench.gate._rules, bench.gate._runtime, None, PATH, {"prompt": "x", "max_tokens": -1}
        )
    await bench.gate._close()
