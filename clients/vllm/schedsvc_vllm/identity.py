"""Who asks: the tenant that a trusted header names, an API key's hash, or a field of the body."""

from __future__ import annotations

import hmac
import itertools
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schedsvc_client import api_key_hash

from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.asgi import Scope, header
from schedsvc_vllm.settings import Settings

_TENANT_BYTES_MAX = 256
_CLASS_BYTES_MAX = 64
_REQUEST_ID_CHARS_MAX = 128


@dataclass(frozen=True, slots=True)
class Identity:
    """One of the two is set, or neither: an unknown tenant."""

    tenant: str = ""
    api_key_sha256: bytes = b""

    @property
    def key(self) -> str | bytes:
        """What tells tenants apart in tables of the gate."""
        return self.tenant or self.api_key_sha256


class Identifier:
    """Applies the settings' order: trusted headers, API key, `safety_identifier`, `user`."""

    def __init__(self, settings: Settings) -> None:
        self._headers = [name.encode() for name in settings.tenant_headers]
        self._trust_api_key = settings.trust_api_key
        self._trust_user_field = settings.trust_user_field
        self._class_from_tier = settings.class_from_service_tier
        self._prefix = secrets.token_hex(8)
        self._numbers = itertools.count(1)

    def identity(self, scope: Scope, body: Mapping[str, Any]) -> Identity:
        """Find the tenant. Raises BadRequestError where a trusted name is no name."""
        for name in self._headers:
            value = _once(scope, name).strip()
            if value:
                return Identity(tenant=_name(value, name.decode()))
        if self._trust_api_key:
            key = bearer(scope)
            if key:
                return Identity(api_key_sha256=api_key_hash(key))
        if self._trust_user_field:
            for field in ("safety_identifier", "user"):
                named = body.get(field)
                if isinstance(named, str) and named:
                    return Identity(tenant=_name(named.encode("utf-8", "replace"), field))
        return Identity()

    def request_class(self, body: Mapping[str, Any]) -> str:
        """Return the priority class that the body's `service_tier` asks for; "": the default."""
        tier = body.get("service_tier") if self._class_from_tier else None
        if not isinstance(tier, str) or tier in ("auto", "default"):
            return ""
        if not tier.isprintable() or len(tier.encode("utf-8", "replace")) > _CLASS_BYTES_MAX:
            raise BadRequestError(
                f"service_tier: at most {_CLASS_BYTES_MAX} printable bytes", "service_tier"
            )
        return tier

    def request_id(self, scope: Scope) -> str:
        """Return the caller's x-request-id where it is fit to be sent back, else a new one."""
        value = header(scope, b"x-request-id").decode("latin-1")
        if value.isascii() and value.isprintable() and 0 < len(value) <= _REQUEST_ID_CHARS_MAX:
            return value
        return f"{self._prefix}-{next(self._numbers)}"


def bearer(scope: Scope) -> str:
    """Return the API key of the Authorization header, else Anthropic's header, or "".

    Raises BadRequestError if one of them occurs twice.
    """
    scheme, _, key = _once(scope, b"authorization").decode("latin-1").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return _once(scope, b"x-api-key").decode("latin-1").strip()


def key_is_known(scope: Scope, keys_sha256: frozenset[bytes]) -> bool:
    """Compare the caller's API key with those that are allowed, in constant time.

    Raises BadRequestError as `bearer()`.
    """
    given = api_key_hash(bearer(scope))
    found = False
    for known in keys_sha256:
        found |= hmac.compare_digest(given, known)
    return found


def _once(scope: Scope, name: bytes) -> bytes:
    """Return the header of that name, or b"". Raises BadRequestError if there are several.

    Another server in the chain could use a different one of them.
    """
    values = [value for key, value in scope["headers"] if key == name]
    if len(values) > 1:
        text = name.decode("latin-1")
        raise BadRequestError(f"{text}: the header occurs {len(values)} times; send it once", text)
    return bytes(values[0]) if values else b""


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
