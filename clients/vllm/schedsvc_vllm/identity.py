"""Finds the tenant of a request: by certificate, token, header, API key's hash, or body field."""

from __future__ import annotations

import hmac
import importlib
import itertools
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from schedsvc_client import TenantProof, api_key_hash

from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.caller import Caller, Terms, tenant_name, use
from schedsvc_vllm.jwks_source import JwksSource
from schedsvc_vllm.scheduler_keys import SchedulerKeys
from schedsvc_vllm.settings import JwtSettings, Settings, SettingsError

_TOKEN_POINTS = 2


class Identity(NamedTuple):
    """Names a tenant by one of the first two fields; if neither is set, the tenant is unknown.

    `request_class`: the class that its token names; "": none. `proof`: how the gate knows the name,
    UNSPECIFIED: the client could have chosen it.
    """

    tenant: str = ""
    api_key_sha256: bytes = b""
    request_class: str = ""
    proof: TenantProof = TenantProof.UNSPECIFIED

    @property
    def key(self) -> str | bytes:
        """Return the key of its tenant in tables of the gate."""
        return self.tenant or self.api_key_sha256


_UNKNOWN = Identity()


class Proof(Protocol):
    """Holds the claims of a verified token."""

    @property
    def tenant(self) -> str:
        """Return the name of its bearer."""

    @property
    def request_class(self) -> str:
        """Return the class of its bearer's requests; "": none."""


class TokenVerifier(Protocol):
    """Declares the verifier of jwt_tokens.py, which is imported only if it is configured."""

    source: JwksSource

    async def prove(self, token: str) -> Proof:
        """Verify a token. Raises BadRequestError."""


class Identifier:
    """Applies the order: certificate, token, headers, API key, `safety_identifier`, `user`.

    Raises SettingsError if tokens are to be verified, and that is not installed.
    """

    def __init__(self, settings: Settings) -> None:
        self._headers = settings.tenant_headers
        #: A trusted header proves nothing, unless a proxy is known to overwrite it.
        self._header_proof = (
            TenantProof.HEADER if settings.header_set_by else TenantProof.UNSPECIFIED
        )
        self._trust_api_key = settings.trust_api_key
        self._trust_user_field = settings.trust_user_field
        self._class_from_tier = settings.class_from_service_tier
        self._trust_request_id = settings.trust_request_id
        #: SHA-256 of the API keys that may call; empty: the gate checks none.
        self.api_keys_sha256 = settings.api_keys_sha256
        self._tokens = None if settings.jwt is None else _verifier(settings.jwt)
        self._has_certificates = settings.certificates is not None
        #: Whose keys the scheduler knows; None: it is not asked.
        self.keys: SchedulerKeys | None = None
        self._prefix = secrets.token_hex(8)
        self._numbers = itertools.count(1)

    def start(self) -> None:
        """Begin what runs in the background, inside the event loop."""
        if self._tokens is not None:
            self._tokens.source.start()

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the sources of a tenant's name, in the order in which they are looked at."""
        found = (
            ("a client certificate", self._has_certificates),
            ("an API key that the scheduler knows", self.keys is not None),
            ("a JSON Web Token", self._tokens is not None),
            *((f"the header {name}", True) for name in self._headers),
            ("the hash of the API key", self._trust_api_key),
            ("the body's safety_identifier or user", self._trust_user_field),
        )
        return tuple(name for name, is_used in found if is_used)

    @property
    def key_set(self) -> JwksSource | None:
        """Return the key set by which tokens are verified; None: none are."""
        return None if self._tokens is None else self._tokens.source

    @property
    def asks_for_proof(self) -> bool:
        """Return whether `prove()` may ask for any."""
        is_open = self.keys is None and self._tokens is None and not self.api_keys_sha256
        return self._has_certificates or not is_open

    async def close(self) -> None:
        """Stop that."""
        if self._tokens is not None:
            await self._tokens.source.close()
        if self.keys is not None:
            await self.keys.close()

    async def prove(self, caller: Caller) -> Identity | None:
        """Check the caller's certificate, API key or token; return whose it is.

        None: it is a key of the gate's list, or the gate asks for no proof. A certificate that
        names a tenant goes first: SDKs send some API key with it, since they need one.

        Raises BadRequestError: 401 for none of them, 503 while the issuer's keys are not known, or
        while the scheduler is away and has not known the key.
        """
        tenant = use(caller.certified)
        if tenant is not None:
            return Identity(tenant=tenant, proof=TenantProof.CERTIFICATE)
        if self.api_keys_sha256 and key_is_known(caller, self.api_keys_sha256):
            return None
        if not self.asks_for_proof:
            return None
        if self.keys is None and self._tokens is None and not self.api_keys_sha256:
            raise BadRequestError(
                "a client certificate is needed that names a tenant",
                status=401,
                code="invalid_certificate",
            )
        key = use(caller.api_key)
        # A JSON Web Token has three parts, and no key that the scheduler made has a point.
        is_token = self._tokens is not None and key.count(".") == _TOKEN_POINTS
        if self.keys is not None and key and not is_token:
            tenant = await self.keys.owner(api_key_hash(key), caller.network)
            if tenant is not None:
                return Identity(tenant=tenant, proof=TenantProof.API_KEY)
        if self._tokens is not None:
            proof = await self._tokens.prove(key)
            return Identity(
                tenant=proof.tenant,
                request_class=proof.request_class,
                proof=TenantProof.TOKEN,
            )
        raise BadRequestError("the API key is wrong", status=401, code="invalid_api_key")

    def listed_key(self, caller: Caller, proved: Identity | None) -> bytes:
        """Return the hash of the caller's API key if it is in the gate's list, else b"".

        `proved`: what `prove()` returned.
        """
        if proved is not None or not self.api_keys_sha256:
            return b""
        return api_key_hash(use(caller.api_key))

    def owner(self, caller: Caller, proved: Identity | None) -> str | bytes:
        """Return the key of the tenant whom a request's response belongs to; "": of the unknown.

        `proved`: what `prove()` returned. A field of the body names no owner, because a request for
        a response has no body. Raises BadRequestError as `trusted()`.
        """
        identity = proved or self.identity(caller, {}, self.trusted(caller))
        return identity.key or self.listed_key(caller, proved)

    def trusted(self, caller: Caller) -> Identity:
        """Return the tenant in the trusted headers; an empty one: they name none.

        Raises BadRequestError if it is no name, or a header occurs twice.
        """
        named = use(caller.named)
        return Identity(named, proof=self._header_proof) if named else _UNKNOWN

    def identity(self, caller: Caller, body: Mapping[str, Any], trusted: Identity) -> Identity:
        """Find the tenant of a request without a token.

        `trusted`: what `trusted()` returned. Raises BadRequestError if the body's name is no name.
        """
        if trusted.tenant:
            return trusted
        if self._trust_api_key:
            key = use(caller.api_key)
            if key:
                return Identity(api_key_sha256=api_key_hash(key))
        if self._trust_user_field:
            for field in ("safety_identifier", "user"):
                told = body.get(field)
                if isinstance(told, str) and told:
                    return Identity(tenant=tenant_name(told.encode("utf-8", "replace"), field))
        return _UNKNOWN

    def terms(self, caller: Caller, body: Mapping[str, Any], identity: Identity) -> Terms:
        """Return the terms of a request; the class that its token names precedes others.

        Raises BadRequestError, which names the header that cannot be used.
        """
        terms = use(caller.terms)
        if self._class_from_tier:
            terms = terms.with_tier_of(body)
        if identity.request_class:
            terms = replace(terms, request_class=identity.request_class)
        return terms

    def request_ids(self, caller: Caller) -> tuple[str, str]:
        """Return the id that the client gets back, and the one for the scheduler and the engine.

        The first is the caller's if it can be sent back. The second is the same only if the gate
        made it, or trusts it. The scheduler answers a repeated id with the first grant: a caller
        that could choose the id would run again on an old lease.
        """
        if caller.request_id and self._trust_request_id:
            return caller.request_id, caller.request_id
        made = f"{self._prefix}-{next(self._numbers)}"
        return caller.request_id or made, made


def _verifier(settings: JwtSettings) -> TokenVerifier:
    """Make what verifies tokens. Raises SettingsError if the extra is not installed."""
    try:
        tokens: Any = importlib.import_module("schedsvc_vllm.jwt_tokens")
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"SCHEDSVC_JWT_ISSUER: {error.name} is not installed: pip install 'schedsvc-vllm[jwt]'"
        ) from None
    made: TokenVerifier = tokens.TokenVerifier(settings)
    return made


def check_operator(caller: Caller, path: str, keys_sha256: frozenset[bytes]) -> None:
    """Check that a request for an operator's path carries an operator's key.

    Raises BadRequestError: 501 if the gate has no such keys, 401 without a key, 403 with another
    one, and 400 for a key that is sent twice.
    """
    if not keys_sha256:
        raise BadRequestError(
            f"{path} is for operators of this engine, and is closed (its operator can open it, to"
            " keys of its own, with SCHEDSVC_OPERATOR_KEYS_FILE)",
            status=501,
            code="operator_endpoint",
        )
    if not key_is_known(caller, keys_sha256):
        raise BadRequestError(
            f"{path} is for operators of this engine: send an operator's key as the bearer token",
            status=403 if use(caller.api_key) else 401,
            code="operator_key_required",
        )


def key_is_known(caller: Caller, keys_sha256: frozenset[bytes]) -> bool:
    """Compare the caller's API key with the allowed ones, in constant time.

    Raises BadRequestError for a key that is sent twice.
    """
    given = api_key_hash(use(caller.api_key))
    found = False
    for known in keys_sha256:
        found |= hmac.compare_digest(given, known)
    return found
