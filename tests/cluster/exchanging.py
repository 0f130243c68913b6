"""Runs schedulers, real cores and drivers; members exchange totals when a test says so."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from schedsvc.cluster.admin import init_store
from schedsvc.cluster.errors import StoreError
from schedsvc.cluster.member import Member
from schedsvc.cluster.store import Address
from schedsvc.config import Config
from schedsvc.driver import Driver, new_core
from schedsvc.driver.clock import SteadyClock
from tests.server.conftest import config_of

from .store_server import ADMIN_PASSWORD, StoreServer

TOKEN = 10**6


def settings(servers: Sequence[StoreServer], member: str, **keys: Any) -> Config:
    section = {
        "name": "prod",
        "member": member,
        "store": {
            "urls": [server.url for server in servers],
            "password_file": str(servers[0].folder / "password"),
        },
        "sync_ms": 50,
    }
    pool = {"name": f"pool-{member}", "capacity_tokens": 1_600}
    return config_of(**({"cluster": section, "pools": [pool]} | keys))


class Scheduler:
    """Runs a driver with its member, whose exchanges the test asks for."""

    def __init__(self, config: Config, incarnation: int) -> None:
        self.clock = SteadyClock()
        self.driver = Driver(new_core(config, self.clock.now_ns()), self.clock)
        assert config.cluster is not None
        self.member = Member(self.driver, config, config.cluster, incarnation)

    async def exchange(self) -> None:
        self.member.collect()
        await self.member.exchange()

    async def exchanged(self) -> bool:
        """Return whether an exchange succeeds; hang up after an error, as the task does."""
        with suppress(StoreError):
            await self.exchange()
            return True
        await self.member._drop()
        return False

    def serve(self, tenant: str, tokens: int) -> None:
        """Grant and complete one request with this input and one token of output."""
        core, now_ns = self.driver._core, self.clock.now_ns()
        name = b"%d" % now_ns
        core.admit(now_ns, core.flow_index(tenant.encode()), name, tokens, 1)
        [granted] = core.poll(now_ns)
        core.complete(now_ns, granted.lease_id, 1, input_tokens=tokens, output_tokens=1)

    def serve_new(self, tenant: str, tokens: int) -> None:
        """Serve a tenant that no configuration names."""
        self.driver._core.set_flow(tenant.encode(), 1_000)
        self.serve(tenant, tokens)

    def counter(self, tenant: str) -> int:
        [row] = self.driver.tenant_stats(tenant.encode())
        found: int = row["vtc_micro"]
        return found

    async def stop(self) -> None:
        await self.member._drop()
        self.driver._core.check()
        self.driver.close()


async def load_functions(server: StoreServer) -> None:
    await init_store(Address("127.0.0.1", server.port, None, ADMIN_PASSWORD), "prod", None, None)


@asynccontextmanager
async def cluster(
    servers: StoreServer | Sequence[StoreServer], *members: str
) -> AsyncIterator[list[Scheduler]]:
    """Make the store ready, and yield a scheduler for each member; `servers`: all of its store."""
    servers = (servers,) if isinstance(servers, StoreServer) else servers
    for server in servers:
        await load_functions(server)
    (servers[0].folder / "password").write_text(ADMIN_PASSWORD)
    async with AsyncExitStack() as stack:
        found = []
        for k, member in enumerate(members):
            scheduler = Scheduler(settings(servers, member), 100 + k)
            stack.push_async_callback(scheduler.stop)
            found.append(scheduler)
        yield found


async def rounds(*schedulers: Scheduler, count: int = 2) -> None:
    for _ in range(count):
        for scheduler in schedulers:
            await scheduler.exchange()
