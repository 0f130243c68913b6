"""Records that a Session keeps of a request and a lease until the scheduler has settled them."""

from __future__ import annotations

from dataclasses import dataclass

from schedsvc_client.leases import Lease
from schedsvc_client.requests import Asked


@dataclass(slots=True)
class Pending:
    """Holds a request without a verdict."""

    asked: Asked
    event: bytes
    sent: bool = False
    cancelled: bool = False


@dataclass(slots=True)
class Ending:
    """Holds a Complete without an acknowledgement."""

    lease: Lease
    event: bytes
    since_ns: int
    # As of a `Lost`.
    ends_ns: int | None

    def replays(self, now_ns: int) -> bool:
        """Return whether the stream replays its lease before it sends the end."""
        return self.ends_ns is None or now_ns < self.ends_ns


@dataclass(slots=True)
class Lost:
    """Holds a lease that is VOID or ENDED, and whose Complete still has to say what was used."""

    lease: Lease
    # When it ended, or a scheduler that restarted takes it for ended: it is charged for good then,
    # and a replay would let it be charged once more. None: the scheduler of the loss knows it.
    ends_ns: int | None = None
