"""Logs that another engine claims a pool of this client: often enough, and not more."""

from __future__ import annotations

import logging
import time

from schedsvc_client.session_notices import PoolContested

_EVERY_S = 60.0
_log = logging.getLogger("schedsvc_client.session")


class ContestLog:
    """One warning a minute: the other engine tries again all the time."""

    def __init__(self) -> None:
        self._next_s = -_EVERY_S

    def log(self, contest: PoolContested) -> None:
        """Take note of one contest."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + _EVERY_S
        _log.warning(
            "two engines claim pool %s; set SCHEDSVC_POOL (the other one's client id: %s)",
            contest.pool,
            contest.client_id,
        )
