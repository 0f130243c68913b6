"""Names the tenant of a request by the team, the user and the key that LiteLLM has checked."""

from __future__ import annotations

import hashlib
from typing import Any

TENANT_BYTES_MAX = 256
NONE = "-"
_KEY_HASH_CHARS, _HASH_CHARS = 16, 64
_HEX = frozenset("0123456789abcdef")


def tenant_path(team: str | None, user: str | None, key: str | None) -> str:
    """Return `team/user/key`, of at most 256 bytes; `-` stands for one that the request lacks.

    No name can stand for another path: `/` and `%` in a name are escaped, and so is a name `-`.
    A longer path ends with a part of its SHA-256 instead.
    """
    path = "/".join(_escaped(part) for part in (team, user, key))
    encoded = path.encode()
    if len(encoded) <= TENANT_BYTES_MAX:
        return path
    digest = hashlib.sha256(encoded).hexdigest()
    kept = encoded[: TENANT_BYTES_MAX - len(digest) - 1].decode(errors="ignore")
    return f"{kept}~{digest}"


def tenant_of(auth: Any) -> str:
    """Return the tenant of LiteLLM's UserAPIKeyAuth.

    A key without an alias goes by its hash. A team goes by its id: two may have one alias.
    """
    key = auth.key_alias or _hashed(auth.api_key)
    return tenant_path(auth.team_id, auth.user_id, key)


def _hashed(api_key: str | None) -> str:
    """Return a part of the key's SHA-256, which LiteLLM may have taken already."""
    if not api_key:
        return ""
    is_hash = len(api_key) == _HASH_CHARS and set(api_key) <= _HEX
    digest = api_key if is_hash else hashlib.sha256(api_key.encode()).hexdigest()
    return digest[:_KEY_HASH_CHARS]


def _escaped(name: str | None) -> str:
    if not name:
        return NONE
    if name == NONE:
        return "%2D"
    return name.replace("%", "%25").replace("/", "%2F").replace("~", "%7E")
