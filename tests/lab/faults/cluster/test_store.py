"""The store of the simulator answers as the Lua functions in a real server do."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schedsvc.cluster.library import escrow_keys_of, keys_of, probe_key_of, term_keys_of
from schedsvc_lab.faults.cluster.store import VirtualStore
from tests.cluster.store_server import StoreServer, running_store
from tests.cluster.timed_store import TimedStore
from tests.seeds import fresh

Words = tuple[Any, ...]
_MEMBERS = ("a", "b", "c")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    with running_store(tmp_path / "store") as found:
        yield found


class Calls:
    """Draws calls that members could make, right and wrong ones."""

    def __init__(self, seed: int) -> None:
        self._rnd = random.Random(seed)
        self._numbers = dict.fromkeys(_MEMBERS, 0)
        self._lives = {name: f"{k:016x}" for k, name in enumerate(_MEMBERS, 1)}
        self._drawn: dict[tuple[str, str], list[int]] = {}
        self._held: dict[tuple[str, str], list[int]] = {}
        self._born: dict[str, bytes] = {}
        self._rows = [b""] * 2  # hold and counter as one look returned them
        self._reads = dict.fromkeys(_MEMBERS, 0)

    def step_ms(self) -> int:
        rnd = self._rnd
        return rnd.choice((0, 1, 40, 250, 999, 1_500, 2_000, 3_001, 70_000, 4_000_000, -400, -9_000)
            if rnd.random() < 0.3 else (0, 3, 50))  # fmt: skip

    def next(self) -> Words:
        kind = self._rnd.random()
        if kind < 0.1:
            return self._entry()
        if kind < 0.13:
            return self._call("schedsvc_probe", [probe_key_of("prod")])
        if kind < 0.4:
            return self._sync()
        return self._terms() if kind < 0.6 else self._escrow()

    def _call(self, function: str, keys: list[Any], *args: Any) -> Words:
        return ("FCALL", function, len(keys), *keys, *args)

    def _who(self) -> tuple[str, str]:
        name = self._rnd.choice(_MEMBERS)
        if self._rnd.random() < 0.03:
            self._lives[name] = f"{self._rnd.randrange(1 << 60):016x}"
        return name, self._lives[name]

    def _entry(self) -> Words:
        name, life = self._who()
        if self._rnd.random() < 0.3:
            return self._call("schedsvc_leave", keys_of("prod"), name, life)
        print_ = self._rnd.choice(("f1", "f1", "f1", "f2"))
        return self._call("schedsvc_join", keys_of("prod"), name, life, print_, 3_000)

    def _number(self, name: str) -> int:
        self._numbers[name] += self._rnd.random() < 0.95
        return self._numbers[name]

    def _sync(self) -> Words:
        rnd, (name, life) = self._rnd, self._who()
        rows: list[Any] = []
        for _ in range(rnd.randrange(4)):
            row = f"{rnd.choice((name, name, 'x'))}/{life}/{rnd.randrange(6)}"
            rows += (row, b"%d 0 0 0" % rnd.randrange(10**6))
        again, most = int(rnd.random() < 0.3), rnd.choice((1, 2, 3, 500))
        return self._call(
            "schedsvc_sync", keys_of("prod"), name, life, "f1", 3_000, self._number(name),
            f"{rnd.randrange(1 << 30):x}", again, most, f"{name}/{life}/", *rows,
        )  # fmt: skip

    def _terms(self) -> Words:
        rnd, keys = self._rnd, term_keys_of("prod", "main")
        mine = [rnd.choice(("1 x a", "2 y b", "3 z c")) for _ in range(2)]
        kind = rnd.randrange(6)
        if kind < 2:
            member = rnd.choice(("", *_MEMBERS))
            return self._call("schedsvc_term_look", keys, "main", member, 3_000)
        if kind < 4:
            seen = self._rows if rnd.random() < 0.8 else [b"", b""]
            return self._call("schedsvc_term_take", keys, "main", *seen, *mine, 2_000, "a")
        if kind < 5:
            other = rnd.choice(("", "2 y b"))
            return self._call("schedsvc_term_renew", keys, "main", *mine, 2_000, other)
        return self._call("schedsvc_term_release", keys, "main", mine[0])

    def _escrow(self) -> Words:
        rnd, (name, life) = self._rnd, self._who()
        origin = f"{name}/{life}".encode()
        buckets = rnd.sample(("t1", "t2", "g"), rnd.randrange(1, 4))
        limits = {"t1": (10, 0, 0, 0), "t2": (60_000, 90_001, 0, 7), "g": (12, 10**6, 3, 0)}
        words: list[Any] = []
        withdrawn = ["t1"] if rnd.random() < 0.1 else []
        for bucket in buckets:
            place = (name, bucket)
            drawn = self._drawn.setdefault(place, [0] * 4)
            held = self._held.setdefault(place, [0] * 4)
            for k in range(4):
                change = rnd.choice((0, 0, 0, 1, -1, 5, -2_000)) if rnd.random() < 0.3 else 0
                held[k] = max(-50, held[k] + change)
                if rnd.random() < 0.1:  # it returns a part
                    back = rnd.randrange(0, max(1, held[k]))
                    held[k], drawn[k] = held[k] - back, (drawn[k] - back) % (1 << 52)
            rates = [rnd.choice((n, n, n, 2 * n)) for n in limits[bucket]]
            words += (*rates, *drawn, *held, *self._knowledge(bucket))
        for bucket in buckets if rnd.random() < 0.7 else ():
            path = [b for b in buckets if b == bucket or rnd.random() < 0.3]
            words += (bucket, len(path))
            for part in path:
                size = max(1, limits[part][0] // rnd.choice((1, 2, 3, 10)))
                least = [size if n and rnd.random() < 0.9 else 0 for n in limits[part]]
                words += (buckets.index(part) + 1, *least, *(n * rnd.choice((1, 3)) for n in least))
        keys = escrow_keys_of("prod", origin, [b.encode() for b in buckets])
        self._asked = name, buckets
        return self._call(
            "schedsvc_escrow", keys, origin, self._number(name), len(withdrawn), *withdrawn, *words
        )

    def _knowledge(self, bucket: str) -> list[Any]:
        """Return the words about a bucket that a member knew before it began again."""
        rnd = self._rnd
        born = rnd.choice((b"", self._born.get(bucket, b""), b"x/1:1"))
        amounts = [rnd.randrange(-12, 60) for _ in range(4)]
        spent = [rnd.choice((0, 0, 3, 40)) for _ in range(4)]
        return [*amounts, *spent, born, rnd.choice((0, max(self._numbers.values()), 1 << 40))]

    def heard(self, words: Words, answer: Any) -> None:
        """Go on from the answer, as a member does; some answers are lost."""
        if words[1] == "schedsvc_term_look":
            self._rows = answer[:2]
        if words[1] == "schedsvc_escrow" and answer and self._rnd.random() < 0.8:
            name, buckets = self._asked
            for at, bucket in enumerate(buckets):
                self._born[bucket] = answer[4][at]
                for k in range(4):
                    given = answer[0][12 * at + k]
                    self._held[name, bucket][k] += given
                    self._drawn[name, bucket][k] = (self._drawn[name, bucket][k] + given) % (
                        1 << 52
                    )


async def test_the_store_answers_as_the_real_one(server: StoreServer) -> None:
    real = await TimedStore.on(server)
    kinds: dict[str, int] = {}
    try:
        for seed in fresh(30):
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
                calls.heard(words, expected)
                kinds[words[1]] = kinds.get(words[1], 0) + 1
    finally:
        await real.close()
    assert len(kinds) == 9
    assert min(kinds.values()) > 100
