"""Tests key servers that misbehave: their answers end no refresh, old keys verify nothing."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from schedsvc_client.testing import FakeScheduler
from schedsvc_vllm import jwks_source
from schedsvc_vllm.settings import JwtSettings, Settings

from tests.waiting import until

from .bench import Bench
from .issuer import AUDIENCE, ISSUER, KeyServer
from .test_gate_jwt import EC, ED, RSA, asked, keys, settings_for, verifier

__all__ = ["keys"]


class RawServer:
    """Answers each connection with bytes: a key set, or the content of `next`."""

    def __init__(self) -> None:
        self.keys = json.dumps({"keys": [RSA.jwk]}).encode()
        self.next: bytes | None = None
        self.asked = 0

    def ok(self, body: bytes) -> bytes:
        return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.asked += 1
        writer.write(self.ok(self.keys) if self.next is None else self.next)
        await writer.drain()
        writer.close()


def jwks_with(**fields: Any) -> bytes:
    """Write a key set with one key that has odd fields, and a good one."""
    return RawServer().ok(json.dumps({"keys": [RSA.jwk | fields, EC.jwk]}).encode())


ODD_ANSWERS = {
    "no status line": b"\x16\x03\x01 nonsense\r\n\r\n",
    "a status that is no number": b"HTTP/1.1 two OK\r\n\r\n",
    "a cut chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nff\r\nabc",
    "a chunk without a size": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "nothing": b"",
    "a cut body": b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nabc",
    "nested": b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000,
    "a list as kty": jwks_with(kty=[]),
    "an object as kty": jwks_with(kty={}),
    "a number as key_ops": jwks_with(key_ops=5),
    "a list as n": jwks_with(n=[]),
    "a number as n": jwks_with(n=5),
    "a list as use": jwks_with(use=[]),
}


@pytest.mark.parametrize("kind", ODD_ANSWERS)
async def test_no_answer_of_the_key_server_ends_the_refresh(fake: FakeScheduler, kind: str) -> None:
    server = RawServer()
    async with await asyncio.start_server(server.answer, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/"
        made = JwtSettings(ISSUER, AUDIENCE, url, refresh_s=0.01)
        bench = Bench(fake, Settings(target=fake.target, jwt=made))
        assert (await asked(bench, RSA.token())).status == 200
        server.next, before = ODD_ANSWERS[kind], server.asked
        await until(lambda: server.asked > before + 2)
        server.keys, server.next = json.dumps({"keys": [ED.jwk]}).encode(), None
        await until(lambda: [key.kid for key in verifier(bench)._keys] == ["ed"])
        assert (await asked(bench, RSA.token())).status == 401  # its key is withdrawn
        await bench.gate._close()


async def test_keys_that_are_too_old_verify_no_token(
    fake: FakeScheduler, keys: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks_source, "HURRY_PERIOD_S", 0.0)
    bench = Bench(fake, settings_for(fake, keys, keys_age_s_max=60.0))
    source, now_s = verifier(bench).source, 1_000.0
    source._clock = lambda: now_s
    token = RSA.token()
    assert (await asked(bench, token)).status == 200
    keys.status = 500
    now_s += 60.0
    assert (await asked(bench, token)).status == 200
    now_s += 0.5
    for each in (token, RSA.token(jti="new")):
        refused = await asked(bench, each)
        assert refused.status == 503
        assert refused.answer_headers["x-schedsvc-dropped-reason"] == "keys_unavailable"
    assert bench.gate._runtime is not None
    page = bench.gate._runtime.counts.text()
    assert re.search(r"^schedsvc_gate_jwks_age_seconds\{.*\} 60\.5", page, re.MULTILINE)
    failures = re.search(r"^schedsvc_gate_jwks_failures_total\{.*\} (\d+)$", page, re.MULTILINE)
    assert failures is not None
    assert int(failures[1]) >= 2
    keys.status = 200
    assert (await asked(bench, token)).status == 200
    await bench.gate._close()
