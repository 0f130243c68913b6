"""Tests that without a credential a client reads only what a probe needs, and no response."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from schedsvc_client.testing import FakeScheduler
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.settings import Settings, SettingsError
from yarl import URL

from .issuer import AUDIENCE, ISSUER, Signer
from .upstreams import POOL, listening, proxy

OPEN = ("/health", "/ping", "/version")
CLOSED = (
    "/", "/docs", "/load", "/metrics", "/openapi.json", "/v1/models/m", "/v1/responses/resp_1",
    "//health", "/health/", "/x/../health", "/%68ealth", "/HEALTH", "/health/%2e%2e/docs",
    "//v1/models", "/prefix/health",
)  # fmt: skip


class Store:
    """Keeps responses as vLLM does: by the body's `request_id`."""

    def __init__(self) -> None:
        self.kept: dict[str, dict[str, Any]] = {}
        self.reached: list[tuple[str, str]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = request.raw_path.partition("?")[0]
        self.reached.append((request.method, path))
        if path == "/v1/responses" and request.method == "POST":
            return await self._respond(request)
        if path == "/v1/models":
            return web.json_response({"data": [{"id": "m", "max_model_len": 1024}]})
        kept = self.kept.get(request.path.removeprefix("/v1/responses/").partition("/")[0])
        return web.json_response(kept if kept is not None else {"path": path})

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        response = {"id": asked["request_id"], "input": asked["input"]}
        response["earlier"] = self.kept.get(asked.get("previous_response_id"))
        self.kept[response["id"]] = response
        if not asked.get("stream"):
            return web.json_response(response)
        streamed = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await streamed.prepare(request)
        event = {"type": "response.completed", "response": response}
        text = f"event: response.completed\ndata: {json.dumps(event)}\n\n"
        await streamed.write(text.encode())
        await streamed.write_eof()
        return streamed


@pytest.fixture
async def store() -> AsyncIterator[tuple[Store, str]]:
    made = Store()
    async with listening(made.handle) as url:
        yield made, url


@pytest.fixture
def variables(fake: FakeScheduler, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "tenants").write_text("a\nb\n")
    (tmp_path / "operators").write_text("operator\n")
    (tmp_path / "secret").write_text("5" * 64 + "\n")
    (tmp_path / "jwks").write_text(json.dumps({"keys": [Signer("EdDSA", "1").jwk]}))
    return {
        "SCHEDSVC_TARGET": fake.target,
        **POOL,
    }


def checks(tmp_path: Path) -> dict[str, dict[str, str]]:
    """Return each way in which a gate asks for a credential."""
    return {
        "list": {"SCHEDSVC_API_KEYS_FILE": str(tmp_path / "tenants")},
        "vllm": {"VLLM_API_KEY": "a"},
        "scheduler": {"SCHEDSVC_API_KEYS_FROM": "scheduler"},
        "jwt": {
            "SCHEDSVC_JWT_ISSUER": ISSUER,
            "SCHEDSVC_JWT_AUDIENCE": AUDIENCE,
            "SCHEDSVC_JWT_JWKS_FILE": str(tmp_path / "jwks"),
        },
        "certificates": {
            "SCHEDSVC_CERTIFICATE_TENANTS": "{tenant}.clients.example",
            "SCHEDSVC_XFCC_SET_BY": "envoy",
        },
    }


async def status(
    session: aiohttp.ClientSession, url: str, method: str = "GET", key: str = "", **headers: str
) -> int:
    if key:
        headers["authorization"] = f"Bearer {key}"
    target = URL(url, encoded=True)
    async with session.request(method, target, headers=headers) as answered:
        await answered.read()
        return answered.status


@pytest.mark.parametrize("check", ["list", "vllm", "scheduler", "jwt", "certificates"])
@pytest.mark.parametrize("ungated", ["refuse", "pass"])
async def test_a_request_without_a_credential_reads_only_probes_and_models(
    variables: dict[str, str], store: tuple[Store, str], tmp_path: Path, check: str, ungated: str
) -> None:
    seen, url = store
    given = {**variables, **checks(tmp_path)[check], "SCHEDSVC_UNGATED": ungated}
    async with proxy(given, url) as front, aiohttp.ClientSession() as session:
        for path, method in itertools.product(CLOSED, ("GET", "HEAD")):
            seen.reached.clear()
            assert await status(session, front + path, method) == 401, (method, path)
            assert [at for _, at in seen.reached if at not in ("/metrics", "/v1/models")] == []
        for path, method in itertools.product((*OPEN, "/v1/models"), ("GET", "HEAD")):
            assert await status(session, front + path, method) == 200, (method, path)
        for path in (*OPEN, *CLOSED):
            assert await status(session, front + path, "OPTIONS") == 200, path


@pytest.mark.parametrize("given", ["on", "off"])
async def test_a_setting_each_opens_the_models_and_the_metrics(
    variables: dict[str, str], store: tuple[Store, str], tmp_path: Path, given: str
) -> None:
    variables |= checks(tmp_path)["list"]
    variables |= {"SCHEDSVC_MODELS_OPEN": given, "SCHEDSVC_METRICS_OPEN": given}
    expected = 200 if given == "on" else 401
    async with proxy(variables, store[1]) as front, aiohttp.ClientSession() as session:
        for path in ("/v1/models", "/metrics"):
            assert await status(session, front + path) == expected
            assert await status(session, front + path, key="a") == 200
            assert await status(session, front + path, key="wrong") == expected


async def test_an_operators_key_reads_the_metrics_and_no_tenants_path(
    variables: dict[str, str], store: tuple[Store, str], tmp_path: Path
) -> None:
    variables |= checks(tmp_path)["list"]
    variables["SCHEDSVC_OPERATOR_KEYS_FILE"] = str(tmp_path / "operators")
    async with proxy(variables, store[1]) as front, aiohttp.ClientSession() as session:
        assert await status(session, f"{front}/metrics", key="operator") == 200
        assert await status(session, f"{front}/docs", key="operator") == 401


async def test_a_gate_that_asks_for_no_credential_passes_every_read(
    variables: dict[str, str], store: tuple[Store, str]
) -> None:
    async with proxy(variables, store[1]) as front, aiohttp.ClientSession() as session:
        for path in (*OPEN, "/docs", "/metrics", "/load", "//health"):
            assert await status(session, front + path) == 200, path


async def test_a_websocket_needs_a_credential(variables: dict[str, str], tmp_path: Path) -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def keep(message: Any) -> None:
        seen.append(message["type"])

    given = {**variables, **checks(tmp_path)["list"], "SCHEDSVC_UNGATED": "pass"}
    gate = Gate(app, Settings.from_environment(given))
    for headers in ([], [(b"authorization", b"Bearer wrong")], [(b"authorization", b"Bearer a")]):
        await gate({"type": "websocket", "path": "/v1/x", "headers": headers}, receive, keep)
    assert seen == ["websocket.close", "websocket.close", "websocket"]
    await gate._close()


async def respond(
    session: aiohttp.ClientSession, front: str, key: str, tenant: str = "", **fields: Any
) -> tuple[int, dict[str, Any]]:
    """Ask for a response; return its status and itself."""
    headers = {"authorization": f"Bearer {key}", "x-tenant-id": tenant}
    url, body = f"{front}/v1/responses", {"input": "Hi", **fields}
    async with session.post(url, json=body, headers=headers) as answered:
        text = await answered.text()
    if answered.content_type == "text/event-stream":
        return answered.status, json.loads(text.partition("data: ")[2])["response"]
    return answered.status, json.loads(text)


SPELLINGS: tuple[Callable[[str], str], ...] = (
    lambda id_: f"/v1/responses/{id_}",
    lambda id_: f"/v1/responses/{id_}/",
    lambda id_: f"//v1//responses//{id_}",
    lambda id_: f"/v1/responses/x/../{id_}",
    lambda id_: f"/v1/responses/{id_}?stream=true&starting_after=0",
    lambda id_: f"/v1/responses/%72{id_[1:]}",
    lambda id_: f"/v1/responses/%2572{id_[1:]}",
    lambda id_: f"/v1/responses%2F{id_}",
)
#: Methods and ends of the path by which a client reads, stops or deletes a response.
USES = (("GET", ""), ("HEAD", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items"))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_found_by_its_tenant_alone(
    variables: dict[str, str], store: tuple[Store, str], tmp_path: Path, stream: bool
) -> None:
    seen, url = store
    variables |= checks(tmp_path)["list"]
    async with proxy(variables, url) as front, aiohttp.ClientSession() as session:
        made, response = await respond(session, front, "a", stream=stream)
        assert made == 200
        for spelling, (method, end) in itertools.product(SPELLINGS, USES):
            path, _, query = spelling(response["id"]).partition("?")
            target = f"{front}{path}{end}?{query}"
            for key, expected in (("a", 200), ("b", 404), ("", 401), ("wrong", 401)):
                seen.reached.clear()
                assert await status(session, target, method, key) == expected, (target, method, key)
                found = [(method, f"/v1/responses/{response['id']}{end}")]
                assert seen.reached == (found if expected == 200 else []), (target, method, key)


async def test_an_id_that_the_gate_did_not_make_is_not_found(
    variables: dict[str, str], store: tuple[Store, str], tmp_path: Path
) -> None:
    seen, url = store
    seen.kept["resp_1"] = {"id": "resp_1"}
    variables |= checks(tmp_path)["list"]
    async with proxy(variables, url) as front, aiohttp.ClientSession() as session:
        _, mine = await respond(session, front, "a")
        changed = mine["id"][:-1] + ("0" if mine["id"][-1] != "0" else "1")
        for id_ in ("resp_1", changed, mine["id"].upper(), mine["id"] + "0"):
            assert await status(session, f"{front}/v1/responses/{id_}", key="a") == 404, id_
        below = f"{front}/v1/responses/{mine['id']}/v1/responses/resp_1"
        assert await status(session, below, key="a") == 404


async def test_a_response_that_another_one_goes_on_from_is_the_tenants_own(
    variables: dict[str, str], store: tuple[Store, str], tmp_path: Path
) -> None:
    variables |= checks(tmp_path)["list"]
    async with proxy(variables, store[1]) as front, aiohttp.ClientSession() as session:
        _, first = await respond(session, front, "a", input="mine")
        found, second = await respond(session, front, "a", previous_response_id=first["id"])
        assert (found, second["earlier"]["input"]) == (200, "mine")
        for earlier in (first["id"], "resp_1", 5, [first["id"]], ""):
            refused, error = await respond(session, front, "b", previous_response_id=earlier)
            assert refused == 404
            assert error["error"]["param"] == "previous_response_id"
        assert (await respond(session, front, "b", previous_response_id=None))[0] == 200


async def test_a_client_chooses_no_id_of_a_response(
    variables: dict[str, str], store: tuple[Store, str], tmp_path: Path
) -> None:
    seen, url = store
    variables |= checks(tmp_path)["list"]
    async with proxy(variables, url) as front, aiohttp.ClientSession() as session:
        _, first = await respond(session, front, "a", input="mine")
        for more in ({}, {"priority": 3}):
            _, second = await respond(session, front, "b", request_id=first["id"], **more)
            assert second["id"] != first["id"]
            assert await status(session, f"{front}/v1/responses/{second['id']}", key="b") == 200
        assert seen.kept[first["id"]]["input"] == "mine"


@pytest.mark.parametrize("shared", [True, False])
async def test_a_response_is_its_tenants_after_a_restart_if_the_gates_share_a_secret(
    variables: dict[str, str], store: tuple[Store, str], tmp_path: Path, shared: bool
) -> None:
    variables |= checks(tmp_path)["list"]
    if shared:
        variables["SCHEDSVC_RESPONSE_KEY_FILE"] = str(tmp_path / "secret")
    async with aiohttp.ClientSession() as session:
        async with proxy(variables, store[1]) as front:
            _, response = await respond(session, front, "a")
        async with proxy(variables, store[1]) as front:
            path = f"/v1/responses/{response['id']}"
            assert await status(session, front + path, key="a") == (200 if shared else 404)
            assert await status(session, front + path, key="b") == 404


async def test_a_response_belongs_to_the_tenant_of_a_trusted_header(
    variables: dict[str, str], store: tuple[Store, str]
) -> None:
    variables["SCHEDSVC_TENANT_HEADERS"] = "x-tenant-id"
    async with proxy(variables, store[1]) as front, aiohttp.ClientSession() as session:
        _, response = await respond(session, front, "k", "a")
        path = f"{front}/v1/responses/{response['id']}"
        assert await status(session, path, **{"x-tenant-id": "a"}) == 200
        assert await status(session, path, key="k", **{"x-tenant-id": "b"}) == 404
        assert await status(session, path) == 404


def test_settings_refuse_a_short_secret_of_responses(
    variables: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("guess me\n")
    variables["SCHEDSVC_RESPONSE_KEY_FILE"] = str(tmp_path / "secret")
    with pytest.raises(SettingsError, match=r"SCHEDSVC_RESPONSE_KEY_FILE: .* has 8 bytes"):
        Settings.from_environment(variables)
