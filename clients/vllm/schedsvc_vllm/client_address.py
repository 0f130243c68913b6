"""The network that a request comes from, for tables that are shared by clients without a name.

A client with one IPv6 address has a whole /64 of them, so the /64 counts as one client. Behind a
front all connections have the front's address. Then the last address of `x-forwarded-for` counts,
which the front has appended.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

from schedsvc_vllm.asgi import Scope

_STATED = b"x-forwarded-for"
# An address as fronts write it, some of them with a port.
_FORMS = re.compile(r"\[([^\]]+)\](?::\d+)?|(\d+(?:\.\d+){3})(?::\d+)?|([0-9a-fA-F:.]+)")
_REST_BITS = 64
_CACHED_MAX = 4_096


def client_network(scope: Scope, *, fronted: bool) -> str:
    """Return the client's IPv4 address or IPv6 /64; "": the server knows none.

    `fronted`: a front states the address. If it states none, its own counts.
    """
    if fronted:
        stated = b""
        for name, value in scope["headers"]:
            if name == _STATED:
                stated = value
        network = _network(stated.rpartition(b",")[2].strip().decode("latin-1"))
        if network:
            return network
    peer = str((scope.get("client") or ("",))[0])
    return _network(peer) or peer


@lru_cache(_CACHED_MAX)
def _network(text: str) -> str:
    """Return the network of an address; "" if it is none."""
    found = _FORMS.fullmatch(text)
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
    return str(ipaddress.IPv6Address(int(address) >> _REST_BITS << _REST_BITS)) + "/64"
