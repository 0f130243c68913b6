"""Tests the protocol of LightLLM and S-LoRA."""

import json

import aiohttp
import pytest

BODY = {
    "model_dir": "models/tiny",
    "lora_dir": None,
    "inputs": " abcd efgh ijkl",
    "parameters": {
        "do_sample": False,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.0,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "ignore_eos": True,
        "max_new_tokens": 5,
        "stop_sequences": None,
    },
}


def asking(**parameters):
    return {**BODY, "parameters": {**BODY["parameters"], **parameters}}


async def events(running, body):
    async with running.http.post(running.url + "/generate_stream", json=body) as response:
        assert response.status == 200, await response.text()
        assert response.headers["content-type"].startswith("text/event-stream")
        text = await response.text()
    parts = text.removesuffix("\n\n").split("\n\n")
    assert all(part.startswith("data:{") for part in parts)
    return [json.loads(part.removeprefix("data:")) for part in parts]


async def test_an_event_for_each_token(running):
    received = await events(running, BODY)
    assert [event["finished"] for event in received] == [False] * 4 + [True]
    assert all(set(event["token"]) == {"id", "text", "logprob", "special"} for event in received)
    assert all(event["generated_text"] is None for event in received)
    assert [event["details"] for event in received[:4]] == [None] * 4
    assert received[-1]["details"] == {
        "finish_reason": "length",
        "generated_tokens": 5,
        "prompt_tokens": 3,
    }
    status, whole = await running.post("/generate", BODY)
    assert (status, whole["count_output_tokens"], whole["prompt_tokens"]) == (200, 5, 3)
    assert whole["generated_text"] == ["".join(event["token"]["text"] for event in received)]
    assert len(whole["generated_text"][0].split()) == 5


async def test_stop_sequences_end_it(running):
    words = [event["token"]["text"] for event in await events(running, BODY)]
    received = await events(running, asking(stop_sequences=[words[2]]))
    assert [event["token"]["text"] for event in received] == [*words[:2], ""]
    assert received[-1]["details"]["finish_reason"] == "stop"


async def test_the_emulated_length_ends_it(running):
    body = asking(ignore_eos=False, emulated_output_tokens=2, max_new_tokens=50)
    assert len(await events(running, body)) == 2


async def test_leaving_frees_the_engine(running):
    async with running.http.post(
        running.url + "/generate_stream", json=asking(max_new_tokens=1_500)
    ) as response:
        assert await response.content.readany()
        assert running.gauges.running == 1
    await running.until(lambda gauges: gauges.running == 0)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "inputs"),
        ({"inputs": ""}, "inputs"),
        ({"inputs": [1, 2]}, "inputs"),
        ({**BODY, "parameters": 3}, "parameters"),
        (asking(max_new_tokens=0), "parameters.max_new_tokens"),
        (asking(max_new_tokens="5"), "parameters.max_new_tokens"),
        (asking(top_p=1.5), "parameters.top_p"),
        (asking(top_k=0), "parameters.top_k"),
        (asking(temperature=0.0), "parameters.temperature"),
        (asking(presence_penalty=-1.0), "parameters.presence_penalty"),
        (asking(stop_sequences=[""]), "parameters.stop_sequences"),
        (asking(max_new_tokens=10**6), "max_new_tokens"),
    ],
)
async def test_bad_fields_are_named(running, body, field):
    for path in ("/generate", "/generate_stream"):
        status, answer = await running.post(path, body)
        assert status == 400
        assert answer["error"]["param"] == field
        assert field in answer["error"]["message"]


async def test_the_gate_can_count_it(running):
    assert running.emulator.app.state.count_prompt_tokens(BODY) == [3]


async def test_only_posts(running):
    async with aiohttp.ClientSession() as http, http.get(running.url + "/generate") as response:
        assert response.status == 405
