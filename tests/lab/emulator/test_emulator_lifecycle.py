import asyncio
import json
from typing import ClassVar

import aiohttp
import openai
import pytest

FORCED = {"ignore_eos": True}
LONG = {"prompt": [1] * 50, "max_tokens": 1500, **FORCED}


class Recorder:
    """Keeps what it sees of each request, as a pure ASGI layer such as vLLM loads."""

    seen: ClassVar[list] = []
    sent: ClassVar[list] = []

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def record(message):
            self.sent.append(message)
            await send(message)

        try:
            await self.app(scope, receive, record)
        finally:
            self.seen.append((scope["path"], scope["state"].get("request_metadata"), scope["app"]))


@pytest.fixture
def seen(monkeypatch):
    records = []
    monkeypatch.setattr(Recorder, "seen", records)
    monkeypatch.setattr(Recorder, "sent", [])
    return records


async def test_a_streaming_client_that_leaves_frees_its_blocks(running, start, seen):
    # A step takes longer than the time that is caught up after a pause.
    async with start("a10g-llama2-7b", speed=0.25, middleware=[Recorder]) as running:
        async with running.http.post(
            running.url + "/v1/completions", json={**LONG, "stream": True}
        ) as response:
            await response.content.readline()
            assert running.gauges.used_blocks > 0
            response.close()
        # A decode step takes 112 ms, and the blocks do not wait for its end.
        steps = running.gauges.steps
        await running.until(lambda g: g.used_blocks == 0)
        assert running.gauges.steps <= steps + 1
        await running.until(lambda g: len(seen) == 1)
        assert seen[0][1].final_usage_info is None
        # A client that left gets no message.
        assert not any(b"[DONE]" in message.get("body", b"") for message in Recorder.sent)
        assert all(message.get("more_body", True) for message in Recorder.sent)
        samples = await running.metrics()
        assert samples['vllm:request_success_total{finished_reason="abort"}'] == 1
        assert samples["vllm:generation_tokens_total"] == running.gauges.generation_tokens < 50


async def test_a_client_that_leaves_while_it_waits_leaves_the_queue(start):
    async with start("a10g-llama2-7b", sequences_max=1) as running:
        first = asyncio.create_task(running.post("/v1/completions", LONG))
        await running.until(lambda g: g.running == 1)
        second = asyncio.create_task(running.post("/v1/completions", LONG))
        await running.until(lambda g: g.waiting == 1)
        second.cancel()
        await running.until(lambda g: g.waiting == 0)
        assert running.gauges.running == 1
        first.cancel()
        await running.until(lambda g: g.running == 0 and g.used_blocks == 0)


async def test_a_middleware_reads_exact_usage_telemetry_and_capacity(start, seen):
    async with start(middleware=[Recorder]) as running:
        totals = [0, 0]
        for stream in (False, True):
            body = {"prompt": ["one two", "red"], "n": 2, "max_tokens": 5, **FORCED}
            if stream:
                body["stream_options"] = {"include_usage": True}
                usage = (await running.events("/v1/completions", body))[-1]["usage"]
            else:
                usage = (await running.post("/v1/completions", body))[1]["usage"]
            path, metadata, app = seen[-1]
            assert path == "/v1/completions"
            final = metadata.final_usage_info
            assert (final.prompt_tokens, final.completion_tokens) == (3, 20)
            assert final.total_tokens == usage["total_tokens"]
            totals[0] += usage["prompt_tokens"]
            totals[1] += usage["completion_tokens"]
        samples = await running.metrics()
        assert samples["vllm:prompt_tokens_total"] == totals[0]
        assert samples["vllm:generation_tokens_total"] == totals[1]
        config = app.state.vllm_config
        assert config.cache_config.kv_cache_size_tokens == 4096
        assert config.cache_config.block_size == 16
        assert config.model_config.max_model_len == 2048
        assert config.scheduler_config.max_num_seqs == 32
        assert app.state.engine_telemetry() == (0, 0, 0, 0)
        body = {"prompt": ["one two", "red"]}
        assert app.state.count_prompt_tokens(body) == [2, 1]
        messages = [{"role": "user", "content": "hi"}]
        tokens = app.state.count_prompt_tokens({"messages": messages})
        assert tokens == [len(app.state.tokenizer.apply_chat_template(messages))]
        await running.post("/v1/completions", {"prompt": "a", "max_tokens": 0})
        assert seen[-2][0] == "/metrics"
        assert seen[-1][1] is None


async def test_telemetry_while_it_runs(start):
    async with start("a10g-llama2-7b", speed=0.25, sequences_max=1) as running:
        tasks = [asyncio.create_task(running.post("/v1/completions", LONG)) for _ in range(3)]
        await running.until(lambda g: g.running == 1 and g.waiting == 2 and g.steps >= 2)
        telemetry = running.emulator.app.state.engine_telemetry()
        assert (telemetry.running, telemetry.waiting, telemetry.used_tokens) == (1, 2, 64)
        samples = await running.metrics()
        assert samples["vllm:num_requests_running"] == 1
        assert samples["vllm:num_requests_waiting"] == 2
        assert samples["vllm:kv_cache_usage_perc"] == 4 / 625
        assert json.loads((await running.get("/load"))[1]) == {"server_load": 3}
        for task in tasks:
            task.cancel()
        await running.until(lambda g: (g.running, g.waiting, g.used_blocks) == (0, 0, 0))


async def test_metrics_have_vllm_s_names_and_labels(running):
    await running.post("/v1/completions", {"prompt": "a b", "max_tokens": 3, **FORCED})
    _, text = await running.get("/metrics")
    labels = '{engine="0",model_name="emulated"}'
    assert f"vllm:prompt_tokens_total{labels} 2.0" in text
    assert f"vllm:generation_tokens_total{labels} 3.0" in text
    assert f"vllm:time_to_first_token_seconds_count{labels} 1.0" in text
    assert f"vllm:num_requests_running{labels} 0.0" in text
    assert 'kv_cache_size_tokens="4096"' in text
    assert 'num_gpu_blocks="256"' in text
    samples = await running.metrics()
    assert samples['vllm:request_success_total{finished_reason="length"}'] == 1


async def test_stop_ends_streams_and_waiting_answers(start):
    async with start("a10g-llama2-7b") as running:
        stream = asyncio.create_task(running.events("/v1/completions", LONG))
        whole = asyncio.create_task(running.post("/v1/completions", LONG))
        await running.until(lambda g: g.steps >= 2 and g.running == 2)
        running.server.stop()
        events = await stream
        status, answer = await whole
    assert events[-1]["error"]["code"] == 503
    assert (status, answer["error"]["type"]) == (503, "ServiceUnavailableError")


async def test_sixty_four_streams_at_once_are_exact(start):
    async with start("tiny-cpu", speed=4.0) as running:
        options = {"stream_options": {"include_usage": True}, **FORCED}

        async def one(i):
            body = {"prompt": [i + 1] * (i + 1), "max_tokens": 20 + i, **options}
            events = await running.events("/v1/completions", body)
            usage = events[-1]["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (i + 1, 20 + i)
            text = "".join(c["text"] for e in events for c in e["choices"])
            assert len(text.split()) == 20 + i

        await asyncio.gather(*(one(i) for i in range(64)))
        assert running.gauges.generation_tokens == sum(20 + i for i in range(64))
        assert running.gauges.used_blocks == 0


async def test_a_slow_reader_gets_everything(start):
    async with start() as running:
        body = {"prompt": [[1] * 8] * 16, "max_tokens": 120, "stream": True, **FORCED}
        url = running.url + "/v1/completions"
        timeout = aiohttp.ClientTimeout(total=20)
        async with running.http.post(url, json=body, timeout=timeout, read_bufsize=256) as response:
            await asyncio.sleep(0.3)
            text = await response.text()
        events = [json.loads(e[6:]) for e in text.split("\n\n") if e.startswith("data: {")]
        words = sum(len(c["text"].split()) for e in events for c in e["choices"])
        assert words == 16 * 120


async def test_the_openai_sdk_works_unchanged(running):
    async with openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="any") as client:
        models = await client.models.list()
        model = models.data[0].id
        completion = await client.completions.create(
            model=model, prompt="tell me", max_tokens=8, extra_body=FORCED
        )
        assert completion.usage.completion_tokens == 8
        assert completion.choices[0].finish_reason == "length"
        stream = await client.completions.create(
            model=model,
            prompt="tell me",
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=FORCED,
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].text for c in chunks if c.choices)
        assert text == completion.choices[0].text
        assert chunks[-1].usage == completion.usage
        messages = [{"role": "user", "content": "hello"}]
        chat = await client.chat.completions.create(
            model=model, messages=messages, max_completion_tokens=6, extra_body=FORCED
        )
        assert chat.usage.completion_tokens == 6
        text = ""
        async with client.chat.completions.stream(
            model=model, messages=messages, max_completion_tokens=6, extra_body=FORCED
        ) as events:
            async for event in events:
                text += event.delta if event.type == "content.delta" else ""
        assert text == chat.choices[0].message.content
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model=model, prompt="a", max_tokens=10**6)
        assert caught.value.param == "max_tokens"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="a")
