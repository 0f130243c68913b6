"""A real store whose functions read a clock that a test sets, by which keys expire too."""

from typing import Any

from schedsvc.cluster.admin import init_store
from schedsvc.cluster.library import (
    escrow_source,
    functions_source,
    limits_source,
    settings_source,
    terms_source,
)
from schedsvc.cluster.store import Address, StoreConnection, connect

from .store_server import ADMIN_PASSWORD, StoreServer

_CLOCK, _DUES = "clock-of-the-test", "dues-of-the-test"
#: In front of each library: what it calls goes through here.
_SHIM = f"""
local loading, server = redis, {{}}
function server.call(...) return redis.call(...) end  -- the global one, while a function runs
function server.sha1hex(...) return redis.sha1hex(...) end
local redis = {{sha1hex = server.sha1hex}}
function redis.register_function(...) return loading.register_function(...) end
function redis.call(name, key, ...)
    local now = tonumber(server.call('GET', '{_CLOCK}'))
    if name == 'TIME' then
        return {{math.floor(now / 1000), (now % 1000) * 1000}}
    end
    for _, due in ipairs(server.call('ZRANGE', '{_DUES}', '-inf', now, 'BYSCORE')) do
        server.call('DEL', due)
        server.call('ZREM', '{_DUES}', due)
    end
    local more = {{...}}
    if name == 'SET' then
        server.call('ZREM', '{_DUES}', key)
        if more[2] == 'PX' then
            server.call('ZADD', '{_DUES}', now + more[3], key)
            return server.call('SET', key, more[1])
        end
    elseif name == 'PEXPIRE' then
        if server.call('EXISTS', key) == 1 then
            server.call('ZADD', '{_DUES}', now + more[1], key)
        end
        return 1
    elseif name == 'PTTL' then
        local due = server.call('ZSCORE', '{_DUES}', key)
        return due and due - now or -1
    elseif name == 'DEL' then
        server.call('ZREM', '{_DUES}', key)
    end
    local answer = server.call(name, key, ...)
    if key and server.call('EXISTS', key) == 0 then
        server.call('ZREM', '{_DUES}', key)
    end
    return answer
end
redis.pcall = redis.call
"""


class TimedStore:
    """The functions of a real store, in the time of a test."""

    def __init__(self, link: StoreConnection) -> None:
        self._link = link

    @classmethod
    async def on(cls, server: StoreServer) -> "TimedStore":
        address = Address("127.0.0.1", server.port, None, ADMIN_PASSWORD)
        await init_store(address, "prod", None, None)
        link = await connect(address)
        for source in (
            functions_source(), escrow_source(), terms_source(), limits_source(), settings_source()
        ):  # fmt: skip
            head, _, rest = source.partition("\n")
            await link.command("FUNCTION", "LOAD", "REPLACE", f"{head}\n{_SHIM}{rest}")
        return cls(link)

    async def set_ms(self, now_ms: int) -> None:
        await self._link.command("SET", _CLOCK, now_ms)

    async def empty(self) -> None:
        await self._link.command("FLUSHALL")

    async def command(self, words: tuple[str | bytes | int, ...]) -> Any:
        return await self._link.command(*words)

    async def close(self) -> None:
        await self._link.close()
