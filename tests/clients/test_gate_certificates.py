"""Tests tenants that a client certificate names: real certificates, and TLS over real sockets."""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import uvicorn
from schedsvc_client import TenantProof, api_key_hash
from schedsvc_client.testing import FakeScheduler
from schedsvc_client.v1 import tenants_pb2
from schedsvc_vllm import certificates, proxy_cli
from schedsvc_vllm.certificates import XFCC, CertificateSettings, read_patterns
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.launcher import LaunchError
from schedsvc_vllm.settings import Settings, SettingsError

from schedsvc.config import Config
from schedsvc.server import Server as Scheduler
from tests import forked
from tests.server.certificates import Authority, Pair

from .asgi import Engine, ask, owner
from .bench import Bench
from .test_proxy_start import POOL, PROXY, upstream
from .test_vllm_proxy import Server, behind

__all__ = ["behind", "upstream"]

DOMAIN = "spiffe://corp.test"
PATTERNS = f"{DOMAIN}/ns/*/sa/{{tenant}}, {{tenant}}.clients.test"
BY_CERTIFICATE = tenants_pb2.TENANT_PROOF_CERTIFICATE
HOUR = datetime.timedelta(hours=1)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def variables(target: str, **more: str) -> dict[str, str]:
    given = {"TARGET": target, "CERTIFICATE_TENANTS": PATTERNS} | more
    return {f"SCHEDSVC_{name}": value for name, value in given.items()}


def context_of(authority: Authority, pair: Pair | None) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=str(authority.file))
    if pair is not None:
        made.load_cert_chain(pair.cert_file, pair.key_file)
    return made


class Caller:
    """Asks a server over TLS: a connection for each certificate, which stays open."""

    def __init__(self, port: int, authority: Authority) -> None:
        self._url = f"https://localhost:{port}/v1/completions"
        self._authority = authority
        self._sessions: dict[Pair | None, aiohttp.ClientSession] = {}

    async def ask(self, pair: Pair | None, **headers: str) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of a completion. Raises aiohttp.ClientError."""
        if pair not in self._sessions:
            connector = aiohttp.TCPConnector(ssl=context_of(self._authority, pair))
            self._sessions[pair] = aiohttp.ClientSession(connector=connector)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        sent = {"content-type": "application/json"} | named
        async with self._sessions[pair].post(self._url, data=ask(), headers=sent) as answer:
            return answer.status, await answer.json()

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()


@asynccontextmanager
async def running(server: Any, authority: Authority) -> AsyncIterator[Caller]:
    bound = socket.create_server(("127.0.0.1", 0))
    caller = Caller(bound.getsockname()[1], authority)
    task = asyncio.create_task(server.serve([bound]))
    try:
        yield caller
    finally:
        await caller.close()
        server.should_exit = True
        await task


def files_of(authority: Authority, *more: str) -> list[str]:
    own = authority.issue("server")
    files = {"certfile": own.cert_file, "keyfile": own.key_file, "ca-certs": authority.file}
    return [*(f"--ssl-{name}={file}" for name, file in files.items()), *more]


@asynccontextmanager
async def proxied(
    authority: Authority, upstream: str, environment: dict[str, str], *arguments: str
) -> AsyncIterator[Caller]:
    """Run the proxy as its command makes it."""
    words = ["--upstream", upstream, *files_of(authority, *arguments)]
    options, settings = proxy_cli.prepare(words, environment)
    gate = proxy_cli.build(options, settings)
    async with running(proxy_cli.server_for(gate, options), authority) as caller:
        yield caller


class App:
    """Serves an engine with the gate in it; the app names its server, as vLLM's does."""

    def __init__(self, settings: Settings, **options: Any) -> None:
        self.engine, self._owner = Engine(), owner()
        self.gate = Gate(self._inner, settings)
        self.server = uvicorn.Server(uvicorn.Config(self, log_config=None, **options))
        self._owner.state.server = self.server

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.gate(scope | {"app": self._owner}, receive, send)

    async def _inner(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await self.engine(scope, receive, send)
            return
        for event in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{event}.complete"})


@pytest.fixture
async def engine(fake: FakeScheduler, authority: Authority) -> AsyncIterator[Caller]:
    """Run the gate inside a server that ends TLS: vLLM's way."""
    own = authority.issue("server")
    app = App(
        Settings.from_environment(variables(fake.target)),
        ssl_certfile=own.cert_file,
        ssl_keyfile=own.key_file,
        ssl_ca_certs=str(authority.file),
        ssl_cert_reqs=int(ssl.CERT_REQUIRED),
    )
    async with running(app.server, authority) as caller:
        yield caller


@pytest.fixture
async def proxy(
    fake: FakeScheduler, authority: Authority, behind: tuple[Server, str]
) -> AsyncIterator[Caller]:
    async with proxied(authority, behind[1], variables(fake.target)) as caller:
        yield caller


@pytest.fixture(params=["engine", "proxy"])
def caller(request: pytest.FixtureRequest) -> Caller:
    """Ask each of them in turn."""
    found: Caller = request.getfixturevalue(request.param)
    return found


async def test_a_certificate_names_the_tenant(
    caller: Caller, fake: FakeScheduler, authority: Authority
) -> None:
    acme = authority.issue("other", f"{DOMAIN}/ns/prod/sa/acme", "host.corp.test")
    beta = authority.issue("acme", "Beta.Clients.TEST")
    assert (await caller.ask(acme))[0] == 200
    # The gate ignores names that a client can choose; SDKs send some key.
    chosen = {"x_tenant_id": "x", "authorization": "Bearer none", XFCC: f"URI={DOMAIN}/ns/a/sa/x"}
    assert (await caller.ask(beta, **chosen))[0] == 200
    assert [(admit.tenant, admit.tenant_proof) for admit in fake.admits] == [
        ("acme", BY_CERTIFICATE),
        ("beta", BY_CERTIFICATE),
    ]


async def test_a_certificate_that_is_not_valid_is_cut_off(
    caller: Caller, fake: FakeScheduler, authority: Authority, tmp_path: Path
) -> None:
    name = f"{DOMAIN}/ns/prod/sa/acme"
    folder = tmp_path / "strangers"
    folder.mkdir()
    for pair in (
        None,
        Authority(folder).issue("stranger", name),
        authority.issue("expired", name, since=-2 * HOUR, until=-HOUR),
        authority.issue("early", name, since=HOUR, until=2 * HOUR),
    ):
        with pytest.raises(aiohttp.ClientError):
            await caller.ask(pair)
    assert (await caller.ask(authority.issue("valid", name)))[0] == 200
    assert len(fake.admits) == 1


REFUSED = {
    "two tenants": ((f"{DOMAIN}/ns/a/sa/acme", "beta.clients.test"), "several tenants"),
    "two names": (("acme.clients.test", "beta.clients.test"), "several tenants"),
    "two ids": ((f"{DOMAIN}/ns/a/sa/acme", f"{DOMAIN}/ns/b/sa/acme"), "it has 2 SPIFFE IDs"),
    "long": ((f"{DOMAIN}/ns/a/sa/{'a' * 257}",), "more than 256 bytes"),
    "another domain": (("spiffe://evil.test/ns/a/sa/acme",), "is needed"),
    "longer": ((f"{DOMAIN}/ns/a/sa/acme/x",), "is needed"),
    "any host": (("*.clients.test",), "is needed"),
    "deeper host": (("acme.x.clients.test",), "is needed"),
    "looks alike": (("https://corp.test/ns/a/sa/acme",), "is needed"),
    "common name": ((None,), "is needed"),
}


@pytest.mark.parametrize(("sans", "problem"), REFUSED.values(), ids=REFUSED.keys())
async def test_a_certificate_without_one_tenant_is_401(
    engine: Caller,
    fake: FakeScheduler,
    authority: Authority,
    sans: tuple[str | None, ...],
    problem: str,
) -> None:
    status, body = await engine.ask(authority.issue("acme.clients.test", *sans))
    assert (status, body["error"]["code"]) == (401, "invalid_certificate")
    assert problem in body["error"]["message"]
    assert fake.admits == []


async def test_a_connection_outlives_no_certificate(
    caller: Caller, fake: FakeScheduler, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server checks the dates only when the connection begins."""
    acme = authority.issue("acme", "acme.clients.test", until=HOUR)
    started_s = time.time()
    for passed_s, status in ((0, 200), (3_590, 200), (3_601, 401), (0, 200)):
        now_s = started_s + passed_s
        monkeypatch.setattr(certificates, "time", SimpleNamespace(time=lambda now_s=now_s: now_s))
        answered, body = await caller.ask(acme)
        assert answered == status, passed_s
        if status == 401:
            assert "it expired at" in body["error"]["message"]
    assert len(fake.admits) == 3


async def test_certificates_go_beside_keys(
    fake: FakeScheduler, authority: Authority, behind: tuple[Server, str], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-1\n")
    given = variables(fake.target, API_KEYS_FILE=str(keys))
    acme = authority.issue("acme", "acme.clients.test")
    unnamed = authority.issue("unnamed")
    async with proxied(authority, behind[1], given, "--ssl-cert-reqs=1") as caller:
        for pair, key, status in (
            (acme, "wrong", 200), (None, "sk-1", 200), (unnamed, "sk-1", 200),
            (None, "wrong", 401), (unnamed, "wrong", 401),
        ):  # fmt: skip
            answered, _ = await caller.ask(pair, authorization=f"Bearer {key}")
            assert answered == status, (pair, key)
    digest = api_key_hash("sk-1")
    assert [(admit.tenant, admit.api_key_sha256) for admit in fake.admits] == [
        ("acme", b""),
        ("", digest),
        ("", digest),
    ]


async def test_a_name_that_a_certificate_proves_has_a_flow(
    authority: Authority, behind: tuple[Server, str]
) -> None:
    scheduler = Scheduler(Config.model_validate({"listeners": [{"tcp": "127.0.0.1:0"}]}))
    await scheduler.start()
    try:
        given = variables(scheduler.targets[0])
        async with proxied(authority, behind[1], given) as caller:
            assert (await caller.ask(authority.issue("acme", "acme.clients.test")))[0] == 200
        rows = {row["tenant"]: row["granted"] for row in scheduler.driver.stats(9)["flows"]}
        assert rows == {"acme": 1, "unknown": 0}
    finally:
        await scheduler.stop(None)


async def forwarded(bench: Bench, *values: str) -> tuple[int, str, str]:
    """Ask with the proxy's header; return the status, the tenant and the problem."""
    exchange = bench.exchange(headers={})
    exchange.scope["headers"] += [(XFCC.encode(), value.encode()) for value in values]
    before = len(bench.fake.admits)
    await exchange.run()
    admits = bench.fake.admits[before:]
    if not admits:
        return exchange.status, "", exchange.error["message"]
    assert admits[0].tenant_proof in (0, BY_CERTIFICATE)
    return exchange.status, admits[0].tenant, ""


ID = f"{DOMAIN}/ns/a/sa/acme"
FORWARDED = [
    ((f'By=spiffe://corp.test/gate;Hash=0a;Subject="CN=a,O=\\"b;c\\"";URI={ID}',), 200, "acme"),
    ((f"uri={ID};dns=acme.clients.test;DNS=host.test;Cert=\"%2D\"",), 200, "acme"),
    ((f'Hash=1;URI="{ID}"',), 200, "acme"),
    (("Hash=1;URI=;DNS=beta.clients.test",), 200, "beta"),
    ((f"URI={ID};DNS=beta.clients.test",), 401, "several tenants"),
    ((f"URI={ID};URI={ID}2",), 401, "2 SPIFFE IDs"),
    ((f"URI={ID}2,Hash=1;URI={ID}",), 400, "envoy has to overwrite the header"),
    ((f"URI={ID}", f"URI={ID}"), 400, "occurs 2 times"),
    ((f'URI={ID};Subject="CN=a',), 400, "cannot be read from character 37 on"),
    ((f"URI={ID};x",), 400, "cannot be read from character 37 on"),
    ((f'Subject="URI={ID}"',), 401, "is needed"),
    ((f"By={ID}",), 401, "is needed"),
    (("",), 401, "is needed"),
    ((), 401, "is needed"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "status", "expected"), FORWARDED)
async def test_a_proxy_forwards_the_names(
    fake: FakeScheduler, values: tuple[str, ...], status: int, expected: str
) -> None:
    bench = Bench(fake, Settings.from_environment(variables(fake.target, XFCC_SET_BY="envoy")))
    answered, tenant, problem = await forwarded(bench, *values)
    assert answered == status, problem
    assert expected in (tenant or problem)
    await bench.gate._close()


async def test_the_header_counts_only_if_a_proxy_sets_it(fake: FakeScheduler) -> None:
    """If a proxy sets it, the proxy's own certificate is not its client's."""
    for more, named in (({}, "is needed"), ({"XFCC_SET_BY": "envoy"}, "acme")):
        settings = Settings.from_environment(variables(fake.target, **more))
        bench = Bench(fake, settings)
        _, tenant, problem = await forwarded(bench, f"URI={ID}")
        assert named in (tenant or problem)
        own = {"notAfter": "Jan  1 00:00:00 2100 GMT", "subjectAltName": (("URI", f"{ID}2"),)}
        scope = {"headers": [], "extensions": {certificates.EXTENSION: own}}
        if more:
            assert settings.certificates is not None
            assert settings.certificates.tenant(certificates.peer_certificate(scope), b"") is None
        else:
            proved = await bench.gate._identifier.prove(bench.gate._caller(scope))
            assert proved is not None
            assert (proved.tenant, proved.proof) == ("acme2", TenantProof.CERTIFICATE)
        await bench.gate._close()


def status_of(path: Path, context: ssl.SSLContext) -> int:
    """Return the status of a POST that a server on a Unix socket does not gate; 0: none yet."""
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    with closing(socket.socket(socket.AF_UNIX)) as plain:
        plain.settimeout(20)
        try:
            plain.connect(str(path))
            with context.wrap_socket(plain, server_hostname="localhost") as client:
                client.sendall(head)
                return int(client.recv(64).split()[1])
        except (FileNotFoundError, ConnectionRefusedError):
            return 0


def test_the_command_ends_tls(upstream: str, folder: Path, authority: Authority) -> None:
    """The command runs with its own event loop."""
    words = [*PROXY, "--upstream", upstream, "--uds", str(folder / "p"), *files_of(authority)]
    environment = os.environ | POOL | variables(f"unix:{folder}/none")
    acme = context_of(authority, authority.issue("acme", "acme.clients.test"))
    unnamed = context_of(authority, authority.issue("unnamed"))
    found = partial(status_of, folder / "p")
    with forked.started(words, partial(found, acme), env=environment, stderr=subprocess.PIPE):
        assert (found(acme), found(unnamed)) == (200, 401)


@pytest.mark.parametrize("http", ["httptools", "h11"])
async def test_a_server_that_shows_no_certificate_does_not_start(
    fake: FakeScheduler, authority: Authority, caplog: pytest.LogCaptureFixture, http: str
) -> None:
    caplog.set_level(logging.ERROR)
    settings = Settings.from_environment(variables(fake.target))
    app = App(settings, http=http)
    with socket.create_server(("127.0.0.1", 0)) as bound, pytest.raises(SystemExit):
        await app.server.serve([bound])
    told = {
        "h11": "the gate sees certificates only in uvicorn with httptools",
        "httptools": "this server asks no client for a certificate: give --ssl-ca-certs",
    }
    assert f"SCHEDSVC_CERTIFICATE_TENANTS: {told[http]}" in caplog.text
    behind_proxy = Settings.from_environment(variables(fake.target, XFCC_SET_BY="envoy"))
    async with running(App(behind_proxy, http=http).server, authority) as caller:
        with pytest.raises(aiohttp.ClientError):  # it serves, without TLS
            await caller.ask(None)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("https://corp.test/{tenant}", "must begin with spiffe://"),
        ("spiffe://corp.test/sa/acme", "must contain {tenant} once"),
        ("spiffe://corp.test/{tenant}/{tenant}", "must contain {tenant} once"),
        ("spiffe://*/{tenant}", "the trust domain must be written out"),
        ("spiffe://{tenant}/sa", "the trust domain must be written out"),
        ("spiffe://Corp.test/{tenant}", "the trust domain must be written out"),
        ("spiffe://corp.test/a*/{tenant}", "each part must be"),
        ("spiffe://corp.test//{tenant}", "each part must be"),
        ("spiffe://corp.test/../{tenant}", "each part must be"),
        ("{tenant}", "must end with a domain that is written out"),
        ("clients.{tenant}", "must end with a domain that is written out"),
        ("{tenant}.*", "must end with a domain that is written out"),
        ("{tenant}..test", "each part must be"),
        ("{tenant}.(x).test", "each part must be"),
    ],
)
def test_a_wrong_pattern_is_named(text: str, problem: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_environment(variables("unix:/s", CERTIFICATE_TENANTS=f"{PATTERNS},{text}"))
    assert str(caught.value).startswith(f"SCHEDSVC_CERTIFICATE_TENANTS: {text}: {problem}")


@pytest.mark.parametrize(
    ("pattern", "san", "tenant"),
    [
        ("spiffe://d/sa-{tenant}", ("URI", "spiffe://d/sa-a.b_c"), "a.b_c"),
        ("spiffe://d/{tenant}/*", ("URI", "spiffe://d/Acme/x"), "Acme"),
        ("spiffe://d/{tenant}", ("URI", "spiffe://d/.."), None),
        ("spiffe://d/{tenant}", ("URI", "SPIFFE://d/a"), None),
        ("spiffe://d/{tenant}", ("URI", "spiffe://d/a%2Fb"), None),
        ("spiffe://d/{tenant}", ("URI", "spiffe://d/a?b"), None),
        ("spiffe://d/{tenant}", ("URI", "spiffe://d/a\n"), None),
        ("spiffe://d.e/{tenant}", ("URI", "spiffe://dxe/a"), None),
        ("spiffe://d/{tenant}", ("DNS", "spiffe://d/a"), None),
        ("{tenant}-llm.A.test", ("DNS", "acme-llm.a.test"), "acme"),
        ("*.{tenant}.test", ("DNS", "pod-1.acme.test"), "acme"),
        ("{tenant}.test", ("DNS", "\u212aate.test"), None),
        ("{tenant}.test", ("DNS", "acme.test."), None),
        ("{tenant}.test", ("URI", "acme.test"), None),
        ("{tenant}.test", ("email", "acme.test"), None),
    ],
)
def test_a_pattern_takes_whole_names(
    pattern: str, san: tuple[str, str], tenant: str | None
) -> None:
    certificate = {"notAfter": "Jan  1 00:00:00 2100 GMT", "subjectAltName": (san,)}
    scope = {"extensions": {certificates.EXTENSION: certificate}}
    peer = certificates.peer_certificate(scope)
    assert CertificateSettings(read_patterns(pattern)).tenant(peer, b"") == tenant


def test_the_proxy_that_sets_the_header_needs_patterns() -> None:
    with pytest.raises(SettingsError, match="SCHEDSVC_CERTIFICATE_TENANTS is not set"):
        Settings.from_environment({"SCHEDSVC_TARGET": "unix:/s", "SCHEDSVC_XFCC_SET_BY": "envoy"})


def test_files_for_tls_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    own, other = authority.issue("server"), authority.issue("other")
    text = tmp_path / "text"
    text.write_text("no certificate")
    good = {"certfile": own.cert_file, "keyfile": own.key_file, "ca-certs": authority.file}
    for changes, problem in (
        ({"certfile": None}, f"--ssl-keyfile {own.key_file}: give --ssl-certfile FILE, too"),
        ({"certfile": None, "keyfile": None}, "--ssl-ca-certs .*: give --ssl-certfile FILE, too"),
        ({"keyfile": None}, f"--ssl-certfile {own.cert_file}: give --ssl-keyfile FILE, too"),
        ({"keyfile": other.key_file}, "--ssl-certfile .*: is no PEM that fits: KEY_VALUES"),
        ({"certfile": text}, "--ssl-certfile .*: is no PEM that fits"),
        ({"certfile": tmp_path / "none"}, "--ssl-certfile .*: No such file or directory"),
        ({"keyfile": tmp_path / "none"}, "--ssl-keyfile .*none: No such file or directory"),
        ({"ca-certs": text}, f"--ssl-ca-certs {text}: is no PEM that fits"),
        ({"ca-certs": None, "cert-reqs": 2}, "--ssl-cert-reqs 2: give --ssl-ca-certs FILE, too"),
    ):  # fmt: skip
        given = {name: file for name, file in (good | changes).items() if file is not None}
        words = ["--upstream", "http://h:1", *(f"--ssl-{n}={file}" for n, file in given.items())]
        with pytest.raises(LaunchError, match=problem):
            proxy_cli.prepare(words, variables("unix:/s"))
