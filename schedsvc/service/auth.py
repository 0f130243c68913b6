"""Who calls: bearer tokens and client certificates, turned into principals."""

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, Literal

__all__ = ["Authenticator", "Credentials", "Forbidden", "Unauthenticated"]

_PRINCIPALS_MAX = 65_536
_SCHEME = "bearer "

#: Of a call, as gRPC gives it.
Metadata = Iterable[tuple[str, str | bytes]] | None


class Unauthenticated(Exception):
    """The caller is not who it has to be; the text may be told to it."""


class Forbidden(Exception):
    """The caller is known and may not do this; the text says what to configure."""


class Credentials:
    """The tokens that are known, and a stable small number for each caller ever seen.

    One object serves all listeners, so that a caller is the same principal on each of them.
    Number 0 is anybody on a listener without authentication.
    """

    def __init__(
        self, tokens: Iterable[tuple[str, bytes]] = (), operators: Iterable[str] = ()
    ) -> None:
        """Learn tokens, as names and SHA-256 digests, and who may operate.

        Operators are names of tokens, or common names of client certificates.
        """
        self._numbers: dict[str, int] = {}
        self._names = [""]
        # Looking up a keyed hash takes a time that tells nothing of any token.
        self._key = secrets.token_bytes(32)
        self._tokens: dict[bytes, tuple[bytes, int]] = {}
        for name, digest in tokens:
            self._tokens[self._slot(digest)] = (digest, self.number(f"token:{name}"))
        self._operators = {
            self.number(f"{kind}:{name}") for name in operators for kind in ("token", "certificate")
        }

    def number(self, who: str) -> int:
        """Return the principal of a caller's name. Raises Unauthenticated beyond 65,536. O(1)."""
        known = self._numbers.get(who)
        if known is not None:
            return known
        if len(self._numbers) >= _PRINCIPALS_MAX:
            raise Unauthenticated("too many different callers since the scheduler started")
        self._numbers[who] = number = len(self._names)
        self._names.append(who)
        return number

    def name(self, principal: int) -> str:
        """Return what a principal is called: `token:NAME` or `certificate:NAME`; "" for 0."""
        return self._names[principal]

    def may_operate(self, principal: int) -> bool:
        """Whether a principal is an operator. O(1)."""
        return principal in self._operators

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
        self.credentials = credentials
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
                self.principal_of(metadata)
        except Unauthenticated as error:
            return str(error)
        return ""

    def _by_token(self, context: Any) -> int:
        return self.principal_of(context.invocation_metadata())

    def principal_of(self, metadata: Metadata) -> int:
        """Return the principal of a bearer token. Raises Unauthenticated. O(metadata)."""
        header: str | bytes = ""
        for key, value in metadata or ():
            if key == "authorization":
                header = value
                break
        if not isinstance(header, str) or header[: len(_SCHEME)].lower() != _SCHEME:
            raise Unauthenticated("send the metadata `authorization: Bearer TOKEN`")
        principal = self.credentials.of_token(header[len(_SCHEME) :].strip())
        if principal is None:
            raise Unauthenticated("the bearer token is not known")
        return principal

    def _by_certificate(self, context: Any) -> int:
        properties: dict[str, Sequence[bytes]] = context.auth_context()
        for key in ("x509_common_name", "x509_subject_alternative_name"):
            names = properties.get(key)
            if names and names[0]:
                return self.credentials.number("certificate:" + names[0].decode(errors="replace"))
        raise Unauthenticated("the client certificate names nobody: give it a common name")
