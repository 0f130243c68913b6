"""Limits how many lines a peer can cause in the log: clients, the upstream, and the scheduler."""

from __future__ import annotations

import logging
import time

from schedsvc_client.gcra import SECOND_NS, Bucket

#: Lines of one place in the code at once; then one a second.
LINES_AT_ONCE = 100


class LineLimit(logging.Filter):
    """Keeps a bucket for each place in the code that logs.

    So a flood leaves out no line of another kind, and there are only as many buckets as such
    places. A traceback counts as one line.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = time.monotonic
        self._buckets: dict[tuple[str, int], Bucket] = {}
        self._left_out: dict[tuple[str, int], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is written; it says how many before it were not. O(1)."""
        if getattr(record, "is_limited", False):
            return True  # by its logger, and now by a handler
        record.is_limited = True
        place, now_ns = (record.pathname, record.lineno), int(self.clock() * SECOND_NS)
        bucket = self._buckets.get(place)
        if bucket is None:
            bucket = self._buckets[place] = Bucket(SECOND_NS, LINES_AT_ONCE)
        if bucket.wait_ns(now_ns):
            self._left_out[place] = self._left_out.get(place, 0) + 1
            return False
        bucket.take(now_ns)
        if left_out := self._left_out.pop(place, 0):
            text = f"{record.getMessage()} ({left_out} such lines before it were left out)"
            record.msg, record.args = text, ()
        return True


def limit_lines(where: logging.Filterer) -> None:
    """Limit the lines that a logger takes itself, or that a handler writes; begin afresh."""
    for each in where.filters[:]:
        if isinstance(each, LineLimit):
            where.removeFilter(each)
    where.addFilter(LineLimit())
