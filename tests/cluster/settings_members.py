"""Runs schedulers in the test's event loop that share operators' settings, with a real store."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from schedsvc.cluster.admin import init_store
from schedsvc.cluster.library import settings_keys_of
from schedsvc.cluster.store import Address, StoreConnection, connect
from schedsvc.driver import SettingsShared
from schedsvc.server import Server
from tests.server.test_operator import Both, operating
from tests.waiting import until

from .members import SECRET
from .store_server import ADMIN_PASSWORD, StoreServer

ROWS = settings_keys_of("prod")[3]


def admin_of(store: StoreServer) -> Address:
    return Address("127.0.0.1", store.port, None, ADMIN_PASSWORD)


async def ready_store(store: StoreServer) -> None:
    await init_store(admin_of(store), "prod", None, None)


@asynccontextmanager
async def member(
    store: StoreServer, name: str, secret: str = SECRET, **keys: Any
) -> AsyncIterator[tuple[Server, Both]]:
    """Run a scheduler without a role, whose operators' settings are shared."""
    (store.folder / "password").write_text(ADMIN_PASSWORD)
    (store.folder / f"secret-{name}").write_text(secret)
    cluster = {
        "name": "prod",
        "member": name,
        "store": {"urls": [store.url], "password_file": str(store.folder / "password")},
        "secret_file": str(store.folder / f"secret-{name}"),
    }
    async with operating(cluster=cluster, **keys) as found:
        yield found


def state_of(folder: Path, name: str) -> dict[str, Any]:
    """Return the key `state` of a member whose settings outlive it."""
    return {"state": {"file": str(folder / f"{name}.db"), "every_ms": 100}}


def shared(server: Server) -> SettingsShared:
    assert server.driver.sharing is not None
    found = server.driver.sharing.settings
    assert found is not None
    return found


async def until_shared(*servers: Server) -> None:
    for server in servers:
        await until(lambda server=server: not shared(server).problem, "settings are shared")


@asynccontextmanager
async def intruder(store: StoreServer) -> AsyncIterator[StoreConnection]:
    """Run a program that may write anything into the store, and has no secret."""
    link = await connect(admin_of(store))
    try:
        yield link
    finally:
        await link.close()
