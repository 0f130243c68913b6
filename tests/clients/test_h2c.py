"""An offer of HTTP/2 in passing leaves an ordinary request of HTTP/1.1."""

from __future__ import annotations

import pytest
from schedsvc_vllm.h2c import without_h2c

OFFER = (
    b"POST /v1/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: 9\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAAB\r\nUpgrade: h2c\r\nHost: x\r\n\r\n"
)


@pytest.mark.parametrize("body", [b"", b"123456789", b"\r\nUpgrade: h2c\r\n\r\n"])
def test_the_offer_goes_and_all_else_stays(body: bytes) -> None:
    assert without_h2c(OFFER + body) == (
        b"POST /v1/completions HTTP/1.1\r\nConnection: keep-alive\r\nContent-Length: 9\r\n"
        b"Host: x\r\n\r\n" + body
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"prompt": "h2c"}',
        b"POST /h2c HTTP/1.1\r\nHost: h2c\r\n\r\n",
        b"GET / HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nx: h2c\r\n\r\n",
        b"\r\nUpgrade: h2c\r\n\r\n",
    ],
)
def test_what_makes_no_offer_is_not_touched(data: bytes) -> None:
    assert without_h2c(data) == data


def test_other_words_of_the_connection_stay() -> None:
    data = OFFER.replace(b"Upgrade, HTTP2-Settings", b"close, Upgrade,HTTP2-Settings")
    assert b"\r\nConnection: close\r\n" in without_h2c(data)
