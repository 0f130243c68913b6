"""Plays a shim's end of a Session stream, without the stream."""

from typing import Any

from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .support import admit_message

HELLO = pb.SessionEvent(hello=pb.SessionHello(client_id="shim", incarnation=1))


def asking(tag: int, request_id: str, *prompts: int, **fields: Any) -> pb.SessionEvent:
    request = admit_message(request_id, prompts or (10,), **fields)
    return pb.SessionEvent(admit=pb.SessionAdmit(tag=tag, request=request))


def completing(lease_id: int, epoch: int = 1, **totals: Any) -> pb.SessionEvent:
    return pb.SessionEvent(
        complete=pb.CompleteRequest(lease_id=lease_id, pool_epoch=epoch, **totals)
    )


def reporting(lease_id: int, epoch: int = 1, **totals: int) -> pb.SessionEvent:
    return pb.SessionEvent(progress=pb.LeaseProgress(lease_id=lease_id, pool_epoch=epoch, **totals))


def cancelling(tag: int) -> pb.SessionEvent:
    return pb.SessionEvent(cancel=pb.SessionCancel(tag=tag))


def offering(pool: str, epoch: int = 1, capacity: int = 100, block: int = 1) -> pb.SessionEvent:
    return pb.SessionEvent(
        pool=pool_pb2.PoolRegistration(
            pool=pool, epoch=epoch, capacity_tokens=capacity, block_size_tokens=block
        )
    )


def replaying(lease_id: int, request_id: str, **fields: Any) -> pb.SessionEvent:
    told: dict[str, Any] = {
        "tenant": "f",
        "pool": "p",
        "pool_epoch": 1,
        "reserved_tokens": 20,
        "prompt_tokens": 10,
        "max_output_tokens": 10,
        "sequences": 1,
    } | fields
    return pb.SessionEvent(replay=pb.LeaseReplay(lease_id=lease_id, request_id=request_id, **told))


class Stream:
    """Numbers its messages, and gathers the answers."""

    def __init__(self, scheduler: core.Scheduler, principal: int = 0, *, greets: bool = True):
        self.core = scheduler
        self.session = scheduler.open_session(principal)
        self.seq = 0
        if greets:
            self.send(0, HELLO)

    def push(self, now_ns: int, *events: pb.SessionEvent) -> None:
        """Send one message, and poll."""
        self.seq += 1
        message = pb.SessionRequest(seq=self.seq, events=events)
        now_ns = max(now_ns, 0)
        self.session.receive(now_ns, message.SerializeToString())
        self.core.poll(now_ns)

    def pull(self, now_ns: int) -> pb.SessionResponse:
        """Return all that waits for the shim, as one message; each part parses and is canonical."""
        whole = pb.SessionResponse()
        while (data := self.session.take(now_ns)) is not None:
            part = pb.SessionResponse.FromString(data)
            # The core writes a lease id even if it is 0, protobuf does not.
            assert part.SerializeToString() == data or any(not n.lease_id for n in part.leases)
            whole.MergeFrom(part)
        return whole

    def send(self, now_ns: int, *events: pb.SessionEvent) -> pb.SessionResponse:
        self.push(now_ns, *events)
        return self.pull(now_ns)

    def grant(self, now_ns: int, tag: int, request_id: str, *prompts: int, **fields: Any) -> int:
        """Ask, and be granted at once: the lease."""
        (verdict,) = self.send(now_ns, asking(tag, request_id, *prompts, **fields)).verdicts
        assert (verdict.tag, verdict.response.outcome) == (tag, core.GRANTED)
        return verdict.response.grant.lease_id


def fates(response: pb.SessionResponse) -> list[tuple[int, int]]:
    """Return (tag, outcome) of each verdict."""
    return [(v.tag, v.response.outcome) for v in response.verdicts]


def notices(response: pb.SessionResponse) -> list[tuple[int, int]]:
    """Return (lease, state) of each notice."""
    return [(n.lease_id, n.state) for n in response.leases]


def faults(response: pb.SessionResponse) -> list[tuple[int, int, str]]:
    """Return (tag, code, field) of each fault."""
    assert all(f.description for f in response.faults)
    return [(f.tag, f.code, f.field) for f in response.faults]
