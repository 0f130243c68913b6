"""Tests OpenAI's SDK, unchanged: answers, streams, errors, its own retries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from . import programs
from .stack import Stack, completion

PROMPT = [100 + number for number in range(40)]
# Whatever the scheduler predicts of its lengths, no more than this run or wait.
FLOOD = programs.UNASKED_MAX + programs.MAX_RUNNING + 4

SOON, SOON_TOKENS = 6, 300


def client(stack: Stack, tenant: str, retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1",
        api_key="any",
        max_retries=retries,
        default_headers={"x-tenant-id": tenant},
    )


@pytest.fixture
async def flood(stack: Stack) -> AsyncIterator[list[asyncio.Task[object]]]:
    """One tenant's pool and queue are full, until the test ends."""
    hog = client(stack, "sdk-0")

    async def ask(output_tokens: int) -> object:
        body = completion(40, output_tokens)
        exact = {name: body.pop(name) for name in ("min_tokens", "ignore_eos")}
        return await hog.completions.create(**body, extra_body=exact)

    # Some end soon, so that a newcomer finds room in time on a slow machine too.
    lengths = [SOON_TOKENS if number < SOON else 1_900 for number in range(FLOOD)]
    tasks = [asyncio.create_task(ask(length)) for length in lengths]
    try:
        await asyncio.to_thread(
            stack.until, lambda: stack.flow("sdk-0").queued >= programs.UNASKED_MAX
        )
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await hog.close()


async def test_answers_and_streams(stack: Stack) -> None:
    async with client(stack, "sdk-1") as sdk:
        models = await sdk.models.list()
        assert [model.id for model in models.data] == [programs.MODEL]
        done = await sdk.completions.create(model=programs.MODEL, prompt=PROMPT, max_tokens=5)
        assert done.usage is not None
        assert done.usage.prompt_tokens == len(PROMPT)
        said = await sdk.chat.completions.create(
            model=programs.MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=5
        )
        assert said.choices[0].message.content
        stream = await sdk.chat.completions.create(
            model=programs.MODEL,
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 5


async def test_request_that_no_pool_could_hold_is_refused(stack: Stack) -> None:
    async with client(stack, "sdk-1") as sdk:
        with pytest.raises(openai.BadRequestError, match="n"):
            await sdk.completions.create(
                model=programs.MODEL, prompt=PROMPT, max_tokens=2_000, n=64
            )


async def test_a_full_queue_is_a_rate_limit(
    stack: Stack, flood: list[asyncio.Task[object]]
) -> None:
    """Some places are for retries that are due, and for requests that count as them."""
    kept = programs.FLOW_QUEUE_MAX - programs.UNASKED_MAX
    async with client(stack, "sdk-0") as sdk:
        answers = await asyncio.gather(
            *(
                sdk.completions.create(model=programs.MODEL, prompt=PROMPT, max_tokens=1_900)
                for _ in range(kept + 10)
            ),
            return_exceptions=True,
        )
        refused = [error for error in answers if isinstance(error, openai.RateLimitError)]
        full = [error for error in refused if error.code == "slow_down"]
        assert full, refused
        assert full[0].type == "rate_limit_error"
        headers = full[0].response.headers
        assert int(headers["retry-after"]) >= 1
        assert int(headers["retry-after-ms"]) >= 1
        assert not [name for name in headers if name.lower().startswith("x-ratelimit-")]
        assert headers["x-schedsvc-dropped-reason"] == "rejected_flow_queue_full"
        assert headers["x-request-id"]


async def test_the_queue_ttl_is_a_rate_limit_and_others_pass(
    stack: Stack, flood: list[asyncio.Task[object]]
) -> None:
    """A newcomer is served before the flood; the flood's excess gets a Retry-After."""
    async with client(stack, "sdk-2") as sdk:
        await sdk.completions.create(model=programs.MODEL, prompt=PROMPT, max_tokens=20)
    # A request beyond the queue is refused at once; the others wait for the whole TTL.
    await asyncio.wait(flood, timeout=programs.QUEUE_TTL_MS / 1e3 + 1)
    errors = [task.exception() for task in flood if task.done() and task.exception()]
    assert {type(error) for error in errors} == {openai.RateLimitError}
    reasons = {
        error.response.headers["x-schedsvc-dropped-reason"]
        for error in errors
        if isinstance(error, openai.RateLimitError)
    }
    assert "evicted_ttl" in reasons


async def test_its_own_retries_bring_a_refused_request_through(stack: Stack) -> None:
    """More than the queue takes, sent at once: with the SDK's retries each is answered."""
    async with client(stack, "sdk-3", retries=8) as sdk:
        answers = await asyncio.gather(
            *(
                sdk.completions.create(
                    model=programs.MODEL,
                    prompt=PROMPT,
                    max_tokens=100,
                    extra_body={"min_tokens": 100, "ignore_eos": True},
                )
                for _ in range(2 * programs.UNASKED_MAX + programs.MAX_RUNNING)
            )
        )
    assert all(answer.usage and answer.usage.completion_tokens == 100 for answer in answers)
    assert sum(count.count for count in stack.flow("sdk-3").refusals) > 0
