"""Issues JSON Web Tokens, with real keys and a server for its key set."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from typing import Any

import jwt
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

ISSUER, AUDIENCE = "https://issuer.test", "llm"
_MAKERS: dict[str, Any] = {
    "RS256": (lambda: rsa.generate_private_key(65_537, 2_048), RSAAlgorithm),
    "ES256": (lambda: ec.generate_private_key(ec.SECP256R1()), ECAlgorithm),
    "EdDSA": (ed25519.Ed25519PrivateKey.generate, OKPAlgorithm),
}


class Signer:
    """Signs with one key of an issuer."""

    def __init__(self, algorithm: str, kid: str) -> None:
        make, self._form = _MAKERS[algorithm]
        self.algorithm, self.kid = algorithm, kid
        self.private = make()

    @property
    def jwk(self) -> dict[str, Any]:
        public = json.loads(self._form.to_jwk(self.private.public_key()))
        return public | {"kid": self.kid, "use": "sig"}

    def token(self, headers: dict[str, Any] | None = None, **claims: Any) -> str:
        """Sign the claims; a claim that is None is left out."""
        now_s = int(time.time())
        given = {"iss": ISSUER, "aud": AUDIENCE, "sub": "acme", "exp": now_s + 600} | claims
        told = {name: value for name, value in given.items() if value is not None}
        headers = {"kid": self.kid} | (headers or {})
        return jwt.encode(told, self.private, algorithm=self.algorithm, headers=headers)


def unsigned(claims: dict[str, Any], **header: Any) -> str:
    """Make a token with any header and an empty signature."""
    parts = [json.dumps(part).encode() for part in ({"typ": "JWT"} | header, claims)]
    return ".".join([base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts] + [""])


class KeyServer:
    """Serves a key set over HTTP."""

    def __init__(self, *signers: Signer) -> None:
        self.signers = list(signers)
        self.status = 200
        self.text: str | None = None
        self.location = ""
        self.asked = 0
        self.held = asyncio.Event()
        self.held.set()
        self.url = ""

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/keys", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/keys"

    async def stop(self) -> None:
        self.held.set()
        await self._runner.cleanup()

    async def _answer(self, _: web.Request) -> web.Response:
        self.asked += 1
        await self.held.wait()
        headers = {"location": self.location} if self.location else {}
        keys = json.dumps({"keys": [signer.jwk for signer in self.signers]})
        text = keys if self.text is None else self.text
        return web.Response(status=self.status, text=text, headers=headers)
