"""A program that can write to the store, and does not have the secret, creates no right."""

import hashlib
import json

from structlog.testing import capture_logs

from schedsvc.cluster.library import settings_keys_of
from schedsvc.cluster.signing import seal_row
from schedsvc.cluster.store import StoreConnection
from tests.server.test_tenant_keys import create, owner, revoke
from tests.server.test_tenants import put
from tests.waiting import until

from .settings_members import ROWS, intruder, member, ready_store, shared, until_shared
from .store_server import StoreServer
from .test_settings import mode, weight

KEY = "sk-of-the-intruder"
ENTRY = {
    "version": 5,
    "terms": {"weight": 1000},
    "keys": [["0badf00d", hashlib.sha256(KEY.encode()).hexdigest(), 1, 0]],
}
NUMBER, _, INDEX, _ = settings_keys_of("prod")


async def write(link: StoreConnection, place: str, row: bytes) -> None:
    """Put a row into the store so that all members read it next."""
    await link.command("HSET", ROWS, place, row)
    number = await link.command("INCR", NUMBER)
    await link.command("ZADD", INDEX, int(number), place)


async def row_of(link: StoreConnection, place: str) -> bytes:
    return bytes(await link.command("HGET", ROWS, place))


async def test_a_hostile_store_row_creates_no_right(store: StoreServer) -> None:
    """It creates no tenant, key or mode, neither in members that run, nor in one that joins."""
    await ready_store(store)
    content = json.dumps(ENTRY).encode()
    rows = {
        "tenant:evil": seal_row(b"another secret", b"settings:prod:tenant:evil", 5, content),
        "tenant:a": content,
        "modes": seal_row(b"", b"settings:prod:modes", 9, b'{"everyone": "dry_run"}'),
        "tenant:": b"5 " + b"0" * 64 + b" " + content,
    }
    async with member(store, "a") as (a, _), intruder(store) as link:
        await until_shared(a)
        with capture_logs() as logs:
            for place, row in rows.items():
                await write(link, place, row)
            await until(lambda: shared(a).forged >= len(rows), "all were seen")
        async with member(store, "b") as (b, _):
            await until_shared(b)
            for server in (a, b):
                assert await owner(server, KEY) == ""
                assert weight(server, "evil") == 0
                assert mode(server, "a") is None
                assert not shared(server).applied
            assert shared(b).forged == len(rows)
    assert any(line["event"] == "cluster_row_forged" for line in logs), logs


async def test_a_row_of_another_place_creates_no_right(store: StoreServer) -> None:
    """A sealed row of one tenant is refused for another tenant, and for another cluster."""
    await ready_store(store)
    async with member(store, "a") as (a, at_a), intruder(store) as link:
        made = await create(at_a, "a")
        await until(lambda: shared(a).rows == 1, "the row is written")
        await write(link, "tenant:b", await row_of(link, "tenant:a"))
        await until(lambda: shared(a).forged == 1, "it was seen")
        assert await owner(a, made.api_key) == "a"
        assert "b" not in a._handles.listed.entries


async def test_an_old_row_brings_no_key_back(store: StoreServer) -> None:
    await ready_store(store)
    async with member(store, "a") as (a, at_a), member(store, "b") as (b, _):
        made = await create(at_a, "a")
        async with intruder(store) as link:
            await until(lambda: shared(b).rows == 1, "the row is written")
            old = await row_of(link, "tenant:a")
            await revoke(at_a, "a", made.key.id)
            await until(lambda: "a" not in b._handles.listed.entries, "the revocation")
            await write(link, "tenant:a", old)
            await until(lambda: shared(a).forged + shared(b).forged, "one has seen it")
            assert await owner(a, made.api_key) == await owner(b, made.api_key) == ""
            await until_row(store, "tenant:a", old)
        async with member(store, "c") as (c, _):
            await until_shared(c)
            assert await owner(c, made.api_key) == ""


async def until_row(store: StoreServer, place: str, old: bytes) -> None:
    """Wait until a member has replaced a row."""
    await until(lambda: old not in store.ask("HGET", ROWS, place), "the row is replaced")


async def test_a_forged_row_does_not_keep_its_place(store: StoreServer) -> None:
    await ready_store(store)
    async with member(store, "a") as (a, at_a), intruder(store) as link:
        await put(at_a, "new", weight_milli=2_000)
        await until(lambda: shared(a).rows == 1, "the row is written")
        await write(link, "tenant:new", b"rubbish")
        await until_row(store, "tenant:new", b"rubbish")
        async with member(store, "b") as (b, _):
            await until(lambda: weight(b, "new") == 2_000, "the right row is read")


async def test_a_member_with_another_secret_is_believed_nothing(store: StoreServer) -> None:
    await ready_store(store)
    other = "another secret, of 32 bytes or more"
    async with member(store, "a") as (a, at_a), member(store, "b", other) as (b, at_b):
        await put(at_a, "one", weight_milli=2_000)
        await put(at_b, "two", weight_milli=2_000)
        await until(lambda: shared(a).forged and shared(b).forged, "both have seen the other's")
        assert (weight(a, "two"), weight(b, "one")) == (0, 0)
