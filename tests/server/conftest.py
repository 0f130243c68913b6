"""Runs a real server in the test's event loop, and makes what the tests ask of it."""

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import grpc
import pytest
from schedsvc_client.aio import SchedulerSession
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from schedsvc.config import Config
from schedsvc.server import Server
from tests.waiting import until

T = TypeVar("T")

POOL = {"name": "pool", "capacity_tokens": 1_600, "block_size_tokens": 16}


class Transport:
    """Says which library serves gRPC in the tests of a module."""

    name = "grpcio"


@pytest.fixture(params=["grpcio", "nghttp2"])
def both_transports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with each transport; `pytestmark` of a module asks for it."""
    monkeypatch.setattr(Transport, "name", request.param)
    return Transport.name


def config_of(**keys: Any) -> Config:
    """One TCP listener, one pool of 100 blocks with no headroom, tenants a and b."""
    data: dict[str, Any] = {
        "transport": Transport.name,
        "listeners": [{"tcp": "127.0.0.1:0"}],
        "scheduler": {"headroom": 0},
        "tenants": [{"name": "a"}, {"name": "b", "weight": 2.5}],
        "pools": [POOL],
    }
    return Config.model_validate(data | keys)


@asynccontextmanager
async def serving(**keys: Any) -> AsyncIterator[Server]:
    server = Server(config_of(**keys))
    await server.start()
    try:
        yield server
        if not server.driver.broken:
            server.driver._core.check()
    finally:
        await server.stop(None)


@asynccontextmanager
async def calling(
    target: str, credentials: grpc.ChannelCredentials | None = None, **options: int
) -> AsyncIterator[stubs.SchedulerServiceStub]:
    async with open_channel(target, credentials, **options) as channel:
        yield stubs.SchedulerServiceStub(channel)


def open_channel(
    target: str, credentials: grpc.ChannelCredentials | None = None, **options: int
) -> grpc.aio.Channel:
    given = [(f"grpc.{name}", value) for name, value in options.items()]
    given.append(("grpc.use_local_subchannel_pool", 1))
    if credentials is None:
        return grpc.aio.insecure_channel(target, given)
    return grpc.aio.secure_channel(target, credentials, given)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as running:
        yield running


@pytest.fixture
async def stub(server: Server) -> AsyncIterator[stubs.SchedulerServiceStub]:
    async with calling(server.targets[0]) as found:
        yield found


#: The grants of a shim that offers any pool, for any tenant.
SHIM = {"pools": ["*"], "stats": "all"}


def token_of(name: str, token: str, **grants: Any) -> dict[str, Any]:
    """Return an entry of auth.principals with a token and the grants of a shim."""
    return {"name": name, "sha256": hashlib.sha256(token.encode()).hexdigest(), **SHIM, **grants}


_counter = iter(range(1, 1 << 30))


def ask(tokens: int = 100, **fields: Any) -> pb.AdmitRequest:
    """Return a request of tenant a with a fresh id and 16 output tokens at most."""
    given: dict[str, Any] = {
        "request_id": f"r{next(_counter)}",
        "tenant": "a",
        "input_tokens": [tokens],
        "max_output_tokens": 16,
    }
    return pb.AdmitRequest(**given | fields)


async def in_time(call: Callable[[float], Awaitable[T]]) -> T:
    """Make a call with a deadline, a later one if a busy machine answered after it."""
    for deadline_s in (0.5, 2.0, 10.0, 60.0):
        with suppress(grpc.aio.AioRpcError):
            return await call(deadline_s)
    pytest.fail("no answer came before the call's deadline")


#: A scheduler whose pools are soon abandoned once their shims are away.
SHORT_LEASES = {"scheduler": {"headroom": 0, "lease_ttl_ms": 100, "lease_grace_ms": 0}}


async def abandon_pool(server: Server, name: str) -> None:
    """Offer a pool, leave without a Goodbye, and wait until the pool is gone."""

    def row() -> dict[str, Any]:
        return next((p for p in server.driver.stats(0)["pools"] if p["name"] == name), {})

    async with SchedulerSession(server.targets[0], client_id="shim", incarnation=1) as opened:
        opened.register_pool(pool=name, epoch=1, capacity_tokens=160, block_size_tokens=16)
        await until(row, "the pool is offered")
        opened._protocol._pools.clear()
    await until(lambda: not row()["attached"], "it is detached")
    await until(lambda: not row()["owned_ms"], "nobody owns it")


def totals(server: Server) -> dict[str, int]:
    return server.driver.stats(0)["totals"]


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """Return the error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value
