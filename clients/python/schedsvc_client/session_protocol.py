"""Keeps the client's side of a Session stream, sans-IO: no socket, no clock, no task.

The caller passes monotonic nanoseconds in, sends the messages that `data_to_send` gives, feeds
what it reads to `receive`, and calls again at `next_deadline_ns`. The state survives streams:
`disconnected` and `connected` may follow each other any number of times. Each new stream begins
with Hello, the pools, a replay of every open lease, and the Completes that the scheduler has not
acknowledged (if it keeps a usage ledger: not saved). After the Welcome the client asks again for
the requests that have no verdict. No message exceeds the limit that the Welcome states; before it,
messages are small. `SessionLimits` bounds the memory.
"""

from __future__ import annotations

from collections import deque

import grpc

from schedsvc_client.errors import CallError, LimitExceeded, Violation, call_error
from schedsvc_client.fence import Fence
from schedsvc_client.leases import Lease, LeaseTable, Totals, lease_of
from schedsvc_client.message_sizes import MESSAGE_BYTES_MIN, accepted_bytes, admit_event, too_large
from schedsvc_client.outcomes import LeaseState, Outcome
from schedsvc_client.requests import Asked
from schedsvc_client.session_limits import SessionLimits
from schedsvc_client.session_notices import (
    Faulted,
    Fenced,
    LeaseLost,
    Notice,
    PoolContested,
    PoolRefused,
    PrefixUse,
    Verdict,
    Welcomed,
)
from schedsvc_client.session_records import Ending, Lost, Pending
from schedsvc_client.stream_fence import StreamFence
from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb
from schedsvc_client.wire import VARINT

# The seq field of a message: a tag and a varint of at most ten bytes.
_SEQ_BYTES_MAX = 11
_GRANTED = int(Outcome.GRANTED)
_GOODBYE, _BEAT = -1, -2
"""In place of a lease id, among the events that the scheduler has to acknowledge."""


def _encoded(event: pb.SessionEvent) -> bytes:
    """Encode an event as a part of a SessionRequest: such parts are simply joined."""
    return pb.SessionRequest(events=[event]).SerializeToString()


class SessionProtocol:
    """Keeps all that one shim process owes the scheduler, and what it knows of it."""

    def __init__(
        self,
        client_id: str,
        incarnation: int,
        limits: SessionLimits | None = None,
        fence: Fence | None = None,
    ) -> None:
        self._limits = limits or SessionLimits()
        self._hello = pb.SessionHello(client_id=client_id, incarnation=incarnation)
        self._fence = fence or Fence(strict=False)
        self._table = LeaseTable(self._limits.progress_delay_ns)
        self._lost: dict[int, Lost] = {}
        self._pools: dict[str, bytes] = {}
        self._pending: dict[int, Pending] = {}
        self._endings: dict[int, Ending] = {}
        self._leaves = False  # it ends for good, and the scheduler has not acknowledged that
        self._next_tag = 1
        self._open_requests_max = self._limits.open_requests_max
        # Our limit, until a scheduler that states none refuses a message: then the size it accepts.
        self._learned_bytes_max = self._limits.message_bytes_max
        self._incarnation: int | None = None
        self._connected = False
        #: The last message had no room for all that there was to send.
        self.has_more = False
        #: The uses of prompt hashes that the scheduler last announced.
        self.prefix_use = PrefixUse()
        #: Beats that the scheduler has acknowledged, on all streams.
        self.beats = 0
        self._reset_stream()

    def _reset_stream(self) -> None:
        """Forget what belongs to one stream."""
        self._seq = 0
        self._welcomed_here = False
        self._message_bytes_max = min(MESSAGE_BYTES_MIN, self._learned_bytes_max)
        self._carry: tuple[bytes, int] | None = None
        self._control_out: deque[bytes] = deque()
        self._telemetry_out: dict[str, bytes] = {}
        self._complete_out: deque[int] = deque()
        # A scheduler that restarted learns these leases from a replay, right before the Complete.
        # Leases that run follow, so ends never lack a place of those that it has for leases.
        self._replay_out: set[int] = set()
        self._rejoin_out: dict[int, Lease] = {}
        self._progress_out: deque[Lease] = deque()
        self._cancel_out: deque[int] = deque()
        self._admit_out: dict[int, None] = {}
        self._unacknowledged: deque[tuple[int, int]] = deque()
        # Acknowledged, but perhaps not in the ledger: a scheduler that restarts needs them again.
        self._unsaved: deque[tuple[int, int]] = deque()
        self._pools_refused = 0
        self._said_goodbye = False
        self._takes_beats = self._beat_out = False
        self._stream_fence = StreamFence(self._fence)

    @property
    def open_requests(self) -> int:
        """Return the number of requests without a verdict."""
        return len(self._pending)

    @property
    def open_leases(self) -> int:
        """Return the number of leases that are renewed."""
        return len(self._table)

    @property
    def unacknowledged(self) -> int:
        """Completes, and a Goodbye, that the scheduler has not acknowledged, or not saved."""
        return len(self._endings) + self._leaves

    @property
    def has_news(self) -> bool:
        """Return whether `data_to_send` may have something to give before the next deadline."""
        return self._connected and bool(
            self._control_out
            or self._carry
            or self._complete_out
            or self._rejoin_out
            or self._admit_out
            or self._cancel_out
            or self._progress_out
            or self._telemetry_out
            or self._beat_out
            or (self._leaves and not self._said_goodbye)
        )

    # Requests of the shim.

    def register_pool(self, pool: pool_pb2.PoolRegistration) -> None:
        """Offer a pool, now and on every later stream."""
        event = self._checked(_encoded(pb.SessionEvent(pool=pool)), "pool")
        self._pools[pool.pool] = event
        if self._connected:
            self._control_out.append(event)
            # A fault does not name its pool; another attempt may be for one that was refused.
            self._pools_refused = 0

    def telemetry(self, telemetry: pool_pb2.EngineTelemetry) -> None:
        """Report what the engine says: the latest of each pool, while a stream offers it."""
        if self._connected and telemetry.pool in self._pools:
            event = _encoded(pb.SessionEvent(telemetry=telemetry))
            self._telemetry_out[telemetry.pool] = self._checked(event, "telemetry")

    def admit(self, asked: Asked) -> int:
        """Ask for one request; returns its tag, under which the verdict will come.

        Raises LimitExceeded if too many are open, InvalidRequest if it does not fit a message.
        """
        if len(self._pending) >= self._open_requests_max:
            raise LimitExceeded(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self._open_requests_max} requests wait for their verdict already",
            )
        tag = self._next_tag
        room = self._event_bytes_max
        event = admit_event(tag, asked, room)
        if len(event) > room:
            raise too_large("request", len(event), room)
        self._next_tag += 1
        self._pending[tag] = Pending(asked, event)
        if self._connected:
            self._admit_out[tag] = None
        return tag

    def cancel(self, tag: int) -> None:
        """Withdraw a request. A grant that crosses is completed CANCELLED here."""
        pending = self._pending.get(tag)
        if pending is None or pending.cancelled:
            return
        if not pending.sent:
            del self._pending[tag]
            self._admit_out.pop(tag, None)
            return
        pending.cancelled = True
        # One that waits to be asked again on this stream is withdrawn right behind that.
        if self._connected and tag not in self._admit_out:
            self._cancel_out.append(tag)

    def progress(self, now_ns: int, lease_id: int, totals: Totals) -> None:
        """Raise the running totals of a lease. Totals that do not grow are not sent."""
        self._table.note(now_ns, lease_id, totals)

    def complete(self, now_ns: int, lease_id: int, outcome: Outcome, totals: Totals) -> bool:
        """End a lease. Totals that are not given are the last ones that were reported.

        The end is sent again on every stream until it is acknowledged. Returns False, and sends
        nothing, if the lease is not open (any more).
        """
        lease = self._table.close(lease_id)
        lost = self._lost.pop(lease_id, None) if lease is None else None
        if lost is not None:
            lease = lost.lease
        if lease is None:
            return False
        event = lease.complete_event(outcome, totals)
        ends_ns = lost.ends_ns if lost is not None else None
        ending = self._endings[lease_id] = Ending(lease, event, now_ns, ends_ns)
        if len(self._endings) > self._limits.unacknowledged_max:
            del self._endings[next(iter(self._endings))]
        if self._rejoin_out.pop(lease_id, None) is not None:
            self._replay_out.add(lease_id)
        if self._connected:
            is_known = lost is None or (ends_ns is None and self._welcomed_here)
            if ending.replays(now_ns) and not is_known:
                self._control_out.append(_encoded(pb.SessionEvent(replay=lease.replay())))
            self._complete_out.append(lease_id)
        return True

    def say_goodbye(self) -> None:
        """End for good: the scheduler is to release the pools of this session at once."""
        self._leaves = bool(self._pools)

    def beat(self) -> None:
        """Ask the scheduler for a sign of life, which `beats` counts. It must take beats."""
        self._beat_out = self._takes_beats

    # The stream.

    def connected(self, now_ns: int) -> None:
        """Begin a new stream: queue all that it must begin with."""
        self._reset_stream()
        self._connected = True
        self._open_requests_max = self._limits.open_requests_max
        forgotten_ns = now_ns - self._limits.answer_ttl_ns
        for lease_id in [i for i, e in self._endings.items() if e.since_ns < forgotten_ns]:
            del self._endings[lease_id]
        highest = self._fence.highest
        if highest.term:
            self._hello.leadership_seen.term = highest.term
            self._hello.leadership_seen.leader = highest.leader
        self._control_out.append(_encoded(pb.SessionEvent(hello=self._hello)))
        self._control_out.extend(self._pools.values())
        self._rejoin_out = {lease.lease_id: lease for lease in self._table.leases()}
        self._table.mark_all_sent(now_ns)
        self._complete_out.extend(self._endings)
        self._replay_out = {i for i, ending in self._endings.items() if ending.replays(now_ns)}
        self._admit_out = dict.fromkeys(self._pending)

    def disconnected(self, error: CallError | None = None) -> None:
        """End the stream, and forget with it whatever was not acknowledged.

        If the `error` says that a message was too large, later ones are split.
        """
        if error is not None and (accepted := accepted_bytes(error)):
            self._learned_bytes_max = min(self._limits.message_bytes_max, accepted)
        self._connected = False
        self._reset_stream()

    def data_to_send(self, now_ns: int) -> bytes | None:
        """Return the next serialised SessionRequest, or None. Call it again while `has_more`."""
        self.has_more = False
        if not self._connected:
            return None
        parts: list[bytes] = []
        room = self._message_bytes_max - _SEQ_BYTES_MAX
        seq = self._seq + 1
        if self._welcomed_here and not self._progress_out:
            self._progress_out.extend(self._table.take_due(now_ns))
        while len(parts) < self._limits.events_max:
            taken = self._carry or self._next_event(now_ns)
            self._carry = None
            if taken is None:
                break
            event, completed = taken
            # The first, a Hello, leaves in any case: the scheduler says what is wrong with it.
            if len(event) > room and (parts or self._seq):
                self._carry = taken
                break
            room -= len(event)
            parts.append(event)
            if completed:
                self._unacknowledged.append((seq, completed))
        if not parts:
            return None
        self._seq = seq
        self.has_more = self._carry is not None or len(parts) >= self._limits.events_max
        return b"".join((b"\x08", VARINT[seq], *parts))

    def next_deadline_ns(self) -> int | None:
        """Return when to call `data_to_send` although nothing new was asked; None: not at all."""
        return self._table.next_deadline_ns() if self._welcomed_here else None

    def receive(self, now_ns: int, response: pb.SessionResponse) -> list[Notice]:
        """Take one message of the scheduler; return its meanings, in its order.

        If a later leader is known than the one of the stream, that is `Fenced` alone.
        """
        fenced = self._stream_fence.check(response)
        if fenced is not None:
            self._welcomed_here = False  # nothing is asked of a leader that was replaced
            return [Fenced(fenced)]
        response = self._stream_fence.effective(response)
        notices: list[Notice] = []
        unacknowledged = self._unacknowledged
        while unacknowledged and unacknowledged[0][0] <= response.ack_seq:
            seq, acknowledged = unacknowledged.popleft()
            self._leaves = self._leaves and acknowledged != _GOODBYE
            self.beats += acknowledged == _BEAT
            if acknowledged > 0:
                self._unsaved.append((seq, acknowledged))
        saved_seq = response.usage_saved.seq if response.HasField("usage_saved") else None
        while self._unsaved and (saved_seq is None or self._unsaved[0][0] <= saved_seq):
            self._endings.pop(self._unsaved.popleft()[1], None)
        if response.HasField("welcome"):
            notices.append(self._welcomed(now_ns, response.welcome))
            notices.extend(self._obey_size(response.welcome.message_bytes_max))
            self.prefix_use = PrefixUse()
        if response.HasField("prefix_use"):
            use = response.prefix_use
            self.prefix_use = PrefixUse(use.hashes_max, use.placement, use.order, use.key)
        # A slice: the end of these repeated fields themselves is an error, which costs more.
        for verdict in response.verdicts[:]:
            notice = self._judged(now_ns, verdict)
            if notice is not None:
                notices.append(notice)
        for status in response.leases[:]:
            lost = self._lease_status(now_ns, status)
            if lost is not None:
                notices.append(lost)
        notices.extend([self._faulted(fault) for fault in response.faults[:]])
        for c in response.contests[:]:
            notices.append(PoolContested(c.pool, c.client_id, claims=not self._welcomed_here))
            self._beat_out = self._takes_beats
        return notices

    def _welcomed(self, now_ns: int, welcome: pb.SessionWelcome) -> Welcomed:
        restarted = self._incarnation not in (None, welcome.incarnation)
        for lost in self._lost.values() if restarted else ():
            if lost.ends_ns is None:
                lost.ends_ns = now_ns + lost.lease.ttl_ns
        self._incarnation = welcome.incarnation
        self._welcomed_here = True
        self._takes_beats = welcome.beats
        if welcome.open_requests_max > 0:
            self._open_requests_max = min(self._limits.open_requests_max, welcome.open_requests_max)
        return Welcomed(welcome.incarnation, restarted, welcome.beats)

    def _obey_size(self, stated: int) -> list[Notice]:
        """Keep to the size of messages that is in force here; give up what can never fit.

        A lease whose replay does not fit goes on: a scheduler that does not know it says so.
        """
        own = self._limits.message_bytes_max
        self._message_bytes_max = min(own, stated) if stated > 0 else self._learned_bytes_max
        room = self._event_bytes_max
        self._control_out = deque(event for event in self._control_out if len(event) <= room)
        if self._carry is not None and len(self._carry[0]) > room:
            self._carry = None
        faults: list[Notice] = []
        for tag, pending in list(self._pending.items()):
            if len(pending.event) > room:
                pending.event = admit_event(tag, pending.asked, room)
            if len(pending.event) > room:
                del self._pending[tag]
                self._admit_out.pop(tag, None)
                error = too_large("request", len(pending.event), room)
                faults.append(Faulted(0 if pending.cancelled else tag, error))
        return faults

    def _judged(self, now_ns: int, verdict: pb.SessionVerdict) -> Verdict | None:
        pending = self._pending.pop(verdict.tag, None)
        if pending is None:
            return None
        response = verdict.response
        if response.outcome != _GRANTED:
            return None if pending.cancelled else Verdict(verdict.tag, response, None)
        lease = lease_of(pending.asked, response.grant, now_ns)
        self._table.open(lease)
        if pending.cancelled:
            self.complete(now_ns, lease.lease_id, Outcome.CANCELLED, (0, 0, 0))
            return None
        return Verdict(verdict.tag, response, lease)

    def _lease_status(self, now_ns: int, status: pb.LeaseStatus) -> LeaseLost | None:
        state = LeaseState(status.state)
        if state not in (LeaseState.VOID, LeaseState.ENDED, LeaseState.UNKNOWN):
            return None
        lease = self._table.close(status.lease_id)
        if lease is not None and state != LeaseState.UNKNOWN:
            self._lost[lease.lease_id] = Lost(lease)
        if state == LeaseState.ENDED and status.lease_id in self._lost:
            self._lost[status.lease_id].ends_ns = now_ns
        if lease is None:
            return None
        return LeaseLost(lease.lease_id, state)

    def _faulted(self, fault: pb.SessionFault) -> Faulted | PoolRefused:
        pending = self._pending.pop(fault.tag, None) if fault.tag else None
        violations = (Violation(fault.field, fault.description),) if fault.field else ()
        error = call_error(fault.code, fault.description, violations=violations)
        if not fault.tag and fault.field.startswith("pool"):
            self._pools_refused += 1
            if of_all := self._pools_refused >= len(self._pools):
                self._welcomed_here = False  # a grant would be from another engine's ledger
            return PoolRefused(error, of_all=of_all)
        wanted = pending is not None and not pending.cancelled
        return Faulted(fault.tag if wanted else 0, error)

    def _next_event(self, now_ns: int) -> tuple[bytes, int] | None:
        """Return the most urgent event and, for a Complete, its lease.

        Ends of leases precede Admits: they make the room that Admits wait for.
        """
        if self._control_out:
            return self._control_out.popleft(), 0
        while self._complete_out:
            lease_id = self._complete_out[0]
            ending = self._endings.get(lease_id)
            if ending is not None and lease_id in self._replay_out:
                self._replay_out.remove(lease_id)
                replay = _encoded(pb.SessionEvent(replay=ending.lease.replay()))
                if len(replay) <= self._event_bytes_max:
                    return replay, 0
            self._complete_out.popleft()
            if ending is not None:
                return ending.event, lease_id
        while self._rejoin_out:
            lease = self._rejoin_out.pop(next(iter(self._rejoin_out)))
            replay = _encoded(pb.SessionEvent(replay=lease.replay()))
            if len(replay) <= self._event_bytes_max:
                return replay, 0
        if not self._welcomed_here:
            # Nothing is asked of a scheduler that may be away.
            return None
        if self._beat_out:
            self._beat_out = False
            return _encoded(pb.SessionEvent(beat=pb.SessionBeat())), _BEAT
        while self._progress_out:
            lease = self._progress_out.popleft()
            if self._table.get(lease.lease_id) is not None:
                message = pb.SessionRequest()
                lease.progress(message.events.add().progress)
                return message.SerializeToString(), 0
        if self._telemetry_out:
            return self._telemetry_out.pop(next(iter(self._telemetry_out))), 0
        while self._cancel_out:
            tag = self._cancel_out.popleft()
            if tag in self._pending:
                return _encoded(pb.SessionEvent(cancel=pb.SessionCancel(tag=tag))), 0
        if self._leaves and not self._said_goodbye and not self._admit_out:
            self._said_goodbye = True
            return _encoded(pb.SessionEvent(goodbye=pb.SessionGoodbye())), _GOODBYE
        return self._next_admit()

    def _next_admit(self) -> tuple[bytes, int] | None:
        if not self._admit_out:
            return None
        tag = next(iter(self._admit_out))
        del self._admit_out[tag]
        pending = self._pending[tag]
        pending.sent = True
        if pending.cancelled:
            # A former stream may have granted it: asking again and withdrawing finds out.
            self._cancel_out.append(tag)
        return pending.event, 0

    @property
    def _event_bytes_max(self) -> int:
        """Return the size of the largest event that a message is known to have room for."""
        known = self._message_bytes_max if self._welcomed_here else self._learned_bytes_max
        return known - _SEQ_BYTES_MAX

    def _checked(self, encoded: bytes, field: str) -> bytes:
        """Return an event that the caller made; InvalidRequest if no message can hold it."""
        # Pools are offered before the Welcome.
        size_max = min(self._event_bytes_max, MESSAGE_BYTES_MIN if field == "pool" else 1 << 31)
        if len(encoded) > size_max:
            raise too_large(field, len(encoded), size_max)
        return encoded
