"""The records that the driver gives its callers: a call that waits, and an error of the service."""

import asyncio

__all__ = ["Broken", "Waiting"]


class Broken(RuntimeError):
    """A defect of ours: this call failed, and if `Driver.broken`, every later one will."""


class Waiting:
    """A queued request, and the calls that wait for its verdict (a repeated call joins in)."""

    __slots__ = ("calls", "delivered", "handle", "verdict")

    def __init__(self, handle: int, verdict: asyncio.Future[bytes]) -> None:
        self.handle = handle
        self.verdict = verdict
        #: Calls that neither have their answer nor left.
        self.calls = 0
        #: Some call has its answer, so the request is no longer ours to withdraw.
        self.delivered = False
