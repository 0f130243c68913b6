"""Declares the sections of a configuration about addresses and callers."""

import ipaddress
from typing import Annotated, Literal

from pydantic import Field

from schedsvc.config.values import Section

__all__ = [
    "Auth",
    "AuthKind",
    "Edge",
    "Listener",
    "Principal",
    "Tls",
    "Transport",
    "callers_of",
    "is_wildcard",
]

Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+$")]
Address = Annotated[str, Field(pattern=r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$")]
FilePath = Annotated[str, Field(min_length=1, max_length=4096)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9A-Fa-f]{64}$")]
Patterns = Annotated[list[Name], Field(max_length=1_000)]
AuthKind = Literal["none", "token", "certificate"]
#: The library that serves gRPC, or our transport on nghttp2.
Transport = Literal["grpcio", "nghttp2"]


def is_wildcard(address: str) -> bool:
    """Return whether HOST:PORT stands for all addresses of this host, of IPv4 and of IPv6."""
    try:
        return ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).is_unspecified
    except ValueError:
        return False


class Tls(Section):
    """Names the files of a TLS listener, in PEM."""

    cert: FilePath
    key: FilePath
    client_ca: FilePath | None = None


class Listener(Section):
    """Names one address to serve gRPC on: `tcp` or `unix`."""

    tcp: Address | None = None
    unix: FilePath | None = None
    mode: Annotated[str, Field(pattern=r"^0?[0-7]{3}$")] = "0660"
    tls: Tls | None = None
    auth: AuthKind | None = None
    operate: bool | None = None


class Edge(Section):
    """Names an address for callers who are not trusted; `schedsvc edge` serves it."""

    tcp: Address
    tls: Tls | None = None
    calls_per_second: Annotated[int, Field(ge=1, le=1_000_000)] = 200
    calls_max: Annotated[int, Field(ge=1, le=1_000_000)] = 500
    connections_max: Annotated[int, Field(ge=1, le=1_000_000)] = 128


class Principal(Section):
    """Describes a caller, its proof of who it is, and its rights.

    A pattern is a name in which * stands for any text.
    """

    name: Name
    sha256: Sha256 | None = None
    env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    token_file: FilePath | None = None
    #: The scheduler writes a random token to `token_file` at its start, if the file is absent.
    make_token: bool = False
    certificate: Annotated[str, Field(min_length=1, max_length=1_024)] | None = None
    listener: Annotated[str, Field(min_length=1, max_length=4_096)] | None = None
    pools: Patterns = []
    tenants: Patterns | None = None
    classes: Patterns = ["*"]
    share_of_places: Annotated[float, Field(gt=0, le=1)] = 1.0
    events_per_second: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    loop_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    stats: Literal["own", "all"] = "own"
    operator: bool = False
    #: Another member of the cluster, which may follow this scheduler.
    member: bool = False

    @classmethod
    def of_port(cls, address: str) -> "Principal":
        """Return what all callers of a TCP listener are if none of them proves who it is."""
        name = f"listener:{address}"
        return cls.model_construct(name=name, listener=address, tenants=["*"])

    @property
    def may_vouch_for(self) -> list[str]:
        """Return patterns of the tenants that it may name; the default is all if it has pools."""
        if self.tenants is None:
            return ["*"] if self.pools else []
        return self.tenants


class Auth(Section):
    """Lists the callers that are allowed."""

    principals: Annotated[list[Principal], Field(max_length=10_000)] = []
    unlisted_certificates: Literal["allow", "refuse"] | None = None

    @property
    def has_tokens(self) -> bool:
        """Return whether a principal proves who it is by a token."""
        return any(p.sha256 or p.env or p.token_file for p in self.principals)

    @property
    def lets_unlisted_in(self) -> bool:
        """Return whether a client certificate that no principal names is let in.

        The default is on only while no principal names a certificate.
        """
        if self.unlisted_certificates is not None:
            return self.unlisted_certificates == "allow"
        return all(principal.certificate is None for principal in self.principals)


def callers_of(auth: Auth, listeners: list[tuple[Listener, AuthKind]]) -> list[Principal]:
    """Return the principals, and one for each other TCP listener that has to bound its callers.

    All who can connect to a port may be such a caller. So where another listener asks for a proof,
    or has a file mode, they only ask. O(principals + listeners).
    """
    given = {principal.listener for principal in auth.principals}
    ports = [entry.tcp for entry, kind in listeners if entry.tcp is not None and kind == "none"]
    if len(ports) == len(listeners):
        return auth.principals
    bounded = [Principal.of_port(tcp) for tcp in dict.fromkeys(ports) if tcp not in given]
    return [*auth.principals, *bounded]
