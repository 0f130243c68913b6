"""API keys that the scheduler knows: the gate asks it whose a key is, and remembers the answer.

`SchedulerKeys.owner()` asks for a key that was not asked for within FRESH_S. So a key that is
revoked is refused within 30 s: FRESH_S, and the deadline of one call. While the scheduler is away,
keys that it has known go on, and other keys cannot be checked.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol, TypeVar

from schedsvc_client import CallError

from schedsvc_vllm.answers import BadRequestError

FRESH_S = 20.0
ASK_S_MAX = 5.0
# A key that the scheduler does not know may have been made since.
UNKNOWN_FRESH_S = 5.0
# After a call that failed, keys that were known are not asked for again for this time.
AWAY_S = 1.0
KEYS_MAX = 65_536
UNKNOWN_MAX = 4_096
# Keys that the scheduler has not known: calls at once, and in a second. Each call counts in the
# gate's `events_per_second`, so a client that invents keys must not use that up.
NEW_AT_ONCE_MAX = 256
NEW_PER_S = 200

V = TypeVar("V")


class Asked(Protocol):
    """The scheduler, as schedsvc_client.aio.AsyncScheduler asks it."""

    async def tenant_of_key(self, api_key_sha256: bytes) -> str | None:
        """Return for whom a key stands; None: for no tenant. Raises CallError."""

    async def close(self) -> None:
        """Hang up."""


class SchedulerKeys:
    """Whose keys are. Use it inside one event loop."""

    def __init__(self, scheduler: Asked, clock: Callable[[], float] = time.monotonic) -> None:
        """Ask a scheduler, and hang up when this is closed."""
        self._scheduler = scheduler
        self._clock = clock
        # Tenants of keys, and until when that is fresh; the oldest come first.
        self._known: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        # Keys that the scheduler does not know: apart, so that invented ones displace none.
        self._unknown: OrderedDict[bytes, float] = OrderedDict()
        self._asking: dict[bytes, asyncio.Task[str | None]] = {}
        self._new_asking = 0
        # Calls for new keys that may follow now, and when that was so.
        self._new_left, self._new_left_at_s = float(NEW_PER_S), clock()

    async def owner(self, digest: bytes) -> str | None:
        """Return the tenant of a key, None if the scheduler knows no such key.

        Raises BadRequestError (503) if the scheduler has not known the key and is away, or if too
        many such keys come.
        """
        now_s = self._clock()
        tenant, fresh_until_s = self._known.get(digest, (None, 0.0))
        if now_s < fresh_until_s:
            return tenant
        if now_s < self._unknown.get(digest, 0.0):
            return None
        task = self._asking.get(digest)
        if task is None:
            is_new = digest not in self._known
            if is_new:
                self._take_turn(now_s)
            task = self._asking[digest] = asyncio.ensure_future(self._ask_again(digest))
            task.add_done_callback(lambda _: self._answered(digest, is_new))
        return await asyncio.shield(task)

    def _take_turn(self, now_s: float) -> None:
        since_s = max(0.0, now_s - self._new_left_at_s)
        self._new_left = min(float(NEW_PER_S), self._new_left + since_s * NEW_PER_S)
        self._new_left_at_s = now_s
        if self._new_left < 1 or self._new_asking >= NEW_AT_ONCE_MAX:
            raise _unchecked("too many new API keys at once")
        self._new_left -= 1
        self._new_asking += 1

    def _answered(self, digest: bytes, is_new: bool) -> None:
        self._asking.pop(digest, None)
        self._new_asking -= is_new

    async def close(self) -> None:
        """Cancel what is asked, and hang up."""
        for task in list(self._asking.values()):
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)
        await self._scheduler.close()

    async def _ask_again(self, digest: bytes) -> str | None:
        try:
            async with asyncio.timeout(ASK_S_MAX):
                tenant = await self._scheduler.tenant_of_key(digest)
        except (CallError, TimeoutError):
            if digest not in self._known:
                raise _unchecked("the scheduler does not answer") from None
            known, _ = self._known[digest]
            self._known[digest] = (known, self._clock() + AWAY_S)
            return known
        if tenant is None:
            self._known.pop(digest, None)
            _put(self._unknown, digest, self._clock() + UNKNOWN_FRESH_S, UNKNOWN_MAX)
            return None
        _put(self._known, digest, (tenant, self._clock() + FRESH_S), KEYS_MAX)
        return tenant


def _put(table: OrderedDict[bytes, V], key: bytes, value: V, most: int) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > most:
        table.popitem(last=False)


def _unchecked(reason: str) -> BadRequestError:
    return BadRequestError(
        f"the API key cannot be checked now: {reason}; retry later",
        status=503,
        code="api_key_not_checked",
    )
