"""Which network a request comes from."""

from __future__ import annotations

import pytest
from schedsvc_vllm.client_address import client_network

ADDRESSES = [
    ("192.0.2.1", "", "192.0.2.1"),
    ("::ffff:192.0.2.1", "", "192.0.2.1"),
    ("2001:db8:1:2:3:4:5:6", "", "2001:db8:1:2::/64"),
    ("", "", ""),
    ("a socket", "", "a socket"),
    ("192.0.2.1", "198.51.100.7", "198.51.100.7"),
    ("192.0.2.1", "9.9.9.9, 198.51.100.7", "198.51.100.7"),
    ("192.0.2.1", "198.51.100.7:4242", "198.51.100.7"),
    ("192.0.2.1", "[2001:db8:1:2::9]:4242", "2001:db8:1:2::/64"),
    ("192.0.2.1", "2001:db8:1:2::9", "2001:db8:1:2::/64"),
    ("192.0.2.1", "198.51.100.7, unknown", "192.0.2.1"),
    ("192.0.2.1", "999.1.1.1", "192.0.2.1"),
    ("192.0.2.1", "::", "::/64"),
]


@pytest.mark.parametrize(("peer", "stated", "network"), ADDRESSES)
def test_the_network_of_a_client(peer: str, stated: str, network: str) -> None:
    headers = [(b"x-forwarded-for", b"9.9.9.9"), (b"x-forwarded-for", stated.encode())]
    scope = {"client": (peer, 1) if peer else None, "headers": headers if stated else []}
    assert client_network(scope, fronted=True) == network
    # Without a front the header is the client's own.
    assert client_network(scope, fronted=False) == client_network(
        {"client": scope["client"], "headers": []}, fronted=True
    )
