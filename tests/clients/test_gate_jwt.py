"""Tests tenants that a JSON Web Token proves: real keys, tokens and key servers."""

from __future__ import annotations

import base64
import hmac
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime, tzinfo
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import jwt
import pytest
from schedsvc_client import api_key_hash
from schedsvc_client.testing import FakeScheduler
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import tenants_pb2
from schedsvc_vllm import jwks_source, jwt_tokens
from schedsvc_vllm.gate import Gate
from schedsvc_vllm.jwt_tokens import TokenVerifier, read_keys
from schedsvc_vllm.proxy import Upstream
from schedsvc_vllm.settings import JwtSettings, Settings, SettingsError

from tests.waiting import until

from .asgi import Exchange, ask
from .bench import TRUST, Bench
from .issuer import AUDIENCE, ISSUER, KeyServer, Signer, unsigned
from .test_vllm_proxy import Server, behind, started

__all__ = ["behind"]

RSA, EC, ED = Signer("RS256", "rsa"), Signer("ES256", "ec"), Signer("EdDSA", "ed")
STRANGER = Signer("RS256", "rsa")
CLAIMS: dict[str, Any] = {"iss": ISSUER, "aud": AUDIENCE, "sub": "acme", "exp": time.time() + 600}


@pytest.fixture
async def keys() -> AsyncIterator[KeyServer]:
    server = KeyServer(RSA, EC, ED)
    await server.start()
    yield server
    await server.stop()


def settings_for(fake: FakeScheduler, keys: KeyServer, **more: Any) -> Settings:
    made = {"issuer": ISSUER, "audience": AUDIENCE, "jwks": keys.url} | more
    return Settings(target=fake.target, tenant_headers=("x-tenant-id",), jwt=JwtSettings(**made))


@pytest.fixture
async def bench(fake: FakeScheduler, keys: KeyServer) -> AsyncIterator[Bench]:
    made = Bench(fake, settings_for(fake, keys, class_claim="tier"))
    yield made
    await made.gate._close()


async def asked(bench: Bench, token: str, **headers: str) -> Exchange:
    return await bench.ask(headers={"authorization": f"Bearer {token}"} | headers)


def verifier(bench: Bench) -> TokenVerifier:
    found: Any = bench.gate._identifier._tokens
    assert isinstance(found, TokenVerifier)
    return found


@pytest.mark.parametrize("signer", [RSA, EC, ED], ids=lambda signer: signer.algorithm)
async def test_a_token_names_the_tenant(bench: Bench, signer: Signer) -> None:
    assert (await asked(bench, signer.token(tier="batch"), **TRUST)).status == 200
    assert (await asked(bench, signer.token(sub="beta", aud=["x", AUDIENCE]))).status == 200
    tenants = [(admit.tenant, admit.request_class) for admit in bench.fake.admits]
    # The trusted header names acme too, but the proof counts.
    assert tenants == [("acme", "batch"), ("beta", "")]
    await bench.settled()


async def test_proof_overrides_a_header(bench: Bench) -> None:
    assert (await asked(bench, RSA.token(sub="beta"), **{"x-tenant-id": "other"})).status == 200
    assert bench.fake.admits[0].tenant == "beta"
    await bench.settled()


def altered(token: str) -> str:
    head, body, signature = token.split(".")
    other = RSA.token(sub="beta").split(".")[1]
    assert other != body
    return f"{head}.{other}.{signature}"


def hmac_by_public_key() -> str:
    """Sign with a part of the public RSA key as if it were a shared secret."""
    signed = unsigned(CLAIMS, alg="HS256", kid="rsa").rstrip(".")
    digest = hmac.digest(RSA.jwk["n"].encode(), signed.encode(), "sha256")
    return f"{signed}.{base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"


BAD: dict[str, Callable[[], str]] = {
    "none": lambda: unsigned(CLAIMS, alg="none"),
    "None": lambda: unsigned(CLAIMS, alg="None", kid="rsa"),
    "no algorithm": lambda: unsigned(CLAIMS),
    "a list": lambda: unsigned(CLAIMS, alg=["RS256"]),
    "unknown algorithm": lambda: unsigned(CLAIMS, alg="RS1", kid="rsa"),
    "not allowed": lambda: jwt.encode(CLAIMS, RSA.private, algorithm="RS512"),
    "hmac": hmac_by_public_key,
    "another's key": STRANGER.token,
    "altered": lambda: altered(RSA.token()),
    "no signature": lambda: RSA.token().rpartition(".")[0] + ".",
    "key of another type": lambda: RSA.token({"kid": "ec"}),
    "expired": lambda: RSA.token(exp=int(time.time()) - 31),
    "never expires": lambda: RSA.token(exp=None),
    "expires in words": lambda: RSA.token(exp="soon"),
    "not yet": lambda: RSA.token(nbf=int(time.time()) + 60),
    "wrong audience": lambda: RSA.token(aud="other"),
    "no audience": lambda: RSA.token(aud=None),
    "wrong issuer": lambda: RSA.token(iss="https://other.test"),
    "no issuer": lambda: RSA.token(iss=None),
    "no tenant": lambda: RSA.token(sub=None),
    "empty tenant": lambda: RSA.token(sub=""),
    "a path": lambda: RSA.token(sub="acme/ops"),
    "unprintable": lambda: RSA.token(sub="a\nb"),
    "too long": lambda: RSA.token(sub="é" * 129),
    "class": lambda: RSA.token(tier="x" * 65),
    "class is none": lambda: RSA.token(tier=5),
    "critical": lambda: RSA.token({"crit": ["exp"]}),
    "nested": lambda: f"{base64.urlsafe_b64encode(b'[' * 9_000).decode()}.e30.",
    "no base64": lambda: "\xff.\xff.\xff",
    "huge": lambda: RSA.token(more="x" * 16_384),
    "no token": lambda: "sk-1234",
    "empty": lambda: "",
}


@pytest.mark.parametrize("make", BAD.values(), ids=BAD.keys())
async def test_a_bad_token_is_401_and_the_scheduler_hears_nothing(
    bench: Bench, make: Callable[[], str]
) -> None:
    assert (await asked(bench, EC.token())).status == 200
    for path in ("/v1/completions", "/tokenize"):
        exchange = bench.exchange(headers=TRUST, path=path)
        value = f"Bearer {make()}".encode("latin-1")
        exchange.scope["headers"].append((b"authorization", value))
        refused = await exchange.run()
        assert (refused.status, refused.error["code"]) == (401, "invalid_token"), refused.answer
        assert refused.error["message"].startswith("the token is not accepted: ")
        assert refused.answer_headers["www-authenticate"] == "Bearer"
    assert len(bench.fake.admits) == len(bench.engine.bodies) == 1


async def test_clocks_may_differ_by_the_leeway(bench: Bench) -> None:
    lately_s = int(time.time()) - 20
    assert (await asked(bench, RSA.token(exp=lately_s))).status == 200


async def test_api_keys_of_the_gate_go_beside_tokens(fake: FakeScheduler, keys: KeyServer) -> None:
    known = frozenset({api_key_hash("sk-1")})
    settings = settings_for(fake, keys)
    bench = Bench(fake, Settings(settings.target, jwt=settings.jwt, api_keys_sha256=known))
    assert (await asked(bench, "sk-1")).status == 200
    assert (await asked(bench, RSA.token())).status == 200
    assert (await asked(bench, "sk-2")).status == 401
    assert [(a.tenant, a.api_key_sha256, a.tenant_proof) for a in fake.admits] == [
        ("", api_key_hash("sk-1"), 0),
        ("acme", b"", tenants_pb2.TENANT_PROOF_TOKEN),
    ]
    await bench.gate._close()


async def test_known_keys_stay_while_the_key_server_is_away(
    bench: Bench, keys: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks_source, "HURRY_PERIOD_S", 0.0)
    assert (await asked(bench, RSA.token())).status == 200
    for wrong in ({"status": 500}, {"status": 302, "location": keys.url}, {"text": "[]"}):
        keys.status, keys.text, keys.location = 200, None, ""
        for name, value in wrong.items():
            setattr(keys, name, value)
        before = keys.asked
        assert (await asked(bench, STRANGER.token({"kid": "new"}))).status == 401
        assert keys.asked > before
        assert (await asked(bench, EC.token(jti=str(wrong)))).status == 200
    await keys.stop()
    assert (await asked(bench, STRANGER.token({"kid": "new"}))).status == 401
    assert (await asked(bench, ED.token())).status == 200


@pytest.mark.parametrize("claim", ["exp", "nbf", "iat"])
@pytest.mark.parametrize("value", [10**400, -(10**400), 1e400, "9" * 400])
async def test_a_time_beyond_any_clock_is_refused(bench: Bench, claim: str, value: object) -> None:
    refused = await asked(bench, RSA.token(**{claim: value}))
    assert refused.status == 401
    assert bench.fake.admits == []


async def test_a_new_key_is_fetched_when_it_is_first_used(bench: Bench, keys: KeyServer) -> None:
    assert (await asked(bench, RSA.token())).status == 200
    newer = Signer("ES256", "newer")
    keys.signers.append(newer)
    assert (await asked(bench, newer.token())).status == 200
    before = keys.asked
    # Made-up keys do not have the server asked again and again.
    for number in range(5):
        assert (await asked(bench, STRANGER.token({"kid": str(number)}))).status == 401
    assert keys.asked == before


async def test_a_key_that_is_removed_takes_its_tokens_along(bench: Bench, keys: KeyServer) -> None:
    by_rsa, by_ec = RSA.token(), EC.token()
    for token in (by_rsa, by_ec):
        assert (await asked(bench, token)).status == 200
    assert len(verifier(bench)) == 2
    keys.signers.remove(RSA)
    await verifier(bench).source.fetch()
    assert len(verifier(bench)) == 1
    assert (await asked(bench, by_rsa)).status == 401
    assert (await asked(bench, by_ec)).status == 200
    # Another key of the same name does not bring them back.
    keys.signers.append(STRANGER)
    await verifier(bench).source.fetch()
    assert (await asked(bench, by_rsa)).status == 401


async def test_a_token_is_verified_once_until_it_expires(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []
    decode = jwt.decode
    monkeypatch.setattr(
        jwt, "decode", lambda token, *a, **n: decoded.append(token) or decode(token, *a, **n)
    )
    until_s = int(time.time()) + 3_600
    token = RSA.token(exp=until_s)
    for _ in range(3):
        assert (await asked(bench, token)).status == 200
    assert len(decoded) == 1
    # It has expired by the gate's own clock alone, not for the library.
    for now_s, times in ((until_s + 29, 1), (until_s + 31, 2)):
        monkeypatch.setattr(jwt_tokens, "time", SimpleNamespace(time=lambda now_s=now_s: now_s))
        assert (await asked(bench, token)).status == 200
        assert len(decoded) == times


class Wall:
    """Replaces the wall clock of the gate and of its library; a test sets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = time.time()
        wall = self

        class Datetime(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> Datetime:
                return cls.fromtimestamp(wall.now_s, tz)

        monkeypatch.setattr(jwt.api_jwt, "datetime", Datetime)
        monkeypatch.setattr(jwt_tokens, "time", SimpleNamespace(time=lambda: wall.now_s))


@pytest.mark.parametrize("claim", ["nbf", "iat"])
async def test_a_known_token_is_judged_by_the_clock_as_it_is(
    bench: Bench, keys: KeyServer, monkeypatch: pytest.MonkeyPatch, claim: str
) -> None:
    """Also after steps forward and back; they have no key set fetched and no token forgotten."""
    wall = Wall(monkeypatch)
    start_s = int(wall.now_s)
    token = RSA.token({}, **{claim: start_s - 60}, exp=start_s + 600)
    assert (await asked(bench, token)).status == 200
    fetched = keys.asked
    for step_s, status in (
        (629, 200), (631, 401), (0, 200), (-89, 200), (-91, 401), (-86_400 * 365, 401),
        (86_400 * 365, 401), (0, 200),
    ):  # fmt: skip
        wall.now_s = start_s + step_s
        assert (await asked(bench, token)).status == status, f"{step_s} s"
    assert keys.asked == fetched


async def test_remembered_tokens_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jwt_tokens, "REMEMBERED_MAX", 3)
    for number in range(5):
        assert (await asked(bench, ED.token(jti=str(number)))).status == 200
    assert len(verifier(bench)) == 3


async def test_before_there_are_keys_the_answer_is_503(
    fake: FakeScheduler, keys: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks_source, "HURRY_PERIOD_S", 0.0)
    keys.status = 500
    bench = Bench(fake, settings_for(fake, keys))
    refused = await asked(bench, RSA.token())
    assert refused.status == 503
    assert refused.answer_headers["x-schedsvc-dropped-reason"] == "keys_unavailable"
    assert "retry-after" in refused.answer_headers
    assert fake.admits == []
    keys.status = 200
    assert (await asked(bench, RSA.token())).status == 200
    await bench.gate._close()


async def test_a_file_of_keys_is_read_again(
    fake: FakeScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks_source, "FILE_PERIOD_S", 0.01)
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [RSA.jwk]}))
    jwt_settings = JwtSettings(ISSUER, AUDIENCE, str(file), tenant_claim="https://x/tenant")
    bench = Bench(fake, Settings(target=fake.target, jwt=jwt_settings))
    token = RSA.token(**{"https://x/tenant": "beta"})
    assert (await asked(bench, token)).status == 200
    assert fake.admits[0].tenant == "beta"
    file.write_text(json.dumps({"keys": [EC.jwk]}))
    await until(lambda: not len(verifier(bench)))
    file.unlink()
    assert (await asked(bench, token)).status == 401
    assert (await asked(bench, EC.token(**{"https://x/tenant": "beta"}))).status == 200
    await bench.gate._close()


def test_keys_that_cannot_verify_are_left_out() -> None:
    short = RSA.jwk | {"n": EC.jwk["x"]}
    others: list[Any] = [
        {"kty": "oct", "k": "c2VjcmV0", "kid": "secret", "alg": "HS256"},
        RSA.jwk | {"use": "enc"},
        RSA.jwk | {"alg": "RS512"},
        RSA.jwk | {"key_ops": ["encrypt"]},
        EC.jwk | {"crv": "P-384"},
        EC.jwk | {"x": "AAAA"},
        ED.jwk | {"crv": "X25519"},
        short,
        "text",
    ]
    assert read_keys(json.dumps({"keys": others}).encode()) == []
    kids = [key.kid for key in read_keys(json.dumps({"keys": [*others, ED.jwk]}).encode())]
    assert kids == ["ed"]
    for wrong in (b"", b"[]", b'{"keys":{}}', b"\xff"):
        with pytest.raises(ValueError, match=r".+"):
            read_keys(wrong)


def test_settings_name_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text("{}")
    given = {"TARGET": "unix:/s", "JWT_ISSUER": ISSUER, "JWT_AUDIENCE": AUDIENCE}

    def read(**more: str) -> Settings:
        variables = {f"SCHEDSVC_{name}": value for name, value in (given | more).items() if value}
        return Settings.from_environment(variables)

    made = read(JWT_JWKS_URL="https://issuer.test/keys", JWT_LEEWAY="5", JWT_CLASS_CLAIM="tier")
    assert made.jwt == JwtSettings(
        ISSUER, AUDIENCE, "https://issuer.test/keys", class_claim="tier", leeway_s=5
    )
    read(JWT_JWKS_FILE=str(file))
    read(JWT_JWKS_URL="http://127.0.0.1:1/keys")
    for more, part in (
        ({"JWT_ISSUER": ""}, "SCHEDSVC_JWT_ISSUER is not set"),
        ({"JWT_AUDIENCE": ""}, "SCHEDSVC_JWT_AUDIENCE is not set"),
        ({}, "give one of them"),
        ({"JWT_JWKS_FILE": str(file), "JWT_JWKS_URL": "https://x/"}, "give one of them"),
        ({"JWT_JWKS_FILE": "/nowhere"}, "SCHEDSVC_JWT_JWKS_FILE: cannot read /nowhere"),
        ({"JWT_JWKS_URL": "http://issuer.test/keys"}, "must be https://"),
        ({"JWT_JWKS_URL": "http://127.0.0.1.evil.test/"}, "must be https://"),
        ({"JWT_JWKS_URL": "file:///etc/passwd"}, "must be https://"),
    ):
        with pytest.raises(SettingsError, match=part):
            read(**more)


@pytest.mark.parametrize("missing", ["jwt", "cryptography"])
async def test_a_gate_without_the_extra_says_what_to_install(
    fake: FakeScheduler, keys: KeyServer, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    if missing == "jwt":
        monkeypatch.setitem(sys.modules, "jwt", None)
        monkeypatch.delitem(sys.modules, "schedsvc_vllm.jwt_tokens")
    else:
        monkeypatch.setattr(jwt.algorithms, "has_crypto", False)
    gate = Gate(Bench(fake, Settings(fake.target)).engine, settings_for(fake, keys))
    assert str(gate._broken).startswith(f"SCHEDSVC_JWT_ISSUER: {missing} is not installed")
    assert "pip install 'schedsvc-vllm[jwt]'" in str(gate._broken)
    refused = await Exchange(gate, ask()).run()
    assert refused.status == 503


async def test_a_header_that_any_client_may_set_is_warned_of(
    fake: FakeScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    for set_by, headers, warns in (
        ("", ("x-tenant-id",), True),
        ("envoy", ("x-tenant-id",), False),
        ("", (), False),
    ):
        caplog.clear()
        bench = Bench(fake, Settings(fake.target, tenant_headers=headers, header_set_by=set_by))
        await bench.ask(headers={"x-tenant-id": "acme"})
        assert ("SCHEDSVC_HEADER_SET_BY" in caplog.text) is warns
        proved = tenants_pb2.TENANT_PROOF_HEADER if set_by else 0
        assert fake.admits[-1].tenant_proof == proved
        await bench.gate._close()


async def test_known_token_costs_few_calls_and_no_signature(keys: KeyServer) -> None:
    made = TokenVerifier(JwtSettings(ISSUER, AUDIENCE, keys.url))
    token = RSA.token()
    await made.source.fetch()
    await made.prove(token)
    calls: list[str] = []

    def count(frame: FrameType, event: str, called: Any) -> None:
        if event in ("call", "c_call"):
            calls.append(getattr(called, "__name__", frame.f_code.co_name))

    sys.setprofile(count)
    try:
        await made.prove(token)
    finally:
        sys.setprofile(None)
    assert "verify" not in calls
    assert len(calls) <= 20, calls


async def test_a_class_of_a_token_that_is_refused_counts_as_none(bench: Bench) -> None:
    fault = pb.SessionFault(code=3, field="admit.request.request_class", description="is unknown")
    bench.fake.faults = [fault]
    assert (await asked(bench, RSA.token(tier="gold"))).status == 200
    assert [admit.request_class for admit in bench.fake.admits] == [""]


async def test_a_bad_token_reaches_no_server_behind_the_proxy(
    fake: FakeScheduler, keys: KeyServer, behind: tuple[Server, str]
) -> None:
    server, url = behind
    async with started(Gate(Upstream(url), settings_for(fake, keys))) as gate:
        for make in (STRANGER.token, lambda: unsigned(CLAIMS, alg="none"), lambda: ""):
            headers = {"authorization": f"Bearer {make()}"}
            assert (await Exchange(gate, ask(), headers=headers).run()).status == 401
        assert server.seen == fake.admits == []
        headers = {"authorization": f"Bearer {RSA.token()}"}
        assert (await Exchange(gate, ask(), headers=headers).run()).status == 200
    assert [admit.tenant for admit in fake.admits] == ["acme"]
    assert [path for _, path, _, _ in server.seen] == ["/v1/completions"]
