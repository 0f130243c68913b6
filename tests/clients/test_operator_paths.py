"""An endpoint that acts on the engine is reached with an operator's key, and in no other way."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import aiohttp
import pytest
from aiohttp import web
from schedsvc_client.testing import FakeScheduler
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.operator_paths import OPERATOR_PATHS
from schedsvc_vllm.paths import TENANT_PATHS, canonical
from schedsvc_vllm.routes import GATED_PATHS
from schedsvc_vllm.settings import Settings, SettingsError
from starlette.routing import Route
from yarl import URL

from schedsvc_lab.emulator.app import Emulator
from schedsvc_lab.emulator.settings import EmulatorSettings
from schedsvc_lab.engine import load_profile

from .asgi import Exchange, owner, start
from .path_lists import READ_PATHS, UNSIZED_PATHS, lists_of
from .upstreams import POOL, listening, proxy

ROOT = Path(__file__).resolve().parents[2]
METHODS = ("POST", "GET", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "get")
# Headers of a request, and the status if operators' keys are set.
CALLERS: dict[str, tuple[list[tuple[bytes, bytes]], int]] = {
    "none": ([], 401),
    "empty": ([(b"authorization", b"Bearer ")], 401),
    "tenant": ([(b"authorization", b"Bearer tenant")], 403),
    "tenant in Anthropic's header": ([(b"x-api-key", b"tenant")], 403),
    "wrong": ([(b"authorization", b"Bearer operato")], 403),
    "operator": ([(b"authorization", b"Bearer operator")], 200),
    "operator in Anthropic's header": ([(b"x-api-key", b"operator")], 200),
    "twice": ([(b"authorization", b"Bearer operator"), (b"authorization", b"Bearer tenant")], 400),
}
SPELLINGS: tuple[Callable[[str], str], ...] = (
    lambda path: path,
    lambda path: path + "/",
    lambda path: "/" + path,
    lambda path: "/." + path + "/.",
    lambda path: "/x/.." + path,
    lambda path: "/tokenize/%2e%2E" + path,
    lambda path: "/" + path[1:].replace("/", "%2F"),
    lambda path: f"/%{ord(path[1]):02x}{path[2:]}",
    lambda path: f"/%25{ord(path[1]):02x}{path[2:]}",
    lambda path: path.upper(),
    lambda path: path + "/below",
    lambda path: "/prefix" + path,  # which a server strips that runs with --root-path
    lambda path: path + "/../x",  # which Starlette hands to an application mounted there
    # A server that decodes once and resolves dots reads the path; one that decodes twice does not.
    lambda path: path + "/%252e%252e/..",
    lambda path: path + "?reset_external=true",
)


class App:
    """Serves every path, and keeps each request that reached it."""

    def __init__(self) -> None:
        self.reached: list[tuple[str, str]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append((scope["method"], scope["path"]))
        await send(start(200, b"text/plain"))
        await send({"type": "http.response.body", "body": b"done"})


@pytest.fixture
def variables(fake: FakeScheduler, tmp_path: Path) -> dict[str, str]:
    """Return the settings of a gate whose tenants and operators have keys."""
    (tmp_path / "tenants").write_text("tenant\n")
    (tmp_path / "operators").write_text("another\noperator\n")
    return {
        "SCHEDSVC_TARGET": fake.target,
        **POOL,
        "SCHEDSVC_API_KEYS_FILE": str(tmp_path / "tenants"),
        "SCHEDSVC_OPERATOR_KEYS_FILE": str(tmp_path / "operators"),
    }


async def ask(
    gate: Gate, raw: str, method: str = "POST", caller: str = "none", root: str = ""
) -> Exchange:
    """Send a request as uvicorn hands it on: the path decoded once, and as it was written."""
    target = raw.partition("?")[0]
    exchange = Exchange(gate, b"{}", root + unquote(target), owner=owner(), method=method)
    exchange.scope["raw_path"] = (root + target).encode()
    exchange.scope["root_path"] = root
    exchange.scope["headers"] += CALLERS[caller][0]
    return await exchange.run()


def cases() -> list[tuple[str, str, str]]:
    """Combine each spelling of a path, a method and a caller so that any three occur together."""
    return [
        (spelling(path), METHODS[(number + each + turn) % len(METHODS)], caller)
        for number, path in enumerate(sorted(OPERATOR_PATHS))
        for each, spelling in enumerate(SPELLINGS)
        for turn, caller in enumerate(CALLERS)
    ]


@pytest.mark.parametrize("ungated", ["refuse", "pass"])
@pytest.mark.parametrize("root", ["", "/engine"])
async def test_gate_without_operator_keys_passes_no_operator_path(
    variables: dict[str, str], ungated: str, root: str
) -> None:
    del variables["SCHEDSVC_OPERATOR_KEYS_FILE"]
    app = App()
    gate = Gate(app, Settings.from_environment({**variables, "SCHEDSVC_UNGATED": ungated}))
    for raw, method, caller in cases():
        refused = await ask(gate, raw, method, caller, root)
        assert app.reached == [], (method, raw, caller)
        found = (refused.status, refused.error["code"])
        assert found == (501, "operator_endpoint"), (method, raw, caller)
    await gate._close()


@pytest.mark.parametrize("ungated", ["refuse", "pass"])
@pytest.mark.parametrize("root", ["", "/engine"])
async def test_gate_with_operator_keys_passes_their_bearer_alone(
    variables: dict[str, str], ungated: str, root: str
) -> None:
    app = App()
    gate = Gate(app, Settings.from_environment({**variables, "SCHEDSVC_UNGATED": ungated}))
    for raw, method, caller in cases():
        app.reached.clear()
        answered = await ask(gate, raw, method, caller, root)
        expected = CALLERS[caller][1]
        assert answered.status == expected, (method, raw, caller)
        path = root + str(canonical(raw.partition("?")[0].encode()))
        reached = [(method, path)] if expected == 200 else []
        assert app.reached == reached, (method, raw, caller)
    await gate._close()


async def test_gate_refusal_of_an_operator_path_names_the_setting(
    variables: dict[str, str],
) -> None:
    del variables["SCHEDSVC_OPERATOR_KEYS_FILE"]
    gate = Gate(App(), Settings.from_environment(variables))
    refused = await ask(gate, "//sleep/", "POST", "tenant")
    assert refused.error["message"].startswith("/sleep is for operators of this engine")
    assert "SCHEDSVC_OPERATOR_KEYS_FILE" in refused.error["message"]
    assert refused.answer_headers["x-should-retry"] == "false"
    await gate._close()


async def test_gate_with_operator_keys_serves_tenants_as_before(variables: dict[str, str]) -> None:
    app = App()
    gate = Gate(app, Settings.from_environment(variables))
    for path in sorted(TENANT_PATHS):
        assert (await ask(gate, path, "POST", "tenant")).status == 200
        refused = await ask(gate, path, "POST", "operator")
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
    for path in ("/health", "/load", "/ping", "/v1/models", "/version", "/docs/", "/x%2Fy"):
        assert (await ask(gate, path, "GET", "tenant")).status == 200
        assert app.reached[-1] == ("GET", unquote(path))
    await gate._close()


@pytest.mark.parametrize("raw", ["/server_info%00", "/server_info;a=b", "/x\\..\\server_info"])
async def test_gate_refuses_a_get_without_a_canonical_path(
    variables: dict[str, str], raw: str
) -> None:
    app = App()
    gate = Gate(app, Settings.from_environment(variables))
    assert (await ask(gate, raw, "GET", "operator")).status == 400
    assert app.reached == []
    await gate._close()


async def test_gate_closes_a_websocket_to_an_operator_path(variables: dict[str, str]) -> None:
    gate = Gate(App(), Settings.from_environment({**variables, "SCHEDSVC_UNGATED": "pass"}))
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def keep(message: Any) -> None:
        sent.append(message["type"])

    await gate({"type": "websocket", "path": "/slots/", "headers": []}, receive, keep)
    assert sent == ["websocket.close"]


async def test_gate_with_wrong_settings_takes_no_operator_key(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**variables, "SCHEDSVC_POOL_GATES": "many"}.items():
        monkeypatch.setenv(name, value)
    app = App()
    refused = await ask(Gate(app), "/sleep", "POST", "operator")
    assert (refused.status, app.reached) == (501, [])


async def test_gate_takes_no_api_key_of_vllm_as_an_operators(variables: dict[str, str]) -> None:
    app = App()
    gate = Gate(app, Settings.from_environment(variables))
    for key, status in (("operator", 403), ("another", 200)):
        exchange = Exchange(
            gate,
            b"{}",
            "/sleep",
            {"authorization": f"Bearer {key}"},
            owner=owner(args=SimpleNamespace(api_key=["operator"])),
        )
        assert (await exchange.run()).status == status
    await gate._close()


@pytest.mark.parametrize("tenants", ["SCHEDSVC_API_KEYS_FILE", "VLLM_API_KEY"])
def test_settings_refuse_a_key_of_tenants_and_operators(
    variables: dict[str, str], tenants: str
) -> None:
    del variables["SCHEDSVC_API_KEYS_FILE"]
    shared = "operator" if tenants == "VLLM_API_KEY" else variables["SCHEDSVC_OPERATOR_KEYS_FILE"]
    with pytest.raises(SettingsError, match="SCHEDSVC_OPERATOR_KEYS_FILE: holds a key of"):
        Settings.from_environment({**variables, tenants: shared})


@pytest.mark.parametrize("path", ["/sleep", "/SLEEP", "/fault_tolerance/status"])
def test_settings_open_no_operator_path_to_tenants(variables: dict[str, str], path: str) -> None:
    with pytest.raises(SettingsError, match=f"SCHEDSVC_UNGATED: {path} acts on the engine"):
        Settings.from_environment({**variables, "SCHEDSVC_UNGATED": f"/v1/embeddings,{path}"})


def test_settings_refuse_a_file_without_operator_keys(
    variables: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "operators").write_text("\n \n")
    with pytest.raises(SettingsError, match=r"SCHEDSVC_OPERATOR_KEYS_FILE: .* holds no key"):
        Settings.from_environment(variables)


class Upstreamed:
    """Serves every path and method, behind the proxy."""

    def __init__(self) -> None:
        self.reached: list[str] = []

    async def handle(self, request: web.Request) -> web.Response:
        if request.raw_path != "/metrics":  # which the proxy reads itself
            self.reached.append(request.raw_path.partition("?")[0])
        return web.Response(text="done")


@pytest.fixture
async def server() -> AsyncIterator[tuple[Upstreamed, str]]:
    made = Upstreamed()
    async with listening(made.handle) as url:
        yield made, url


@pytest.mark.parametrize("is_open", [False, True])
async def test_proxy_passes_an_operator_path_to_an_operator_alone(
    variables: dict[str, str], server: tuple[Upstreamed, str], is_open: bool
) -> None:
    if not is_open:
        del variables["SCHEDSVC_OPERATOR_KEYS_FILE"]
    seen, url = server
    async with proxy(variables, url) as front, aiohttp.ClientSession() as session:
        for number, path in enumerate(sorted(OPERATOR_PATHS)):
            raw = SPELLINGS[number % len(SPELLINGS)](path)
            for method, caller in itertools.product(
                ("POST", "GET", "HEAD", "OPTIONS", "DELETE"), ("none", "tenant", "operator")
            ):
                seen.reached.clear()
                headers = [(key.decode(), value.decode()) for key, value in CALLERS[caller][0]]
                target = URL(front + raw, encoded=True)
                async with session.request(method, target, headers=headers) as answered:
                    await answered.read()
                expected = CALLERS[caller][1] if is_open else 501
                assert answered.status == expected, (method, raw, caller)
                passed = [canonical(raw.partition("?")[0].encode())] if expected == 200 else []
                assert seen.reached == passed, (method, raw, caller)


def test_every_path_is_canonical_and_in_one_list() -> None:
    for path in GATED_PATHS | TENANT_PATHS | OPERATOR_PATHS | READ_PATHS | UNSIZED_PATHS:
        assert canonical(path.encode()) == path
        assert len(lists_of(path)) == 1, (path, lists_of(path))


@pytest.mark.parametrize(
    ("path", "lists"),
    [
        ("/v1/responses/{response_id}/cancel", ["tenants"]),
        ("/v1/responses/{response_id}", ["reads"]),
        ("/adapters/{adapter_name}", ["operators"]),
        ("/stop_everything", []),
    ],
)
def test_a_new_endpoint_is_in_no_list(path: str, lists: list[str]) -> None:
    assert lists_of(path) == lists


def test_every_endpoint_of_the_emulator_is_in_one_list() -> None:
    profile = load_profile("tiny-cpu")
    app = Emulator(EmulatorSettings(profile, profile.config(), "m")).app
    paths = {route.path for route in app.routes if isinstance(route, Route)}
    assert "/v1/completions" in paths
    assert [path for path in sorted(paths) if len(lists_of(path)) != 1] == []


def test_the_page_lists_every_path_of_tenants_and_operators() -> None:
    text = (ROOT / "docs" / "use" / "vllm.md").read_text()
    section = text[text.index("### Paths of tenants and of operators") :]
    section = section[: section.index("\n## ")]
    for path in TENANT_PATHS | OPERATOR_PATHS:
        assert f"`{path}`" in section, path
