"""Notices that a Session's state machine returns to its driver."""

from __future__ import annotations

from dataclasses import dataclass

from schedsvc_client.errors import CallError
from schedsvc_client.leases import Lease
from schedsvc_client.outcomes import LeaseState
from schedsvc_client.v1 import scheduler_pb2 as pb


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The stream is open. `restarted`: the scheduler is another one than before.

    `beats`: it acknowledges beats.
    """

    incarnation: int
    restarted: bool
    beats: bool = False


@dataclass(frozen=True, slots=True)
class PrefixUse:
    """The scheduler's present uses of prompt hashes; see schedsvc.v1.PrefixUse."""

    hashes_max: int = 0
    placement: bool = False
    order: bool = False
    key: int = 0


@dataclass(slots=True)
class Verdict:
    """Answers one Admit, with `lease` if it was granted."""

    tag: int
    response: pb.AdmitResponse
    lease: Lease | None


@dataclass(frozen=True, slots=True)
class Faulted:
    """An event was wrong: of the request `tag`, or (0) of something else."""

    tag: int
    error: CallError


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """Reports a lease that is no longer open: VOID, ENDED (it expired) or UNKNOWN."""

    lease_id: int
    state: LeaseState


@dataclass(frozen=True, slots=True)
class PoolRefused:
    """Reports a refused pool of this stream; only another stream offers it again.

    `of_all`: all others were refused too, and the stream is of no use.
    """

    error: CallError
    of_all: bool = True


@dataclass(frozen=True, slots=True)
class PoolContested:
    """Another engine claims a pool of this stream; the protocol answers that this one lives.

    `claims`: this stream claims a pool of the other one, and has no Welcome before that is decided.
    """

    pool: str
    client_id: str
    claims: bool = False


@dataclass(frozen=True, slots=True)
class Fenced:
    """A later leader is known than the one of this stream, whose messages have no effect."""

    error: CallError


Notice = Welcomed | Verdict | Faulted | LeaseLost | PoolRefused | PoolContested | Fenced
