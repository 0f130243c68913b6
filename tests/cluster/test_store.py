"""The store's port ends when its caller is cancelled."""

import asyncio

from schedsvc.cluster.store import Address, connect

from .store_server import ADMIN_PASSWORD, StoreServer


async def test_a_cancelled_call_ends_at_any_moment(store: StoreServer) -> None:
    address = Address("127.0.0.1", store.port, None, ADMIN_PASSWORD)
    cancelled = 0
    for turns in range(1, 25):
        link = await connect(address)
        call = asyncio.ensure_future(link.command("PING"))
        for _ in range(turns):
            await asyncio.sleep(0)
        is_asked = call.cancel()
        await asyncio.wait({call})
        assert call.cancelled() == is_asked, f"lost after {turns} turns of the loop"
        cancelled += is_asked
        await link.close()
    assert cancelled, "every call was over before its cancellation"
