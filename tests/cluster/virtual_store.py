"""A real store whose functions read the time that a test has set."""

from schedsvc.cluster.admin import init_store
from schedsvc.cluster.library import escrow_source
from schedsvc.cluster.store import Address, StoreConnection, connect

from .store_server import ADMIN_PASSWORD, StoreServer

CLOCK = "{schedsvc:prod}:clock"
TIME = """    local time = redis.call('TIME')
    return time[1] * 1000 + math.floor(time[2] / 1000)
"""


class VirtualStore:
    """Functions of escrow.lua in virtual time, in ms."""

    def __init__(self, server: StoreServer, link: StoreConnection) -> None:
        self.server, self.link = server, link
        self.now_ms = 1_000_000

    @classmethod
    async def on(cls, server: StoreServer) -> "VirtualStore":
        address = Address("127.0.0.1", server.port, None, ADMIN_PASSWORD)
        await init_store(address, "prod", None, None)
        source = escrow_source()
        assert source.count(TIME) == 1
        source = source.replace(TIME, f"    return tonumber(redis.call('GET', '{CLOCK}'))\n")
        link = await connect(address)
        await link.command("FUNCTION", "LOAD", "REPLACE", source)
        found = cls(server, link)
        await found.set_ms(found.now_ms)
        return found

    async def set_ms(self, now_ms: int) -> None:
        self.now_ms = now_ms
        await self.link.command("SET", CLOCK, now_ms)
