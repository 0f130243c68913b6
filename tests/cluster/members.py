"""Runs members with a role in one set, in the test's event loop, with a real store."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.v1 import scheduler_pb2_grpc as stubs

from schedsvc.cluster.admin import init_store
from schedsvc.cluster.store import Address
from schedsvc.server.led import LedServer
from schedsvc_lab.demo.processes import free_port
from tests.server.conftest import config_of, open_channel, token_of
from tests.waiting import until

from .store_server import ADMIN_PASSWORD, StoreServer

SECRET = "secret of the cluster, 32 bytes and more"
TOKEN, PEER_TOKEN = "token-of-the-shim", "token-of-a-member"
POOL_SET = "main"


def settings(
    folder: Path, member: str, urls: str | Sequence[str], port: int, **cluster: Any
) -> dict[str, Any]:
    """Return the keys of a configuration that a member with a role has."""
    for name, text in (("password", ADMIN_PASSWORD), ("secret", SECRET), ("peer", PEER_TOKEN)):
        (folder / name).write_text(text)
    return {
        "listeners": [{"tcp": f"127.0.0.1:{port}"}],
        "auth": {
            "principals": [
                token_of("shim", TOKEN),
                {**token_of("peer", PEER_TOKEN), "pools": [], "member": True},
            ]
        },
        "state": {"file": str(folder / f"{member}.db"), "every_ms": 100},
        "limits": {"drain_ms": 0},
        "cluster": {
            "name": "prod",
            "member": member,
            "store": {
                "urls": [urls] if isinstance(urls, str) else list(urls),
                "password_file": str(folder / "password"),
            },
            "set": POOL_SET,
            "role": "auto",
            "advertise": f"127.0.0.1:{port}",
            "secret_file": str(folder / "secret"),
            "leader": {"token_file": str(folder / "peer")},
            **cluster,
        },
    }


async def ready_store(store: StoreServer) -> None:
    await init_store(Address("127.0.0.1", store.port, None, ADMIN_PASSWORD), "prod", None, None)


def member(folder: Path, name: str, urls: str | Sequence[str], **keys: Any) -> LedServer:
    config = config_of(**(settings(folder, name, urls, free_port()) | keys))
    assert config.cluster is not None
    return LedServer(config, config.cluster)


@contextlib.asynccontextmanager
async def running(*members: LedServer) -> AsyncIterator[None]:
    """Start members; the first of several leads before the others start."""
    try:
        for each in members:
            await each.start()
            if len(members) > 1:
                await until(lambda: bool(members[0].leading.until_ns), "the first one leads")
        yield
    finally:
        for each in members:
            await each.stop(None)


@contextlib.asynccontextmanager
async def calling(each: LedServer) -> AsyncIterator[stubs.SchedulerServiceStub]:
    async with open_channel(each.targets[0]) as channel:
        yield stubs.SchedulerServiceStub(channel)


def proof(token: str = TOKEN, term: int = 0) -> list[tuple[str, str]]:
    """Return metadata of a call; `term`: the highest one that its client has seen."""
    seen = [("schedsvc-term", str(term))] if term else []
    return [("authorization", f"Bearer {token}"), *seen]


_counter = iter(range(1, 1 << 30))


def ask(**fields: Any) -> pb.AdmitRequest:
    given = {"tenant": "a", "input_tokens": [100], "max_output_tokens": 16}
    return pb.AdmitRequest(**{"request_id": f"r{next(_counter)}", **given, **fields})


def trailer(error: grpc.aio.AioRpcError) -> str | bytes | None:
    """Return the target of the leader that an answer names."""
    return dict(error.trailing_metadata() or ()).get("schedsvc-leader")
