"""Makes ids under which the gate asks the scheduler: each only once.

The scheduler answers a repeated id with the first verdict, which may be a lease that has ended. So
every attempt needs an id of its own, also if a proxy sends the same x-request-id again.
"""

from __future__ import annotations

import itertools
import secrets
from collections import OrderedDict

CLAIMED_MAX = 65_536
_BASE_CHARS_MAX = 96


class RequestIds:
    """Remembers the last CLAIMED_MAX ids that this process has used."""

    def __init__(self) -> None:
        self._claimed: OrderedDict[str, None] = OrderedDict()
        self._suffix = secrets.token_hex(6)
        self._numbers = itertools.count(1)

    def claim(self, wanted: str) -> str:
        """Return the wanted id if it is new here, else one that begins with it. O(1)."""
        if wanted in self._claimed:
            return f"{wanted[:_BASE_CHARS_MAX]}~{self._suffix}-{next(self._numbers)}"
        self._claimed[wanted] = None
        if len(self._claimed) > CLAIMED_MAX:
            self._claimed.popitem(last=False)
        return wanted
