"""The gate charges what the engine computed, whatever a client asks for and whenever it leaves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from schedsvc_client.testing import FakeScheduler
from schedsvc_client.v1 import scheduler_pb2 as pb

from tests.clients.upstreams import POOL, proxy
from tests.waiting import until

from .stack import Stack, chat, completion

N, TOKENS = 8, 400
ENDPOINTS = {
    "/v1/completions": completion(40, 12),
    "/v1/chat/completions": chat("Tell me a story.", 12),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", [True, "false", "yes"])
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_no_value_of_the_field_for_beams_switches_counting_off(
    stack: Stack, path: str, value: object, stream: bool
) -> None:
    body = ENDPOINTS[path] | {"use_beam_search": value, "n": 2, "stream": stream}
    books, generated = stack.flow("charge-0"), stack.gauges()["generation_tokens_total"]
    async with (
        aiohttp.ClientSession(stack.url, headers={"x-tenant-id": "charge-0"}) as http,
        http.post(path, json=body) as response,
    ):
        text = await response.text()
        if stream and value != "false" and path == "/v1/completions":
            assert response.status == 400, text  # vLLM streams no beams there
            return
        assert response.status == 200, text
    await asyncio.to_thread(stack.rest)
    after = stack.flow("charge-0")
    computed = stack.gauges()["generation_tokens_total"] - generated
    assert computed >= 2 * 12 - 1  # both beams have the first token of one
    assert after.input_tokens > books.input_tokens
    charged = after.output_tokens - books.output_tokens
    assert computed <= charged <= 2 * 12
    assert stream or charged == json.loads(text)["usage"]["completion_tokens"]


async def test_before_vllm_a_client_that_leaves_pays_for_what_all_choices_had(
    stack: Stack, tmp_path: Path
) -> None:
    """The proxy counts the answer by vLLM's events, though its client leaves early."""

    def computed() -> float:
        return stack.gauges()["generation_tokens_total"] - generated

    fake = FakeScheduler(f"unix:{tmp_path}/s")
    await fake.start()
    generated = stack.gauges()["generation_tokens_total"]
    try:
        async with (
            proxy({"SCHEDSVC_TARGET": fake.target, **POOL}, stack.url) as url,
            aiohttp.ClientSession(url, headers={"x-tenant-id": "charge-1"}) as http,
        ):
            body = completion(64, TOKENS, n=N, stream=True)
            response = await http.post("/v1/completions", json=body)
            assert response.status == 200
            while await asyncio.to_thread(computed) < N * TOKENS // 4:
                await response.content.readany()
            response.close()
            await until(lambda: fake.books[1].completes)
        await asyncio.to_thread(stack.rest)
        end = fake.books[1].end
    finally:
        await fake.stop()
    assert (end.outcome, end.input_tokens) == (pb.OUTCOME_CANCELLED, 64)
    assert N * TOKENS // 4 <= computed() < N * TOKENS
    assert computed() / 2 <= end.output_tokens <= computed()
