"""Names the caller by its certificate, in the form of gRPC's `auth_context()`."""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["auth_context_of"]

_KINDS = {"URI": "peer_uri", "DNS": "peer_dns", "email": "peer_email", "IP Address": "peer_ip"}


def auth_context_of(certificate: Mapping[str, Any] | None) -> dict[str, Sequence[bytes]]:
    """Return the names of a certificate, as `ssl.SSLSocket.getpeercert()` gives it. O(names)."""
    found: dict[str, list[bytes]] = {}
    if not certificate:
        return {}
    for kind, value in certificate.get("subjectAltName", ()):
        name = str(value).encode()
        found.setdefault("x509_subject_alternative_name", []).append(name)
        if kind in _KINDS:
            found.setdefault(_KINDS[kind], []).append(name)
    for attributes in certificate.get("subject", ()):
        for key, value in attributes:
            if key == "commonName":
                found.setdefault("x509_common_name", []).append(str(value).encode())
    return dict(found)
