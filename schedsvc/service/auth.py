"""Finds out which principal calls, by its bearer token, client certificate or listener."""

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from schedsvc.service.turns import Turns

__all__ = ["Authenticator", "Credentials", "Forbidden", "Known", "Unauthenticated"]

_PRINCIPALS_MAX = 65_536
_SCHEME = "bearer "
_SPIFFE = "spiffe://"
_SEVERAL = "this client certificate names several callers; issue one with a single URI SAN"

#: The metadata of a call, as gRPC gives it.
Metadata = Iterable[tuple[str, str | bytes]] | None


class Unauthenticated(Exception):
    """The caller is not who it has to be; the caller may read the text."""


class Forbidden(Exception):
    """The caller is known and may not do this; the text says what to configure."""


@dataclass(frozen=True, slots=True)
class Known:
    """Describes a principal that the configuration lists, and how it proves who it is."""

    name: str
    #: SHA-256 of each token.
    tokens: tuple[bytes, ...] = ()
    #: A URI SAN if it has a scheme, else a DNS SAN, or the common name of one without SANs.
    certificate: str | None = None
    #: `tcp` or `unix` of a listener without authentication, as the configuration writes it.
    listener: str | None = None
    is_operator: bool = False
    #: It is a member of the cluster, and may follow this scheduler.
    is_member: bool = False
    #: Stats shows it what it may not name itself, too.
    sees_all: bool = False
    #: 0: as many as it sends.
    events_per_second: int = 0
    #: A part of the event loop's time; 1: all of it.
    loop_share: float = 1.0

    @property
    def proofs(self) -> frozenset[object]:
        """Return the proofs that a caller is this principal."""
        others = (("certificate", self.certificate), ("listener", self.listener))
        return frozenset((*self.tokens, *others))


class Credentials:
    """Knows the proofs, and a stable small number for each caller ever seen.

    One object serves all listeners, so that a caller is the same principal on each of them. Listed
    principals have the first numbers; a number stays its principal's while the process runs.
    """

    def __init__(self, known: Iterable[Known] = (), *, unlisted_certificates: bool = True) -> None:
        """Learn the principals; their tokens and certificates have to differ.

        `unlisted_certificates`: a client certificate that no principal names is let in, with all
        grants, under its own name.
        """
        self._numbers: dict[tuple[str, str], int] = {}
        self._names = [""]
        #: The callers' turns of the event loop.
        self.turns = Turns()
        # Looking up a keyed hash takes a time that says nothing of any token.
        self._key = secrets.token_bytes(32)
        self._listed: dict[int, Known] = {}
        self._tokens: dict[bytes, tuple[bytes, int]] = {}
        self._certificates: dict[str, int] = {}
        self._listeners: dict[str, int] = {}
        self._lets_unlisted_in = True
        self.replace(known, unlisted_certificates=unlisted_certificates)

    def replace(self, known: Iterable[Known], *, unlisted_certificates: bool) -> set[int]:
        """Know these principals from now on. O(principals).

        Returns the principals of which a proof is not valid any more: their streams have to end.
        """
        before, before_unlisted = self._listed, self._lets_unlisted_in
        self._listed = {self._number("principal", entry.name): entry for entry in known}
        self._lets_unlisted_in = unlisted_certificates
        self._tokens, self._certificates, self._listeners = {}, {}, {}
        for number, entry in self._listed.items():
            for digest in entry.tokens:
                self._tokens[self._slot(digest)] = (digest, number)
            if entry.certificate is not None:
                self._certificates[entry.certificate] = number
            if entry.listener is not None:
                self._listeners[entry.listener] = number
        ended = {
            number
            for number, entry in before.items()
            if number not in self._listed or entry.proofs - self._listed[number].proofs
        }
        # The file may list an unlisted caller now with fewer grants, or refuse it.
        closed = before_unlisted and not unlisted_certificates
        ended |= {
            number
            for (kind, name), number in self._numbers.items()
            if (kind == "certificate" and (closed or name in self._certificates))
            or (kind == "listener" and name in self._listeners)
        }
        return ended

    @property
    def listed(self) -> Mapping[int, Known]:
        """Return the principals that the configuration lists, by number."""
        return self._listed

    def _number(self, kind: str, name: str) -> int:
        known = self._numbers.get((kind, name))
        if known is not None:
            return known
        if len(self._numbers) >= _PRINCIPALS_MAX:
            raise Unauthenticated("too many different callers since the scheduler started")
        self._numbers[kind, name] = number = len(self._names)
        self._names.append(name if kind == "principal" else f"{kind}:{name}")
        return number

    def name(self, principal: int) -> str:
        """Return a principal's name in the configuration; else `certificate:NAME` and the like."""
        return self._names[principal]

    def number(self, name: str) -> int | None:
        """Return the principal of a name that `name()` returns; None: none is known. O(names)."""
        return self._names.index(name) if name in self._names[1:] else None

    def may_operate(self, principal: int) -> bool:
        """Return whether a principal is an operator. O(1)."""
        listed = self._listed.get(principal)
        return listed is not None and listed.is_operator

    def is_member(self, principal: int) -> bool:
        """Return whether a principal is a member of the cluster. O(1)."""
        listed = self._listed.get(principal)
        return listed is not None and listed.is_member

    def sees_all(self, principal: int) -> bool:
        """Return whether Stats shows a principal everything. O(1)."""
        listed = self._listed.get(principal)
        return listed is None or listed.sees_all

    def of_listener(self, address: str) -> int:
        """Return the principal of all who call on a listener without authentication. O(1).

        `address`: its `tcp` or `unix`, as the configuration writes it.
        """
        listed = self._listeners.get(address)
        return self._number("listener", address) if listed is None else listed

    def of_certificate(self, uris: Sequence[str], names: Sequence[str]) -> int | None:
        """Return the principal of a certificate, or None if it is not let in. O(names).

        `uris`: its URI SANs; `names`: its DNS SANs, or the common name of one without SANs. A name
        with a scheme in the configuration stands for a URI SAN only, so that no common name can
        imitate one. Raises Unauthenticated for a certificate that names several callers, which one
        with a SPIFFE ID beside another URI does (X509-SVID, section 2).
        """
        listed = (*uris, *(name for name in names if "://" not in name))
        found = {self._certificates[name] for name in listed if name in self._certificates}
        is_spiffe = any(uri.lower().startswith(_SPIFFE) for uri in uris)
        if len(found) > 1 or (is_spiffe and len(uris) > 1):
            raise Unauthenticated(_SEVERAL)
        if found:
            return found.pop()
        if not self._lets_unlisted_in or not (uris or names):
            return None
        return self._number("certificate", (*names, *uris)[0])

    def of_token(self, token: str) -> int | None:
        """Return the principal of a token, or None. O(1), in constant time for equal lengths."""
        digest = hashlib.sha256(token.encode()).digest()
        known, number = self._tokens.get(self._slot(digest), (b"", 0))
        return number if hmac.compare_digest(digest, known) else None

    def _slot(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._key, digest_size=16).digest()


class Authenticator:
    """Finds out who a call comes from, on one listener."""

    def __init__(
        self,
        credentials: Credentials,
        kind: Literal["none", "token", "certificate"],
        listener: str = "",
        proven: Callable[[str], None] | None = None,
    ) -> None:
        """Ask callers for this kind of proof; `listener`: its address in the configuration.

        `proven` gets the peer of each call whose caller is known.
        """
        self._proven = proven
        self.credentials = credentials
        #: Whether callers have to prove anything.
        self.asks = kind != "none"
        self._kind = kind
        self._listener = listener
        self._of_context: Callable[[Any], int] = {
            "none": self._of_anybody,
            "token": self._by_token,
            "certificate": self._by_certificate,
        }[kind]

    def principal(self, context: Any) -> int:
        """Return the principal of a call. Raises Unauthenticated. O(metadata)."""
        principal = self._of_context(context)
        self.note_proof(context)
        return principal

    def note_proof(self, context: Any) -> None:
        """Note that the caller of a call is known. O(1)."""
        if self._proven is not None:
            self._proven(context.peer())

    def _of_anybody(self, _: Any) -> int:
        return self.credentials.of_listener(self._listener)

    def turned_away(self, metadata: Metadata) -> str:
        """Say why a call with this metadata fails, before its message is read; else "".

        A certificate is only known to the call itself: TLS lets in only callers that have one.
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

        def texts(key: str) -> list[str]:
            return [text.decode(errors="replace") for text in properties.get(key, ()) if text]

        # As RFC 6125 has it: a CA checks each SAN, and often not the common name.
        has_sans = "x509_subject_alternative_name" in properties
        uris, names = texts("peer_uri"), texts("peer_dns" if has_sans else "x509_common_name")
        principal = self.credentials.of_certificate(uris, names)
        if principal is None:
            raise Unauthenticated("no principal has this client certificate")
        return principal
