"""Tests that no generating request passes the gate ungated, however its path is written."""

from __future__ import annotations

import itertools
import json
import posixpath
import random
from dataclasses import replace
from typing import Any
from urllib.parse import quote, unquote

import pytest
from schedsvc_client.testing import FakeScheduler
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.operator_paths import OPERATOR_PATHS
from schedsvc_vllm.paths import TENANT_PATHS, canonical
from schedsvc_vllm.routes import GATED_PATHS
from schedsvc_vllm.settings import Settings, SettingsError

from .asgi import Exchange, owner, start

VARIANTS = 500
METHODS = ("POST", "PUT", "PATCH", "DELETE", "GET", "HEAD", "post", "MERGE")


def nginx(raw: str) -> str:
    """Decodes once, merges slashes, resolves dots."""
    path = unquote(raw.partition("?")[0])
    return posixpath.normpath("/" + path.lstrip("/"))


def uvicorn(raw: str) -> str:
    """Decode once; Starlette matches the result, with or without a slash at the end."""
    path = unquote(raw.partition("?")[0])
    return path[:-1] if len(path) > 1 and path.endswith("/") else path


def go(raw: str) -> str:
    """Clean the path as Go's ServeMux does, which then redirects to the result."""
    path = unquote(raw.partition("?")[0])
    return posixpath.normpath("/" + path.lstrip("/"))


def node(raw: str) -> str:
    """Express: decodes, in any case, with or without a slash at the end."""
    path = unquote(raw.partition("?")[0]).lower()
    return path[:-1] if len(path) > 1 and path.endswith("/") else path


def twice(raw: str) -> str:
    """Pass the path through two of them in a row."""
    return nginx(quote(nginx(raw)))


def java(raw: str) -> str:
    """Drop the parameters of a segment, as Tomcat does."""
    path = unquote(raw.partition("?")[0])
    return posixpath.normpath("/".join(part.partition(";")[0] for part in path.split("/")))


SERVERS = (nginx, uvicorn, go, node, twice, java)


def quote_all(text: str) -> str:
    return "".join(f"%{byte:02x}" for byte in text.encode())


def spellings(path: str, rnd: random.Random) -> str:
    """Write a path in some way that one of the servers may take for it."""
    text = path
    for _ in range(rnd.randrange(1, 5)):
        at = rnd.randrange(len(text) + 1)
        slash = text.find("/", rnd.randrange(len(text)))
        slash = max(slash, 0)
        text = rnd.choice(
            (
                text[:slash] + "/" + text[slash:],
                text[:slash] + "/." + text[slash:],
                text[:slash] + "/x/.." + text[slash:],
                text[:slash] + "/%2e%2E" + text[slash:] if slash else "/y/%2e%2e" + text,
                text + "/",
                text + "//",
                text + "/.",
                "/tokenize/.." + text,
                "/tokenize;/.." + text,
                text[:slash] + ";a=b" + text[slash:],
                text[:slash] + text[slash:].replace("/", "%2F", 1),
                text[:slash] + text[slash:].replace("/", "\\", 1),
                text.upper() if rnd.random() < 0.3 else text.title(),
                text[:at] + quote_all(text[at : at + 1] or " ") + text[at + 1 :],
                text.replace("%", "%25", 1),
                text[:at] + rnd.choice(("%00", "\t", "%0a", " ", "#", "\u2044")) + text[at:],
            )
        )
    return text if text.startswith("/") else "/" + text


class App:
    """Generates for every path that one of the servers maps to a generating one."""

    def __init__(self) -> None:
        self.reached: list[tuple[str, str]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/metrics":
            await send(start(404, b"text/plain"))
            return
        raw = scope.get("raw_path") or scope["path"].encode()
        self.reached.append((scope["method"], raw.decode("latin-1")))
        await receive()
        await send(start(200, b"application/json"))
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        await send({"type": "http.response.body", "body": json.dumps({"usage": usage}).encode()})


BODIES: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": [1]},
    "messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "input": {"input": "x"},
    "token_ids": {"token_ids": [1], "sampling_params": {}},
    "inputs": {"inputs": "x"},
}


async def send(gate: Gate, raw: str, method: str, body: bytes) -> Exchange:
    exchange = Exchange(gate, body, unquote(raw), owner=owner(), method=method)
    exchange.scope["raw_path"] = raw.encode("utf-8")
    return await exchange.run()


@pytest.mark.parametrize("path", sorted(GATED_PATHS))
async def test_no_spelling_of_a_path_gets_round_the_gate(fake: FakeScheduler, path: str) -> None:
    rnd = random.Random(path)
    app = App()
    gate = Gate(app, Settings(target=fake.target))
    body = b"{}"
    for _ in range(VARIANTS):
        raw, method = spellings(path, rnd), rnd.choice(METHODS)
        admitted = len(fake.admits)
        before = len(app.reached)
        body = json.dumps(rnd.choice(list(BODIES.values()))).encode()
        await send(gate, raw, method, body)
        if len(app.reached) == before or len(fake.admits) > admitted:
            continue
        [(method, reached)] = app.reached[before:]
        taken_for = {server(reached) for server in SERVERS}
        generates = method not in ("HEAD", "GET") and taken_for & GATED_PATHS
        assert not generates, f"{method} {raw} reached the engine as {reached}, not admitted"
    if gate._runtime is not None:
        await gate._close()


async def test_no_spelling_of_an_operator_path_reaches_the_engine(fake: FakeScheduler) -> None:
    app = App()
    gate = Gate(app, Settings(target=fake.target, refuse_ungated=False))
    for path in sorted(OPERATOR_PATHS):
        rnd = random.Random(path)
        for _ in range(VARIANTS // 5):
            raw, method = spellings(path, rnd), rnd.choice((*METHODS, "OPTIONS"))
            refused = await send(gate, raw, method, b"{}")
            assert app.reached == [], f"{method} {raw} reached the engine"
            assert refused.status in (400, 501)
    await gate._close()


@pytest.mark.parametrize(
    "raw",
    ["//v1/completions", "/v1/completions/", "/v1//completions", "/v1/x/../completions",
     "/v1/%63ompletions", "/v1%2Fcompletions", "/%2576%31/completions", "/./v1/completions/."],
)  # fmt: skip
async def test_other_spellings_are_admitted_and_reach_the_engine_as_one(
    fake: FakeScheduler, raw: str
) -> None:
    app = App()
    gate = Gate(app, Settings(target=fake.target))
    answered = await send(gate, raw, "POST", b'{"prompt": [1, 2]}')
    assert answered.status == 200
    assert len(fake.admits) == 1
    assert app.reached == [("POST", "/v1/completions")]
    await gate._close()


async def test_unknown_path_is_refused_unless_a_list_opens_it(
    fake: FakeScheduler,
) -> None:
    app = App()
    settings = Settings(target=fake.target)
    for path in ("/v1/systemone", "/generative_scoring", "/v1/Completions", "/anything"):
        refused = await Exchange(Gate(app, settings), b"{}", path).run()
        assert (refused.status, refused.error["code"]) == (501, "not_gated")
        assert refused.answer_headers["x-should-retry"] == "false"
    assert app.reached == []
    opened = replace(settings, open_paths=frozenset({"/v1/embeddings"}))
    for path in ("/v1/embeddings", "//v1/embeddings/", "/tokenize"):
        assert (await Exchange(Gate(app, opened), b"{}", path, owner=owner()).run()).status == 200
    passing = replace(settings, refuse_ungated=False)
    passed = await Exchange(Gate(app, passing), b"{}", "/anything", owner=owner()).run()
    assert passed.status == 200
    assert [path for _, path in app.reached] == [
        "/v1/embeddings", "/v1/embeddings", "/tokenize", "/anything",
    ]  # fmt: skip
    assert fake.admits == []


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_a_gated_path_is_only_posted_to(fake: FakeScheduler, method: str) -> None:
    app = App()
    refused = await Exchange(
        Gate(app, Settings(target=fake.target)), b"", "/v1//completions", method=method
    ).run()
    assert refused.status == 405
    assert refused.answer_headers["allow"] == "POST"
    assert app.reached == []
    preflight = Exchange(Gate(app, Settings(target=fake.target)), b"", method="OPTIONS")
    assert (await preflight.run()).status == 200


async def test_a_path_without_a_canonical_form_is_refused(fake: FakeScheduler) -> None:
    app = App()
    for raw in ("/v1/completions%00", "/v1\\completions", "/tokenize%0a", "/v1;x/completions%23"):
        refused = await send(Gate(app, Settings(target=fake.target)), raw, "POST", b"{}")
        assert refused.status == 400
        assert "characters" in refused.error["message"]
    assert app.reached == []


async def test_a_websocket_is_refused_unless_everything_passes(fake: FakeScheduler) -> None:
    seen: list[str] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def keep(message: Any) -> None:
        sent.append(message)

    settings = Settings(target=fake.target)
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": [], "app": owner()}
    await Gate(app, settings)(scope, receive, keep)
    assert [message["type"] for message in sent] == ["websocket.close"]
    assert seen == []
    await Gate(app, replace(settings, refuse_ungated=False))(scope, receive, keep)
    assert seen == ["websocket"]


def test_a_canonical_path_is_canonical() -> None:
    for path in itertools.chain(GATED_PATHS, TENANT_PATHS):
        assert canonical(path.encode()) == path
    assert canonical(b"/") == canonical(b"//") == canonical(b"/x/..") == "/"
    assert canonical(b"v1/completions") is None
    assert canonical(b"/" + b"%25" * 20 + b"41") is None  # too often encoded to be honest


@pytest.mark.parametrize("key", [None, "Bearer wrong"])
@pytest.mark.parametrize("path", ["/tokenize", "/v1/responses/render", "/generative_scoring"])
async def test_with_keys_what_is_free_needs_one_too(
    fake: FakeScheduler, monkeypatch: pytest.MonkeyPatch, path: str, key: str | None
) -> None:
    settings = Settings.from_environment(
        {"SCHEDSVC_TARGET": fake.target, "VLLM_API_KEY": "right", "SCHEDSVC_UNGATED": path}
    )
    app = App()
    gate = Gate(app, settings)
    headers = {"authorization": key} if key else {}
    refused = await Exchange(gate, b"{}", path, headers, owner=owner()).run()
    assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
    assert app.reached == []
    headers = {"authorization": "Bearer right"}
    assert (await Exchange(gate, b"{}", path, headers, owner=owner()).run()).status == 200
    await gate._close()


@pytest.mark.parametrize("value", ["/v1/embeddings/", "v1/embeddings", "open", "/a,//b"])
def test_a_wrong_list_of_open_paths_is_named(value: str) -> None:
    with pytest.raises(SettingsError, match="SCHEDSVC_UNGATED: must be refuse, pass, or paths"):
        Settings.from_environment({"SCHEDSVC_TARGET": "x:1", "SCHEDSVC_UNGATED": value})


@pytest.mark.parametrize("path", sorted(TENANT_PATHS | GATED_PATHS))
def test_table_of_spellings_agrees_with_the_rules(path: str) -> None:
    # With another slash it is not in the table, so the rules decide.
    assert canonical(path.encode()) == canonical(b"/" + path.encode()) == path
