"""Who calls: bearer tokens and client certificates, turned into principals."""

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, Literal

__all__ = ["Authenticator", "Credentials", "Unauthenticated"]

_PRINCIPALS_MAX = 65_536
_SCHEME = "bearer "

#: Of a call, as gRPC gives it.
Metadata = Iterable[tuple[str, str | bytes]] | None


class Unauthenticated(Exception):
    """The caller is not who it has to be; the text may be told to it."""


class Credentials:
    """The tokens that are known, and a stable small number for each caller ever seen.

    One object serves all listeners, so that a caller is the same principal on each of them.
    Number 0 is anybody on a listener without authentication.
    """

    def __init__(self, tokens: Iterable[tuple[str, bytes]] = ()) -> None:
        """Learn tokens, as names and SHA-256 digests."""
        self._numbers: dict[str, int] = {}
        # Looking up a keyed hash takes a time that tells nothing of any token.
        self._key = secrets.token_bytes(32)
        self._tokens: dict[bytes, tuple[bytes, int]] = {}
        for name, digest in tokens:
            self._tokens[self._slot(digest)] = (digest, self.number(f"token:{name}"))

    def number(self, who: str) -> int:
        """Return the principal of a caller's name. Raises Unauthenticated beyond 65,536. O(1)."""
        known = self._numbers.get(who)
        if known is not None:
            return known
        if len(self._numbers) >= _PRINCIPALS_MAX:
            raise Unauthenticated("too many different callers since the scheduler started")
        self._numbers[who] = number = len(self._numbers) + 1
        return number

    def of_token(self, token: str) -> int | None:
        """Return the principal of a token, or None. O(1), in constant time for equal lengths."""
        digest = hashlib.sha256(token.encode()).digest()
        known, number = self._tokens.get(self._slot(digest), (b"", 0))
        return number if hmac.compare_digest(digest, known) else None

    def _slot(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._key, digest_size=16).digest()


class Authenticator:
    """Tells who a call comes from, on one listener."""

    def __init__(self, credentials: Credentials, kind: Literal["token", "certificate"]) -> None:
        self._credentials = credentials
        self._kind = kind
        self._of_context = self._by_token if kind == "token" else self._by_certificate

    def principal(self, context: Any) -> int:
        """Return the principal of a call (> 0). Raises Unauthenticated. O(metadata)."""
        return self._of_context(context)

    def turned_away(self, metadata: Metadata) -> str:
        """Say why a call with this metadata fails, before its message is read; "" where it may not.

        A certificate is only known to the call itself: TLS has let nobody in without one.
        """
        try:
            if self._kind == "token":
                self._of_metadata(metadata)
        except Unauthenticated as error:
            return str(error)
        return ""

    def _by_token(self, context: Any) -> int:
        return self._of_metadata(context.invocation_metadata())

    def _of_metadata(self, metadata: Metadata) -> int:
        header: str | bytes = ""
        for key, value in metadata or ():
            if key == "authorization":
                header = value
                break
        if not isinstance(header, str) or header[: len(_SCHEME)].lower() != _SCHEME:
            raise Unauthenticated("send the metadata `authorization: Bearer TOKEN`")
        principal = self._credentials.of_token(header[len(_SCHEME) :].strip())
        if principal is None:
            raise Unauthenticated("the bearer token is not known")
        return principal

    def _by_certificate(self, context: Any) -> int:
        properties: dict[str, Sequence[bytes]] = context.auth_context()
        for key in ("x509_common_name", "x509_subject_alternative_name"):
            names = properties.get(key)
            if names and names[0]:
                return self._credentials.number("certificate:" + names[0].decode(errors="replace"))
        raise Unauthenticated("the client certificate names nobody: give it a common name")
