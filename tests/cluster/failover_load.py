"""Loads all members as an engine's client with several targets, and audits its messages."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from schedsvc_client import Refused, SchedulerError
from schedsvc_client.aio import Admission
from schedsvc_client.fence import Fence

from .member_process import CAPACITY, QUOTA
from .members import TOKEN
from .message_audit import AuditedSession, Found, MessageAudit

#: A lease is held for this long, and more loops ask than the pool has room for.
HOLD_S = 0.04
LOOPS = 40
SAVED_S_MAX = 20.0


@dataclass
class Failover(Found):
    """Holds how one failover went."""

    kind: str = "kill"
    number: int = 0
    #: The time from the signal to the first grant of the next leader, as the client sees it; None:
    #: an error came first.
    gap_s: float | None = None
    #: Grants that had an effect, and the most that they reserved at one time.
    granted: int = 0
    reserved_max: int = 0
    #: Grants of a leader after its term, which the client ignored.
    late: int = 0

    @property
    def wrong(self) -> list[str]:
        """Return all that was wrong."""
        return [*self.broken_streams, *self.over_grants, *self.violations]


LIMITED: dict[str, Any] = {
    "tenant": "limited", "pools": ["probed"], "input_tokens": 16, "max_output_tokens": 16,
}  # fmt: skip


class Load:
    """Runs the client, and tenants who always ask."""

    def __init__(self, targets: str, seen: Failover, hold_s: float = HOLD_S) -> None:
        self._seen, self._hold_s = seen, hold_s
        self.fence = Fence()
        self.audit = MessageAudit(CAPACITY, seen)
        self.session = AuditedSession(
            targets, self.audit, client_id="shim", incarnation=1, token=TOKEN, fence=self.fence
        )
        self.session.register_pool(
            pool="p", epoch=1, capacity_tokens=CAPACITY, block_size_tokens=16
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = False

    def start(self, loops: int = LOOPS) -> None:
        self.session.start()
        self._tasks = [
            asyncio.create_task(self._ask("light" if i % 4 else "heavy")) for i in range(loops)
        ]

    async def stop(self) -> None:
        """End all requests, and wait until their ends are saved. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not await self.session.flush(SAVED_S_MAX):
            text = f"ends of leases were not saved within {SAVED_S_MAX:g} s"
            self._seen.violations.append(text)
        await self.session.close()
        self._seen.granted = sum(self.audit.granted.values())
        self._seen.reserved_max, self._seen.late = self.audit.reserved_max, self.audit.late

    def granted_later(self) -> int:
        """Return how many grants of later terms than the first had an effect.

        The next leader may skip a term: if the store's answer is late, it takes another one.
        """
        return sum(count for term, count in self.audit.granted.items() if term > 1)

    def granted(self, term: int) -> int:
        """Return how many grants of a term had an effect."""
        return self.audit.granted.get(term, 0)

    async def _ask(self, tenant: str) -> None:
        shape: dict[str, Any] = {"tenant": tenant, "pools": ["p"], "input_tokens": 200}
        while True:
            try:
                async with self.session.admission(**shape, max_output_tokens=40) as it:
                    await self._run(it)
                if it.lost is not None:
                    self._seen.broken_streams.append(f"the engine aborts a request: {it.lost}")
            except SchedulerError as error:
                self._seen.broken_streams.append(f"the application got {error!r}")
                await asyncio.sleep(0.1)

    async def _run(self, it: Admission) -> None:
        assert it.lease is not None
        self.audit.started(it.lease.lease_id)
        for tokens in (10, 20, 30, 40):
            await asyncio.sleep(self._hold_s / 4)
            it.progress(input_tokens=200, output_tokens=tokens)

    async def spend(self) -> None:
        """Use the quota of the tenant `limited` up."""
        for _ in range(QUOTA):
            async with self.session.admission(**LIMITED) as it:
                it.progress(input_tokens=LIMITED["input_tokens"], output_tokens=1)
        await self.check_spent("before the failover")

    async def check_spent(self, when: str) -> None:
        with suppress(Refused):
            async with self.session.admission(**LIMITED, queue_ttl_ms=200):
                self._seen.violations.append(f"a spent quota was granted {when}")
