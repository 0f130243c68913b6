"""Tests a tenant's queue, for which several principals may ask in the tenant's name."""

import asyncio
from typing import Any

from schedsvc_client.v1 import scheduler_pb2 as pb

from tests.waiting import until

from .conftest import POOL, ask, calling, serving, token_of, totals

GATE, OTHER = "gate-token-of-enough", "other-token-of-enough"
PLACES = 10
OPEN = PLACES - PLACES // 5  # to requests that are no retries


def bearer(token: str) -> Any:
    return (("authorization", f"Bearer {token}"),)


async def test_one_principal_cannot_fill_the_queue_of_anothers_tenant() -> None:
    """With the default `tenants`, one gate may queue in the name of another's tenant, but it must
    leave places."""
    principals = [token_of("gate", GATE), token_of("other", OTHER)]
    limits = {"headroom": 0, "flow_queue_max": PLACES}
    async with (
        serving(auth={"principals": principals}, scheduler=limits, pools=[POOL]) as server,
        calling(server.targets[0]) as stub,
    ):
        whole = await stub.Admit(ask(1_584), metadata=bearer(OTHER))
        assert whole.outcome == pb.OUTCOME_GRANTED

        def send(token: str) -> "asyncio.Future[pb.AdmitResponse]":
            return asyncio.ensure_future(stub.Admit(ask(100), metadata=bearer(token)))

        async def queue(token: str, places: int) -> list["asyncio.Future[pb.AdmitResponse]"]:
            """Ask for one more than there are places: that one is refused."""
            before = totals(server)
            calls = [send(token) for _ in range(places + 1)]
            await until(
                lambda: totals(server)["received"] == before["received"] + places + 1, "all came"
            )
            assert totals(server)["queued"] == before["queued"] + places
            first, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            (refused,) = first
            assert (await refused).outcome == pb.OUTCOME_REJECTED_FLOW_QUEUE_FULL
            return [call for call in calls if call is not refused]

        waiting = await queue(GATE, OPEN) + await queue(OTHER, OPEN // 2)
        for call in waiting:
            call.cancel()
        await until(lambda: not totals(server)["queued"], "all have left")
