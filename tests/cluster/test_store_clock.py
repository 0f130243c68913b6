"""Tests a store's clock that is set back: earlier rows count for no longer than before."""

from schedsvc.cluster.library import keys_of

from .store_server import StoreServer
from .timed_store import TimedStore

KEYS = keys_of("prod")
HOUR_MS = 3_600_000


async def test_a_dead_members_name_is_free_soon(store: StoreServer) -> None:
    timed = await TimedStore.on(store)

    async def join(member: str, life: int) -> bytes:
        words = member, f"{life:016x}", "f", 3_000
        return bytes((await timed.link.call("schedsvc_join", KEYS, *words))[0])

    async def sync(member: str, life: int, call: int) -> list[bytes]:
        words = (member, f"{life:016x}", "f", 3_000, call, "life", 0, 500, f"{member}/{life:016x}/")
        answer: list[bytes] = await timed.link.call("schedsvc_sync", KEYS, *words)
        return answer

    await timed.set_ms(2 * HOUR_MS)
    assert await join("a", 1) == await join("b", 1) == b"joined"
    await timed.set_ms(HOUR_MS)
    assert await join("a", 2) == b"name"
    assert (await sync("b", 1, 1))[4] == b"a b"
    await timed.set_ms(HOUR_MS + 18_001)
    assert (await sync("b", 1, 2))[4] == b"b"
    assert await join("a", 2) == b"joined"
    await timed.close()
