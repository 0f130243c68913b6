"""Asks the scheduler whose an API key is, and remembers the answer.

`SchedulerKeys.owner()` asks for a key that was not asked for within FRESH_S. So a key that is
revoked is refused within 30 s: FRESH_S, and the deadline of one call. While the scheduler is away,
keys that it has known go on, and other keys cannot be checked. A key in use is asked again in the
background before FRESH_S has passed. A file keeps the known keys over a restart (known_keys.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from schedsvc_client import CallError

from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.key_turns import KeyTurns, NoTurnError
from schedsvc_vllm.known_keys import KEYS_MAX, KnownKeys
from schedsvc_vllm.refusals import Reason

FRESH_S = 20.0
# A key in use is asked again this time before the end of its freshness.
AGAIN_S = 10.0
ASK_S_MAX = 5.0
# A key that the scheduler does not know may have been made since.
UNKNOWN_FRESH_S = 5.0
# After a call that failed, keys that were known are not asked for again for this time.
AWAY_S = 1.0
UNKNOWN_MAX = 4_096
# The file gets what has changed after this time, and says again what is older than this.
SAVE_S = 1.0
SAVED_S_MAX = 3_600.0

_log = logging.getLogger("schedsvc_vllm")
V = TypeVar("V")


class Asked(Protocol):
    """Declares the scheduler as schedsvc_client.aio.AsyncScheduler asks it."""

    async def tenant_of_key(self, api_key_sha256: bytes) -> str | None:
        """Return for whom a key stands; None: for no tenant. Raises CallError."""

    async def close(self) -> None:
        """Hang up."""


class _Known(NamedTuple):
    tenant: str
    fresh_until_s: float
    #: When the file got it, by the clock of freshness.
    saved_s: float


class SchedulerKeys:
    """Says whose keys are. Use it inside one event loop."""

    def __init__(
        self,
        scheduler: Asked,
        clock: Callable[[], float] = time.monotonic,
        path: str = "",
    ) -> None:
        """Ask a scheduler, and hang up when this is closed.

        `path`: of the file that keeps the known keys; "": they end with this process.
        """
        self._scheduler = scheduler
        self._clock = clock
        # The oldest come first.
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        # Keys that the scheduler does not know: apart, so that invented ones displace none.
        self._unknown: OrderedDict[bytes, float] = OrderedDict()
        self._asking: dict[bytes, asyncio.Task[str | None]] = {}
        self._turns = KeyTurns(lambda: self._clock())
        self._file = KnownKeys(path) if path else None
        self._unsaved: dict[bytes, str | None] = {}
        self._saving: asyncio.Task[None] | None = None
        self._problem = ""
        self._load()

    async def owner(self, digest: bytes, network: str = "") -> str | None:
        """Return the tenant of a key, None if the scheduler knows no such key.

        `network`: the client's, for its turn. Raises BadRequestError (503) if the scheduler has not
        known the key and is away, or if too many such keys come from the network.
        """
        now_s = self._clock()
        known = self._known.get(digest)
        if known is not None and now_s < known.fresh_until_s:
            if now_s >= known.fresh_until_s - AGAIN_S:
                self._ask(digest)  # in the background
            return known.tenant
        if known is None and now_s < self._unknown.get(digest, 0.0):
            return None
        if known is not None or digest in self._asking:
            return await asyncio.shield(self._ask(digest))
        try:
            await self._turns.take(network)
        except NoTurnError:
            raise _unchecked("too many new API keys at once from your network") from None
        if digest in self._known or self._clock() < self._unknown.get(digest, 0.0):
            self._turns.release()  # another request has got the answer meanwhile
            return await self.owner(digest, network)
        task = self._ask(digest)
        task.add_done_callback(lambda _: self._turns.release())
        return await asyncio.shield(task)

    def _ask(self, digest: bytes) -> asyncio.Task[str | None]:
        task = self._asking.get(digest)
        if task is None:
            task = self._asking[digest] = asyncio.ensure_future(self._ask_again(digest))
            task.add_done_callback(lambda ended: self._answered(digest, ended))
        return task

    def _answered(self, digest: bytes, task: asyncio.Task[str | None]) -> None:
        self._asking.pop(digest, None)
        if not task.cancelled():
            task.exception()  # no request may be waiting for it

    async def close(self) -> None:
        """Cancel what is asked, save the known keys, and hang up."""
        self._turns.close()
        for task in list(self._asking.values()):
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)
        if self._saving is not None:
            self._saving.cancel()
            await asyncio.gather(self._saving, return_exceptions=True)
        await self._save()
        await self._scheduler.close()

    async def _ask_again(self, digest: bytes) -> str | None:
        try:
            async with asyncio.timeout(ASK_S_MAX):
                tenant = await self._scheduler.tenant_of_key(digest)
        except (CallError, TimeoutError):
            known = self._known.get(digest)
            if known is None:
                raise _unchecked("the scheduler does not answer") from None
            fresh_until_s = max(known.fresh_until_s, self._clock() + AWAY_S)
            self._known[digest] = known._replace(fresh_until_s=fresh_until_s)
            return known.tenant
        now_s = self._clock()
        known = self._known.get(digest)
        if tenant is None:
            if self._known.pop(digest, None) is not None:
                self._change(digest, None)
            _put(self._unknown, digest, now_s + UNKNOWN_FRESH_S, UNKNOWN_MAX)
            return None
        saved_s = now_s
        if known is not None and known.tenant == tenant and now_s < known.saved_s + SAVED_S_MAX:
            saved_s = known.saved_s
        else:
            self._change(digest, tenant)
        _put(self._known, digest, _Known(tenant, now_s + FRESH_S, saved_s), KEYS_MAX)
        return tenant

    # The file.

    def _load(self) -> None:
        """Take over the keys of the file. None is fresh: each is asked again at its first use."""
        if self._file is None:
            return
        try:
            found = self._file.read()
        except OSError as error:
            self._say(error)
            return
        now_s = self._clock()
        for digest, (tenant, _) in found.items():
            _put(self._known, digest, _Known(tenant, 0.0, now_s - SAVED_S_MAX), KEYS_MAX)

    def _change(self, digest: bytes, tenant: str | None) -> None:
        if self._file is None:
            return
        self._unsaved[digest] = tenant
        if self._saving is None or self._saving.done():
            self._saving = asyncio.ensure_future(self._save_soon())

    async def _save_soon(self) -> None:
        while self._unsaved:
            await asyncio.sleep(SAVE_S)
            await self._save()

    async def _save(self) -> None:
        if self._file is None or not self._unsaved:
            return
        changes, self._unsaved = self._unsaved, {}
        try:
            await asyncio.to_thread(self._file.apply, changes)
        except BlockingIOError:
            self._unsaved = changes | self._unsaved  # another process holds the lock
        except OSError as error:
            self._say(error)

    def _say(self, error: OSError) -> None:
        problem = error.strerror or str(error)
        if problem != self._problem:
            _log.warning(
                "SCHEDSVC_KNOWN_KEYS_FILE: %s does not keep the known keys over a restart: %s",
                self._file, problem,
            )  # fmt: skip
        self._problem = problem


def _put(table: OrderedDict[bytes, V], key: bytes, value: V, most: int) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > most:
        table.popitem(last=False)


def _unchecked(reason: str) -> BadRequestError:
    return BadRequestError(
        f"the API key cannot be checked now: {reason}",
        status=503,
        code=Reason.API_KEY_NOT_CHECKED,
    )
