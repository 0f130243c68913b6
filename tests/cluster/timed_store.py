"""Runs a real store whose functions and expiry read a clock that a test sets."""

from typing import Any

from schedsvc.cluster.admin import init_store
from schedsvc.cluster.library import library_source
from schedsvc.cluster.store import Address, StoreConnection, connect

from .store_server import ADMIN_PASSWORD, StoreServer

_CLOCK, _DUES = "clock-of-the-test", "dues-of-the-test"
#: Wraps the library: its calls go through here.
_SHIM = f"""
local loading, server = redis, {{}}
function server.call(...) return redis.call(...) end  -- the global one, while a function runs
function server.pcall(...) return redis.pcall(...) end
function server.sha1hex(...) return redis.sha1hex(...) end
local redis = {{sha1hex = server.sha1hex}}
function redis.register_function(name, callback)
    if callback == nil then  -- without its flags: what is due is removed in each function
        name, callback = name.function_name, name.callback
    end
    return loading.register_function(name, callback)
end
function redis.pcall(name, key, ...)
    local now = tonumber(server.call('GET', '{_CLOCK}'))
    if name == 'TIME' then
        return {{math.floor(now / 1000), (now % 1000) * 1000}}
    end
    for _, due in ipairs(server.call('ZRANGE', '{_DUES}', '-inf', now, 'BYSCORE')) do
        server.call('DEL', due)
        server.call('ZREM', '{_DUES}', due)
    end
    local more = {{...}}
    if name == 'SET' and more[2] ~= 'NX' then
        local due = more[2] == 'PX' and now + more[3]
        local answer = server.call('SET', key, more[1])
        server.call('ZREM', '{_DUES}', key)
        if due then
            server.call('ZADD', '{_DUES}', due, key)
        end
        return answer
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
    local answer = server.pcall(name, key, ...)
    if key and server.call('EXISTS', key) == 0 then
        server.call('ZREM', '{_DUES}', key)
    end
    return answer
end
function redis.call(...)
    local answer = redis.pcall(...)
    if type(answer) == 'table' and answer.err then
        error(answer)
    end
    return answer
end
"""
#: The command that reads a key of each type.
_READERS = {
    b"string": ("GET",),
    b"hash": ("HGETALL",),
    b"zset": ("ZRANGE", "0", "-1", "WITHSCORES"),
}


class TimedStore:
    """Runs the functions of a real store in the time of a test."""

    def __init__(self, link: StoreConnection) -> None:
        self.link = link
        self.now_ms = 1_000_000

    @classmethod
    async def on(cls, server: StoreServer) -> "TimedStore":
        address = Address("127.0.0.1", server.port, None, ADMIN_PASSWORD)
        await init_store(address, "prod", None, None)
        link = await connect(address)
        head, _, rest = library_source().partition("\n")
        await link.command("FUNCTION", "LOAD", "REPLACE", f"{head}\n{_SHIM}{rest}")
        found = cls(link)
        await found.set_ms(found.now_ms)
        return found

    async def set_ms(self, now_ms: int) -> None:
        self.now_ms = now_ms
        await self.link.command("SET", _CLOCK, now_ms)

    async def flush(self) -> None:
        """Lose everything but the time."""
        await self.link.command("FLUSHALL")
        await self.set_ms(self.now_ms)

    async def plant(self, name: str, key: str | bytes, *words: str | bytes) -> None:
        """Replace a value."""
        await self.link.command("DEL", key)
        await self.link.command("ZREM", _DUES, key)
        await self.link.command(name, key, *words)

    async def contents(self) -> dict[bytes, tuple[Any, int | None]]:
        """Return each key's value, and when it expires, as the simulator's keyspace does."""
        found: dict[bytes, tuple[Any, int | None]] = {}
        for key in await self.link.command("KEYS", "*"):
            due = await self.link.command("ZSCORE", _DUES, key)
            due_ms = None if due is None else int(due)
            if key.decode() in (_CLOCK, _DUES) or (due_ms is not None and due_ms <= self.now_ms):
                continue
            kind = await self.link.command("TYPE", key)
            name, *words = _READERS[kind]
            value = await self.link.command(name, key, *words)
            if isinstance(value, list):
                value = dict(zip(value[::2], value[1::2], strict=True))
            if kind == b"zset":
                value = {member: float(score) for member, score in value.items()}
            found[key] = value, due_ms
        return found

    async def close(self) -> None:
        await self.link.close()
