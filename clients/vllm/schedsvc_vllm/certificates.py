"""Finds the tenant of a client certificate: by its SPIFFE ID (a URI SAN) or its DNS SANs.

The server that ends TLS verifies the certificate: its chain, its dates, and that the client has its
key. `http_limits.py` puts the server's knowledge of it into each scope. If a proxy ends TLS, the
proxy writes the names into `x-forwarded-client-cert`, in Envoy's form. The common name never
counts. Patterns say which names stand for tenants: a name that fits none says nothing.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.asgi import Scope

#: The key of a scope's `extensions` with the certificate as `ssl.SSLSocket.getpeercert()` returns
#: it.
EXTENSION = "schedsvc.peer_certificate"
XFCC = "x-forwarded-client-cert"
TENANT = "{tenant}"
_TENANT_BYTES_MAX = 256
_SPIFFE = "spiffe://"
# One segment of a SPIFFE ID's path, and one label of a DNS name.
_SEGMENT = r"(?!\.{1,2}(?:/|$))[A-Za-z0-9._-]+"
_LABEL = r"[a-z0-9](?:[a-z0-9_-]*[a-z0-9])?"
_TRUST_DOMAIN = re.compile(r"[a-z0-9._-]+")
_FIXED = {"URI": re.compile(r"[A-Za-z0-9._-]*"), "DNS": re.compile(r"[a-z0-9_-]*")}
# A pair of x-forwarded-client-cert and what follows it.
_PAIR = re.compile(r'\s*([A-Za-z]+)=("(?:[^"\\]|\\.)*"|[^",;]*)(?:([;,])|$)')
_KINDS = {"uri": "URI", "dns": "DNS"}

#: A kind (`URI`, `DNS` and others) and a name.
San = tuple[str, str]


class Pattern(NamedTuple):
    """Matches names of one form, and says where in them the tenant is."""

    kind: str
    form: re.Pattern[str]

    def tenant(self, kind: str, name: str) -> str | None:
        """Return the tenant that a name of a certificate stands for; None: it has another form."""
        if kind != self.kind or not name.isascii():
            return None
        found = self.form.fullmatch(name.lower() if kind == "DNS" else name)
        return found["tenant"] if found else None


class PeerCertificate(NamedTuple):
    """Holds the names in the certificate of a connection's client.

    `expired`: when it did; "": not.
    """

    names: Sequence[San] = ()
    expired: str = ""


#: That of a client without one.
NO_CERTIFICATE = PeerCertificate()


def peer_certificate(scope: Scope) -> PeerCertificate:
    """Return the certificate of a scope's client."""
    certificate: Mapping[str, Any] | None = (scope.get("extensions") or {}).get(EXTENSION)
    if not certificate:
        return NO_CERTIFICATE
    # The server has checked the dates when the connection began, which may be days ago.
    ends = str(certificate["notAfter"])
    is_over = time.time() >= ssl.cert_time_to_seconds(ends)
    return PeerCertificate(certificate.get("subjectAltName", ()), ends if is_over else "")


@dataclass(frozen=True)
class CertificateSettings:
    """Says which names of certificates stand for tenants, and where the gate finds certificates.

    `set_by`: which proxy overwrites x-forwarded-client-cert; "": the gate's own server ends TLS.
    """

    patterns: tuple[Pattern, ...]
    set_by: str = ""

    def tenant(self, certificate: PeerCertificate, forwarded: bytes) -> str | None:
        """Return the tenant of the client's certificate; None: it has none, or names no tenant.

        `certificate`: of the connection. `forwarded`: the header of the proxy. O(names * patterns).
        Raises BadRequestError: 401 for a certificate that has expired or is ambiguous, and 400 for
        a header that cannot be read.
        """
        if self.set_by:
            names = _of_header(forwarded.decode("latin-1"), self.set_by)
        else:
            names = _of_peer(certificate)
        found = {
            tenant
            for kind, name in names
            for pattern in self.patterns
            if (tenant := pattern.tenant(kind, name)) is not None
        }
        ids = sum(kind == "URI" and name.startswith(_SPIFFE) for kind, name in names)
        if found and ids > 1:
            raise _refused(f"it has {ids} SPIFFE IDs, and a valid one has one")
        if len(found) > 1:
            listed = ", ".join(repr(tenant) for tenant in sorted(found))
            raise _refused(f"its names stand for several tenants: {listed[:200]}")
        tenant = next(iter(found), None)
        if tenant is not None and len(tenant) > _TENANT_BYTES_MAX:
            raise _refused(f"the tenant in its name has more than {_TENANT_BYTES_MAX} bytes")
        return tenant


def read_patterns(text: str) -> tuple[Pattern, ...]:
    """Read patterns, separated by commas. Raises ValueError, which names the wrong one."""
    return tuple(_pattern(part.strip()) for part in text.split(",") if part.strip())


def _pattern(text: str) -> Pattern:
    is_uri = text.startswith(_SPIFFE)
    if not is_uri and "://" in text:
        raise ValueError(f"{text}: must begin with spiffe://, or be a DNS name")
    if text.count(TENANT) != 1:
        raise ValueError(f"{text}: must contain {TENANT} once, where the tenant stands")
    if is_uri:
        domain, *parts = text.removeprefix(_SPIFFE).split("/")
        if not _TRUST_DOMAIN.fullmatch(domain):
            raise ValueError(
                f"{text}: the trust domain must be written out, of a-z, 0-9, '.', '-' and '_',"
                f" not {domain!r}"
            )
        forms = [_part(part, "URI", text) for part in parts]
        return Pattern(
            "URI", re.compile(re.escape(_SPIFFE + domain) + "".join(f"/{f}" for f in forms))
        )
    labels = text.lower().split(".")
    if len(labels) < 2 or labels[-1] == "*" or TENANT in labels[-1]:
        raise ValueError(f"{text}: must end with a domain that is written out, as in {TENANT}.a.b")
    return Pattern("DNS", re.compile(r"\.".join(_part(label, "DNS", text) for label in labels)))


def _part(part: str, kind: str, text: str) -> str:
    """Return the form of one segment or label."""
    any_part = _SEGMENT if kind == "URI" else _LABEL
    if part == "*":
        return any_part
    before, tenant, after = part.partition(TENANT)
    fixed = _FIXED[kind]
    if not part or part in (".", "..") or not (fixed.fullmatch(before) and fixed.fullmatch(after)):
        raise ValueError(
            f"{text}: each part must be letters, digits, '-' and '_', with or without {TENANT}; or"
            f" * for any, not {part!r}"
        )
    form = f"(?P<tenant>{any_part})" if tenant else ""
    return re.escape(before) + form + re.escape(after)


def _of_peer(certificate: PeerCertificate) -> Sequence[San]:
    """Return the names of the connection's own certificate; none without one."""
    if certificate.expired:
        raise _refused(f"it expired at {certificate.expired}; connect again with a new one")
    return certificate.names


def _of_header(value: str, set_by: str) -> Sequence[San]:
    """Return the names that the proxy has found; none without a certificate."""
    return list(_pairs(value, set_by)) if value.strip() else ()


def _pairs(value: str, set_by: str) -> Iterator[San]:
    at = 0
    while at < len(value):
        pair = _PAIR.match(value, at)
        if pair is None:
            raise BadRequestError(f"{XFCC}: cannot be read from character {at + 1} on", XFCC)
        key, name, end = pair.groups()
        if end == ",":
            raise BadRequestError(
                f"{XFCC}: describes several certificates; {set_by} has to overwrite the header, and"
                " not to append to it (in Envoy: SANITIZE_SET)",
                XFCC,
            )
        if name.startswith('"'):
            name = re.sub(r"\\(.)", r"\1", name[1:-1])
        if name and key.lower() in _KINDS:
            yield _KINDS[key.lower()], name
        at = pair.end()


def _refused(problem: str) -> BadRequestError:
    return BadRequestError(
        f"the client certificate is not accepted: {problem}",
        status=401,
        code="invalid_certificate",
    )
