import asyncio
import json

import pytest

from schedsvc_lab.emulator.realtime import LAG_MAX_NS
from tests.waiting import Stopwatch

FORCED = {"ignore_eos": True}


def text_of(events, choice=0):
    return "".join(
        c["text"] for e in events for c in e["choices"] if c["index"] == choice and c["text"]
    )


async def test_a_completion_whole_and_streamed_is_the_same(start):
    body = {"prompt": "once upon a time", "max_tokens": 6, **FORCED}
    # A step takes longer than any catching up, so tokens are separate on any machine.
    async with start("a10g-llama2-7b", speed=0.5) as running:
        cost = running.emulator.driver.engine.cost
        assert cost.duration_ns(0, 1, 5) / 0.5 > LAG_MAX_NS
        status, whole = await running.post("/v1/completions", body)
        assert status == 200
        events = await running.events("/v1/completions", body)
    assert 1 < len(events) <= 6
    assert text_of(events) == whole["choices"][0]["text"]
    reasons = [e["choices"][0]["finish_reason"] for e in events]
    assert reasons == [None] * (len(events) - 1) + ["length"]
    assert {e["id"] for e in events} == {events[0]["id"]}
    assert all(e["object"] == "text_completion" for e in events)
    assert "usage" not in events[-1]
    assert whole["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 6,
        "total_tokens": 10,
        "prompt_tokens_details": None,
    }


async def test_chat_whole_and_streamed_is_the_same(running):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 4, **FORCED}
    status, whole = await running.post("/v1/chat/completions", body)
    assert status == 200
    assert whole["object"] == "chat.completion"
    events = await running.events("/v1/chat/completions", body)
    deltas = [e["choices"][0]["delta"] for e in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    text = "".join(d["content"] for d in deltas)
    assert text == whole["choices"][0]["message"]["content"]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert events[0]["object"] == "chat.completion.chunk"


async def test_prompts_in_all_four_forms(running):
    async def usage(prompt):
        status, answer = await running.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
        assert status == 200, answer
        return len(answer["choices"]), answer["usage"]["prompt_tokens"]

    assert await usage("one two") == (1, 2)
    assert await usage(["one two", "red"]) == (2, 3)
    assert await usage([5, 6, 7]) == (1, 3)
    assert await usage([[5, 6, 7], [8]]) == (2, 4)


async def test_n_choices_of_several_prompts_are_numbered_prompt_by_prompt(running):
    body = {"prompt": ["one two", "red"], "n": 2, "max_tokens": 6, "seed": 3, **FORCED}
    _, whole = await running.post("/v1/completions", body)
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"]["prompt_tokens"] == 3
    assert whole["usage"]["completion_tokens"] == 24
    events = await running.events("/v1/completions", body)
    for choice in range(4):
        assert text_of(events, choice) == whole["choices"][choice]["text"]
    alone = await running.post("/v1/completions", {**body, "prompt": "red", "n": 1})
    assert alone[1]["choices"][0]["text"] == whole["choices"][2]["text"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_usage_of_a_stream_equals_that_of_the_whole(running, path):
    body = {"max_tokens": 9, "n": 2, **FORCED}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": "count me"}]
    else:
        body["prompt"] = "count me"
    _, whole = await running.post(path, body)
    asked = {**body, "stream_options": {"include_usage": True}}
    events = await running.events(path, asked)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]
    assert all(e["usage"] is None for e in events[:-1])


async def test_continuous_usage_grows_to_the_final_one(running):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "a b c", "max_tokens": 7, "stream_options": options, **FORCED}
    events = await running.events("/v1/completions", body)
    counts = [e["usage"]["completion_tokens"] for e in events]
    # The steps of this profile are shorter than a timer's tick, so events may be merged.
    assert counts[:-1] == sorted(set(counts))
    assert counts[-2:] == [7, 7]
    words = [len(e["choices"][0]["text"].split()) for e in events[:-1]]
    assert counts[:-1] == [sum(words[: i + 1]) for i in range(len(words))]
    assert {e["usage"]["prompt_tokens"] for e in events} == {3}


async def test_min_tokens_and_stop(running):
    body = {"prompt": "stop here", "max_tokens": 30, **FORCED}
    _, free = await running.post("/v1/completions", body)
    text = free["choices"][0]["text"]
    stop = text[26:29]
    _, cut = await running.post("/v1/completions", {**body, "stop": [stop]})
    choice = cut["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    events = await running.events("/v1/completions", {**body, "stop": stop})
    assert text_of(events) == choice["text"]
    both = {"prompt": "stop here", "max_tokens": 40, "min_tokens": 40}
    _, forced = await running.post("/v1/completions", both)
    assert forced["usage"]["completion_tokens"] == 40


async def test_models_health_version_load_and_ping(running):
    status, text = await running.get("/v1/models")
    model = json.loads(text)["data"][0]
    assert (status, model["id"], model["max_model_len"]) == (200, "emulated", 2048)
    assert await running.get("/health") == (200, "")
    assert await running.get("/ping") == (200, "")
    assert "version" in json.loads((await running.get("/version"))[1])
    assert json.loads((await running.get("/load"))[1]) == {"server_load": 0}


async def test_tokenize_and_detokenize_round_trip_and_agree_with_usage(running):
    text = "Fünf tokens, or so"
    _, tokens = await running.post("/tokenize", {"prompt": text, "return_token_strs": True})
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 2048
    _, back = await running.post("/detokenize", {"tokens": tokens["tokens"]})
    assert back == {"prompt": text}
    _, answer = await running.post("/v1/completions", {"prompt": text, "max_tokens": 1})
    assert answer["usage"]["prompt_tokens"] == tokens["count"]
    messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    _, chat = await running.post("/tokenize", {"messages": messages})
    _, answer = await running.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert answer["usage"]["prompt_tokens"] == chat["count"] > tokens["count"]


async def test_a_unix_socket(start, tmp_path):
    async with start(uds=str(tmp_path / "e.sock")) as running:
        assert (await running.get("/health"))[0] == 200
    async with start(uds=str(tmp_path / "e.sock")) as running:
        assert (await running.get("/health"))[0] == 200


async def test_the_request_id_header_is_part_of_the_id(running):
    body = {"prompt": "a", "max_tokens": 1}
    _, answer = await running.post("/v1/completions", body, **{"X-Request-Id": "me-1"})
    assert answer["id"] == "cmpl-me-1"


async def test_more_than_the_pool_holds_is_preempted_and_still_exact(start):
    async with start(kv_tokens=1024, context_tokens_max=1024) as running:
        body = {"prompt": [1] * 100, "max_tokens": 100, **FORCED}
        answers = await asyncio.gather(*(running.post("/v1/completions", body) for _ in range(12)))
        assert {a["usage"]["completion_tokens"] for _, a in answers} == {100}
        gauges = running.gauges
        assert gauges.preemptions > 0
        assert (gauges.running, gauges.waiting, gauges.used_blocks) == (0, 0, 0)
        samples = await running.metrics()
        assert samples["vllm:num_preemptions_total"] == gauges.preemptions
        assert samples["vllm:prompt_tokens_total"] == 1200
        assert samples["vllm:generation_tokens_total"] == 1200


async def test_priority_from_the_body_and_from_the_header(start):
    async with start("a10g-llama2-7b", policy="priority", sequences_max=1) as running:
        ended = []

        async def ask(name, body, **headers):
            body = {"prompt": "x", "max_tokens": 2, **FORCED, **body}
            status, answer = await running.post("/v1/completions", body, **headers)
            assert status == 200, answer
            ended.append(name)

        first = asyncio.create_task(ask("first", {"max_tokens": 20}))
        await running.until(lambda g: g.running == 1)
        low = asyncio.create_task(ask("low", {"priority": 5}))
        await running.until(lambda g: g.waiting == 1)
        header = {"X-Vllm-Priority": "-3"}
        high = asyncio.create_task(ask("high", {"priority": 9}, **header))
        await asyncio.gather(first, low, high)
        assert ended == ["first", "high", "low"]


async def test_steps_take_the_profile_s_time_divided_by_the_speed(start):
    async with start("a10g-llama2-7b", speed=2.0) as running:
        body = {"prompt": [1] * 10, "max_tokens": 11, **FORCED}
        # That they take no longer is shown in virtual time, in test_emulator_realtime.py.
        watch = Stopwatch()
        await running.post("/v1/completions", body)
        assert watch.ran_for(0.98 * (3.0 + 35.8 + 2.131 + 10 * 28.3) / 2 / 1000)


async def test_tokens_of_the_prefix_cache_are_in_the_usage(start):
    async with start(prefix_cache="lru", block_size_tokens=16) as running:
        asked = {"prompt": list(range(100)), "max_tokens": 4, **FORCED}
        told = []
        for body in (asked, asked, asked | {"n": 2}, asked | {"prompt": list(range(50))}):
            _, answer = await running.post("/v1/completions", body)
            told.append(answer["usage"]["prompt_tokens_details"])
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await running.events("/v1/completions", asked | {"stream_options": options})
        metrics = await running.metrics()
    found = [None, {"cached_tokens": 96}, {"cached_tokens": 96}, {"cached_tokens": 48}]
    assert told == found
    assert {e["usage"]["prompt_tokens_details"]["cached_tokens"] for e in events} == {96}
    hits = metrics["vllm:prefix_cache_hits_total"]
    # A prompt counts once in the answer, however many sequences look it up.
    assert hits >= 96 + 96 + 48 + 96
