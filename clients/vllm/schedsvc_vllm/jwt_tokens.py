"""Verifies JSON Web Tokens, for callers whose names an issuer proves.

It needs PyJWT and cryptography (`pip install 'schedsvc-vllm[jwt]'`). A token is verified once and
remembered while the clock is within its claims. A key that leaves the issuer's set takes the tokens
with it that were verified by it. Only the algorithms below are taken, each with its own type of
key: a token never chooses how it is verified.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import jwt

from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.jwks_source import JwksSource
from schedsvc_vllm.settings import JwtSettings, SettingsError

REMEMBERED_MAX = 10_000
TOKEN_CHARS_MAX = 16_384
KEYS_MAX = 64
RSA_BITS_MIN = 2_048
# The one algorithm of each type of key, its curve, and the fields that are public.
_TYPES = {
    "RSA": ("RS256", None, ("n", "e")),
    "EC": ("ES256", "P-256", ("crv", "x", "y")),
    "OKP": ("EdDSA", "Ed25519", ("crv", "x")),
}
ALGORITHMS = tuple(algorithm for algorithm, _, _ in _TYPES.values())
_NAME_BYTES_MAX = 256
_CLASS_BYTES_MAX = 64
_log = logging.getLogger("schedsvc_vllm")


class Key(NamedTuple):
    """Holds a public key of the set."""

    kid: str | None
    algorithm: str
    public: Any
    fingerprint: bytes


class Proof(NamedTuple):
    """Holds the claims of a verified token, when they hold, and the key that verified them."""

    tenant: str
    request_class: str
    from_s: float
    until_s: float
    fingerprint: bytes


def read_keys(text: bytes) -> list[Key]:
    """Read a JSON Web Key Set; keys of other types are left out. Raises ValueError."""
    try:
        parsed = json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    listed = parsed.get("keys") if isinstance(parsed, dict) else None
    if not isinstance(listed, list):
        raise ValueError("is not a JSON Web Key Set: an object with a list named keys")
    keys = [key for entry in listed[:KEYS_MAX] if (key := _key(entry)) is not None]
    if not keys:
        _log.warning("the key set has no key for any of %s", ", ".join(ALGORITHMS))
    return keys


def _key(entry: object) -> Key | None:
    kind = entry.get("kty") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(kind, str) or kind not in _TYPES:
        return None
    algorithm, curve, fields = _TYPES[kind]
    uses = entry.get("key_ops", ["verify"])
    verifies = entry.get("use", "sig") == "sig" and isinstance(uses, list) and "verify" in uses
    if not verifies or entry.get("alg", algorithm) != algorithm or entry.get("crv") != curve:
        return None
    kid = entry.get("kid")
    given = {"kty": kind, **{name: entry.get(name) for name in fields}}
    try:
        public = jwt.PyJWK(given, algorithm=algorithm).key
    except Exception as error:  # of any kind: one key must not keep the others away
        _log.warning("the key set has a key that cannot be read (kid %r): %s", kid, error)
        return None
    if getattr(public, "key_size", RSA_BITS_MIN) < RSA_BITS_MIN and algorithm == "RS256":
        _log.warning("a key of the key set is too short: kid %r, %s bits", kid, public.key_size)
        return None
    text = json.dumps([kid, given], sort_keys=True).encode()
    kid = kid if isinstance(kid, str) else None
    return Key(kid, algorithm, public, hashlib.sha256(text).digest())


class TokenVerifier:
    """Verifies the tokens of one issuer. Raises SettingsError if cryptography is missing."""

    def __init__(self, settings: JwtSettings) -> None:
        if not jwt.algorithms.has_crypto:
            raise SettingsError(
                "SCHEDSVC_JWT_ISSUER: cryptography is not installed: pip install"
                " 'schedsvc-vllm[jwt]'"
            )
        self._settings = settings
        self._keys: list[Key] = []
        self._proofs: OrderedDict[bytes, Proof] = OrderedDict()
        self.source = JwksSource(
            settings.jwks, settings.refresh_s, self._take, age_s_max=settings.keys_age_s_max
        )

    def __len__(self) -> int:
        return len(self._proofs)

    async def prove(self, token: str) -> Proof:
        """Return what a token proves. O(1) while it is remembered, else a signature's check.

        Raises BadRequestError: 401 for a token that does not verify, 503 before there are keys and
        while they are too old.
        """
        if self.source.is_stale:
            await self.source.hurry()
            if self.source.is_stale:
                raise _keys_unavailable()
        digest = hashlib.sha256(token.encode()).digest()
        proof = self._proofs.get(digest)
        if proof is not None:
            if proof.from_s <= time.time() < proof.until_s:
                return proof
            del self._proofs[digest]
        candidates = await self._candidates(token)
        proof = self._verify(token, candidates)
        self._proofs[digest] = proof
        if len(self._proofs) > REMEMBERED_MAX:
            self._proofs.popitem(last=False)
        return proof

    def _take(self, text: bytes) -> None:
        self._keys = read_keys(text)
        known = {key.fingerprint for key in self._keys}
        for digest, proof in list(self._proofs.items()):
            if proof.fingerprint not in known:
                del self._proofs[digest]

    async def _candidates(self, token: str) -> list[Key]:
        """Return the keys that may have signed it; look for new ones if there are none."""
        if not token:
            raise _refused("a bearer token is needed")
        if len(token) > TOKEN_CHARS_MAX:
            raise _refused(f"it has more than {TOKEN_CHARS_MAX} characters")
        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, ValueError, RecursionError):
            raise _refused("it is no JSON Web Token") from None
        algorithm, kid = header.get("alg"), header.get("kid")
        if algorithm not in ALGORITHMS:
            shown = repr(algorithm)[:40]
            raise _refused(f"its algorithm is {shown}; allowed are {', '.join(ALGORITHMS)}")
        if "crit" in header:
            raise _refused("it has critical header fields (crit)")
        for is_last in (False, True):
            found = [
                key
                for key in self._keys
                if key.algorithm == algorithm and (kid is None or key.kid == kid)
            ]
            if found:
                return found
            if not is_last:
                await self.source.hurry()
        if not self.source.is_known:
            raise _keys_unavailable()
        raise _refused(f"it was signed with a key that the issuer does not list (kid {kid!r:.60})")

    def _verify(self, token: str, keys: list[Key]) -> Proof:
        settings = self._settings
        problem = "its signature is wrong"
        for key in keys:
            try:
                claims = jwt.decode(
                    token,
                    key.public,
                    algorithms=[key.algorithm],
                    audience=settings.audience,
                    issuer=settings.issuer,
                    leeway=settings.leeway_s,
                    options={"require": ["exp", "iss", "aud"]},
                )
            except jwt.InvalidSignatureError:
                continue
            except (
                jwt.PyJWTError,
                ArithmeticError,
                RecursionError,
                TypeError,
                ValueError,
            ) as error:
                problem = str(error)[:200]
                continue
            return self._proof(claims, key)
        raise _refused(problem)

    def _proof(self, claims: Mapping[str, Any], key: Key) -> Proof:
        settings = self._settings
        tenant = _name(claims, settings.tenant_claim, _NAME_BYTES_MAX)
        if "/" in tenant:
            # It would enter another organisation's path.
            raise _refused(f"its claim {settings.tenant_claim} contains a /")
        request_class = ""
        if settings.class_claim and settings.class_claim in claims:
            request_class = _name(claims, settings.class_claim, _CLASS_BYTES_MAX)
        try:
            from_s = max(float(claims.get(claim, 0)) for claim in ("nbf", "iat"))
            until_s = float(claims["exp"])
            if not math.isfinite(from_s) or not math.isfinite(until_s):
                raise OverflowError
        except (ArithmeticError, TypeError, ValueError):
            raise _refused("its times are no numbers that a clock can reach") from None
        from_s, until_s = from_s - settings.leeway_s, until_s + settings.leeway_s
        return Proof(tenant, request_class, from_s, until_s, key.fingerprint)


def _name(claims: Mapping[str, Any], claim: str, bytes_max: int) -> str:
    value = claims.get(claim)
    if (
        not isinstance(value, str)
        or not value
        or not value.isprintable()
        or len(value.encode("utf-8", "replace")) > bytes_max
    ):
        raise _refused(f"its claim {claim} has to be a text of 1 to {bytes_max} printable bytes")
    return value


def _keys_unavailable() -> BadRequestError:
    return BadRequestError("the keys of the token's issuer cannot be fetched", status=503)


def _refused(problem: str) -> BadRequestError:
    return BadRequestError(
        f"the token is not accepted: {problem}", status=401, code="invalid_token"
    )
