"""Tests a gate whose clients invent API keys: it asks a real scheduler whose each key is."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from schedsvc_vllm import key_turns
from schedsvc_vllm.settings import Settings

from tests.waiting import until

from .asgi import Exchange
from .bench import Bench
from .test_gate_keys import CONFIG, Keys, scheduling
from .test_vllm_proxy import Server, behind
from .upstreams import POOL, proxy

__all__ = ["behind"]

NEW = 200
# In the 10 s in which all new keys have to work, the gate sends no more questions than this.
CALLS_MAX = 10 * key_turns.PER_S
# The part of 5,000 invented keys a second that comes between two calls.
INVENTED = 5_000 // key_turns.PER_S
TENANTS = [{"name": name} for name in "abcd"]


@pytest.fixture
async def keys() -> AsyncIterator[Keys]:
    async with scheduling(CONFIG | {"tenants": TENANTS}) as made:
        yield made


async def created(keys: Keys, count: int) -> list[str]:
    names = itertools.cycle("abcd")
    return [(await keys.create(next(names)))[0] for _ in range(count)]


def variables(keys: Keys, **more: str) -> dict[str, str]:
    return {"SCHEDSVC_TARGET": keys.target, "SCHEDSVC_API_KEYS_FROM": "scheduler", **more}


def benched(keys: Keys, given: dict[str, str]) -> Bench:
    scheduler: Any = SimpleNamespace(target=keys.target)
    return Bench(scheduler, Settings.from_environment(given))


class Flood:
    """Invents keys between two calls of the gate."""

    def __init__(self, bench: Bench, ask: Callable[[str, int], Any]) -> None:
        self._ask = ask
        self._tasks: set[asyncio.Task[Any]] = set()
        self._numbers = itertools.count()
        self.calls = 0
        found: Any = bench.gate._identifier.keys
        self._asked, found._scheduler.tenant_of_key = found._scheduler.tenant_of_key, self._counted

    async def _counted(self, digest: bytes) -> str | None:
        self.calls += 1
        self.invent(INVENTED)
        name: str | None = await self._asked(digest)
        return name

    def invent(self, count: int) -> None:
        for number in itertools.islice(self._numbers, count):
            task = asyncio.ensure_future(self._ask(f"sk-invented-{number}", number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def end(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


#: The origin of client k: address of the connection, and the address that the front states.
NETWORKS: dict[str, Callable[[str, int], tuple[str, str]]] = {
    "IPv4": lambda who, k: ("192.0.2.66" if who == "bad" else f"198.51.100.{k}", ""),
    "one network": lambda who, k: ("192.0.2.66" if who == "bad" else "198.51.100.1", ""),
    "IPv6": lambda who, k: (f"2001:db8:{'bad' if who == 'bad' else k}::{k:x}", ""),
    "behind a front": lambda who, k: (
        "10.0.0.1",
        f"198.51.100.{k % 256}, 192.0.2.66" if who == "bad" else f"198.51.100.{k}",
    ),
}


@pytest.mark.parametrize("networks", NETWORKS)
async def test_invented_keys_keep_no_new_key_out(keys: Keys, networks: str) -> None:
    """The gate accepts 200 of 200 new keys within 10 s beside 5,000 invented ones a second."""
    valid = await created(keys, NEW)
    given = variables(keys, SCHEDSVC_HEADER_SET_BY="front")
    bench = benched(keys, given)

    async def ask(who: str, key: str, k: int) -> int:
        address, stated = NETWORKS[networks](who, k)
        headers = {"authorization": f"Bearer {key}"} | (
            {"x-forwarded-for": stated} if stated else {}
        )
        exchange = bench.exchange(headers=headers)
        exchange.scope["client"] = (address, 5)
        return (await exchange.run()).status

    await bench.ask()  # starts it
    flood = Flood(bench, lambda key, k: ask("bad", key, k))
    try:
        flood.invent(5_000)
        await asyncio.sleep(0)
        statuses = await asyncio.gather(*(ask("good", key, k) for k, key in enumerate(valid)))
        calls = flood.calls
    finally:
        await flood.end()
        await bench.gate._close()
    assert (statuses.count(200), calls <= CALLS_MAX) == (NEW, True), calls


async def test_a_flood_from_one_address_spares_others_over_http(
    keys: Keys, behind: tuple[Server, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More connections than a network may queue, each of which goes on inventing keys."""
    monkeypatch.setattr(key_turns, "OF_ONE_MAX", 20)
    valid = await created(keys, 20)
    numbers = itertools.count()

    @asynccontextmanager
    async def client(address: str) -> AsyncIterator[Callable[[str], Any]]:
        connector = aiohttp.TCPConnector(limit=0, local_addr=(address, 0))
        async with aiohttp.ClientSession(connector=connector) as session:

            async def ask(key: str) -> int:
                headers = {"authorization": f"Bearer {key}"}
                body = {"prompt": [1], "max_tokens": 1}
                async with session.post(f"{url}/v1/completions", json=body, headers=headers) as got:
                    await got.read()
                    return got.status

            yield ask

    async def flood(ask: Callable[[str], Any]) -> None:
        while True:
            refused.append(await ask(f"sk-invented-{next(numbers)}"))

    refused: list[int] = []
    async with (
        proxy(variables(keys, **POOL), behind[1]) as url,
        client("127.0.0.2") as bad,
        client("127.0.0.3") as good,
    ):
        tasks = [asyncio.ensure_future(flood(bad)) for _ in range(60)]
        await until(lambda: refused.count(503) > 2 * key_turns.PER_S, "the flood")
        statuses = await asyncio.gather(*map(good, valid))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert set(refused) == {401, 503}
    assert statuses == [200] * len(valid)


async def test_a_known_key_takes_no_turn_after_a_restart(
    keys: Keys, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = variables(keys, SCHEDSVC_KNOWN_KEYS_FILE=str(tmp_path / "known"))
    (key, _), (revoked, key_id), (new, _) = [await keys.create("b") for _ in range(3)]

    async def asked(bench: Bench, key: str) -> Exchange:
        return await bench.ask(headers={"authorization": f"Bearer {key}"})

    for restarted in (False, True):
        if restarted:
            await keys.revoke(key_id, "b")
            monkeypatch.setattr(key_turns, "PER_S", 0.001)
        bench = benched(keys, given)
        try:
            await bench.ask()
            assert (await asked(bench, key)).status == 200
            assert (await asked(bench, revoked)).status == (401 if restarted else 200)
            if restarted:
                monkeypatch.setattr(key_turns, "WAIT_S_MAX", 0.01)
                refused = await asked(bench, new)
                assert refused.status == 503
                assert "too many new API keys" in refused.error["message"]
        finally:
            await bench.gate._close()
