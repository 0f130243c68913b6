"""Tests buckets of quotas in a real store: all members spend what one bucket allows."""

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from schedsvc.cluster.escrow_books import Book
from schedsvc.cluster.escrow_store import CHUNK_MS, WRAP, Answer, Ask, Part, Stated, ask_store
from tests.seeds import fresh

from .store_server import StoreServer
from .timed_store import TimedStore

NONE = (0, 0, 0, 0)
MINUTE_MS = 60_000


@pytest.fixture
async def virtual(store: StoreServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TimedStore]:
    # On a busy machine one of thousands of calls may take longer than a member would wait.
    monkeypatch.setattr("schedsvc.cluster.store.CALL_S", 60)
    found = await TimedStore.on(store)
    yield found
    await found.link.close()


def requests(count: int) -> tuple[int, int, int, int]:
    return (count, 0, 0, 0)


@dataclass
class Holder:
    """Keeps a member's books of buckets of requests, as the rules of escrow.lua want them."""

    virtual: TimedStore
    name: str
    limits: dict[str, int]
    drawn: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    ends_ms: dict[str, int] = field(default_factory=dict)
    books: dict[str, Book] = field(default_factory=dict)
    call: int = 0

    def has(self, bucket: str) -> int:
        """Return the amount that it may spend now; a chunk that is over counts as spent."""
        if self.virtual.now_ms >= self.ends_ms.get(bucket, 0):
            self.held[bucket] = min(0, self.held.get(bucket, 0))
        return self.held.get(bucket, 0)

    def stated(self, bucket: str) -> Stated:
        book = self.books.setdefault(bucket, Book([0] * 4, 0))
        book.drawn[0] = self.drawn.get(bucket, 0) % WRAP
        limits, held = requests(self.limits[bucket]), requests(self.has(bucket))
        return book.state(bucket.encode(), limits, held, self.virtual.now_ms * 1_000_000)

    async def exchange(
        self,
        asks: dict[str, dict[str, tuple[int, int]]] | None = None,
        *,
        buckets: tuple[str, ...] = (),
        give_back: bool = False,
        withdrawn: tuple[str, ...] = (),
        lost: bool = False,
    ) -> Answer:
        """Call with asks: name to bucket to least and most."""
        named = dict.fromkeys([*buckets, *(b for path in (asks or {}).values() for b in path)])
        for bucket in named if give_back else ():
            self.drawn[bucket] = self.drawn.get(bucket, 0) - max(0, self.has(bucket))
            self.held[bucket] = min(0, self.held.get(bucket, 0))
        self.call += 1
        sent = [
            Ask(
                name.encode(),
                [Part(b.encode(), requests(n), requests(m)) for b, (n, m) in path.items()],
            )
            for name, path in (asks or {}).items()
        ]
        stated, gone = [self.stated(bucket) for bucket in named], [n.encode() for n in withdrawn]
        link, origin = self.virtual.link, self.name.encode()
        answer = await ask_store(link, "prod", origin, self.call, stated, sent, gone)
        assert answer is not None
        if lost:
            return answer
        for each in stated:
            book = self.books[each.bucket.decode()]
            book.learn(each, answer, self.call, self.virtual.now_ms * 1_000_000)
        for bucket in named:
            given = answer.given[bucket.encode()][0]
            self.drawn[bucket] = self.drawn.get(bucket, 0) + given
            self.held[bucket] = self.held.get(bucket, 0) + given
            self.ends_ms[bucket] = self.virtual.now_ms + CHUNK_MS
        return answer

    async def ask(self, bucket: str, least: int, most: int | None = None) -> int:
        """Return the ms to wait; 0: it was served."""
        answer = await self.exchange({"x": {bucket: (least, most or least)}})
        return answer.waits_ms[0]

    async def spend(self, bucket: str, held: int = 0) -> Answer:
        """Spend all held units, or down to `held`, and report them."""
        self.held[bucket] = held
        return await self.exchange(buckets=(bucket,))


async def test_members_draw_no_more_than_one_bucket(virtual: TimedStore) -> None:
    a, b = (Holder(virtual, name, {"q": 10}) for name in "ab")
    assert await a.ask("q", 6) == 0
    assert await b.ask("q", 5) == 6_000
    assert await b.ask("q", 4) == 0
    await virtual.set_ms(virtual.now_ms + 600)
    assert a.has("q") + b.has("q") == 10
    await a.spend("q")  # only units that are not held refill
    assert await a.ask("q", 1) == 6_000
    await virtual.set_ms(virtual.now_ms + 5_999)
    assert await a.ask("q", 1) == 1
    await virtual.set_ms(virtual.now_ms + 1)
    assert await a.ask("q", 1) == 0


async def test_a_large_ask_gets_the_chunks_of_others_back(virtual: TimedStore) -> None:
    members = [Holder(virtual, name, {"q": 10_000}) for name in "abcd"]
    for member in members:
        assert await member.ask("q", 2_500) == 0
    a, *others = members
    assert await a.ask("q", 5_500) > 0
    for other in others:
        answer = await other.exchange()
        assert answer.recalled == [b"q"]
        await other.exchange(buckets=("q",), give_back=True)
        assert (await other.exchange()).recalled == []
    assert await a.ask("q", 5_500) == 0
    assert a.has("q") == 8_000


async def test_asks_are_served_in_their_order(virtual: TimedStore) -> None:
    a, b, c = (Holder(virtual, name, {"q": 600}) for name in "abc")
    assert await a.ask("q", 600) == 0
    await a.spend("q")
    assert await b.ask("q", 50) == 5_000
    assert await c.ask("q", 1) == 5_100  # small, and yet behind
    await virtual.set_ms(virtual.now_ms + 1_000)
    assert await c.ask("q", 1) == 4_100
    await b.exchange(buckets=("q",), withdrawn=("x",))
    assert await c.ask("q", 1) == 0


async def test_an_ask_that_is_not_repeated_delays_no_other(virtual: TimedStore) -> None:
    a, b, c = (Holder(virtual, name, {"q": 600}) for name in "abc")
    assert await a.ask("q", 600) == 0
    await a.spend("q")
    assert await b.ask("q", 500) > 0
    await virtual.set_ms(virtual.now_ms + 1_400)
    assert await c.ask("q", 1) > 0
    await virtual.set_ms(virtual.now_ms + 100)
    assert await c.ask("q", 1) == 0


async def test_a_path_is_served_whole_or_not_at_all(virtual: TimedStore) -> None:
    limits = {"tenant": 10, "group": 20}
    a, b = (Holder(virtual, name, limits) for name in "ab")
    assert await b.ask("group", 15) == 0
    path = {"tenant": (6, 6), "group": (6, 6)}
    answer = await a.exchange({"x": path})
    assert answer.waits_ms == [3_000]
    assert (a.has("tenant"), a.has("group")) == (0, 0)
    assert answer.left[b"tenant"][0] == 10
    await b.exchange(buckets=("group",), give_back=True)
    answer = await a.exchange({"x": path})
    assert answer.waits_ms == [0]
    assert (a.has("tenant"), a.has("group")) == (6, 6)


async def test_a_path_waits_for_one_bucket_alone(virtual: TimedStore) -> None:
    """A tenant that has used its own limit does not delay others of its group."""
    limits = {"t1": 10, "t2": 10, "group": 20}
    a, b = (Holder(virtual, name, limits) for name in "ab")
    assert await b.ask("t1", 10) == 0
    b.held["t1"] = 0
    assert (await a.exchange({"x": {"t1": (1, 1), "group": (1, 1)}})).waits_ms[0] > 0
    assert (await b.exchange({"x": {"t2": (1, 1), "group": (1, 1)}})).waits_ms[0] == 0


async def test_a_chunk_without_a_word_of_its_member_is_over(virtual: TimedStore) -> None:
    a, b = (Holder(virtual, name, {"q": 60}) for name in "ab")
    assert await a.ask("q", 60) == 0
    await virtual.set_ms(virtual.now_ms + CHUNK_MS - 1)
    assert await b.ask("q", 1) > 0  # a may spend it
    await virtual.set_ms(virtual.now_ms + 1)
    assert a.has("q") == 0
    assert await b.ask("q", 1) > 0  # it counts as spent, and fills up from now on
    await virtual.set_ms(virtual.now_ms + 1_000)
    assert await b.ask("q", 1) == 0


async def test_a_lost_answer_costs_nothing(virtual: TimedStore) -> None:
    a, b = (Holder(virtual, name, {"q": 10}) for name in "ab")
    await a.exchange({"x": {"q": (7, 7)}}, lost=True)
    assert await b.ask("q", 4) > 0
    await b.exchange(buckets=("q",), withdrawn=("x",))
    assert await a.ask("q", 10) == 0
    a.held["q"] = -3  # requests that cost more than they took
    await a.exchange(buckets=("q",), lost=True)
    answer = await a.exchange(buckets=("q",))
    assert answer.left[b"q"][0] == -3
    assert a.has("q") == 0


async def test_a_call_that_comes_late_changes_nothing(virtual: TimedStore) -> None:
    a = Holder(virtual, "a", {"q": 10})
    assert await a.ask("q", 4) == 0
    old = Stated(b"q", requests(10), NONE, NONE)
    assert await ask_store(virtual.link, "prod", b"a", 1, [old]) is None
    assert (await a.exchange(buckets=("q",))).left[b"q"][0] == 6


async def test_a_clock_that_jumps_gives_one_bucket(virtual: TimedStore) -> None:
    a = Holder(virtual, "a", {"q": 10})
    assert await a.ask("q", 10) == 0
    await a.spend("q")
    await virtual.set_ms(virtual.now_ms + 3_600_000)
    assert await a.ask("q", 11) > 0
    assert await a.ask("q", 10) == 0
    await a.spend("q")
    await virtual.set_ms(virtual.now_ms - 3_600_000)  # back again: no time has gone by
    assert await a.ask("q", 1) == 6_000
    await virtual.set_ms(virtual.now_ms + 6_000)
    assert await a.ask("q", 1) == 0
    await virtual.set_ms(virtual.now_ms - 500)
    assert await a.ask("q", 1) == 6_000
    await virtual.set_ms(virtual.now_ms + 500 + 6_000)
    assert await a.ask("q", 1) == 0


async def test_the_largest_amounts_are_exact(virtual: TimedStore) -> None:
    """The largest limit is exact, though its product with a minute's milliseconds exceeds 2^53."""
    limit = 10**12
    a = Holder(virtual, "a", {"q": limit}, {"q": WRAP - 5})
    assert await a.ask("q", limit) == 0
    await a.spend("q", -7)
    await virtual.set_ms(virtual.now_ms + 59_999)
    gained = limit * 59_999 // 60_000
    answer = await a.exchange(buckets=("q",))
    assert answer.left[b"q"][0] == gained - 7
    await virtual.set_ms(virtual.now_ms + 1)
    answer = await a.exchange(buckets=("q",))
    assert answer.left[b"q"][0] == limit - 7
    odd = Holder(virtual, "a", {"odd": limit - 1})
    await odd.ask("odd", limit - 1)
    await odd.spend("odd")
    for step_ms in (1, 7, 30_001, 29_990):
        await virtual.set_ms(virtual.now_ms + step_ms)
        answer = await odd.exchange(buckets=("odd",))
    assert answer.left[b"odd"][0] == (limit - 1) * 59_999 // 60_000


async def test_another_limit_keeps_what_is_spent(virtual: TimedStore) -> None:
    a = Holder(virtual, "a", {"q": 10})
    assert await a.ask("q", 8) == 0
    a.limits = {"q": 30}
    assert (await a.exchange(buckets=("q",))).left[b"q"][0] == 22
    a.limits = {"q": 5}
    assert (await a.exchange(buckets=("q",))).left[b"q"][0] == -3
    assert await a.ask("q", 1) == 48_000


QUIET_MS = 1_500


@pytest.mark.parametrize("order", ["ab", "ba"])
async def test_a_flushed_bucket_restarts_at_what_members_know(
    virtual: TimedStore, order: str
) -> None:
    a, b = members = [Holder(virtual, name, {"q": 60}) for name in "ab"]
    assert await a.ask("q", 20) == 0
    await a.spend("q", 5)
    assert await b.ask("q", 10) == 0
    b.held["q"], a.held["q"] = 2, 1  # spent, and not reported yet
    await virtual.set_ms(virtual.now_ms + 2_000)
    await virtual.flush()
    for name in order:
        holder = members["ab".index(name)]
        assert await holder.ask("q", 2) > 0  # it waits for the others' reports
    await virtual.set_ms(virtual.now_ms + QUIET_MS)
    answer = await a.exchange(buckets=("q",))
    # The bucket has 60 with what 3.5 s add: 27 are spent, and 3 held.
    assert answer.left[b"q"][0] == 60 - 27 - 3 + 3
    assert await b.ask("q", 33) == 0


async def test_a_flushed_bucket_that_no_member_knows_is_full(virtual: TimedStore) -> None:
    a, b = (Holder(virtual, name, {"q": 60}) for name in "ab")
    assert await a.ask("q", 60) == 0
    await a.spend("q")
    await virtual.flush()
    assert await b.ask("q", 40) == 0
    # The member that knows the bucket comes later: units granted meanwhile are owed.
    assert (await a.exchange(buckets=("q",))).left[b"q"][0] == -40


async def test_an_older_state_of_a_bucket_is_not_believed(virtual: TimedStore) -> None:
    a, b = (Holder(virtual, name, {"q": 60}) for name in "ab")
    key = "{schedsvc:prod}:bucket:q"
    assert await a.ask("q", 10) == 0
    old = await virtual.link.command("GET", key)
    await a.spend("q")
    assert await a.ask("q", 30) == 0
    await a.spend("q", 4)
    await virtual.link.command("SET", key, old)
    answer = await a.exchange(buckets=("q",))
    assert answer.left[b"q"][0] == 60 - 36 - 4
    assert answer.born[b"q"] == b"a:%d" % a.call
    await virtual.set_ms(virtual.now_ms + QUIET_MS)
    assert await b.ask("q", 22) > 0


GARBAGE = [
    b"",
    b"\xc1",
    b"\x07",
    b"\x80",
    b"\x81\xa2at\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
    b"x" * 99,
]


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_a_bucket_of_another_program_counts_as_lost(
    virtual: TimedStore, garbage: bytes
) -> None:
    a = Holder(virtual, "a", {"q": 60})
    assert await a.ask("q", 50) == 0
    await a.spend("q")
    await virtual.link.command("SET", "{schedsvc:prod}:bucket:q", garbage)
    answer = await a.exchange(buckets=("q",))
    assert answer.left[b"q"][0] == 10
    await virtual.set_ms(virtual.now_ms + QUIET_MS)
    assert await a.ask("q", 11) == 0


class Reference:
    """Models one bucket of one process, from which everything that is spent is taken."""

    def __init__(self, limit: int, now_ms: int) -> None:
        self.limit, self.level, self.at_ms = limit, limit * MINUTE_MS, now_ms

    def take(self, amount: int, now_ms: int) -> None:
        self.level += (now_ms - self.at_ms) * self.limit
        self.level = min(self.level, self.limit * MINUTE_MS) - amount * MINUTE_MS
        self.at_ms = now_ms


@pytest.mark.parametrize("seed", fresh(8))
async def test_random_members_spend_no_more_than_one(virtual: TimedStore, seed: int) -> None:
    """Asks, spending, returns, lost answers, deaths and ends of chunks, in any order."""
    rng = random.Random(seed)
    limits = {"t1": 60, "t2": 1_000, "group": 1_200}
    bars = {name: Reference(limit, virtual.now_ms) for name, limit in limits.items()}
    members = [Holder(virtual, f"m{k}", limits) for k in range(4)]
    served = 0
    for step in range(400):
        member = rng.choice(members)
        action = rng.random()
        bucket = rng.choice(["t1", "t2"])
        path = {
            name: (n := rng.randint(0, limits[name] // 3), n + rng.randint(0, limits[name]))
            for name in (bucket, "group")
        }
        if action < 0.35:
            answer = await member.exchange({bucket: path}, lost=rng.random() < 0.1)
            served += answer.waits_ms[0] == 0
        elif action < 0.7:
            for name in (bucket, "group"):
                spent = rng.randint(0, max(0, member.has(name)))
                member.held[name] = member.has(name) - spent
                bars[name].take(spent, virtual.now_ms)
                assert bars[name].level >= 0, f"seed {seed}, step {step}: {name} overspent"
        elif action < 0.8:
            await member.exchange(buckets=(bucket, "group"), give_back=True)
        elif action < 0.85:
            members.remove(member)
            members.append(Holder(virtual, f"late{step}", limits))
        else:
            await virtual.set_ms(virtual.now_ms + rng.choice([1, 250, 2_900, 2_900, 40_000]))
    assert served > 10
