"""Describes the caller of a request by its head: one function reads every header about it.

`read_caller()` is sans-IO and proves nothing. `identity.py` checks what it found, and no other part
of the gate or the proxy reads these headers. A part of a Caller that cannot be used holds its
error, and `use()` raises that: an endpoint that asks for no tenant serves a head that names two.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.asgi import Scope
from schedsvc_vllm.certificates import (
    NO_CERTIFICATE,
    XFCC,
    CertificateSettings,
    PeerCertificate,
    peer_certificate,
)
from schedsvc_vllm.settings import (
    DEADLINE,
    LLM_D_OBJECTIVE,
    LLM_D_TTFT,
    MAX_QUEUE,
    SESSION,
    Settings,
)

T = TypeVar("T")

TENANT_BYTES_MAX = 256
MS_MAX = 86_400_000
_REQUEST_ID_CHARS_MAX = 128
_CLASS_BYTES_MAX = 64
_SESSION_BYTES_MAX = 256
_NUMBER = re.compile(rb"\d{1,9}(\.\d{0,9})?", re.ASCII)
_TIER = "service_tier"
_OWN = ""
_AUTHORIZATION, _API_KEY = b"authorization", b"x-api-key"
_REQUEST_ID, _IDEMPOTENCY_KEY = b"x-request-id", b"idempotency-key"
_FORWARDED_FOR, _XFCC = b"x-forwarded-for", XFCC.encode()
_ALWAYS = frozenset(
    {_AUTHORIZATION, _API_KEY, _REQUEST_ID, _IDEMPOTENCY_KEY, _FORWARDED_FOR, _XFCC}
)
# An address as fronts write it, some of them with a port.
_ADDRESS = re.compile(r"\[([^\]]+)\](?::\d+)?|(\d+(?:\.\d+){3})(?::\d+)?|([0-9a-fA-F:.]+)")
_INTERFACE_BITS = 64
_NETWORKS_CACHED_MAX = 4_096


@dataclass(frozen=True, slots=True)
class Terms:
    """Holds the terms of one request, as AdmitRequest has them; 0 and "": the scheduler's default.

    The gate reads them from any caller: each can make only that caller's own request leave earlier,
    or names a class. A class that the scheduler does not have, or that the tenant may not name,
    counts as the tenant's own: SDKs name tiers that no configuration has. A session only divides
    what the caller's own tenant gets. `states_tier`: the request named a tier or a class, so its
    answer states the one that counted.
    """

    queue_ttl_ms: int = 0
    deadline_ms: int = 0
    request_class: str = ""
    states_tier: bool = False
    session: str = ""

    @property
    def wait_s_max(self) -> float:
        """Return the longest that the caller waits for its turn; infinity: it does not say."""
        limits = [ms for ms in (self.queue_ttl_ms, self.deadline_ms) if ms]
        return min(limits) / 1_000 if limits else math.inf

    def after(self, waited_s: float) -> Terms:
        """Return the terms of a request that has waited already: its limits count from then."""
        waited_ms = int(waited_s * 1_000)
        return replace(
            self,
            queue_ttl_ms=max(1, self.queue_ttl_ms - waited_ms) if self.queue_ttl_ms else 0,
            deadline_ms=max(1, self.deadline_ms - waited_ms) if self.deadline_ms else 0,
        )

    def with_tier_of(self, body: Mapping[str, Any]) -> Terms:
        """Return the terms with the class that a body's `service_tier` names.

        A header that names a class precedes it.
        """
        tier = body.get(_TIER)
        if self.states_tier or not isinstance(tier, str):
            return self
        named = _OWN if tier in ("auto", "default") else _class_name(tier)
        return replace(self, request_class=named, states_tier=True)


_NO_TERMS = Terms()


_Sent = Mapping[bytes, Sequence[bytes]]


class Peer(NamedTuple):
    """Names the other end of a connection, as the server knows it; "": it knows no address."""

    address: str = ""
    certificate: PeerCertificate = NO_CERTIFICATE


class Caller(NamedTuple):
    """Describes a caller by one request's head, of which nothing is proved.

    `network`: the client's IPv4 address or IPv6 /64. `api_key`: of the Authorization header, else
    of Anthropic's. `certified`: the tenant in its certificate; None: it has none, or names none.
    `named`: the tenant in a trusted header. `request_id`: its own, if it can be sent back.
    """

    network: str = ""
    api_key: str | BadRequestError = ""
    certified: str | BadRequestError | None = None
    named: str | BadRequestError = ""
    terms: Terms | BadRequestError = _NO_TERMS
    request_id: str = ""
    idempotency_key: bytes = b""


@dataclass(frozen=True)
class Sources:
    """Says which headers count beside those that always do, by a gate's settings."""

    tenant_headers: tuple[bytes, ...] = ()
    terms_headers: frozenset[bytes] = frozenset()
    fronted: bool = False
    certificates: CertificateSettings | None = None

    @classmethod
    def of(cls, settings: Settings) -> Sources:
        """Return the sources of a gate."""
        return cls(
            tuple(name.encode() for name in settings.tenant_headers),
            frozenset(name.encode() for name in settings.request_headers),
            settings.is_fronted,
            settings.certificates,
        )


def use(part: T | BadRequestError) -> T:
    """Return a part of a Caller. Raises BadRequestError if it cannot be used."""
    if isinstance(part, BadRequestError):
        raise part
    return part


def peer_of(scope: Scope, sources: Sources) -> Peer:
    """Return the other end of a scope's connection, with its certificate if that counts."""
    counts = sources.certificates is not None and not sources.certificates.set_by
    address = str((scope.get("client") or ("",))[0])
    return Peer(address, peer_certificate(scope) if counts else NO_CERTIFICATE)


def read_caller(
    headers: Iterable[tuple[bytes, bytes]], peer: Peer, sources: Sources = Sources()
) -> Caller:
    """Read all that a head says of its caller. O(headers).

    `headers`: with lower-case names.
    """
    sent: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        if name in _ALWAYS or name in sources.terms_headers or name in sources.tenant_headers:
            sent.setdefault(name, []).append(bytes(value))
    has_terms = not sources.terms_headers.isdisjoint(sent)
    has_key = _AUTHORIZATION in sent or _API_KEY in sent
    certificates, names = sources.certificates, sources.tenant_headers
    return Caller(
        _network_of(sent, peer, sources),
        _part(_api_key, sent) if has_key else "",
        None if certificates is None else _part(_certified, sent, peer, certificates),
        _part(_named, sent, names) if names and not sent.keys().isdisjoint(names) else "",
        _part(_terms, sent, sources.terms_headers) if has_terms else _NO_TERMS,
        _request_id(sent) if _REQUEST_ID in sent else "",
        sent[_IDEMPOTENCY_KEY][0] if _IDEMPOTENCY_KEY in sent else b"",
    )


def tenant_name(value: bytes, where: str) -> str:
    """Return a tenant's name that a client sent. Raises BadRequestError if it can be none."""
    if len(value) > TENANT_BYTES_MAX:
        raise BadRequestError(f"{where}: has more than {TENANT_BYTES_MAX} bytes", where)
    try:
        name = value.decode()
    except UnicodeDecodeError:
        raise BadRequestError(f"{where}: is not UTF-8", where) from None
    if not name.isprintable():
        raise BadRequestError(f"{where}: has characters that cannot be printed", where)
    return name


def _part(read: Callable[..., T], *of: Any) -> T | BadRequestError:
    try:
        return read(*of)
    except BadRequestError as error:
        return error


def _once(sent: _Sent, name: bytes) -> bytes:
    """Return the header of that name, or b"". Raises BadRequestError if there are several.

    Another server in the chain could use a different one of them.
    """
    values = sent.get(name, (b"",))
    if len(values) > 1:
        text = name.decode("latin-1")
        raise BadRequestError(f"{text}: the header occurs {len(values)} times; send it once", text)
    return values[0]


def _network_of(sent: _Sent, peer: Peer, sources: Sources) -> str:
    """Return the network that a request comes from, for tables shared by clients without a name.

    A client with one IPv6 address has a whole /64 of them, so the /64 counts as one client. Behind
    a front all connections have the front's address. Then the last address of `x-forwarded-for`
    counts, which the front has appended; without one, the front's own address counts.
    """
    if sources.fronted and _FORWARDED_FOR in sent:
        last = sent[_FORWARDED_FOR][-1].rpartition(b",")[2].strip()
        if network := _network(last.decode("latin-1")):
            return network
    return _network(peer.address) or peer.address


@lru_cache(_NETWORKS_CACHED_MAX)
def _network(text: str) -> str:
    """Return the network of an address; "" if it is none."""
    found = _ADDRESS.fullmatch(text)
    if found is None:
        return ""
    try:
        address = ipaddress.ip_address(found[1] or found[2] or found[3])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Address(int(address) >> _INTERFACE_BITS << _INTERFACE_BITS)) + "/64"


def _api_key(sent: _Sent) -> str:
    scheme, _, key = _once(sent, _AUTHORIZATION).decode("latin-1").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return _once(sent, _API_KEY).decode("latin-1").strip()


def _certified(sent: _Sent, peer: Peer, certificates: CertificateSettings) -> str | None:
    return certificates.tenant(peer.certificate, _once(sent, _XFCC) if certificates.set_by else b"")


def _named(sent: _Sent, names: Sequence[bytes]) -> str:
    """Return the tenant in the trusted headers; "": they name none.

    A hop may join two headers with a comma (RFC 9110, 5.3), so one with a comma counts as two.
    """
    tenant = ""
    for name in names:  # all of them: none may occur twice
        value = _once(sent, name).strip()
        if b"," in value:
            text = name.decode()
            raise BadRequestError(
                f"{text}: {value.decode('latin-1')[:200]!r} holds a comma, as two headers do"
                " that a proxy has joined; send one name without a comma",
                text,
            )
        if value and not tenant:
            tenant = tenant_name(value, name.decode())
    return tenant


def _terms(sent: _Sent, names: frozenset[bytes]) -> Terms:
    def value(name: str) -> bytes:
        key = name.encode()
        return _once(sent, key).strip() if key in names else b""

    def milliseconds(name: str, least: int) -> int | None:
        return _milliseconds(value(name), name, least)

    # The least TTL: the scheduler grants at once a request that has room. 0 would be its default.
    wait_ms = milliseconds(MAX_QUEUE, 0)
    deadline_ms = milliseconds(DEADLINE, 1)
    if deadline_ms is None:
        deadline_ms = milliseconds(LLM_D_TTFT, 0)  # llm-d's routers write 0 for "no target"
    named = value(LLM_D_OBJECTIVE)
    return Terms(
        queue_ttl_ms=0 if wait_ms is None else max(1, wait_ms),
        deadline_ms=deadline_ms or 0,
        request_class=_class_name(named.decode("latin-1")),
        states_tier=bool(named),
        session=_session(value(SESSION)),
    )


def _session(value: bytes) -> str:
    text = value.decode("latin-1")
    if not text.isprintable() or len(text.encode()) > _SESSION_BYTES_MAX:
        raise BadRequestError(
            f"{SESSION}: {text[:40]!r} is no session: send at most {_SESSION_BYTES_MAX}"
            " printable bytes, or leave the header out",
            SESSION,
        )
    return text


def _milliseconds(value: bytes, name: str, least: int) -> int | None:
    """Return a header's time, rounded up; None: it is not there, or not read."""
    if not value:
        return None
    number = math.ceil(float(value)) if _NUMBER.fullmatch(value) else -1
    if not least <= number <= MS_MAX:
        text = value[:40].decode("latin-1")
        raise BadRequestError(
            f"{name}: {text!r} is not a number of milliseconds from {least} to {MS_MAX};"
            " send one, such as 500, or leave the header out",
            name,
        )
    return number


def _class_name(value: str) -> str:
    """Return a name that can be that of a class, else the tenant's own."""
    fits = value.isprintable() and len(value.encode("utf-8", "replace")) <= _CLASS_BYTES_MAX
    return value if fits else _OWN


def _request_id(sent: _Sent) -> str:
    """Return the caller's id of its request if it can be sent back, else ""."""
    value = sent.get(_REQUEST_ID, (b"",))[0].decode("latin-1")
    fits = value.isascii() and value.isprintable() and len(value) <= _REQUEST_ID_CHARS_MAX
    return value if fits else ""
