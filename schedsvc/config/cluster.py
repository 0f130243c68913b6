"""Reads the section `cluster`: several schedulers that share one fairness through a store."""

import ipaddress
import socket
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import Field

from schedsvc.config.files import path_in, read_file, unreadable
from schedsvc.config.network import FilePath as FileName
from schedsvc.config.rule_helpers import Finding, Once, mapping
from schedsvc.config.values import Section
from schedsvc.config.yaml_positions import Path

__all__ = [
    "SECRET_BYTES_MIN",
    "Cluster",
    "ClusterLeader",
    "ClusterStore",
    "ClusterTls",
    "cluster_advice",
    "cluster_findings",
]

#: A name stands inside the hash tag of the store's keys and in a pattern of its ACL, so it holds
#: neither braces nor what a pattern gives a meaning.
ClusterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
MemberName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
#: As a client's target: followers and clients reach this member there.
Target = Annotated[str, Field(pattern=r"^(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]]{1,255}):[0-9]{1,5}$")]
StoreUrl = Annotated[str, Field(pattern=r"^rediss?://[^\s]{1,500}$")]

_PORT = 6_379
SECRET_BYTES_MIN = 32
_NEEDED_BY_ROLE = {
    "set": "the pools that it leads or follows",
    "advertise": "the HOST:PORT at which clients and members reach it",
    "secret_file": "the secret with which members seal the rows that say who leads",
}


class ClusterTls(Section):
    """Names the PEM files of the connection to the store; without `ca` the system's authorities."""

    ca: FileName | None = None
    cert: FileName | None = None
    key: FileName | None = None


class ClusterStore(Section):
    """Names a Valkey or Redis server; further URLs are tried if the first cannot be used."""

    urls: Annotated[list[StoreUrl], Field(min_length=1, max_length=8)]
    password_file: FileName | None = None
    tls: ClusterTls | None = None


class ClusterLeader(Section):
    """Says how this member calls the leader that it follows; without `tls` in clear."""

    token_file: FileName | None = None
    tls: ClusterTls | None = None


class Cluster(Section):
    """Describes the cluster that this scheduler is a member of."""

    name: ClusterName
    member: MemberName | None = None
    store: ClusterStore
    sync_ms: Literal["auto"] | Annotated[int, Field(ge=50, le=5_000)] = "auto"
    #: While the store is away: a member spends its part of the shared limits, or what it holds.
    outage: Literal["share", "hold"] = "share"
    #: Pools that are led together; several members have the same set.
    set: ClusterName | None = None
    #: `auto`: leads if no other member does; `follow`: never leads.
    role: Literal["auto", "follow"] | None = None
    #: `{member}` in it stands for the member's name, so that members can share a file.
    advertise: Target | None = None
    secret_file: FileName | None = None
    leader: ClusterLeader = ClusterLeader()

    @property
    def member_name(self) -> str:
        """Return the member's name; by default the host's."""
        return self.member or socket.gethostname()

    @property
    def advertised(self) -> str:
        """Return the HOST:PORT of this member for clients and members; "": it has no role."""
        return (self.advertise or "").replace("{member}", self.member_name)


def cluster_findings(data: dict[str, Any], folder: FilePath) -> Iterator[Finding]:
    """Yield path and message of each broken rule of `cluster`. O(urls)."""
    cluster = mapping(data.get("cluster"))
    store = mapping(cluster.get("store"))
    where: Path = ("cluster", "store")
    urls = store.get("urls") if isinstance(store.get("urls"), list) else []
    addresses = Once("this server")
    for i, url in enumerate(urls or []):
        if isinstance(url, str):
            yield from _url_findings(url, (*where, "urls", i))
            yield from addresses.see(url, (*where, "urls", i))
    yield from _role_findings(data, cluster, folder)
    tls = store.get("tls")
    secure = [isinstance(url, str) and url.startswith("rediss://") for url in urls or []]
    if isinstance(tls, dict) and not all(secure):
        yield (*where, "tls"), "needs rediss:// in all of urls; without it nothing is encrypted"
    for name in ("cert", "key"):
        other = "key" if name == "cert" else "cert"
        if isinstance(tls, dict) and tls.get(name) and not tls.get(other):
            yield (*where, "tls", name), f"needs tls.{other} beside it"
    files: list[tuple[Path, Any]] = [(("password_file",), store.get("password_file"))]
    files += [(("tls", name), mapping(tls).get(name)) for name in ("ca", "cert", "key")]
    for path, file in files:
        if isinstance(file, str):
            problem = unreadable(path_in(folder, file))
            if problem:
                yield (*where, *path), problem


def _role_findings(
    data: dict[str, Any], cluster: dict[str, Any], folder: FilePath
) -> Iterator[Finding]:
    """Find what a leader or a standby lacks."""
    path: Path = ("cluster",)
    if cluster.get("role") is None:
        if cluster.get("set") is not None:
            yield (*path, "set"), "needs cluster.role beside it: auto, or follow"
        return
    for key, what in _NEEDED_BY_ROLE.items():
        if cluster.get(key) is None:
            yield (*path, "role"), f"needs cluster.{key}, {what}"
    if not mapping(data.get("state")):
        what = "needs the section state: a member that leads continues from its rows"
        yield (*path, "role"), what
    principals = mapping(data.get("auth")).get("principals") or []
    if not any(mapping(entry).get("member") for entry in principals):
        what = "needs a principal with `member: true` in auth.principals, as which members follow"
        yield (*path, "role"), what
    advertise = cluster.get("advertise")
    if isinstance(advertise, str) and set(advertise.replace("{member}", "")) & set("{}"):
        yield (*path, "advertise"), "has braces; only {member} stands for something: its name"
    leader = mapping(cluster.get("leader"))
    tls = mapping(leader.get("tls"))
    for key, file in (("token_file", leader.get("token_file")), *tls.items()):
        problem = unreadable(path_in(folder, file)) if isinstance(file, str) else ""
        if problem:
            yield (*path, "leader", key), problem
    secret = cluster.get("secret_file")
    if isinstance(secret, str):
        yield from _secret_findings(path_in(folder, secret))


def _secret_findings(file: FilePath) -> Iterator[Finding]:
    problem = unreadable(file)
    if not problem and len(read_file(file).strip()) < SECRET_BYTES_MIN:
        problem = f"{file} holds fewer than {SECRET_BYTES_MIN} bytes; write `openssl rand -hex 32`"
    if problem:
        yield ("cluster", "secret_file"), problem


def cluster_advice(data: dict[str, Any]) -> Iterator[Finding]:
    """Yield what of `cluster` is allowed and yet worth a second look. O(urls)."""
    store = mapping(mapping(data.get("cluster")).get("store"))
    for i, url in enumerate(store.get("urls") or []):
        if not isinstance(url, str) or not url.startswith("redis://"):
            continue
        host = _split(url).hostname
        if host is not None and not _is_loopback(host):
            message = f"{host} is reached without TLS: the password travels in clear"
            yield ("cluster", "store", "urls", i), message


def _url_findings(url: str, path: Path) -> Iterator[Finding]:
    parts = _split(url)
    if parts.password is not None:
        # Not quoted: what a check prints often ends up in a log.
        yield path, "contains a password; remove it and name a file in store.password_file"
        return
    if "," in url:
        message = "names several servers; Redis Cluster is not supported: name one server in each"
        yield path, f"{message} entry of urls"
        return
    try:
        port = parts.port or _PORT
    except ValueError:
        yield path, f"{url} has no valid port; write redis://HOST:PORT"
        return
    if not parts.hostname or port < 1:
        yield path, f"{url} names no host; write redis://HOST:PORT"
    elif parts.path not in ("", "/", "/0") or parts.query or parts.fragment:
        yield path, f"{url} has more than a host and a port; write redis://HOST:PORT"


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:  # of a malformed IPv6 address
        return urlsplit("")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
