"""Keeps books from messages alone, between one engine's client and all members of a set.

The audit sees each message of each stream on the wire, also those that the client ignores. It knows
the rules of the contract and nothing of the client or of the schedulers:

- A grant has an effect if no other message before it stated a higher term.
- Leases with an effect, until the client sends their ends, reserve no more than the pool has.
- The client starts no request without such a grant.
- No lease ends before its client ends it.
- A term has one leader.
"""

import time
from dataclasses import dataclass, field
from typing import Any

from schedsvc_client.aio import SchedulerSession
from schedsvc_client.v1 import scheduler_pb2 as pb

from .usage_audit import UsageBooks

_ENDS = (pb.LEASE_STATE_VOID, pb.LEASE_STATE_ENDED, pb.LEASE_STATE_UNKNOWN)


@dataclass
class Found:
    """Collects the sentences that an audit has against the set."""

    broken_streams: list[str] = field(default_factory=list)
    over_grants: list[str] = field(default_factory=list)
    #: Other rules that were broken.
    violations: list[str] = field(default_factory=list)


@dataclass
class _Open:
    """Represents a lease that is in force at the engine."""

    reserved: int
    term: int


class MessageAudit:
    """Keeps the books of one pool. O(1) for each message, and for each event in it."""

    def __init__(self, capacity_tokens: int, found: Found) -> None:
        self._capacity, self.found = capacity_tokens, found
        self._leases: dict[int, _Open] = {}
        self._reserved = 0
        self.reserved_max = 0
        self.highest = (0, "")
        #: Term to the time of its first grant with an effect, and to the number of them.
        self.first_s: dict[int, float] = {}
        self.granted: dict[int, int] = {}
        self._leader_of: dict[int, str] = {}
        #: Grants under a term that was over, which the client has to ignore.
        self.late = 0
        #: The ends of all leases, with the tokens that the engine served.
        self.used = UsageBooks()

    def sent(self, request: pb.SessionRequest) -> None:
        """Record a message of the client before a scheduler can have read it."""
        for event in request.events:
            if event.HasField("complete"):
                self._close(event.complete.lease_id)
                self.used.ended(event.complete)

    def received(self, target: str, stream: "AuditedCall", response: pb.SessionResponse) -> None:
        """Record a message of a scheduler before the client reads it."""
        if response.HasField("welcome"):
            stated = response.welcome.leadership
            stream.rank = (stated.term, stated.leader)
            first = self._leader_of.setdefault(stated.term, stated.leader)
            if first != stated.leader:
                text = f"{first} and {stated.leader} lead in term {stated.term}"
                self.found.violations.append(text)
        rank = stream.rank
        self.highest = max(self.highest, rank, key=lambda each: each[0])
        in_force = rank == self.highest
        for verdict in response.verdicts:
            if verdict.response.outcome == pb.OUTCOME_GRANTED:
                self._granted(target, rank[0], verdict.response.grant, in_force=in_force)
        for status in response.leases:
            if in_force and status.state in _ENDS and status.lease_id in self._leases:
                self._close(status.lease_id)
                state = pb.LeaseState.Name(status.state)
                self.found.broken_streams.append(f"{target} ends a lease that runs: {state}")

    def started(self, lease_id: int) -> None:
        """Take that the engine begins with a request."""
        if lease_id not in self._leases:
            text = f"a request started by lease {lease_id}, which no leader had granted"
            self.found.over_grants.append(text)

    def _granted(self, target: str, term: int, grant: pb.Grant, *, in_force: bool) -> None:
        if not in_force:
            self.late += 1
            return
        if grant.lease_id in self._leases:  # it repeats an answer
            return
        self._leases[grant.lease_id] = _Open(grant.reserved_tokens, term)
        self._reserved += grant.reserved_tokens
        self.reserved_max = max(self.reserved_max, self._reserved)
        self.first_s.setdefault(term, time.monotonic())
        self.granted[term] = self.granted.get(term, 0) + 1
        if self._reserved > self._capacity:
            text = f"{self._reserved} of {self._capacity} tokens are reserved by a grant of"
            self.found.over_grants.append(f"{text} {target} in term {term}")

    def _close(self, lease_id: int) -> None:
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self._reserved -= lease.reserved


class AuditedCall:
    """Wraps gRPC's call of one stream, which is read and written through the books."""

    def __init__(self, call: Any, target: str, audit: MessageAudit) -> None:
        self._call, self._target, self._audit = call, target, audit
        self.rank = (0, "")

    async def read(self) -> Any:
        response = await self._call.read()
        if isinstance(response, pb.SessionResponse):
            self._audit.received(self._target, self, response)
        return response

    async def write(self, data: bytes) -> None:
        self._audit.sent(pb.SessionRequest.FromString(data))
        await self._call.write(data)

    def cancel(self) -> None:
        self._call.cancel()


class AuditedSession(SchedulerSession):
    """Acts as the client of an engine, with an audit between it and the network."""

    def __init__(self, target: str, audit: MessageAudit, **options: Any) -> None:
        super().__init__(target, **options)
        self._audit = audit

    async def _one_stream(self, open_stream: Any) -> Any:
        def opened(**words: Any) -> AuditedCall:
            return AuditedCall(open_stream(**words), self._targets.current, self._audit)

        return await super()._one_stream(opened)
