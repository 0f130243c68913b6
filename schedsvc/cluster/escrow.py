"""Draws chunks of shared quotas from the store, and returns what is not used.

It also states slots of concurrency and what was spent of budgets (see slots.py and budgets.py).

Decisions never wait for it: without a chunk a request waits for its quota. The task reads what is
wanted and what was spent, states both to the store, and gives the core the answer as an event.

Rules, beside those of escrow.lua:
- What is returned leaves the core before the call. So it cannot be spent while the call is on its
  way, and a call without an answer loses nothing: the next one states the same.
- A chunk's end counts from before the call, less 2 %.
- Once the store has been away for _AWAY_S, and the configuration says `share`, time fills the
  buckets at a part of their limits.
- After the third loss of buckets in a minute it does so too, until a minute has passed without one.
- The store is away until it has answered writes: a new connection begins with some (see store.py).
  It was not back if a later call of the same exchange fails, and outage.py has more.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from schedsvc.cluster.budgets import HeldBudgets, SharedBudgets
from schedsvc.cluster.errors import StoreError, StoreRefusedError
from schedsvc.cluster.escrow_books import Book, Losses
from schedsvc.cluster.escrow_store import (
    CHUNK_MS,
    KINDS,
    WRAP,
    Amounts,
    Answer,
    Ask,
    Part,
    Stated,
    ask_store,
)
from schedsvc.cluster.joining import Identity
from schedsvc.cluster.library import bucket_keys_of
from schedsvc.cluster.outage import Outage
from schedsvc.cluster.slots import Slots
from schedsvc.cluster.store import CALL_S, StoreConnection, check_writes, open_any
from schedsvc.config.cluster import Cluster
from schedsvc.driver import Broken, Driver, EscrowWatch, Sharing
from schedsvc.driver.clock import boot_ns

__all__ = ["Escrow"]

_log = structlog.get_logger("schedsvc.cluster")

_MS = 1_000_000
_CHUNK_NS = CHUNK_MS * _MS * 98 // 100
#: Between two calls while something is held or waits.
_PAUSE_S, _PAUSE_MIN_S = 0.25, 0.01
_IDLE_NS = 1_000 * _MS
#: Books are kept for longer than the store keeps what they are about.
_BOOK_NS = _MINUTE_NS = 60_000 * _MS
#: With the pause before the next try, the members' parts are in force within a second.
_AWAY_S = 0.75
_END_S = 1.0
_BUCKETS_MAX = 100
_ZEROS: Amounts = (0,) * KINDS
_ALL_BACK: Amounts = (-(10**12),) * KINDS
_AMOUNT_MAX = 10**12


@dataclass(slots=True)
class _Wanted:
    """Describes an ask that the store has, and where it waits."""

    path: list[tuple[bytes, Amounts, Amounts]]
    due_ns: int
    waits_at: bytes | None = None


class Escrow:
    """Holds the shared quotas of this member."""

    def __init__(
        self,
        driver: Driver,
        settings: Cluster,
        resolve: Callable[[str], Path],
        who: Identity,
        sharing: Sharing,
        replay_ns: int = 0,
    ) -> None:
        """Begin; clients may replay earlier leases for `replay_ns` after the start."""
        self._driver, self._settings, self._resolve = driver, settings, resolve
        self._servers = list(settings.store.urls)
        self._cluster, self._origin = who.cluster, who.prefix.rstrip(b"/")
        self._sharing = sharing
        self._link: StoreConnection | None = None
        self._call, self._called_ns = 0, 0
        self._books: dict[bytes, Book] = {}
        self._asked: dict[bytes, _Wanted] = {}
        self._recalled: set[bytes] = set()
        self._woken = asyncio.Event()
        self._watch = EscrowWatch(self._woken.set)
        #: As `set_escrow()` of the core has it; None: quotas are this scheduler's own.
        self._share: int | None = None
        self._slots = Slots(
            driver, who, settings.set if settings.role else None, sharing, replay_ns
        )
        self._budgets = SharedBudgets(driver, who.cluster, who.member, sharing)
        self._losses = Losses()
        self._restates = False  # the next call states all books, because the store lost its data
        self._members_ns: dict[str, int] = {}  # when each member was alive last
        self._is_away = False  # as the core knows it
        self.outage = Outage()

    def share_budgets(self, held: HeldBudgets) -> None:
        """Share with other members what is spent of these, from the start on."""
        self._budgets.held = held

    @property
    def distrusts(self) -> bool:
        """Return whether the store loses buckets too often to rely on it."""
        return self._losses.are_many(self._driver.clock.now_ns())

    async def begin(self) -> None:
        """Try the store once, before the first request; takes at most CALL_S."""
        if self._settings.outage == "hold":
            self._fill(0)
        try:
            async with asyncio.timeout(CALL_S):
                await self.exchange()
        except (StoreError, TimeoutError) as error:
            await self._failed(error)

    async def run(self) -> None:
        """Draw and return chunks until cancelled; then return all."""
        try:
            while True:
                pause_s = _PAUSE_S
                try:
                    pause_s = await self.exchange()
                except StoreError as error:
                    await self._failed(error)
                await self._wait(pause_s)
        except Broken:
            return  # the driver has said why
        finally:
            await self._end()

    async def _wait(self, pause_s: float) -> None:
        """Wait for the pause, or until something else is wanted than what the store knows."""
        end_ns = boot_ns() + int(pause_s * 1e9)
        await asyncio.sleep(_PAUSE_MIN_S / 2)
        while (left_ns := end_ns - boot_ns()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left_ns / 1e9):
                    await self._woken.wait()
                    self._woken.clear()
                    if self._link is not None and self._has_news():
                        return

    def _has_news(self) -> bool:
        now_ns = self._driver.clock.now_ns()
        for name, path in self._wants():
            asked = self._asked.get(name)
            if asked is None or asked.path != path or asked.due_ns <= now_ns:
                return True
        return bool(self._sharing.forgiven) or self._slots.has_news()

    def _wants(self) -> list[tuple[bytes, list[tuple[bytes, Amounts, Amounts]]]]:
        return self._driver.change(lambda core, _: core.escrow_wants())

    def _fill(self, share: int) -> None:
        """Let chunks (0) or a part of the limits fill the buckets from now on."""
        if self._share == share:
            return
        self._share = self._sharing.divided_by = share
        self._watch.lag_ns = None
        self._driver.escrow = self._watch
        self._driver.change(lambda core, now_ns: core.set_escrow(now_ns, share))
        _log.info("quotas_shared", members=share or None, store=share == 0)

    def _say_away(self, *, away: bool) -> None:
        """Let tenants whose requests do not wait be refused at once while the store is away."""
        if self._is_away != away:
            self._is_away = away
            self._driver.change(lambda core, now_ns: core.set_escrow_away(now_ns, away))

    async def exchange(self) -> float:
        """State what is held and wanted; return the seconds to the next call. Raises StoreError."""
        link = self._link or await self._connect()
        if self._settings.outage == "share" and self.outage.holds():
            await check_writes(link, self._cluster, self.outage.refused)
            self._spend_part()
            return _PAUSE_S
        now_ns = self._driver.clock.now_ns()
        self._members_ns |= dict.fromkeys(self._sharing.members, now_ns)
        if self._losses.are_many(now_ns):
            return await self._exchange_divided(link, now_ns)
        self._fill(0)
        self._say_away(away=False)
        wants = dict(self._wants())
        drawn = self._driver.change(lambda core, _: core.escrow_drawn(10_000))
        for name in drawn:
            if name in self._books:
                self._books[name].used_ns = now_ns
        back = {n for n, book in self._books.items() if book.holds and self._is_idle(book, now_ns)}
        # In one order, so that a run in virtual time is the same each time.
        returned = sorted(back | self._recalled)
        self._recalled = set()
        self._give_back(returned)
        gone = {n: self._asked.pop(n) for n in sorted(self._asked.keys() - wants.keys())}
        lost, self._restates = self._books if self._restates else (), False
        stated = dict.fromkeys(
            [*drawn, *returned, *(b for w in gone.values() for b, _, _ in w.path), *lost]
        )
        for name in gone:
            self._clear_due(gone[name])
        # Also without news from time to time, so that a store that is away is missed.
        if not (wants or stated or self._holds) and now_ns - self._called_ns >= _IDLE_NS:
            await check_writes(link, self._cluster)
            await self._ask(link, {}, {}, [])  # it may have lost its data
        while wants or stated or self._holds:
            buckets: dict[bytes, None] = {}
            asks = {}
            while wants and len(buckets) < _BUCKETS_MAX:
                name, path = wants.popitem()
                asks[name] = path
                buckets.update(dict.fromkeys(bucket for bucket, _, _ in path))
            while stated and len(buckets) < _BUCKETS_MAX:
                buckets[stated.popitem()[0]] = None
            await self._ask(link, buckets, asks, list(gone))
            if not wants and not stated:
                break
        await self._exchange_limits(link, drawn)
        self._well()
        self._forget(now_ns)
        return self._pause_s()

    async def _exchange_divided(self, link: StoreConnection, now_ns: int) -> float:
        """Spend this member's part of the limits, and look whether the store keeps its data."""
        if self._share == 0:
            self._asked.clear()
            self._books.clear()
            self._fill(self._members(now_ns))
        self._say_away(away=False)
        await self._ask(link, {}, {}, [])
        await self._exchange_limits(link, ())
        self.outage.answered()
        self._sharing.quota_problem = "the store has lost its data three times in a minute"
        return _PAUSE_S

    def _members(self, now_ns: int) -> int:
        """Return how many members there were within a minute.

        A store that has just lost its data knows some of them only.
        """
        alive = {name: at for name, at in self._members_ns.items() if now_ns - at < _MINUTE_NS}
        self._members_ns = alive
        return max(1, len(alive))

    def _count_loss(self, now_ns: int) -> None:
        self._sharing.losses += 1
        had_many = self._losses.are_many(now_ns)
        self._losses.count(now_ns)
        if had_many:
            return  # known
        effect = "buckets go on from what the members know"
        if self._losses.are_many(now_ns):
            effect = "this member spends its part until the store has kept its data for a minute"
        _log.warning("cluster_quotas_forgotten", losses=self._sharing.losses, effect=effect)

    async def _exchange_limits(self, link: StoreConnection, drawn: Iterable[bytes]) -> None:
        """Exchange slots and budgets; without any of them the store is not asked."""
        forgiven = self._sharing.forgiven
        if not (forgiven or self._slots.has_some(drawn) or self._budgets.has_some()):
            return
        if forgiven:
            buckets = [b"t" + tenant for tenant in forgiven]
            await link.call("schedsvc_forgive", bucket_keys_of(self._cluster, buckets))
            del forgiven[: len(buckets)]
        await self._slots.exchange(link, drawn)
        await self._budgets.exchange(link)

    @property
    def _holds(self) -> bool:
        return any(book.holds for book in self._books.values())

    def _pause_s(self) -> float:
        if self._recalled or self._slots.is_told or self._restates:
            return _PAUSE_MIN_S
        now_ns = self._driver.clock.now_ns()
        due_ns = min((asked.due_ns for asked in self._asked.values()), default=now_ns + 10**9)
        return min(_PAUSE_S, max(_PAUSE_MIN_S, (due_ns - now_ns) / 1e9))

    @staticmethod
    def _is_idle(book: Book, now_ns: int) -> bool:
        return now_ns - book.used_ns >= _IDLE_NS

    def _clear_due(self, asked: _Wanted) -> None:
        if asked.waits_at in self._books:
            self._books[asked.waits_at].due_ns = 0

    def _give_back(self, names: Iterable[bytes]) -> None:
        """Take what is held from the core; it is the store's again with the next call."""
        rows = [(name, _ALL_BACK, _ZEROS, _ZEROS, 0) for name in names if name in self._books]
        if not rows:
            return
        applied = self._driver.change(lambda core, now_ns: core.set_escrow_grants(now_ns, rows))
        for (name, *_), amounts in zip(rows, applied, strict=True):
            book = self._books[name]
            book.holds = False
            for k in range(KINDS):
                book.drawn[k] = (book.drawn[k] + amounts[k]) % WRAP

    async def _ask(
        self,
        link: StoreConnection,
        buckets: dict[bytes, None],
        wants: dict[bytes, list[tuple[bytes, Amounts, Amounts]]],
        gone: list[bytes],
    ) -> None:
        """Make one call about these buckets, and give the core its answer."""
        names = list(buckets)
        now_ns = self._driver.clock.now_ns()
        levels = self._driver.change(lambda core, _: core.escrow_levels(names))
        stated = []
        for name, found in zip(names, levels, strict=True):
            if found is None or (name not in self._books and not any(found[1]) and not wants):
                continue
            book = self._books.setdefault(name, Book([0] * KINDS, now_ns))
            stated.append(book.state(name, *found, now_ns))
        known = {each.bucket for each in stated}
        asks = [
            Ask(name, [Part(*part) for part in path])
            for name, path in wants.items()
            if all(part[0] in known for part in path)
        ]
        self._call, self._called_ns = self._call + 1, now_ns
        self._watch.lag_ns = boot_ns() - now_ns
        answer = await ask_store(link, self._cluster, self._origin, self._call, stated, asks, gone)
        if answer is None:
            raise StoreRefusedError(
                f"another scheduler is {self._origin.decode(errors='replace')} of cluster"
                f" {self._cluster}; restart this one"
            )
        self._take(answer, stated, asks, wants, now_ns)

    def _take(
        self,
        answer: Answer,
        stated: list[Stated],
        asks: list[Ask],
        wants: dict[bytes, list[tuple[bytes, Amounts, Amounts]]],
        asked_ns: int,
    ) -> None:
        for ask, wait_ms, where in zip(asks, answer.waits_ms, answer.waits_at, strict=True):
            self._asked.pop(ask.name, None)
            for part in ask.path:
                self._books[part.bucket].due_ns = 0
            if wait_ms:
                due_ns = asked_ns + min(wait_ms, 3_600_000) * _MS
                self._asked[ask.name] = _Wanted(wants[ask.name], due_ns, where)
        for wanted in self._asked.values():
            if wanted.waits_at in self._books:
                self._books[wanted.waits_at].due_ns = wanted.due_ns
        is_lost = self._losses.is_new_life(answer.life)
        self._restates |= is_lost
        rows = []
        for each in stated:
            book = self._books[each.bucket]
            is_lost |= book.learn(each, answer, self._call, asked_ns)
            given = tuple(min(n, 2 * _AMOUNT_MAX) for n in answer.given[each.bucket])
            left = tuple(min(max(0, n), _AMOUNT_MAX) for n in answer.left[each.bucket])
            for k in range(KINDS):
                book.drawn[k] = (book.drawn[k] + given[k]) % WRAP
            self._sharing.chunks += any(given)
            book.used_ns = asked_ns if any(given) else book.used_ns
            book.holds = any(n + m > 0 for n, m in zip(each.held, given, strict=True))
            rows.append((each.bucket, given, (book.due_ns,) * KINDS, left, asked_ns + _CHUNK_NS))
        if is_lost:
            self._count_loss(asked_ns)
        self._recalled.update(name for name in answer.recalled if name in self._books)
        self._driver.change(lambda core, now_ns: core.set_escrow_grants(now_ns, rows))

    def _forget(self, now_ns: int) -> None:
        self._sharing.buckets = 0
        for name, book in list(self._books.items()):
            if now_ns - book.used_ns >= _BOOK_NS and not book.holds:
                del self._books[name]
            self._sharing.buckets += book.holds or book.due_ns > now_ns

    async def _connect(self) -> StoreConnection:
        self._link = await open_any(
            self._settings, self._resolve, self._servers, self.outage.refused
        )
        return self._link

    def _well(self) -> None:
        if self.outage.answered() and self._sharing.quota_problem:
            _log.info("cluster_quotas_back")
            self._sharing.quota_problem = ""

    def _spend_part(self) -> None:
        """Let this member's part of the limits fill the buckets once the store was away for long.

        Not if this member has never reached it: then it enforces the whole limits by itself.
        """
        if self._share == 0 and boot_ns() - self.outage.since_ns >= _AWAY_S * 1e9:
            self._fill(max(1, len(self._sharing.members)))

    async def _failed(self, error: Exception) -> None:
        reason = str(error) or f"no answer within {CALL_S:g} s"
        hold = self._settings.outage == "hold"
        self._say_away(away=True)
        if self.outage.failed(error, reason):
            effect = "this member spends its part"
            if hold:
                effect = "quotas end with what is held"
            elif self._share is None:
                effect = "this member enforces the whole limits by itself"
            _log.warning("cluster_quotas_lost", reason=reason, effect=effect)
        self._sharing.quota_problem = reason
        self._asked.clear()
        self._slots.forget_asks()
        if not hold:
            self._spend_part()
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def _end(self) -> None:
        link = self._link
        if link is None:
            return
        try:
            async with asyncio.timeout(_END_S):
                held = [name for name, book in self._books.items() if book.holds]
                self._give_back(held)
                for at in range(0, len(held), _BUCKETS_MAX):
                    batch = dict.fromkeys(held[at : at + _BUCKETS_MAX])
                    await self._ask(link, batch, {}, list(self._asked))
                await self._slots.exchange(link, (), ends=True)
        except (StoreError, Broken, TimeoutError):
            pass  # the chunks end by themselves
        await link.close()
