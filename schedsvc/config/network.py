"""Who may come in, and where: the sections of a configuration about addresses and callers."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["STRICT", "Auth", "AuthKind", "Edge", "Listener", "Tls", "Token"]

#: No key but the known ones, no value of another type.
STRICT = ConfigDict(strict=True, extra="forbid", frozen=True)

Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+$")]
Address = Annotated[str, Field(pattern=r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$")]
FilePath = Annotated[str, Field(min_length=1, max_length=4096)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9A-Fa-f]{64}$")]
AuthKind = Literal["none", "token", "certificate"]


class _Section(BaseModel):
    model_config = STRICT


class Tls(_Section):
    """Files of a TLS listener, in PEM."""

    cert: FilePath
    key: FilePath
    client_ca: FilePath | None = None


class Listener(_Section):
    """One address to serve gRPC on: `tcp` or `unix`."""

    tcp: Address | None = None
    unix: FilePath | None = None
    mode: Annotated[str, Field(pattern=r"^0?[0-7]{3}$")] = "0660"
    tls: Tls | None = None
    auth: AuthKind | None = None
    operate: bool | None = None


class Edge(_Section):
    """An address for callers who are not trusted; `schedsvc edge` serves it."""

    tcp: Address
    tls: Tls | None = None
    calls_per_second: Annotated[int, Field(ge=1, le=1_000_000)] = 200
    calls_max: Annotated[int, Field(ge=1, le=1_000_000)] = 1_000


class Token(_Section):
    """A bearer token of one shim: by its hash, from the environment, or from a file."""

    name: Name
    sha256: Sha256 | None = None
    env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    file: FilePath | None = None


class Auth(_Section):
    """Who may call."""

    tokens: list[Token] = []
    operators: Annotated[list[Name], Field(max_length=1_000)] = []
