"""Carries what has changed from the core to the state file, beside the event loop's work."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import structlog

from schedsvc._core import CallerError, Scheduler
from schedsvc.driver import Broken, Driver, Saving
from schedsvc.records.state.backlog import Backlog, aged
from schedsvc.records.state.place_feed import PlaceFeed
from schedsvc.records.state.row_feed import RowFeed
from schedsvc.records.state.store import OperatorRows, StateError, Store

__all__ = ["StateWriter", "restore"]

_log = structlog.get_logger("schedsvc.records.state")

#: Rows that are read from the core before the event loop gets its turn: well under a millisecond.
_ROWS_AT_ONCE = 64


def restore(
    core: Scheduler,
    store: Store,
    now_ns: int,
    wall_ns: Callable[[], int] = time.time_ns,
) -> None:
    """Let a core that was just configured take over what a file holds. O(rows * log n).

    A file whose rows are wrong is set aside like one that SQLite finds damaged, and the core starts
    as if it never ran. A wall clock that was put back credits nothing. Raises StateError.
    """
    if store.recovered:
        file, effect = str(store.path), "the file of the killed scheduler is back at its path"
        _log.error("state_file_lost", file=file, reason=store.recovered, effect=effect)
        _log.warning("state_file_begun", file=file, kept_as=str(store.aside or ""))
    rows = aged(store.rows, wall_ns())
    found = 0
    try:
        found = core.set_saved(now_ns, rows)
    except CallerError as error:
        store.set_aside(str(error))
    if store.set_aside_as:
        effect = "the scheduler starts as if it never ran"
        _log.error(
            "state_damaged", file=str(store.path), kept_as=store.set_aside_as,
            reason=store.damage, effect=effect,
        )  # fmt: skip
    else:
        if store.torn:
            effect = "the last changes before the scheduler ended are lost"
            _log.error("state_log_torn", file=str(store.path), reason=store.torn, effect=effect)
        _log.info("state_restored", file=str(store.path), rows=found, left_out=len(rows) - found)
    store.rows = []


class StateWriter:
    """Saves at intervals; a write that fails is reported, and its rows go with the next one.

    A separate thread waits for the disk. Serving goes on while it fails: a restart would lose the
    changes since the last save, whose time `Driver.saving` holds.
    """

    def __init__(
        self,
        driver: Driver,
        store: Store,
        every_ms: int,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Save the changed rows of a driver's core, once it `run()`s."""
        self._driver = driver
        self._store = store
        self._every_s = every_ms / 1_000
        self._wall_ns = wall_ns
        self._thread = ThreadPoolExecutor(1, "state")
        self._backlog = Backlog()
        #: The same rows for members that follow this one.
        self.feed = RowFeed(wall_ns)
        #: For them, too: what waits.
        self.places = PlaceFeed(driver, time.monotonic_ns)
        self._hurried = asyncio.Event()
        #: Calls that wait for the next save.
        self._waiters: list[asyncio.Future[bool]] = []
        self._is_lost = False
        self._saving = driver.saving = Saving(driver.clock.now_ns())
        self._saving.files_lost = int(bool(store.recovered))
        store.log.on_held, store.on_left = self._log_held, self._left
        if store.unlinked:
            effect = "state is lost if another program deletes it, and then this process is killed"
            file, reason = str(store.path), store.unlinked
            _log.warning("state_file_unlinked", file=file, reason=reason, effect=effect)
        #: All that happened since then is unsaved if the file is lost.
        self._began_ns = self._saving.saved_ns

    async def run(self) -> None:
        """Save until it is cancelled, or the core is broken."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._hurried.wait()
            self._hurried.clear()
            waiters, self._waiters = self._waiters, []
            try:
                _answer(waiters, saved=await self.save())
            except Broken:
                return
            finally:
                _answer(waiters, saved=False)

    def hurry(self) -> None:
        """Save at once, or at once again: what an operator said is not to be lost."""
        self._hurried.set()

    async def saved(self) -> None:
        """Wait until all that happened until now is saved. Raises StateError if it cannot be."""
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self.hurry()
        if not await waiter:
            raise StateError(self._saving.problem or "the scheduler is stopping")

    async def save(self) -> bool:
        """Save what has changed; False if the file could not be written. Raises Broken.

        A file that another program deleted or changed is begun again, with everything.
        """
        began_ns = self._driver.clock.now_ns()
        if not await self._find_file():
            return False
        if self._store.wants_all:
            self._driver.save_all()
            self._store.wants_all = False
        await self.collect()
        taken, modes = self._backlog.take(), self._driver.mode_overlay.saved()
        entries = self._driver.tenant_entries.take(everything=self._store.is_old)
        work: Callable[[], None] = self._store.look
        if taken or entries or modes != self._store.modes:
            work = partial(self._store.write, taken.values(), modes, entries)
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (asyncio.CancelledError, StateError) as error:
            self._backlog.put_back(taken)
            self._driver.tenant_entries.put_back(entries)
            if not isinstance(error, StateError):
                # Perhaps it is written, perhaps its turn never comes: `close()` writes it.
                raise
            self._tell(str(error))
            return False
        self._saving.log_bytes = self._store.log.bytes
        self._saving.saved_ns = began_ns
        self._tell("")
        return True

    async def collect(self) -> None:
        """Take over what changed in the core, for the file and for followers. Raises Broken."""
        while rows := self._driver.save(_ROWS_AT_ONCE):
            at_ns = self._wall_ns()
            self._backlog.add(rows, at_ns)
            self.feed.add(rows, at_ns)
            await asyncio.sleep(0)

    def operators(self) -> OperatorRows:
        """Return what operators have set, and the key of all hashes. O(entries)."""
        modes, entries = self._driver.mode_overlay.saved(), self._driver.tenant_entries.all()
        return OperatorRows(self._store.hash_key, modes, entries)

    def begin_feed(self) -> None:
        """Bring all rows to the feed, once, and what changes from then on. O(1)."""
        if not self.feed.is_on:
            self.feed.begin()
            self._driver.save_all()

    async def _find_file(self) -> bool:
        """Look whether the file is still as it was left; begin it again if it is not."""
        loop = asyncio.get_running_loop()
        reason = await loop.run_in_executor(self._thread, self._store.find_lost)
        if not reason:
            return True
        if not self._is_lost:
            self._is_lost = True
            self._saving.files_lost += 1
            self._saving.saved_ns = self._began_ns
            effect = "a new file gets everything; until then a restart would lose all of it"
            _log.error(
                "state_file_lost", file=str(self._store.path), reason=reason, effect=effect
            )  # fmt: skip
        try:
            await loop.run_in_executor(self._thread, self._store.begin_again)
        except StateError as error:
            self._tell(str(error))
            return False
        self._is_lost = False
        kept_as = self._store.set_aside_as or str(self._store.aside or "")
        _log.warning("state_file_begun", file=str(self._store.path), kept_as=kept_as)
        return True

    async def close(self) -> None:
        """Save once more, as far as that goes, and close the file."""
        loop = asyncio.get_running_loop()
        try:
            with suppress(Broken):
                _answer(self._waiters, saved=await self.save())
        finally:
            _answer(self._waiters, saved=False)
            await loop.run_in_executor(self._thread, self._store.close)
            self._thread.shutdown()

    def _left(self, size: int) -> None:
        effect = "a copy is the state file; the other program reads on in the file before it"
        _log.error("state_file_left", file=str(self._store.path), bytes=size, effect=effect)

    def _log_held(self, is_held: bool) -> None:
        log = self._store.log
        if is_held:
            effect = "the log grows until the query of another program ends"
            _log.warning("state_log_held", file=str(log.path), bytes=log.bytes, effect=effect)
        else:
            _log.info("state_log_truncated", file=str(log.path), bytes=log.bytes)

    def _tell(self, problem: str) -> None:
        if problem != self._saving.problem:
            self._saving.problem = problem
            if problem:
                _log.error("state_not_saved", reason=problem, effect="a restart would lose it")
            else:
                _log.info("state_saved_again")


def _answer(waiters: list[asyncio.Future[bool]], *, saved: bool) -> None:
    """Let calls go on that wait for a save, and that nothing has answered yet."""
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(saved)
