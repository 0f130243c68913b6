import asyncio
import json

from schedsvc_lab.engine import Engine

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
DEEP = '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}"

COMPLETION_CASES = [
    ("{", None, "not valid JSON"),
    (b"\xff\xfe", None, "not valid JSON"),
    (DEEP, None, "not valid JSON"),
    ('{"prompt": "a", "temperature": NaN}', None, "not valid JSON"),
    ('{"prompt": "a", "max_tokens": ' + "9" * 5_000 + "}", None, "not valid JSON"),
    ("[]", None, "must be a JSON object, not an array"),
    ({}, "prompt", "Field required"),
    ({"prompt": None}, "prompt", "not null"),
    ({"prompt": 7}, "prompt", "not a number"),
    ({"prompt": {}}, "prompt", "not an object"),
    ({"prompt": ""}, "prompt", "must not be empty"),
    ({"prompt": []}, "prompt", "must not be empty"),
    ({"prompt": ["a", ""]}, "prompt", r"prompt[1]: must not be empty"),
    ({"prompt": ["a", 3]}, "prompt", r"prompt[1]: must be a string or an array"),
    ({"prompt": [1, "a"]}, "prompt", r"prompt[1]: must be a token id"),
    ({"prompt": [1, True]}, "prompt", r"prompt[1]: must be a token id"),
    ({"prompt": [1, -1]}, "prompt", r"prompt[1]: must be a token id"),
    ({"prompt": [1, 1 << 70]}, "prompt", r"prompt[1]: must be a token id"),
    ({"prompt": [[1], []]}, "prompt", r"prompt[1]: must not be empty"),
    ({"prompt": ["a"] * 1025}, "prompt", "at most 1024"),
    ({"prompt": ["a"] * 100, "n": 100}, "n", "100 prompts times 100"),
    ({"prompt": [1] * 2048}, "prompt", "maximum context length is 2048"),
    ({"prompt": "word " * 5_000}, "prompt", "maximum context length is 2048"),
    ({"prompt": "a", "max_tokens": 2048}, "max_tokens", "too large: 2048"),
    ({"prompt": "a", "max_tokens": 1 << 62}, "max_tokens", "too large"),
    ({"prompt": "a", "max_tokens": 1 << 64}, "max_tokens", "less than or equal"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"prompt": "a", "max_tokens": -5}, "max_tokens", "greater than or equal to 1"),
    ({"prompt": "a", "max_tokens": 2.5}, "max_tokens", "valid integer"),
    ({"prompt": "a", "max_tokens": "5"}, "max_tokens", "valid integer"),
    ({"prompt": "a", "min_tokens": 9, "max_tokens": 8}, "min_tokens", "at most the limit of 8"),
    ({"prompt": "a", "n": 0}, "n", "greater than or equal to 1"),
    ({"prompt": "a", "n": 1 << 40}, "n", "less than or equal to 128"),
    ({"prompt": "a", "stream": "yes"}, "stream", "valid boolean"),
    ({"prompt": "a", "priority": 1 << 63}, "priority", "less than or equal"),
    ({"prompt": "a", "temperature": -1}, "temperature", "greater than or equal to 0"),
    ({"prompt": "a", "stop": 5}, "stop", "valid string"),
    ({"prompt": "a", "stop": [""]}, "stop", "must not be empty"),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop", "at most 16"),
    ({"prompt": "a", "echo": True}, "echo", "not supported"),
    ({"prompt": "a", "logprobs": 1}, "logprobs", "not supported"),
    ({"prompt": "a", "stream_options": {}}, "stream_options", "only allowed where stream is true"),
    (
        {"prompt": "a", "stream": True, "stream_options": {"include_usage": 3}},
        "stream_options.include_usage",
        "valid boolean",
    ),
]

CHAT_CASES = [
    ({}, "messages", "Field required"),
    ({"messages": []}, "messages", "must not be empty"),
    ({"messages": "hi"}, "messages", "not a string"),
    ({"messages": ["hi"]}, "messages[0]", "must be an object"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "must be a string"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "must be a string"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content",
        r"messages[0].content[0]: must be",
    ),
    (
        {"messages": [{"role": "user", "content": "word " * 5_000}]},
        "messages",
        "reduce the length of messages",
    ),
    ({**CHAT, "max_completion_tokens": 9_999}, "max_completion_tokens", "too large: 9999"),
    ({**CHAT, "max_tokens": 9_999}, "max_tokens", "too large: 9999"),
    ({**CHAT, "logprobs": True}, "logprobs", "not supported"),
]


async def check(running, path, body, param, message, status=400):
    got, answer = await running.post(path, body)
    error = answer["error"]
    assert got == status == error["code"], answer
    assert error["param"] == param, answer
    assert message in error["message"], answer
    return error


async def test_wrong_completions_name_the_field_and_leave_nothing(running):
    for body, param, message in COMPLETION_CASES:
        error = await check(running, "/v1/completions", body, param, message)
        assert error["type"] == "BadRequestError"
    gauges = running.gauges
    assert (gauges.running, gauges.waiting, gauges.steps) == (0, 0, 0)


async def test_wrong_chats_name_the_field(running):
    for body, param, message in CHAT_CASES:
        await check(running, "/v1/chat/completions", body, param, message)
    assert running.gauges.steps == 0


async def test_another_model_is_not_found(running):
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", CHAT),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        body = {**body, "model": "gpt-9"}
        error = await check(running, path, body, "model", "`gpt-9` does not exist", 404)
        assert error["type"] == "NotFoundError"


async def test_wrong_tokenize_and_detokenize(running):
    await check(running, "/tokenize", {}, "prompt", "either prompt or messages")
    await check(running, "/tokenize", {"prompt": "a", **CHAT}, "prompt", "either prompt or")
    await check(running, "/tokenize", {"prompt": 5}, "prompt", "valid string")
    await check(running, "/detokenize", {}, "tokens", "Field required")
    await check(running, "/detokenize", {"tokens": "a"}, "tokens", "must be an array of token ids")
    await check(running, "/detokenize", {"tokens": [1, -1]}, "tokens", "tokens[1]")


async def test_a_wrong_priority_header_is_named(running):
    for value in ("high", "9" * 40):
        status, answer = await running.post(
            "/v1/completions", {"prompt": "a"}, **{"X-Vllm-Priority": value}
        )
        assert (status, answer["error"]["param"]) == (400, "x-vllm-priority")


async def test_a_body_that_is_too_large(running):
    body = b'{"prompt": "' + b"a" * (17 << 20) + b'"}'
    await check(running, "/v1/completions", body, None, "more than 16777216 bytes", 413)


async def test_unknown_paths_and_methods_have_the_same_form(running):
    status, text = await running.get("/v1/nothing")
    assert (status, json.loads(text)["error"]["code"]) == (404, 404)
    status, text = await running.get("/v1/completions")
    assert (status, json.loads(text)["error"]["code"]) == (405, 405)


async def test_a_dead_engine_answers_503_and_hangs_no_client(running, monkeypatch, caplog):
    class Broken(Engine):
        def finish_step(self):
            raise RuntimeError("a defect")

    engine = running.emulator.driver.engine
    monkeypatch.setattr(running.emulator.driver, "engine", Broken(engine.config, engine.cost))
    body = {"prompt": "a", "max_tokens": 5}
    async with asyncio.timeout(30):
        assert (await running.post("/v1/completions", body))[0] == 503
        assert (await running.post("/v1/completions", body))[0] == 503
        events = await running.events("/v1/completions", body)
        assert (await running.get("/health"))[0] == 503
    assert events[0]["error"]["code"] == 503
    assert "the engine has died" in caplog.text
