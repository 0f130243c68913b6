"""JSON of any depth is served or refused by 400, at emulator, gate and proxy."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from schedsvc_client.testing import FakeScheduler
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.paths import TENANT_PATHS
from schedsvc_vllm.routes import FORM_PATHS, GATED_PATHS
from schedsvc_vllm.settings import Settings

from tests.lab.emulator.conftest import run_emulator

from .upstreams import POOL, listening, proxy

#: orjson and Python's parser stop near 1,000 levels; where exactly depends on the stack.
DEPTHS = (*range(940, 1_032, 2), 971, 973)
#: Some paths are not the emulator's, some not covered; and a long body may exceed the context.
SERVED = {200, 400, 404, 405, 413, 501}
#: `@` marks the nested part.
BODIES = (
    '{"prompt":[[1,@]],"messages":[{"role":"user","content":[@]}],"inputs":@,"tokens":[@]}',
    '{"prompt":"x","input":"x","inputs":"x","max_tokens":1,"x":@,"tools":@,"parameters":@}',
    '{"prompt":[1],"max_tokens":1,"stream":true,"stream_options":{"x":@},"priority":1,"user":@}',
    "@",
)


def nested(depth: int, shape: str) -> str:
    return "[" * depth + "]" * depth if shape == "array" else '{"a":' * depth + "1" + "}" * depth


@asynccontextmanager
async def served(by: str, target: str) -> AsyncIterator[str]:
    """Serve the emulator alone, with the gate in it, or behind the proxy; give the URL."""
    variables = {"SCHEDSVC_TARGET": target, **POOL}
    gate = [lambda app: Gate(app, Settings.from_environment(variables))] if by == "gate" else []
    async with run_emulator(middleware=gate) as running:
        if by != "proxy":
            yield running.url
            return
        async with proxy(variables, running.url) as front:
            yield front


async def statuses(url: str, paths: Iterable[str], depths: Iterable[int], body: str) -> set[int]:
    found = set()
    async with aiohttp.ClientSession() as session:
        for path, depth, shape in itertools.product(paths, depths, ("array", "object")):
            data = body.replace("@", nested(depth, shape))
            async with session.post(url + path, data=data) as answered:
                await answered.read()
                found.add(answered.status)
    return found


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("by", ["emulator", "gate", "proxy"])
async def test_json_of_any_depth_is_served_or_refused_by_400(
    fake: FakeScheduler, caplog: pytest.LogCaptureFixture, by: str, body: str
) -> None:
    dense = ["/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize"]
    paths = [*dense, "/generate_stream"]
    if by != "emulator":  # which has no others
        dense += ["/v1/messages", "/v1/responses", "/v1/embeddings"]
        paths = sorted(GATED_PATHS - FORM_PATHS | TENANT_PATHS)
    async with served(by, fake.target) as url:
        assert await statuses(url, dense, DEPTHS, body) <= SERVED
        assert await statuses(url, paths, (970, 10_000, 100_000), body) <= SERVED
        assert await statuses(url, ["/v1/completions"], (10_000, 100_000), body) == {400}
    assert [record for record in caplog.records if record.exc_info] == []


async def test_a_deep_body_is_served_where_its_server_refuses_usage_in_each_event(
    fake: FakeScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    """The gate parses the body once more to ask for less, with another parser."""

    async def handle(request: web.Request) -> web.Response:
        is_ours = b"continuous_usage_stats" in await request.read()
        if is_ours:
            return web.json_response({"error": {"message": "unknown option"}}, status=400)
        event = b'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n'
        return web.Response(body=event, content_type="text/event-stream")

    for depth in range(940, 1_032, 8):
        body = '{"prompt":[1],"max_tokens":1,"stream":true,"x":@}'
        async with (
            listening(handle) as url,
            proxy({"SCHEDSVC_TARGET": fake.target, **POOL}, url) as front,
        ):
            assert await statuses(front, ["/v1/completions"], [depth], body) <= {200, 400}
    assert [record for record in caplog.records if record.exc_info] == []
