"""The tenant of a request: by certificate, token, header, API key's hash, or field of the body."""

from __future__ import annotations

import hmac
import importlib
import itertools
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from schedsvc_client import TenantProof, api_key_hash

from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.asgi import Scope, header, path_of
from schedsvc_vllm.certificates import XFCC
from schedsvc_vllm.client_address import client_network
from schedsvc_vllm.jwks_source import JwksSource
from schedsvc_vllm.scheduler_keys import SchedulerKeys
from schedsvc_vllm.settings import JwtSettings, Settings, SettingsError

_TENANT_BYTES_MAX = 256
_REQUEST_ID_CHARS_MAX = 128
_TOKEN_POINTS = 2
_XFCC = XFCC.encode()


class Identity(NamedTuple):
    """One of the first two is set, or neither: an unknown tenant.

    `request_class`: the class that its token names; "": none. `proof`: how the gate knows the name,
    UNSPECIFIED: the client could have chosen it.
    """

    tenant: str = ""
    api_key_sha256: bytes = b""
    request_class: str = ""
    proof: TenantProof = TenantProof.UNSPECIFIED

    @property
    def key(self) -> str | bytes:
        """The key of its tenant in tables of the gate."""
        return self.tenant or self.api_key_sha256


_UNKNOWN = Identity()


class Proof(Protocol):
    """The claims of a verified token."""

    @property
    def tenant(self) -> str:
        """The name of its bearer."""

    @property
    def request_class(self) -> str:
        """The class of its bearer's requests; "": none."""


class TokenVerifier(Protocol):
    """That of jwt_tokens.py, which is imported only if it is configured."""

    source: JwksSource

    async def prove(self, token: str) -> Proof:
        """Verify a token. Raises BadRequestError."""


class Identifier:
    """Applies the order: certificate, token, headers, API key, `safety_identifier`, `user`.

    Raises SettingsError if tokens are to be verified, and that is not installed.
    """

    def __init__(self, settings: Settings) -> None:
        self._headers = [name.encode() for name in settings.tenant_headers]
        #: A trusted header proves nothing, unless a proxy is known to overwrite it.
        self._header_proof = (
            TenantProof.HEADER if settings.header_set_by else TenantProof.UNSPECIFIED
        )
        self._fronted = settings.is_fronted
        self._trust_api_key = settings.trust_api_key
        self._trust_user_field = settings.trust_user_field
        self._trust_request_id = settings.trust_request_id
        #: SHA-256 of the API keys that may call; empty: the gate checks none.
        self.api_keys_sha256 = settings.api_keys_sha256
        self._tokens = None if settings.jwt is None else _verifier(settings.jwt)
        self._certificates = settings.certificates
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
        """The sources of a tenant's name, in the order in which they are looked at."""
        found = (
            ("a client certificate", self._certificates is not None),
            ("an API key that the scheduler knows", self.keys is not None),
            ("a JSON Web Token", self._tokens is not None),
            *((f"the header {name.decode()}", True) for name in self._headers),
            ("the hash of the API key", self._trust_api_key),
            ("the body's safety_identifier or user", self._trust_user_field),
        )
        return tuple(name for name, is_used in found if is_used)

    @property
    def key_set(self) -> JwksSource | None:
        """The key set by which tokens are verified; None: none are."""
        return None if self._tokens is None else self._tokens.source

    async def close(self) -> None:
        """Stop that."""
        if self._tokens is not None:
            await self._tokens.source.close()
        if self.keys is not None:
            await self.keys.close()

    async def prove(self, scope: Scope) -> Identity | None:
        """Check the caller's certificate, API key or token; return whose it is.

        None: it is a key of the gate's list, or the gate asks for no proof. A certificate that
        names a tenant goes first: SDKs send some API key with it, since they need one.

        Raises BadRequestError: 401 for none of them, 503 while the issuer's keys are not known, or
        while the scheduler is away and has not known the key.
        """
        if self._certificates is not None:
            forwarded = once(scope, _XFCC) if self._certificates.set_by else b""
            tenant = self._certificates.tenant(scope, forwarded)
            if tenant is not None:
                return Identity(tenant=tenant, proof=TenantProof.CERTIFICATE)
        if self.api_keys_sha256 and key_is_known(scope, self.api_keys_sha256):
            return None
        if self.keys is None and self._tokens is None and not self.api_keys_sha256:
            if self._certificates is None:
                return None
            raise BadRequestError(
                "a client certificate is needed that names a tenant",
                status=401,
                code="invalid_certificate",
            )
        key = bearer(scope)
        # A JSON Web Token has three parts, and no key that the scheduler made has a point.
        is_token = self._tokens is not None and key.count(".") == _TOKEN_POINTS
        if self.keys is not None and key and not is_token:
            tenant = await self.keys.owner(
                api_key_hash(key), client_network(scope, fronted=self._fronted)
            )
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

    def listed_key(self, scope: Scope, proved: Identity | None) -> bytes:
        """Return the hash of the caller's API key if it is in the gate's list, else b"".

        `proved`: what `prove()` returned.
        """
        if proved is not None or not self.api_keys_sha256:
            return b""
        return api_key_hash(bearer(scope))

    def owner(self, scope: Scope, proved: Identity | None) -> str | bytes:
        """Return the key of the tenant whom a request's response belongs to; "": of the unknown.

        `proved`: what `prove()` returned. A field of the body names no owner, because a request for
        a response has no body. Raises BadRequestError as `trusted()`.
        """
        identity = proved or self.identity(scope, {}, self.trusted(scope))
        return identity.key or self.listed_key(scope, proved)

    def trusted(self, scope: Scope) -> Identity:
        """Find the tenant in the trusted headers; an empty one: they name none.

        Raises BadRequestError if it is no name, or a header occurs twice. A hop may join two
        headers with a comma (RFC 9110, 5.3), so one with a comma counts as two.
        """
        found = _UNKNOWN
        for name in self._headers:  # all of them: none may occur twice
            value = once(scope, name).strip()
            if b"," in value:
                text = name.decode()
                raise BadRequestError(
                    f"{text}: {value.decode('latin-1')[:200]!r} holds a comma, as two headers do"
                    " that a proxy has joined; send one name without a comma",
                    text,
                )
            if value and not found.tenant:
                found = Identity(_name(value, name.decode()), proof=self._header_proof)
        return found

    def identity(self, scope: Scope, body: Mapping[str, Any], trusted: Identity) -> Identity:
        """Find the tenant of a request without a token.

        `trusted`: what `trusted()` returned. Raises BadRequestError if the body's name is no name.
        """
        if trusted.tenant:
            return trusted
        if self._trust_api_key:
            key = bearer(scope)
            if key:
                return Identity(api_key_sha256=api_key_hash(key))
        if self._trust_user_field:
            for field in ("safety_identifier", "user"):
                told = body.get(field)
                if isinstance(told, str) and told:
                    return Identity(tenant=_name(told.encode("utf-8", "replace"), field))
        return _UNKNOWN

    def request_ids(self, scope: Scope) -> tuple[str, str]:
        """Return the id that the client gets back, and the one for the scheduler and the engine.

        The first is the caller's x-request-id if it can be sent back. The second is the same only
        if the gate made it, or trusts it: the scheduler answers a repeated id with the first
        grant, so a caller that could choose it would run again on an old lease.
        """
        value = header(scope, b"x-request-id").decode("latin-1")
        if not (
            value.isascii() and value.isprintable() and 0 < len(value) <= _REQUEST_ID_CHARS_MAX
        ):
            value = ""
        if value and self._trust_request_id:
            return value, value
        made = f"{self._prefix}-{next(self._numbers)}"
        return value or made, made


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


def bearer(scope: Scope) -> str:
    """Return the API key of the Authorization header, else Anthropic's header, or "".

    Raises BadRequestError if one of them occurs twice.
    """
    scheme, _, key = once(scope, b"authorization").decode("latin-1").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return once(scope, b"x-api-key").decode("latin-1").strip()


def check_operator(scope: Scope, keys_sha256: frozenset[bytes]) -> None:
    """Check that a request carries an operator's key.

    Raises BadRequestError: 501 if the gate has no such keys, 401 without a key, 403 with another
    one, and as `bearer()`.
    """
    path = path_of(scope)
    if not keys_sha256:
        raise BadRequestError(
            f"{path} is for operators of this engine, and is closed (its operator can open it, to"
            " keys of its own, with SCHEDSVC_OPERATOR_KEYS_FILE)",
            status=501,
            code="operator_endpoint",
        )
    if not key_is_known(scope, keys_sha256):
        raise BadRequestError(
            f"{path} is for operators of this engine: send an operator's key as the bearer token",
            status=403 if bearer(scope) else 401,
            code="operator_key_required",
        )


def key_is_known(scope: Scope, keys_sha256: frozenset[bytes]) -> bool:
    """Compare the caller's API key with those that are allowed, in constant time.

    Raises BadRequestError as `bearer()`.
    """
    given = api_key_hash(bearer(scope))
    found = False
    for known in keys_sha256:
        found |= hmac.compare_digest(given, known)
    return found


def once(scope: Scope, name: bytes) -> bytes:
    """Return the header of that name, or b"". Raises BadRequestError if there are several.

    Another server in the chain could use a different one of them.
    """
    found = None
    for key, value in scope["headers"]:
        if key == name:
            if found is not None:
                text = name.decode("latin-1")
                number = [key for key, _ in scope["headers"]].count(name)
                raise BadRequestError(
                    f"{text}: the header occurs {number} times; send it once", text
                )
            found = bytes(value)
    return found or b""


def _name(value: bytes, where: str) -> str:
    if len(value) > _TENANT_BYTES_MAX:
        raise BadRequestError(f"{where}: has more than {_TENANT_BYTES_MAX} bytes", where)
    try:
        name = value.decode()
    except UnicodeDecodeError:
        raise BadRequestError(f"{where}: is not UTF-8", where) from None
    if not name.isprintable():
        raise BadRequestError(f"{where}: has characters that cannot be printed", where)
    return name
