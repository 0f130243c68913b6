"""Chooses the transport by the configuration."""

import pytest
from pydantic import ValidationError

from schedsvc.config import needs_restart
from schedsvc.server.listeners import ListenError
from schedsvc.transport import Server as OwnServer

from .conftest import ask, calling, config_of, serving


async def test_the_transport_is_the_configured_one() -> None:
    async with serving(transport="nghttp2") as server, calling(server.targets[0]) as stub:
        assert all(isinstance(each, OwnServer) for each in server._grpc)
        assert (await stub.Admit(ask(10))).HasField("grant")
    async with serving() as server:
        assert not any(isinstance(each, OwnServer) for each in server._grpc)


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ValidationError, match="'grpcio' or 'nghttp2'"):
        config_of(transport="quic")


def test_another_transport_needs_a_restart() -> None:
    assert needs_restart(config_of(transport="nghttp2"), config_of()) == ["transport"]


async def test_an_address_in_use_is_named() -> None:
    async with serving(transport="nghttp2") as first:
        taken = [{"tcp": first.targets[0]}]
        with pytest.raises(ListenError, match="already in use"):
            async with serving(transport="nghttp2", listeners=taken):
                pass
