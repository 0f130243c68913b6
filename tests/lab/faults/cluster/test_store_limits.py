"""The simulator's store answers calls about slots, budgets and settings as the real one does."""

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schedsvc.cluster.library import (
    budget_key_of,
    escrow_keys_of,
    settings_keys_of,
    slot_keys_of,
)
from schedsvc_lab.faults.cluster.store import VirtualStore
from tests.cluster.store_server import StoreServer, running_store
from tests.cluster.timed_store import TimedStore
from tests.seeds import fresh

Words = tuple[Any, ...]
_HOLDERS = (b"set:main", b"member:a", b"member:b")
_LIMITS = {b"t1": 3, b"t2": 10, b"g": 1}
_PLACES = ("modes", "tenant:a", "tenant:b")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    with running_store(tmp_path / "store") as found:
        yield found


class Calls:
    """Draws calls that members could make, right and wrong ones."""

    def __init__(self, seed: int) -> None:
        self._rnd = random.Random(seed)
        self._number = 0
        self._rows: dict[str, bytes] = {}

    def step_ms(self) -> int:
        rnd = self._rnd
        return rnd.choice((0, 40, 250, 1_500, 3_001, 60_000, 130_000, -400, -9_000)
            if rnd.random() < 0.2 else (0, 3, 50))  # fmt: skip

    def next(self) -> Words:
        kind = self._rnd.random()
        if kind < 0.6:
            return self._slots()
        if kind < 0.7:
            return self._budgets()
        return self._forgiven() if kind < 0.8 else self._settings()

    def _forgiven(self) -> Words:
        """A debt, or an operator who forgives it."""
        rnd = self._rnd
        keys = escrow_keys_of("prod", b"a/1", [b"tt"])
        if rnd.random() < 0.5:
            return self._call("schedsvc_forgive", keys[2:])
        self._number += 1
        rates, held = (10, 0, 0, 500), (rnd.choice((0, -4)), 0, 0, rnd.choice((-90, 0, 7)))
        nothing = (0,) * 4
        words = (b"a/1", self._number, 0, *rates, *nothing, *held, *nothing, *nothing, b"", 0)
        return self._call("schedsvc_escrow", keys, *words)

    def _slots(self) -> Words:
        rnd = self._rnd
        self._number += 1
        holder, caps = rnd.choice(_HOLDERS), rnd.sample(sorted(_LIMITS), rnd.randrange(1, 4))
        term = rnd.choice((3, 3, 3, 4)) if holder == b"set:main" else 0
        life, call = rnd.choice("1112"), self._number - rnd.choice((0, 0, 0, 0, 9))
        words: list[Any] = [holder, term, life, call]
        for cap in caps:
            words += (_LIMITS[cap], rnd.choice((0, 0, 1, 2, 4)), rnd.choice((0, 0, 1, 3)))
        return self._call("schedsvc_slots", slot_keys_of("prod", holder, caps), *words)

    def _budgets(self) -> Words:
        rnd = self._rnd
        keys = [budget_key_of("prod", b"tenant:t", b"day-%d-UTC" % rnd.randrange(2)) for _ in "ab"]
        spent = [rnd.randrange(10**6) for _ in keys]
        return self._call("schedsvc_budgets", keys, rnd.choice("abc"), *spent)

    def _settings(self) -> Words:
        rnd = self._rnd
        words: list[Any] = [rnd.randrange(0, 30), rnd.choice((1, 2, 500)), f"{rnd.random()}"]
        for place in rnd.sample(_PLACES, rnd.randrange(0, 3)):
            row = rnd.choice((b"", b"%d row" % rnd.randrange(99), b"%d row" % rnd.randrange(99)))
            before = self._rows.get(place, b"") if rnd.random() < 0.8 else b"another"
            seen = hashlib.sha1(before).hexdigest() if before else ""
            if before != b"another":
                self._rows[place] = row
            words += (place, seen, row)
        return self._call("schedsvc_settings", settings_keys_of("prod"), *words)

    def _call(self, function: str, keys: list[Any], *args: Any) -> Words:
        return ("FCALL", function, len(keys), *keys, *args)


async def test_limits_and_settings_are_as_in_the_real_store(server: StoreServer) -> None:
    real = await TimedStore.on(server)
    kinds: dict[str, int] = {}
    try:
        for seed in fresh(20):
            calls, clock = Calls(seed), [1_000_000]
            virtual = VirtualStore(lambda clock=clock: clock[0])
            await real.empty()
            for number in range(200):
                clock[0] += calls.step_ms()
                await real.set_ms(clock[0])
                words = calls.next()
                expected = await real.command(words)
                found = virtual.command(words)
                assert found == expected, (seed, number, words)
                kinds[words[1]] = kinds.get(words[1], 0) + 1
    finally:
        await real.close()
    assert len(kinds) == 5
    assert min(kinds.values()) > 100
