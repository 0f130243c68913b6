"""Runs schedulers with real cores and drivers that share quotas through a real store."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.cluster.admin import init_store
from schedsvc.cluster.member import Member
from schedsvc.cluster.store import Address
from schedsvc.driver import Driver, Waiting, new_core
from schedsvc.driver.clock import SteadyClock
from tests.server.conftest import config_of

from .store_server import ADMIN_PASSWORD, StoreServer


class Sharer:
    """Runs a scheduler and its member's tasks."""

    def __init__(self, store: StoreServer, member: str, number: int, **keys: Any) -> None:
        cluster = {
            "name": "prod",
            "member": member,
            "store": {"urls": [store.url], "password_file": str(store.folder / "password")},
            "sync_ms": 100,
            **keys.pop("cluster", {}),
        }
        pool = {"name": f"pool-{member}", "capacity_tokens": 1_000_000}
        scheduler = {"queue_ttl_ms": 120_000, "lease_ttl_ms": 120_000, "headroom": 0}
        given = {"cluster": cluster, "pools": [pool], "scheduler": scheduler}
        config = config_of(**(given | keys))
        assert config.cluster is not None
        self.name, self.clock = member, SteadyClock()
        self.driver = Driver(new_core(config, self.clock.now_ns()), self.clock)
        self.member = Member(self.driver, config, config.cluster, 100 + number)
        self._tasks: list[asyncio.Task[None]] = []
        self._asked = 0

    async def start(self) -> None:
        await self.member.escrow.begin()
        self._tasks = [asyncio.create_task(self.member.run())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self.driver.broken:
            self.driver._core.check()
        self.driver.close()

    def die(self) -> None:
        """End the tasks without a word to the store."""
        self.member.escrow._link = None
        for task in self._tasks:
            task.cancel()

    async def ask(self, tenant: str, input_tokens: int = 1) -> pb.AdmitResponse:
        """Send a request for one output token, and return the verdict."""
        self._asked += 1
        ask = pb.AdmitRequest(
            request_id=f"{self.name}-{self._asked}", tenant=tenant, input_tokens=[input_tokens],
            max_output_tokens=1,
        )  # fmt: skip
        found = self.driver.admit(0, ask.SerializeToString())
        answer = await self.driver.wait(found) if isinstance(found, Waiting) else found
        return pb.AdmitResponse.FromString(answer)


@asynccontextmanager
async def sharing(store: StoreServer, count: int, **keys: Any) -> AsyncIterator[list[Sharer]]:
    await init_store(Address("127.0.0.1", store.port, None, ADMIN_PASSWORD), "prod", None, None)
    (store.folder / "password").write_text(ADMIN_PASSWORD)
    async with AsyncExitStack() as stack:
        found = []
        for k in range(count):
            sharer = Sharer(store, "abcdefgh"[k], k, **keys)
            stack.push_async_callback(sharer.stop)
            await sharer.start()
            found.append(sharer)
        yield found
