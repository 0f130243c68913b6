"""Combines each way to prove a tenant with each place that a client can write.

A cell is one request of the tenant `own`, whose client claims to be `victim` in one place. Its
outcome is the tenant that the scheduler charges, or a refusal. No front runs: a request arrives as
one would pass it on. A front drops the fields of `Evidence.sets` and writes the evidence. In the
places "copy ..." and "joined ..." it appends the evidence to the client's own field instead.

    python -m tests.clients.identity_matrix     prints the table
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import ssl
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from schedsvc_client import api_key_hash
from schedsvc_client.testing import FakeScheduler
from schedsvc_vllm import proxy_cli
from schedsvc_vllm.certificates import XFCC
from schedsvc_vllm.settings import Settings

from tests.server.certificates import Authority

from .issuer import AUDIENCE, ISSUER, Signer, unsigned
from .test_gate_certificates import App, context_of, files_of
from .test_vllm_proxy import Server

OWN, VICTIM = "own", "victim"
#: Outcomes of a cell that are no tenant's name.
REFUSED, UNKNOWN = "refused", "unknown"
DOMAIN = "spiffe://corp.test/sa"
LLM_D = "x-llm-d-inference-fairness-id"
USER_FIELDS = frozenset({"user", "safety_identifier"})
KINDS = ("gate", "proxy")
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
#: Ends the connection behind a request without reaching an engine, and shows the request's rest.
_LAST = b"GET /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"

Fields = list[tuple[str, str]]


@dataclass(frozen=True)
class Evidence:
    """Holds the proof of a tenant in one request: fields of the head, and of the body."""

    fields: Fields
    body: dict[str, str]
    #: Fields that the front sets, so that the client's own are dropped.
    sets: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Source:
    """Describes a way to prove a tenant, and the settings of a gate that uses it."""

    settings: dict[str, str]
    evidence: Callable[[str], Evidence]
    #: A client that spoils its own proof becomes an unknown tenant.
    takes_unknown: bool = False
    uses_tls: bool = False


def key_of(tenant: str) -> str:
    return f"key-of-{tenant}"


def _by_header(name: str, *others: str) -> Callable[[str], Evidence]:
    return lambda tenant: Evidence([(name, tenant)], {}, frozenset({name, *others}))


def _by_bearer(tenant: str) -> Evidence:
    return Evidence([("authorization", f"Bearer {key_of(tenant)}")], {})


def sources(folder: Path) -> dict[str, Source]:
    """Return every way to prove a tenant. `folder`: for the files of their settings."""
    signer = Signer("EdDSA", "1")
    (folder / "jwks").write_text(json.dumps({"keys": [signer.jwk]}))
    (folder / "keys").write_text(f"{key_of(OWN)}\n{key_of(VICTIM)}\n")
    listed = {"SCHEDSVC_API_KEYS_FILE": str(folder / "keys")}
    front = {"SCHEDSVC_HEADER_SET_BY": "front"}
    patterns = {"SCHEDSVC_CERTIFICATE_TENANTS": f"{DOMAIN}/{{tenant}}"}
    tenant_header = {"SCHEDSVC_TENANT_HEADERS": "x-tenant-id", **front}
    both_headers = {"SCHEDSVC_TENANT_HEADERS": "x-tenant-id, llm-d", **front}
    tokens = {
        "SCHEDSVC_JWT_ISSUER": ISSUER,
        "SCHEDSVC_JWT_AUDIENCE": AUDIENCE,
        "SCHEDSVC_JWT_JWKS_FILE": str(folder / "jwks"),
    }
    return {
        "header": Source(tenant_header, _by_header("x-tenant-id")),
        "header of llm-d": Source(both_headers, _by_header(LLM_D, "x-tenant-id")),
        "header and listed key": Source(
            tenant_header | listed,
            lambda tenant: Evidence(
                [("x-tenant-id", tenant), *_by_bearer(OWN).fields], {}, frozenset({"x-tenant-id"})
            ),
        ),
        "any key": Source({}, _by_bearer, takes_unknown=True),
        "listed key": Source(listed, _by_bearer),
        "x-api-key": Source(listed, lambda t: Evidence([("x-api-key", key_of(t))], {})),
        "key of the scheduler": Source({"SCHEDSVC_API_KEYS_FROM": "scheduler"}, _by_bearer),
        "token": Source(
            tokens,
            lambda t: Evidence([("authorization", f"Bearer {signer.token(sub=t)}")], {}),
        ),
        "forwarded certificate": Source(
            patterns | {"SCHEDSVC_XFCC_SET_BY": "front"},
            lambda tenant: Evidence([(XFCC, f"URI={DOMAIN}/{tenant}")], {}, frozenset({XFCC})),
        ),
        "certificate": Source(patterns, lambda _: Evidence([], {}), uses_tls=True),
        "user of the body": Source(
            # A key overrides the body's fields, and any client can send some key.
            {"SCHEDSVC_TRUST_USER_FIELD": "on", "SCHEDSVC_TRUST_API_KEY": "off"},
            lambda tenant: Evidence([], {"user": tenant}, USER_FIELDS),
        ),
    }


#: Names of fields, and the values that claim another tenant without a secret.
CLAIMS = {
    "x-tenant-id": VICTIM,
    LLM_D: VICTIM,
    XFCC: f"URI={DOMAIN}/{VICTIM}",
    "authorization": f"Bearer {VICTIM}",
    "authorization: unsigned token": "Bearer "
    + unsigned({"iss": ISSUER, "aud": AUDIENCE, "sub": VICTIM, "exp": 1 << 40}, alg="none"),
    "authorization: key in another case": f"Bearer {key_of(VICTIM).upper()}",
    "x-api-key": VICTIM,
    "user": VICTIM,
    "safety_identifier": VICTIM,
}

# Places.


_BODY: dict[str, Any] = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 5}


def request(
    own: Evidence,
    *,
    before: Sequence[tuple[str, str]] = (),
    after: Sequence[tuple[str, str]] = (),
    raw: bytes = b"",
    body: bytes | None = None,
    framing: bytes = b"content-length: %d",
    end: Callable[[bytes], bytes] = lambda body: body,
    target: bytes = b"/v1/completions",
    **more: Any,
) -> bytes:
    """Write a request: `before` and `after` stand beside the evidence, `raw` ends the head."""
    dropped = own.sets - {name for name, _ in own.fields}
    given = [("host", "x"), ("content-type", "application/json"), *before, *own.fields, *after]
    fields = [pair for pair in given if pair[0].lower() not in dropped]
    text = json.dumps(_BODY | more | own.body)
    content = text.encode() if body is None else body
    head = "".join(f"{name}: {value}\r\n" for name, value in fields).encode()
    size = framing % len(content) if b"%d" in framing else framing
    return b"POST %b HTTP/1.1\r\n%b%b%b\r\n\r\n%b" % (target, head, raw, size, end(content))


def _chunked(body: bytes, trailer: bytes = b"", extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n0\r\n%b\r\n" % (len(body), extension, body, trailer)


def _line(name: str, value: str) -> bytes:
    return f"{name}: {value}\r\n".encode()


def _inner(name: str, value: str) -> bytes:
    return request(Evidence([(name, value)], {}))


def _replaced(own: Evidence, name: str, value: str) -> bytes:
    kept = [(name, value)] if name not in own.sets else []
    return request(own, before=kept)


def _joined(own: Evidence, name: str, value: str, *, is_first: bool) -> bytes:
    """Join the claim and the evidence in one line, as RFC 9110, 5.3 permits each hop to do."""
    values = [given for key, given in own.fields if key == name] or [value]
    joined = [value, *values] if is_first else [*values, value]
    rest = [pair for pair in own.fields if pair[0] != name]
    return request(Evidence(rest, own.body), after=[(name, ", ".join(joined))])


def _in_body(own: Evidence, name: str, value: str) -> bytes:
    return request(own, **({name: value} if name not in own.sets else {}))


def _twice(own: Evidence, name: str, value: str, *, is_first: bool) -> bytes:
    """Write the claim as a field of the body, beside evidence of the same name if that is one."""
    if name in own.sets - own.body.keys():
        return request(own)  # the front drops it
    text, claim = json.dumps(_BODY | own.body), json.dumps({name: value})[1:-1]
    body = f"{{{claim}, {text[1:]}" if is_first else f"{text[:-1]}, {claim}}}"
    return request(own, body=body.encode())


def _named_by_connection(own: Evidence, name: str, value: str) -> bytes:
    """Have the front's own field dropped on the way, and the claim taken instead."""
    fields = [("connection", f"keep-alive, {name}"), ("x-original-" + name, value)]
    return request(own, after=fields)


CHUNKED = b"transfer-encoding: chunked"
_OFFER = b"GET /x HTTP/1.1\r\nUpgrade: h2c\r\nConnection:\r\nHTTP2-Settings: A\r\n\r\n"
Place = Callable[[Evidence, str, str], bytes]
#: The fields in which a client writes its claim.
PLACES: dict[str, Place] = {
    "field that the front overwrites": _replaced,
    "copy before": lambda own, name, value: request(own, before=[(name, value)]),
    "copy behind": lambda own, name, value: request(own, after=[(name, value)]),
    "other case": lambda own, name, value: request(own, after=[(name.upper(), value)]),
    "joined before": lambda own, name, value: _joined(own, name, value, is_first=True),
    "joined behind": lambda own, name, value: _joined(own, name, value, is_first=False),
    "underscores": lambda own, name, value: request(own, after=[(name.replace("-", "_"), value)]),
    "space in the name": lambda own, name, value: request(own, before=[(f"{name} ", value)]),
    "folded line": lambda own, name, value: request(own, raw=b"x-pad: 1\r\n " + _line(name, value)),
    "bare LF": lambda own, name, value: request(own, raw=b"x-pad: 1\n" + _line(name, value)),
    "bare CR": lambda own, name, value: request(own, raw=b"x-pad: 1\r" + _line(name, value)),
    "named by Connection": _named_by_connection,
    "trailer": lambda own, name, value: request(
        own, framing=CHUNKED, end=lambda body: _chunked(body, _line(name, value))
    ),
    "extension of a chunk": lambda own, name, value: request(
        own, framing=CHUNKED, end=lambda body: _chunked(body, extension=f";{name}={value}".encode())
    ),
    "request as a body": lambda own, name, value: request(own, body=_inner(name, value)),
    "request behind an upgrade": lambda own, name, value: request(
        own, raw=b"connection: upgrade\r\nupgrade: h2c\r\n", body=_inner(name, value)
    ),
    "body like an upgrade": lambda own, name, value: request(
        own, body=_OFFER + _inner(name, value)
    ),
    "line in a chunk's extension": lambda own, name, value: request(
        own,
        framing=CHUNKED,
        end=lambda body: _chunked(body, extension=b";a\n" + _line(name, value)),
    ),
    "request behind a shorter length": lambda own, name, value: request(
        own, raw=b"content-length: 0\r\n", body=_inner(name, value)
    ),
    "request behind a spaced field": lambda own, name, value: request(
        own, raw=b"transfer-encoding : chunked\r\n", body=b"0\r\n\r\n" + _inner(name, value)
    ),
    "request behind two lengths": lambda own, name, value: request(
        own, raw=CHUNKED + b"\r\n", end=lambda body: _chunked(body) + _inner(name, value)
    ),
    "request behind no chunks": lambda own, name, value: request(
        own, framing=b"transfer-encoding: xchunked\r\ncontent-length: 0", body=_inner(name, value)
    ),
    "second host": lambda own, name, value: request(own, after=[("host", value), (name, value)]),
    "target": lambda own, name, value: request(
        own, target=f"http://{name}:{VICTIM}@x/v1/completions".encode()
    ),
    "field of the body": _in_body,
    "field of the body twice, first": lambda own, name, value: _twice(
        own, name, value, is_first=True
    ),
    "field of the body twice, last": lambda own, name, value: _twice(
        own, name, value, is_first=False
    ),
    "field of the body's metadata": lambda own, name, value: request(own, metadata={name: value}),
    "query": lambda own, name, value: request(
        own, target=f"/v1/completions?{name}={value}".replace(" ", "+").encode()
    ),
    "cookie": lambda own, name, value: request(own, after=[("cookie", f"{name}={value}")]),
    "session": lambda own, name, value: request(
        own, after=[("x-session-id", value if name == "user" else f"{name}={value}")]
    ),
}


# Servers.


def is_refusal(status: int) -> bool:
    """Return whether a status means that the request, not the server, is at fault."""
    return 400 <= status < 500 or status == 501


Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class Served:
    """Runs a gate or a proxy, the scheduler that it asks, and the engine behind."""

    def __init__(self, source: Source, fake: FakeScheduler, reached: Callable[[], int]) -> None:
        self._source, self._fake, self._reached = source, fake, reached
        self.port = 0
        self.tls: dict[str, ssl.SSLContext | None] = {OWN: None, VICTIM: None}

    async def charged(self, stream: bytes, connect: Connect) -> tuple[list[str], int]:
        """Send a stream; return the tenant that the scheduler charges for it, and the first status.

        Fails if another number of requests reached the engine. The status is 400 if the connection
        is closed without an answer.
        """
        self._fake.admits.clear()
        before = self._reached()
        reader, writer = await connect()
        writer.write(stream + _LAST)
        try:
            answer = await asyncio.wait_for(reader.read(), 60)
        except ConnectionError:
            answer = b""
        writer.close()
        charged = [self._name(admit) for admit in self._fake.admits]
        assert self._reached() - before == len(charged), charged
        found = _STATUS.search(answer)
        return charged, int(found[1]) if found else 400

    async def outcome(self, stream: bytes, tenant: str = OWN) -> str:
        """Send a stream; return its outcome: `refused`, or the tenant that the scheduler charges.

        `tenant`: the owner of the certificate, if the source is one.
        """
        context = self.tls[tenant]
        host = "localhost" if context else "127.0.0.1"
        charged, status = await self.charged(
            stream, lambda: asyncio.open_connection(host, self.port, ssl=context)
        )
        if charged:
            return " and ".join(charged)
        return REFUSED if is_refusal(status) else f"status {status}"

    @staticmethod
    def _name(admit: Any) -> str:
        known = {api_key_hash(key_of(tenant)): tenant for tenant in (OWN, VICTIM)}
        return str(admit.tenant or known.get(admit.api_key_sha256, UNKNOWN))

    async def cell(self, claim: str, place: str) -> str:
        """Return the outcome of one cell."""
        name = claim.partition(":")[0]
        return await self.outcome(PLACES[place](self._source.evidence(OWN), name, CLAIMS[claim]))

    async def table(self) -> dict[tuple[str, str], str]:
        """Return the outcome of each cell of this source."""
        return {cell: await self.cell(*cell) for cell in itertools.product(CLAIMS, PLACES)}


@asynccontextmanager
async def serving(source: Source, kind: str, folder: Path) -> AsyncIterator[Served]:
    """Serve the gate in an engine's server, or the proxy before one, as their commands do."""
    fake = FakeScheduler(f"unix:{folder}/s")
    fake.owners = {api_key_hash(key_of(tenant)): tenant for tenant in (OWN, VICTIM)}
    await fake.start()
    behind = Server()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", behind.handle)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    # A machine may stall for longer than a gate waits for its scheduler.
    given = {"SCHEDSVC_TARGET": fake.target, "SCHEDSVC_UNREACHABLE_AFTER": "60", **source.settings}
    authority = Authority(folder)
    server: Any
    if kind == "gate":
        own = authority.issue("server")
        tls: dict[str, Any] = {
            "ssl_certfile": own.cert_file,
            "ssl_keyfile": own.key_file,
            "ssl_ca_certs": str(authority.file),
            "ssl_cert_reqs": int(ssl.CERT_REQUIRED),
        }
        app = App(Settings.from_environment(given), **(tls if source.uses_tls else {}))
        server, made = app.server, Served(source, fake, lambda: len(app.engine.scopes))
    else:
        words = ["--upstream", f"http://127.0.0.1:{runner.addresses[0][1]}"]
        words += files_of(authority) if source.uses_tls else []
        options, settings = proxy_cli.prepare(words, given)
        server = proxy_cli.server_for(proxy_cli.build(options, settings), options)
        made = Served(source, fake, lambda: len(behind.seen))
    if source.uses_tls:
        for tenant in (OWN, VICTIM):
            made.tls[tenant] = context_of(authority, authority.issue(tenant, f"{DOMAIN}/{tenant}"))
    # Named as TCP, so that asyncio switches Nagle's delay off.
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.bind(("127.0.0.1", 0))
    bound.listen()
    made.port = bound.getsockname()[1]
    running = asyncio.create_task(server.serve([bound]))
    try:
        yield made
    finally:
        server.should_exit = True
        await running
        await runner.cleanup()
        await fake.stop()


async def _print() -> None:
    with tempfile.TemporaryDirectory() as name:
        for source, kind in itertools.product(sources(Path(name)), KINDS):
            async with serving(sources(Path(name))[source], kind, Path(name)) as made:
                table = await made.table()
            print(f"\n{source} ({kind}): {dict(Counter(table.values()))}")
            for place in PLACES:
                row = [f"{table[claim, place]:<8.8}" for claim in CLAIMS]
                print(f"  {place:<32}", *row)
    print("\nThe columns:", ", ".join(CLAIMS))


if __name__ == "__main__":
    sys.exit(asyncio.run(_print()))
