"""Decides which messages of one Session stream take effect, by the leadership of its Welcome.

Before the Welcome it is not known who leads. If the client has seen a term, acknowledgements and
states of leases are kept back until then: otherwise a scheduler that leads no more could
acknowledge the end of a lease.
"""

from __future__ import annotations

from schedsvc_client.errors import CallError
from schedsvc_client.fence import Fence, Rank, rank_of
from schedsvc_client.v1 import scheduler_pb2 as pb


class StreamFence:
    """Holds the fence of one stream."""

    def __init__(self, fence: Fence) -> None:
        self._fence = fence
        self._rank = Rank()
        self._is_welcomed = False
        self._early = pb.SessionResponse()

    def check(self, response: pb.SessionResponse) -> CallError | None:
        """Return why nothing of a message takes effect; None if it does. O(verdicts)."""
        if response.HasField("welcome"):
            self._rank = rank_of(response.welcome.leadership)
        elif not self._is_welcomed:
            return None
        wrong: CallError | None = self._fence.check(self._rank)
        for verdict in response.verdicts[:]:
            if wrong is None and verdict.response.HasField("leadership"):
                wrong = self._fence.check(rank_of(verdict.response.leadership))
        return wrong

    def effective(self, response: pb.SessionResponse) -> pb.SessionResponse:
        """Return what takes effect now; with the Welcome, also what was kept back before."""
        if self._is_welcomed or not self._fence.highest.term:
            self._is_welcomed = self._is_welcomed or response.HasField("welcome")
            return response
        self._is_welcomed = response.HasField("welcome")
        self._early.MergeFrom(response)
        if self._is_welcomed:
            return self._early
        self._early.ClearField("faults")
        self._early.ClearField("contests")
        return pb.SessionResponse(faults=response.faults, contests=response.contests)
