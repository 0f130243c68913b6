"""Sends one request by an SDK, in the environment that has it: ask.py SDK URL TENANT WAY TOKENS.

Prints the SDK's view as one line of JSON: see Seen in tests/clients/interop_clients.py.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import anthropic
import openai
from langchain_openai import ChatOpenAI

SAID = [{"role": "user", "content": "Tell me a story."}]
RETRIES = 8


def with_anthropic(url: str, tenant: str, way: str, tokens: int) -> dict[str, Any]:
    retries = RETRIES if way == "retry" else 0
    headers = {"x-tenant-id": tenant}
    client = anthropic.Anthropic(
        base_url=url, api_key="any", max_retries=retries, default_headers=headers
    )
    asked: dict[str, Any] = {"model": "emulated", "messages": SAID, "max_tokens": tokens}
    asked["extra_body"] = {"emulated_output_tokens": tokens}
    try:
        if way in ("whole", "retry"):
            usage = client.messages.create(**asked).usage
            return {"usage": [usage.input_tokens, usage.output_tokens]}
        events = 0
        with client.messages.stream(**asked) as stream:
            for _ in stream.text_stream:
                events += 1
                if way == "leave":
                    return {"events": events}
            usage = stream.get_final_message().usage
        return {"usage": [usage.input_tokens, usage.output_tokens], "events": events, "ended": True}
    except anthropic.APIStatusError as error:
        return refused(error)


def with_langchain(url: str, tenant: str, way: str, tokens: int) -> dict[str, Any]:
    model = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="any",
        model="emulated",
        max_retries=RETRIES if way == "retry" else 0,
        default_headers={"x-tenant-id": tenant},
        extra_body={"emulated_output_tokens": tokens, "max_tokens": tokens},
    )
    try:
        if way in ("whole", "retry"):
            usage = model.invoke("Tell me a story.").usage_metadata
            assert usage is not None
            return {"usage": [usage["input_tokens"], usage["output_tokens"]]}
        events = 0
        for _ in model.stream("Tell me a story."):
            events += 1
            if way == "leave":
                return {"events": events}
        return {"events": events, "ended": True}
    except openai.APIStatusError as error:
        return refused(error)


def refused(error: Any) -> dict[str, Any]:
    told = error.response.json()["error"]
    after = error.response.headers.get("retry-after", "")
    return {"status": error.status_code, "code": told.get("code", ""), "after": after}


if __name__ == "__main__":
    sdk, url, tenant, way, tokens = sys.argv[1:]
    ask: Callable[..., dict[str, Any]] = {"anthropic": with_anthropic, "langchain": with_langchain}[
        sdk
    ]
    print(json.dumps(ask(url, tenant, way, int(tokens))))
