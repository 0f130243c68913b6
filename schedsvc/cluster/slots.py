"""Caps on concurrent requests that all members share: this member's slots.

A member states how many slots it keeps of each cap: those of its running requests, and those that
it was granted and may fill. Without a slot a request waits, as it does at the cap of one scheduler.

Rules, beside those of limits.lua:
- What is given back leaves the core before the call, so it cannot be filled meanwhile.
- Slots belong to the set of pools, or to the member if it has no set. The next leader of the set
  takes them over, and learns how many from the answer to its first statement. Until clients had the
  time to replay what runs, it keeps those that nothing filled, also if other members wait.
- Slots end a bit earlier here than in the store, counted from before the call.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from schedsvc.cluster.errors import StoreError, StoreRefusedError
from schedsvc.cluster.joining import Identity
from schedsvc.cluster.library import slot_keys_of
from schedsvc.cluster.store import CALL_S, StoreConnection
from schedsvc.driver import Driver, Sharing
from schedsvc.driver.clock import boot_ns

__all__ = ["SET_MS", "SlotAnswer", "SlotRow", "Slots", "ask_slots"]

#: As in limits.lua: the silence of a holder after which its slots are free again.
SET_MS = 60_000
_SECOND_NS = 1_000_000_000
_SLOTS_NS = SET_MS * 1_000_000 * 98 // 100
_IDLE_NS = _SECOND_NS
#: A cap of which nothing changes is stated this often, unless there are very many.
_STATE_NS = _SECOND_NS
_CAPS_MAX = 100
#: After the store was away, members ask for nothing until the others have stated what they run.
_STATING_NS = 1_500_000_000
#: At least this number, and this part, of the caps without a change are in one exchange.
_QUIET_MIN, _QUIET_PART = 50, 40


class SlotRow(NamedTuple):
    """Holds a holder's statement on one cap."""

    cap: bytes
    limit: int
    keeps: int
    #: How many more it can use.
    wants: int


class SlotAnswer(NamedTuple):
    """Holds the store's answer about one cap."""

    held: int
    free: int
    #: Slots beyond the cap, of all holders.
    over: int
    waits: bool


async def ask_slots(
    link: StoreConnection,
    cluster: str,
    holder: bytes,
    term: int,
    life: str,
    call: int,
    rows: list[SlotRow],
) -> tuple[list[SlotAnswer], dict[bytes, int]] | None:
    """State what a holder keeps, and ask for more.

    Returns an answer for each row, and fair parts of caps of which the holder shall keep no more.
    None: the store knows a later call, or a later term. Raises StoreError. O(caps * holders).
    """
    keys = slot_keys_of(cluster, holder, [row.cap for row in rows])
    words: list[str | bytes | int] = [holder, term, life, call]
    for row in rows:
        words += row[1:]
    found = await link.call("schedsvc_slots", keys, *words)
    if not found:
        return None
    try:
        numbers, told = [int(n) for n in found[0]], found[1]
        fours = zip(*[iter(numbers)] * 4, strict=True)
        answers = [SlotAnswer(held, free, over, bool(waits)) for held, free, over, waits in fours]
        head = len(keys[0].partition(b"}:")[0]) + len(b"}:slots:")
        fair = {bytes(key)[head:]: int(n) for key, n in zip(told[::2], told[1::2], strict=True)}
        if len(answers) != len(rows):
            raise ValueError
    except (ValueError, TypeError, IndexError):
        raise StoreError(f"store {link.address.text}: unknown answer to schedsvc_slots") from None
    return answers, fair


@dataclass(slots=True)
class _Book:
    """Keeps the books of this member on one cap."""

    used_ns: int
    stated_ns: int = 0
    over: int = 0
    slots: int = 0
    #: While others wait and more runs here: the part that this member may fill again.
    fair: int | None = None
    #: Slots of the earlier leader, or of this member's earlier life, that no request fills yet.
    inherited: int = 0
    #: The most requests that ran at a statement.
    most: int = 0


class Slots:
    """Keeps the slots of this member, which the task that draws chunks of quotas states."""

    def __init__(
        self, driver: Driver, who: Identity, pool_set: str | None, sharing: Sharing, replay_ns: int
    ) -> None:
        """Begin; clients may replay earlier leases for `replay_ns` after the start."""
        self._driver, self._who, self._sharing = driver, who, sharing
        self._holder = (f"set:{pool_set}" if pool_set else f"member:{who.member}").encode()
        self._call = 0
        self._books: dict[bytes, _Book] = {}  # stated last, last
        self._asked: set[bytes] = set()
        self._told: dict[bytes, int] = {}
        self._is_lost, self._asks_from_ns = False, 0
        self._inherits_until_ns = driver.clock.now_ns() + replay_ns
        #: Caps that were stated in that time.
        self._known: set[bytes] = set()

    @property
    def is_told(self) -> bool:
        """Return whether other holders wait for what this one has."""
        return bool(self._told)

    def has_some(self, drawn: Iterable[bytes]) -> bool:
        """Return whether there is a cap to state. O(drawn)."""
        caps = [cap for cap in drawn if cap not in self._books]
        rows = self._driver.change(lambda core, _: core.slot_rows(caps)) if caps else ()
        return bool(self._books or self._wants() or any(rows))

    def has_news(self) -> bool:
        """Return whether a request lacks a slot for which the store was not asked. O(waiting)."""
        return any(cap not in self._asked for cap, _ in self._wants())

    def _wants(self) -> list[tuple[bytes, int]]:
        return self._driver.change(lambda core, _: core.slot_wants())

    def forget_asks(self) -> None:
        """Ask once more when the store answers, after all have stated what runs. O(asks)."""
        self._asked.clear()
        self._is_lost = True

    async def exchange(
        self, link: StoreConnection, drawn: Iterable[bytes], *, ends: bool = False
    ) -> None:
        """State what is kept and wanted. Raises StoreError. `ends`: give back all that is free."""
        now_ns = self._driver.clock.now_ns()
        wants = {} if ends else dict(self._wants())
        if self._is_lost:
            self._is_lost, self._asks_from_ns = False, now_ns + _STATING_NS
        asks = wants if now_ns >= self._asks_from_ns else {}
        hot = dict.fromkeys([*wants, *drawn, *self._told])
        for cap in hot:
            self._books.setdefault(cap, _Book(now_ns)).used_ns = now_ns
        quiet_max = max(_QUIET_MIN, len(self._books) // _QUIET_PART)
        for cap, book in self._books.items():
            if (now_ns - book.stated_ns < _STATE_NS or len(hot) >= quiet_max) and not ends:
                break
            hot[cap] = None
        caps, told = list(hot), self._told
        self._told, self._asked = {}, set(wants)
        for at in range(0, len(caps), _CAPS_MAX):
            await self._state(link, caps[at : at + _CAPS_MAX], asks, told, ends=ends)
        self._sharing.overlap = sum(book.over for book in self._books.values())
        self._sharing.slots = sum(book.slots for book in self._books.values())

    async def _state(
        self,
        link: StoreConnection,
        caps: list[bytes],
        wants: dict[bytes, int],
        told: dict[bytes, int],
        *,
        ends: bool,
    ) -> None:
        now_ns, began_ns = self._driver.clock.now_ns(), boot_ns()
        found = self._driver.change(lambda core, _: core.slot_rows(caps))
        rows: list[SlotRow] = []
        may_run: dict[bytes, int] = {}
        lowered = []
        for cap, row in zip(caps, found, strict=True):
            if row is None:
                self._books.pop(cap, None)
                continue
            limit, live, slots = row
            book = self._books[cap]
            # A request that runs has a slot, also if the core has forgotten it in an outage.
            kept = max(slots, min(live, limit))
            is_idle = now_ns - book.used_ns >= _IDLE_NS
            if cap in told:
                fills_it = cap in wants or live >= told[cap]
                book.fair = told[cap] if fills_it else live
            if book.fair is not None:
                kept = min(kept, book.fair)
                book.fair = None if live <= book.fair else book.fair
            if now_ns < self._inherits_until_ns:
                book.inherited -= min(book.inherited, max(0, live - book.most))
                book.most = max(book.most, live)
                if book.inherited:
                    kept = max(kept, min(live + book.inherited, slots))
            elif is_idle:
                kept = min(kept, live)
            if ends:
                kept = min(kept, live)
            if kept < slots:
                lowered.append((cap, kept, 0, now_ns + _SLOTS_NS))
            may_run[cap] = kept
            # With more than it may run, it has to wait for an end first.
            wanted = min(wants.get(cap, 0), limit - kept) if live == kept else 0
            if cap not in self._known and now_ns < self._inherits_until_ns:
                wanted = 0  # the answer to this first statement says what is inherited
                self._asked.discard(cap)
            rows.append(SlotRow(cap, limit, max(live, kept), wanted))
        if lowered:
            self._driver.change(lambda core, now_ns: core.set_slots(now_ns, lowered))
        if not rows:
            return
        self._call += 1
        leading = self._driver.leading
        answer = await ask_slots(
            link, self._who.cluster, self._holder, 0 if leading is None else leading.term,
            self._who.life, self._call, rows,
        )  # fmt: skip
        if answer is None:
            raise StoreRefusedError(
                f"another scheduler states the slots of {self._holder.decode()} by now; if that"
                " goes on, restart this one"
            )
        if boot_ns() - began_ns > 2 * CALL_S * 1e9:
            raise StoreError("the answer of the store came while this process stood still")
        self._told |= answer[1]
        self._take(rows, answer[0], may_run, now_ns)

    def _take(
        self, rows: list[SlotRow], answers: list[SlotAnswer], may_run: dict[bytes, int], now_ns: int
    ) -> None:
        granted = []
        for row, answer in zip(rows, answers, strict=True):
            slots = may_run[row.cap] + max(0, answer.held - row.keeps)
            granted.append((row.cap, slots, min(answer.free, row.limit), now_ns + _SLOTS_NS))
            book = self._books.pop(row.cap)
            book.stated_ns, book.over, book.slots = now_ns, answer.over, answer.held
            if row.cap not in self._known and now_ns < self._inherits_until_ns:
                self._known.add(row.cap)
                book.inherited = answer.held - row.keeps
            if answer.held or answer.waits:
                self._books[row.cap] = book
        self._driver.change(lambda core, now_ns: core.set_slots(now_ns, granted))
