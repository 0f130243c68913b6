"""Records answers of a vLLM for the tests that read usage from them.

    python -m tests.vllm.answers http://127.0.0.1:8000 tests/clients/answers/vllm_0_32.yaml

The server has to serve the model of `programs`, behind the gate or not: inside vLLM the gate
changes no body. Each entry has the endpoint, the body of the answer, and the counts in it.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from schedsvc_vllm.routes import ROUTES
from schedsvc_vllm.usage import UsageReader

from . import programs
from .stack import chat, completion

OUTPUT_TOKENS = 3
_EVERY = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
_SAID: dict[str, Any] = chat("Tell me a story.", OUTPUT_TOKENS)
_ITEM = {"model": programs.MODEL, "input": "Tell me a story.", "max_output_tokens": OUTPUT_TOKENS}
_MESSAGE = {name: _SAID[name] for name in ("model", "messages", "max_tokens")}
_IDS = {
    "model": programs.MODEL,
    "token_ids": [5, 6, 7],
    "sampling_params": {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True},
}
#: Name, endpoint, body.
ASKED: list[tuple[str, str, dict[str, Any]]] = [
    ("completion", "/v1/completions", completion(9, OUTPUT_TOKENS)),
    ("two completions", "/v1/completions", completion(9, OUTPUT_TOKENS, n=2)),
    ("chat", "/v1/chat/completions", _SAID),
    ("response", "/v1/responses", _ITEM | {"metadata": {"cached_tokens": "100000"}}),
    ("message", "/v1/messages", _MESSAGE),
    ("generate", "/inference/v1/generate", _IDS),
]
STREAMED = ("completion", "chat", "response", "message")


def requests() -> list[tuple[str, str, dict[str, Any]]]:
    """Return all requests, whole and streamed."""
    streams = [
        (f"{name}, streamed", path, body | {"stream": True} | (_EVERY if "/comp" in path else {}))
        for name, path, body in ASKED
        if name in STREAMED
    ]
    return ASKED + streams


def ask(url: str, path: str, body: dict[str, Any]) -> str:
    """Return the body of an answer. Raises urllib.error.HTTPError."""
    headers = {"content-type": "application/json", "x-tenant-id": "truth-0"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        text: str = response.read().decode()
    return text


def counts(path: str, text: str, is_stream: bool) -> list[int | None]:
    """Return input, cached and output tokens as the proxy reads them."""
    reader = UsageReader(ROUTES[path].usage, is_stream=is_stream)
    reader.feed(text.encode(), True)
    return [reader.input_tokens, reader.cached_input_tokens, reader.output_tokens]


def record(url: str) -> str:
    """Return the file with all answers."""
    with urllib.request.urlopen(f"{url}/version", timeout=30) as response:
        version = json.load(response)["version"]
    entries = []
    for name, path, body in requests():
        text, is_stream = ask(url, path, body), bool(body.get("stream"))
        told = counts(path, text, is_stream)
        entry = {"name": name, "path": path, "stream": is_stream, "body": text, "counts": told}
        entries.append(entry)
    head = f"# Recorded from vLLM {version} by `python -m tests.vllm.answers`.\n"
    return head + yaml.dump(entries, Dumper=_Dumper, sort_keys=False, width=10**6)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)

if __name__ == "__main__":
    Path(sys.argv[2]).write_text(record(sys.argv[1]))
