"""Exchanges totals of service with the other members.

Decisions never wait for it: it collects what the core served, talks to the store with a bound on
every wait, and gives the core what others served as an event. While the store is away it goes on
collecting, and sends the totals once the store is back.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterable

import structlog

from schedsvc.cluster.errors import StoreError, StoreRefusedError, WritesRefusedError
from schedsvc.cluster.escrow import Escrow
from schedsvc.cluster.joining import Identity, fingerprint_of, join, leave
from schedsvc.cluster.library import info_problem
from schedsvc.cluster.outage import Outage
from schedsvc.cluster.rows import Key, pack_row, pack_totals, split_rows, unpack_row, unpack_totals
from schedsvc.cluster.settings import Settings, SettingsSync
from schedsvc.cluster.store import CALL_S, StoreConnection, open_any
from schedsvc.cluster.totals import OwnTotals, SeenTotals
from schedsvc.config import Config
from schedsvc.config.cluster import Cluster
from schedsvc.driver import Broken, Driver, Sharing

__all__ = ["Member", "interval_s"]

_log = structlog.get_logger("schedsvc.cluster")

_INTERVAL_S, _INTERVAL_MAX_S = 0.25, 5.0
#: Changed totals of an exchange up to which the interval is the shortest, of a member and of all
#: together. The store takes 9 us for a total, so 4,800 a second are 5 % of a core.
_CHANGED_QUICK, _CHANGED_QUICK_ALL = 500, 1_200
#: Totals of others in one answer.
_READ_MAX = 500
#: As schedsvc_sync says whether there are more.
_STATES = (b"all", b"more", b"lost")
_ALL, _, _LOST = range(3)
#: Calls in one exchange; what is left waits for the next one.
_CALLS_MAX = 40
#: Rows that the core takes at once, so that the event loop has its turn in between.
_ROWS_AT_ONCE = 100
#: The core's own bound. A total that grows by more at once is no service.
_GROWN_MAX = 1 << 62
_TTL_MIN_MS = 3_000
#: Between two looks at the store's policy.
_LOOK_NS = 10_000_000_000
#: The last exchange of a scheduler that stops.
_END_S = 2.0


def interval_s(sync_ms: int | str, changed: int, members: int) -> float:
    """Return the time to the next exchange, if `changed` totals changed since the last."""
    if isinstance(sync_ms, int):
        return sync_ms / 1_000
    quick = min(_CHANGED_QUICK, max(1, _CHANGED_QUICK_ALL // max(1, members)))
    return min(_INTERVAL_MAX_S, _INTERVAL_S * max(1.0, changed / quick))


class Member:
    """Makes the scheduler of this process a member of its cluster."""

    def __init__(self, driver: Driver, config: Config, settings: Cluster, incarnation: int) -> None:
        self._driver = driver
        self._settings, self._resolve = settings, config.resolve
        self._servers = list(settings.store.urls)
        self._fingerprint = fingerprint_of(config)
        self._who = Identity(settings.name, settings.member_name, incarnation)
        self._own, self._seen = OwnTotals(), SeenTotals()
        self._link: StoreConnection | None = None
        self._outage = Outage()
        self._call = 0
        self._number, self._life = 0, b""  # as the store said last
        self._again = True  # until all totals were sent and read on this connection
        self._looked_ns = 0  # when the store's policy was looked at last
        self._changed = 0  # totals of this member that the last exchange sent
        self.sharing = Sharing(settings.name, self._who.member, driver.clock.now_ns())
        driver.sharing = self.sharing
        #: Draws chunks of shared quotas; its task runs while this one does.
        times = config.scheduler
        replay_ns = (times.lease_ttl_ms + times.lease_grace_ms) * 1_000_000
        self.escrow = Escrow(driver, settings, config.resolve, self._who, self.sharing, replay_ns)
        self._sync_settings: SettingsSync | None = None

    def share_settings(self, held: Settings, secret: bytes) -> None:
        """Share what operators set, before the start; `secret` seals the rows."""
        self._sync_settings = SettingsSync(self._settings, self._resolve, self._who, secret, held)
        self.sharing.settings = self._sync_settings.state

    async def begin(self) -> None:
        """Try the store once, before the first request; takes at most CALL_S."""
        sync = self._sync_settings
        beginning = [self.escrow.begin(), *([sync.begin()] if sync else [])]
        await asyncio.gather(*beginning)

    def configured(self, config: Config) -> None:
        """Announce another configuration with the next exchange. O(tenants)."""
        self._fingerprint = fingerprint_of(config)

    async def run(self) -> None:
        """Exchange totals, quotas and settings until cancelled; then free the member's name."""
        loop = asyncio.get_running_loop()
        beside = {loop.create_task(self.escrow.run())}
        if self._sync_settings is not None:
            beside.add(loop.create_task(self._sync_settings.run()))
        try:
            while True:
                self.collect()
                try:
                    await self.exchange()
                except StoreError as error:
                    await self._failed(error)
                await asyncio.sleep(self._interval_s)
        except Broken:
            return  # the driver has said why
        finally:
            for task in beside:
                task.cancel()
            await self._end()
            await asyncio.wait(beside)

    @property
    def _interval_s(self) -> float:
        return interval_s(self._settings.sync_ms, self._changed, len(self.sharing.members))

    @property
    def _ttl_ms(self) -> int:
        """Return for how long the store counts this member as alive after a call."""
        return max(_TTL_MIN_MS, int(3_000 * (self._interval_s + CALL_S)))

    def collect(self) -> None:
        """Add what the core served to this member's totals. O(rows)."""
        now_ns = self._driver.clock.now_ns()
        while rows := self._driver.take_served(1_000):
            for tenant, cls, domain, charged, refunded in rows:
                self._own.add((tenant, cls, domain), charged, refunded, now_ns)
        self._own.forget(now_ns)
        self._seen.forget(now_ns)

    async def exchange(self) -> None:
        """Send what changed, and charge what others served. Raises StoreError."""
        link = self._link or await self._connect()
        await self._look_at_policy(link)
        self._changed = self._own.unsent
        for _ in range(_CALLS_MAX):
            is_done = await self._sync(link)
            if is_done:
                break
        self.sharing.own, self.sharing.seen = len(self._own), len(self._seen)

    async def _connect(self) -> StoreConnection:
        link = await open_any(
            self._settings,
            self._resolve,
            self._servers,
            self._outage.refused,
            lambda link: join(link, self._who, self._fingerprint, self._ttl_ms),
        )
        self._link = link
        self._number = self._call = 0
        self._looked_ns, self.sharing.may_evict = self._driver.clock.now_ns(), False
        self._read_all_again()
        return link

    async def _look_at_policy(self, link: StoreConnection) -> None:
        """Notice a store that may evict keys by now. A new connection refuses such a store.

        This one goes on: to give up sharing at once would do the harm that an eviction might do.
        """
        now_ns = self._driver.clock.now_ns()
        if now_ns < self._looked_ns + _LOOK_NS:
            return
        self._looked_ns = now_ns
        problem = info_problem((await link.command("INFO")).decode(errors="replace"))
        if problem and not self.sharing.may_evict:
            effect = "the store may lose quotas, totals and terms; no connection is made again"
            _log.error(
                "cluster_store_may_evict",
                reason=f"store {link.address.text} {problem}", effect=effect,
            )  # fmt: skip
        elif self.sharing.may_evict and not problem:
            _log.info("cluster_store_keeps_keys")
        self.sharing.may_evict = bool(problem)

    def _read_all_again(self) -> None:
        """Send all totals, and so read those of others, because either may have been lost."""
        self._own.send_all_again()
        self._again = True

    async def _sync(self, link: StoreConnection) -> bool:
        """Make one call; return whether nothing is left to send or read."""
        who, batch = self._who, self._own.batch()
        self._call += 1
        words: list[str | bytes | int] = [
            *(who.member, who.life, self._fingerprint, self._ttl_ms, self._call),
            *(secrets.token_hex(8), int(self._again), _READ_MAX, who.prefix),
        ]
        for key, totals in batch:
            words += (pack_row(who.prefix, key), pack_totals(totals))
        answer = await link.call("schedsvc_sync", who.keys, *words)
        if len(answer) != 5:
            raise StoreRefusedError(
                f"another scheduler is member {who.member} of cluster {who.cluster} by now; set"
                " cluster.member to another name"
            )
        try:
            number, life, state = int(answer[0]), answer[1], _STATES.index(answer[2])
            rows, members = split_rows(answer[3]), answer[4].decode().split()
        except (ValueError, TypeError, AttributeError):
            raise StoreError(
                f"store {link.address.text}: unknown answer to schedsvc_sync"
            ) from None
        self._own.acknowledge(batch)
        has_lost = self._life and (number <= self._number or life != self._life)
        if has_lost or state == _LOST:
            # The store may lack what members wrote, or what this one has not read.
            self._read_all_again()
            self.sharing.repeats += 1
        self._number, self._life = number, life
        await self._take(rows)
        if state != _ALL or self._own.unsent:
            return False
        self._again = False
        self.sharing.members = tuple(members)
        self.sharing.synced_ns = self._driver.clock.now_ns()
        if self._outage.answered() and self.sharing.problem:
            self.sharing.problem, self.sharing.refuses_writes = "", False
            _log.info("cluster_joined", store=link.address.text, member=self._who.member)
        return True

    async def _take(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Charge by how much the totals of others grew."""
        now_ns = self._driver.clock.now_ns()
        charged: Counter[Key] = Counter()
        refunded: Counter[Key] = Counter()
        for row, data in rows:
            try:
                origin, key = unpack_row(row)
                totals = unpack_totals(data)
            except ValueError:
                self.sharing.ignored += 1
                continue
            grown = self._seen.take(origin, key, totals, now_ns)
            charged[key] += grown[0]
            self.sharing.charged_micro += grown[0]
            refunded[key] += grown[1]
        grew = [key for key in charged if charged[key] or refunded[key]]
        for at in range(0, len(grew), _ROWS_AT_ONCE):
            self._charge(
                (*key, min(charged[key], _GROWN_MAX), min(refunded[key], _GROWN_MAX))
                for key in grew[at : at + _ROWS_AT_ONCE]
            )
            await asyncio.sleep(0)

    def _charge(self, grown: Iterable[tuple[bytes, bytes, bytes, int, int]]) -> None:
        rows = list(grown)
        self._driver.change(lambda core, now_ns: core.set_remote_service(now_ns, rows))

    async def _failed(self, error: StoreError) -> None:
        if self._outage.failed(error, str(error)):
            event = "cluster_refused" if isinstance(error, StoreRefusedError) else "cluster_lost"
            _log.warning(event, reason=str(error), effect="this scheduler serves alone")
        self.sharing.problem = str(error)
        self.sharing.refuses_writes = isinstance(error, WritesRefusedError)
        await self._drop()

    async def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def _end(self) -> None:
        if self._link is not None:
            try:
                async with asyncio.timeout(_END_S):
                    self.collect()
                    await self.exchange()
                    await leave(self._link, self._who)
            except (StoreError, Broken, TimeoutError):
                pass  # the entry expires by itself
        await self._drop()
