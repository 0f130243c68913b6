"""Tests requests that name no pool beside a pool that another principal has registered."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.server import Server

from .conftest import POOL, ask, calling, config_of, serving, token_of, totals, until
from .test_principals import bearer

A, B = "gate-a-token-of-enough", "gate-b-token-of-enough"
GATES = [token_of("a", A, pools=["a*"]), token_of("b", B, pools=["b*"])]
LISTED = {"name": "b1"}


@asynccontextmanager
async def offering(server: Server, pool: str, **call: Any) -> AsyncIterator[None]:
    """Offer a pool on a stream, for as long as this lasts."""
    registration = pool_pb2.PoolRegistration(
        pool=pool, epoch=1, capacity_tokens=16_000, block_size_tokens=16
    )
    hello = pb.SessionHello(client_id="engine", incarnation=1)
    async with calling(server.targets[0]) as stub:
        session = stub.Session(**call)
        events = [pb.SessionEvent(hello=hello), pb.SessionEvent(pool=registration)]
        await session.write(pb.SessionRequest(seq=1, events=events))
        await until(lambda: row_of(server, pool).get("attached"), f"{pool} is offered")
        yield


@asynccontextmanager
async def beside_b1(**keys: Any) -> AsyncIterator[Server]:
    """Serve two principals, one of which has registered the pool b1."""
    async with (
        serving(auth={"principals": GATES}, **keys) as server,
        offering(server, "b1", metadata=bearer(B)),
    ):
        yield server


def row_of(server: Server, pool: str) -> dict[str, Any]:
    return next((row for row in server.driver.stats(0)["pools"] if row["name"] == pool), {})


async def placed(server: Server, token: str, count: int = 5, **fields: Any) -> list[str]:
    """Ask some times; return where each request runs, or its outcome."""
    async with calling(server.targets[0]) as stub:
        answers = [
            await stub.Admit(ask(10, **fields), metadata=bearer(token)) for _ in range(count)
        ]
    return [each.grant.pool or pb.Outcome.Name(each.outcome) for each in answers]


async def test_a_request_without_a_pool_never_runs_in_a_strangers_pool() -> None:
    """The idle pool of another principal was the first choice."""
    async with beside_b1() as server:
        assert row_of(server, "b1")["named_only"]
        assert not row_of(server, "pool")["named_only"]
        for token in (A, B):
            assert await placed(server, token) == ["pool"] * 5
            assert await placed(server, token, pools=["b1"]) == ["b1"] * 5


async def test_a_request_without_a_pool_is_refused_if_every_pool_is_a_strangers() -> None:
    async with beside_b1(pools=[]) as server:
        refused = ["OUTCOME_REJECTED_NO_POOL"]
        assert await placed(server, A, 1) == await placed(server, B, 1) == refused
        assert await placed(server, A, 1, pools=["b1"]) == ["b1"]
        async with calling(server.targets[0]) as stub:
            refusal = await stub.Admit(ask(10), metadata=bearer(A))
        assert "name one, or list it in `pools`" in refusal.refusal.message


async def test_a_pool_that_the_configuration_lists_takes_all() -> None:
    async with serving(auth={"principals": GATES}, pools=[LISTED]) as server:
        assert await placed(server, A, 1) == ["OUTCOME_REJECTED_NO_POOL"]
        async with offering(server, "b1", metadata=bearer(B)):
            assert not row_of(server, "b1")["named_only"]
            assert await placed(server, A) == ["b1"] * 5


@pytest.mark.parametrize(
    "others",
    [
        [],
        [token_of("b", B)],
        [token_of("reader", B, pools=["b*"], tenants=[])],
        [{"name": "operator", "sha256": "b" * 64, "operator": True}],
    ],
)
async def test_a_pool_that_all_who_ask_may_offer_takes_all(others: list[dict[str, Any]]) -> None:
    principals = [token_of("a", A), *others]
    async with (
        serving(auth={"principals": principals}, pools=[]) as server,
        offering(server, "a1", metadata=bearer(A)),
    ):
        assert await placed(server, A) == ["a1"] * 5


async def test_a_scheduler_without_principals_places_requests_as_it_did() -> None:
    async with serving(pools=[]) as server, offering(server, "a1"):
        assert await placed(server, A) == ["a1"] * 5


async def test_a_port_that_only_asks_reaches_only_pools_that_are_listed(tmp_path: Any) -> None:
    port, socket = {"tcp": "127.0.0.1:0", "auth": "none"}, {"unix": str(tmp_path / "s")}
    async with (
        serving(listeners=[socket, port], pools=[]) as server,
        offering(server, "a1"),
        calling(server.targets[1]) as stub,
    ):
        assert (await stub.Admit(ask(10))).outcome == pb.OUTCOME_REJECTED_NO_POOL
        assert (await stub.Admit(ask(10, pools=["a1"]))).grant.pool == "a1"


async def test_a_reload_of_principals_moves_what_waits() -> None:
    """A request waits for the full pool of the configuration; another pool is a stranger's until
    a reload lets all offer it."""
    async with beside_b1() as server, calling(server.targets[0]) as stub:
        full = await stub.Admit(ask(1_580), metadata=bearer(A))
        assert full.grant.pool == POOL["name"]
        waits = stub.Admit(ask(100), metadata=bearer(A))
        await until(lambda: totals(server)["queued"], "it waits")
        both = [token_of("a", A, pools=["a*", "b1"]), token_of("b", B, pools=["b*"])]
        server.reconfigure(config_of(auth={"principals": both}))
        assert (await waits).grant.pool == "b1"
        server.reconfigure(config_of(auth={"principals": GATES}))
        assert row_of(server, "b1")["named_only"]
        server.reconfigure(config_of(auth={"principals": GATES}, pools=[POOL, LISTED]))
        assert not row_of(server, "b1")["named_only"]


async def test_why_names_no_pool_that_takes_only_what_names_it() -> None:
    async with beside_b1() as server, calling(server.targets[0]) as stub:
        await stub.Admit(ask(1_580), metadata=bearer(A))
        waits = stub.Admit(ask(100, request_id="w"), metadata=bearer(A))
        await until(lambda: totals(server)["queued"], "it waits")
        (story,) = server.driver.explain(b"w", b"", -1)
        assert [row["pool"] for row in story["pools"]] == [POOL["name"]]
        waits.cancel()
        await until(lambda: not totals(server)["queued"], "it left")
