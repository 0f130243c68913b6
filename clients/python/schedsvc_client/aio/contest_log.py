"""Logs that another engine claims a pool of this client: often enough, and not more."""

from __future__ import annotations

import logging
import time

from schedsvc_client.gcra import SECOND_NS, Bucket
from schedsvc_client.session_notices import PoolContested

_PERIOD_NS = 60 * SECOND_NS
_log = logging.getLogger("schedsvc_client.session")


class ContestLog:
    """Logs one warning a minute: the other engine tries again all the time."""

    def __init__(self) -> None:
        self._bucket = Bucket(_PERIOD_NS)

    def log(self, contest: PoolContested) -> None:
        """Take note of one contest."""
        now_ns = time.monotonic_ns()
        if self._bucket.wait_ns(now_ns):
            return
        self._bucket.take(now_ns)
        _log.warning(
            "two engines claim pool %s; set SCHEDSVC_POOL (the other one's client id: %s)",
            contest.pool,
            contest.client_id,
        )
