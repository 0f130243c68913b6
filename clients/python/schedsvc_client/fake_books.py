"""Holds what a test gives to its fake scheduler, and the books that this keeps of leases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc

from schedsvc_client.v1 import scheduler_pb2 as pb


class Failure(NamedTuple):
    """Lets an Admit fail; on a Session it is a fault."""

    code: grpc.StatusCode
    details: str = "as the test asked"


class Delayed(NamedTuple):
    """Gives a verdict after some seconds."""

    seconds: float
    verdict: pb.AdmitResponse | Failure


#: The numbers of outcomes from which on a request was refused or evicted, and had been granted.
_REFUSED, _GRANTED = 16, 48

#: The answer to one Admit; None: it waits until the test calls `release()`.
Verdict = pb.AdmitResponse | Failure | Delayed | None
Decide = Callable[[pb.AdmitRequest], Verdict]
Answer = Callable[[pb.AdmitResponse | Failure], None]


def grant(lease_id: int, pool: str = "p", epoch: int = 1, ttl_ms: int = 10_000) -> pb.AdmitResponse:
    """Return a grant of this lease; the grants that `decide` makes count their leases."""
    given = pb.Grant(
        lease_id=lease_id, pool=pool, pool_epoch=epoch, ttl_ms=ttl_ms, reserved_tokens=64
    )
    return pb.AdmitResponse(outcome=pb.OUTCOME_GRANTED, grant=given, queue_duration_us=1_500)


def refusal(
    outcome: pb.Outcome.ValueType = pb.OUTCOME_REJECTED_FLOW_QUEUE_FULL, **fields: Any
) -> pb.AdmitResponse:
    """Return a refusal or eviction, with fields of `Refusal`: `retry_after_ms`, `message`.

    Raises ValueError if the outcome is none of a refusal or eviction.
    """
    if not isinstance(outcome, int) or not _REFUSED <= outcome < _GRANTED:
        raise ValueError(f"{outcome!r} is not the outcome of a refusal or eviction")
    return pb.AdmitResponse(
        outcome=outcome, refusal=pb.Refusal(**fields), queue_duration_us=2_000_000
    )


def checked(verdict: Verdict) -> Verdict:
    """Return a verdict that can be given; raise TypeError that says what is wrong with it."""
    if verdict is None or isinstance(verdict, pb.AdmitResponse):
        return verdict
    if isinstance(verdict, Failure):
        if not isinstance(verdict.code, grpc.StatusCode) or verdict.code is grpc.StatusCode.OK:
            raise TypeError(
                f"a Failure has one of grpc.StatusCode, and not OK; not {verdict.code!r}"
            )
        return verdict
    if not isinstance(verdict, Delayed):
        kinds = "grant(), refusal(), Failure(), Delayed() or None"
        raise TypeError(f"{verdict!r} is no verdict; it has to be {kinds}")
    if not isinstance(verdict.seconds, int | float) or not verdict.seconds >= 0:
        raise TypeError(f"Delayed has seconds, 0 or more; not {verdict.seconds!r}")
    if not isinstance(verdict.verdict, pb.AdmitResponse | Failure):
        raise TypeError(f"Delayed has a grant, a refusal or a Failure; not {verdict.verdict!r}")
    checked(verdict.verdict)
    return verdict


@dataclass
class Book:
    """Records one lease."""

    request_id: str
    tenant: str
    progress: list[pb.LeaseProgress] = field(default_factory=list)
    completes: list[pb.CompleteRequest] = field(default_factory=list)

    @property
    def end(self) -> pb.CompleteRequest:
        """Return the Complete that ended it; repeats of it have to be the same."""
        assert len({c.SerializeToString() for c in self.completes}) == 1, self.completes
        return self.completes[0]


class LeaseStates(dict[int, pb.LeaseState.ValueType]):
    """Holds what renewals of leases are answered, by their numbers."""

    def __setitem__(self, lease_id: int, state: pb.LeaseState.ValueType) -> None:
        if not isinstance(state, int):
            raise TypeError(f"a lease's state is one of pb.LEASE_STATE_*; not {state!r}")
        super().__setitem__(lease_id, state)
