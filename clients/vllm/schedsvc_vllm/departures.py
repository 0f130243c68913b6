"""Looks for clients that leave while their requests wait for a verdict.

Most verdicts come within a moment. So one timer serves all requests: it begins to watch the clients
of those that wait already when it fires.
"""

from __future__ import annotations

import asyncio

from schedsvc_vllm.asgi import ClientLeftError, Mailbox

#: A request that has waited this long is watched.
WATCH_AFTER_S = 0.05

_Waiting = dict[Mailbox, asyncio.Future[None]]


class Departures:
    """Holds the requests that wait for a verdict. O(1) for each."""

    def __init__(self) -> None:
        self._new: _Waiting = {}
        self._known: _Waiting = {}  # those whose clients are watched
        self._left: set[Mailbox] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, verdict: asyncio.Future[None], mailbox: Mailbox) -> None:
        """Wait for a verdict; it is cancelled on every other way out.

        Raises ClientLeftError, or the error that is the verdict.
        """
        if not verdict.done():
            self._new[mailbox] = verdict
            if self._timer is None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(WATCH_AFTER_S, self._look)
        try:
            await verdict
        except asyncio.CancelledError:
            if mailbox in self._left:
                raise ClientLeftError from None
            raise
        finally:
            if self._new.pop(mailbox, None) is None:
                self._known.pop(mailbox, None)
                self._left.discard(mailbox)

    def _look(self) -> None:
        """Watch those that wait and are not watched yet. O(those)."""
        self._timer = None
        self._known |= self._new
        new, self._new = self._new, {}
        for mailbox, verdict in new.items():
            self._watch(mailbox, verdict)

    def _watch(self, mailbox: Mailbox, verdict: asyncio.Future[None]) -> None:
        def left(_: object) -> None:
            if self._known.get(mailbox) is verdict and not verdict.done():
                self._left.add(mailbox)
                verdict.cancel()

        mailbox.departure().add_done_callback(left)
