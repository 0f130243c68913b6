"""Carries what ended leases used from the core to the ledger, beside the event loop's work."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from schedsvc.config import Config, Tenant
from schedsvc.driver import Broken, Driver, Ledgering
from schedsvc.records.usage.ledger import Ledger, UsageError, UsageKey, UsedLease
from schedsvc.records.usage.places import Places

if TYPE_CHECKING:
    from schedsvc._core_usage import UsageRow

__all__ = ["QUEUE_MAX", "UsageWriter"]

_log = structlog.get_logger("schedsvc.records.usage")

#: Ended leases that wait for the disk; more are dropped, and counted. Some 50 MB.
QUEUE_MAX = 131_072
#: Rows of one transaction. The holders of leases keep what is not saved, so a kill loses none.
_BATCH_MAX = 4_096
_GATHER_S = 0.05
_RETRY_S = 1.0
#: Without usage to write, the file is looked at this often.
_LOOK_S = 1.0


class UsageWriter:
    """Writes rows in batches, in a thread. While that fails, serving goes on and rows wait."""

    def __init__(
        self,
        driver: Driver,
        ledger: Ledger,
        config: Config,
        wall_s: Callable[[], float] | None = None,
        queue_max: int = QUEUE_MAX,
    ) -> None:
        """Take rows from a driver's core from now on; write them once it `run()`s."""
        self._driver = driver
        self._ledger = ledger
        self._places = Places(config)
        self._wall_s = wall_s or time.time
        self._queue_max = queue_max
        self._thread = ThreadPoolExecutor(1, "usage")
        self._waiting: deque[tuple[int, UsedLease]] = deque()
        self._taken = 0  # rows of the core so far, those that were dropped included
        self._filled = asyncio.Event()
        self._figures = Ledgering()
        #: Gets the leases of each batch that the ledger had already.
        self.on_known: Callable[[list[UsedLease]], None] = lambda leases: None
        ledger.on_file_lost, ledger.on_file_written = self._file_lost, self._file_written
        ledger.log.on_held, ledger.on_left = self._log_held, self._left
        driver.keep_usage(self._figures, self.put)
        if ledger.torn:
            self._figures.files_lost += 1
            file, effect = str(ledger.path), "the last usage is lost, and what budgets spent of it"
            _log.error("usage_log_torn", file=file, reason=ledger.torn, effect=effect)
        if ledger.unlinked:
            effect = "usage is lost if another program deletes it, and then this process is killed"
            file, reason = str(ledger.path), ledger.unlinked
            _log.warning("usage_file_unlinked", file=file, reason=reason, effect=effect)
        if ledger.recovered:
            self._file_lost(ledger.recovered)
            self._file_written(ledger.aside, 0)

    def configure(self, config: Config) -> None:
        """Look groups and models up in another configuration from now on."""
        self._places = Places(config)

    def move(self, name: str, tenant: Tenant | None) -> None:
        """Count a tenant for the groups that an operator has given it; None: as the rules say."""
        self._places.put(name, tenant)

    def put(self, rows: "Sequence[UsageRow]") -> None:
        """Queue rows of the core; what the queue has no room for is dropped. O(rows)."""
        now_s = int(self._wall_s())
        for row in rows:
            self._taken += 1
            if len(self._waiting) >= self._queue_max:
                self._figures.lost_rows += 1
            else:
                self._waiting.append((self._taken, self._used(row, now_s)))
        self._figures.waiting_rows = len(self._waiting)
        self._filled.set()

    def _used(self, row: "UsageRow", now_s: int) -> UsedLease:
        lease_id, tenant, request_class, pool, adapter = row[:5]
        name, place = tenant.decode(), pool.decode()
        key = UsageKey(
            self._places.groups_of(name),
            name,
            self._places.model_of(place),
            place,
            adapter.decode(),
            request_class.decode(),
        )
        return UsedLease(lease_id, now_s, key, *row[5:])

    async def run(self) -> None:
        """Write until it is cancelled, or the core is broken."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._filled.wait()
            if not self._filled.is_set():
                await self._look()
                continue
            await asyncio.sleep(_GATHER_S)
            self._filled.clear()
            try:
                while self._waiting:
                    if not await self.write():
                        await asyncio.sleep(_RETRY_S)
            except Broken:
                return

    async def _look(self) -> None:
        """Write the file again if it is lost, before another scheduler starts with its path.

        The log that a reader held is truncated here if no usage comes after the reader.
        """
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._thread, self._ledger.look)
        except UsageError as error:
            self._tell(str(error))
        else:
            self._figures.log_bytes = self._ledger.log.bytes
            self._tell("")

    def _file_lost(self, reason: str) -> None:
        self._figures.files_lost += 1
        effect = "no end is acknowledged until the file is written again"
        _log.error("usage_file_lost", file=str(self._ledger.path), reason=reason, effect=effect)

    def _file_written(self, aside: Path | None, lost: int) -> None:
        self._figures.lost_rows += lost
        log, file, moved = _log.error if lost else _log.warning, self._ledger.path, str(aside or "")
        log("usage_file_written_again", file=str(file), lost_rows=lost, moved_aside=moved)

    def _left(self, size: int) -> None:
        effect = "a copy is the ledger; the other program reads on in the file before it"
        _log.error("usage_file_left", file=str(self._ledger.path), bytes=size, effect=effect)

    def _log_held(self, is_held: bool) -> None:
        file, size = str(self._ledger.log.path), self._ledger.log.bytes
        if is_held:
            effect = "the log grows until the query of another program ends"
            _log.warning("usage_log_held", file=file, bytes=size, effect=effect)
        else:
            _log.info("usage_log_truncated", file=file, bytes=size)

    async def write(self) -> bool:
        """Write one batch; False if the ledger cannot be written. Raises Broken."""
        batch = list(islice(self._waiting, _BATCH_MAX))
        if not batch:
            return True
        leases = [lease for _, lease in batch]
        loop = asyncio.get_running_loop()
        try:
            # A batch that was written although this is cancelled is written again by `close()`,
            # and the ledger leaves it out.
            known = await loop.run_in_executor(self._thread, self._ledger.add, leases)
        except UsageError as error:
            self._tell(str(error))
            return False
        for _ in batch:
            self._waiting.popleft()
        self._figures.waiting_rows = len(self._waiting)
        self._figures.saved_rows += len(batch)
        self._figures.log_bytes = self._ledger.log.bytes
        self._tell("")
        self.on_known(known)
        # Once none waits, dropped rows are not waited for either.
        row = batch[-1][0] if self._waiting else self._taken
        self._driver.change(lambda core, now_ns: core.set_usage_saved(now_ns, row))
        return True

    async def close(self) -> None:
        """Write what waits, as far as that goes, and close the ledger."""
        try:
            with suppress(Broken):
                while self._waiting and await self.write():
                    pass
        finally:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._ledger.close)
            self._thread.shutdown()

    def _tell(self, problem: str) -> None:
        if bool(problem) == bool(self._figures.problem):
            return
        self._figures.problem = problem
        if problem:
            effect = f"usage waits, at most {self._queue_max:,} ended leases; serving goes on"
            _log.error("usage_not_saved", reason=problem, effect=effect)
        else:
            _log.info("usage_saved_again", lost_rows=self._figures.lost_rows)
