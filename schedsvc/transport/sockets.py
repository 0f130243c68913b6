"""Makes sockets that listen, and names the peers of connections as gRPC does."""

import socket
from typing import Any

__all__ = ["bound_socket", "listening_socket", "peer_name", "wildcard_socket"]

_BACKLOG = 1_024
_WILDCARDS = ("0.0.0.0", "[::]")  # noqa: S104 - compared, never bound
_UNIX = "unix:"


def bound_socket(family: int, where: Any) -> socket.socket:
    """Return a TCP socket that is bound, and does not listen. Raises OSError."""
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # A real address of IPv6 has no other family.
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, where[0] != "")
        made.bind(where)
    except BaseException:
        made.close()
        raise
    return made


def wildcard_socket(port: int) -> socket.socket:
    """Return a bound socket for all addresses of this host: of IPv4 and, if it has it, of IPv6.

    gRPC does the same for `0.0.0.0` and for `[::]`. Raises OSError.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    return bound_socket(family, ("", port))


def listening_socket(address: str) -> socket.socket:
    """Return a socket that listens on HOST:PORT or unix:PATH. Raises OSError."""
    made = _bound(address)
    try:
        made.setblocking(False)
        made.listen(_BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


def _bound(address: str) -> socket.socket:
    if address.startswith(_UNIX):
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.bind(address.removeprefix(_UNIX))
        except BaseException:
            made.close()
            raise
        return made
    host, _, port = address.rpartition(":")
    if host in _WILDCARDS:
        return wildcard_socket(int(port))
    found = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    return bound_socket(found[0][0], found[0][4])


def peer_name(peer: Any) -> str:
    """Return gRPC's name for the peer of a connection, from its address as sockets have it."""
    if not isinstance(peer, tuple):
        return _UNIX
    host = str(peer[0]).removeprefix("::ffff:").partition("%")[0]
    return f"ipv6:%5B{host}%5D:{peer[1]}" if ":" in host else f"ipv4:{host}:{peer[1]}"
