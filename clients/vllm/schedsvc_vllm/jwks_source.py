"""Fetches a JSON Web Key Set in the background, from a file or a URL, and keeps the last good one.

`JwksSource` hands each new text to `take`, which raises ValueError if it is no key set. A text that
cannot be fetched or taken changes nothing: known keys stay, until they are older than `age_s_max`.
An issuer withdraws a key by leaving it out, so keys that cannot be fetched again must not verify
tokens for ever. The loop ends by `close()` alone: no server's answer can end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from schedsvc_vllm.files import read_bytes

FILE_PERIOD_S = 5.0
FETCH_S_MAX = 5.0
JWKS_BYTES_MAX = 1 << 20
# Tokens with an unknown key may have the set fetched again, but not more often than this.
HURRY_PERIOD_S = 10.0
_log = logging.getLogger("schedsvc_vllm")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **named: Any) -> None:
        """Follow none: it could lead to a place that the operator did not name."""


class JwksSource:
    """Fetches one key set. `place`: a path, or a URL; fetched again every `period_s`.

    `age_s_max`: seconds since the last good fetch after which its keys verify no token.
    """

    def __init__(
        self,
        place: str,
        period_s: float,
        take: Callable[[bytes], None],
        *,
        age_s_max: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.place = place
        self._age_s_max = age_s_max
        self._clock = clock
        self._taken_s = -math.inf
        self._is_url = place.startswith(("http://", "https://"))
        self._period_s = period_s if self._is_url else min(period_s, FILE_PERIOD_S)
        self._take = take
        self._last = b""
        self._failed = False
        self._task: asyncio.Task[None] | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._hurried_s = -HURRY_PERIOD_S
        #: Fetches that gave no key set.
        self.failures = 0

    @property
    def is_known(self) -> bool:
        """Return whether a key set has been taken."""
        return self._taken_s > -math.inf

    @property
    def age_s(self) -> float:
        """Return the seconds since the key set was fetched; infinite before the first time."""
        return self._clock() - self._taken_s

    @property
    def is_stale(self) -> bool:
        """Return whether the keys are too old to verify tokens."""
        return self.is_known and self.age_s > self._age_s_max

    def start(self) -> None:
        """Begin to fetch, inside the event loop. Idempotent."""
        if self._task is None:
            self._begin()  # the first token joins it, and may have it fetched again soon after
            self._task = asyncio.ensure_future(self._repeat())

    async def close(self) -> None:
        """Stop."""
        for task in (self._task, self._fetching):
            if task is not None:
                task.cancel()
                with contextlib.suppress(BaseException):
                    await task
        self._task = self._fetching = None

    async def hurry(self) -> None:
        """Fetch now, unless that was done a moment ago; wait for a fetch that is under way."""
        if self._fetching is None:
            now_s = self._clock()
            if now_s - self._hurried_s < HURRY_PERIOD_S:
                return
            self._hurried_s = now_s
        await self.fetch()

    async def fetch(self) -> None:
        """Fetch once, together with every caller that asks meanwhile."""
        await asyncio.shield(self._begin())

    def _begin(self) -> asyncio.Task[None]:
        if self._fetching is None:
            self._fetching = asyncio.ensure_future(self._fetch())
            self._fetching.add_done_callback(self._fetched)
        return self._fetching

    def _fetched(self, task: asyncio.Task[None]) -> None:
        self._fetching = None

    async def _repeat(self) -> None:
        while True:
            await self.fetch()
            await asyncio.sleep(self._period_s)

    async def _fetch(self) -> None:
        try:
            text = await asyncio.to_thread(self._read)
            if text != self._last or not self.is_known:
                self._take(text)
                self._last = text
        except Exception as error:  # of any kind: a server's answer must not end the loop
            level = logging.DEBUG if self._failed else logging.WARNING
            kept = "the known keys stay" if self.is_known else "no token can be verified yet"
            reason = str(error) or type(error).__name__
            _log.log(level, "%s: no key set: %s; %s", self.place, reason, kept)
            self._failed = True
            self.failures += 1
        else:
            self._taken_s = self._clock()
            if self._failed:
                _log.warning("%s: the key set is there again", self.place)
            self._failed = False

    def _read(self) -> bytes:
        if not self._is_url:
            return read_bytes(self.place)
        opener = urllib.request.build_opener(_NoRedirect)
        with opener.open(self.place, timeout=FETCH_S_MAX) as response:
            text: bytes = response.read(JWKS_BYTES_MAX + 1)
        if len(text) > JWKS_BYTES_MAX:
            raise ValueError(f"has more than {JWKS_BYTES_MAX} bytes")
        return text
