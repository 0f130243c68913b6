"""Fuzzes the core's reader: Admit calls, Session streams, and their effect on its books.

Protobuf's own reader is the reference: it writes each message that it accepts again, for a second
core, which has to do the same.
"""

from collections.abc import Iterator

from google.protobuf.message import DecodeError, Message
from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core
from tests.core.encoding import FIXED32, FIXED64, LENGTH, VARINT
from tests.core.test_wire import has_group as has_a_group
from tests.core.test_wire import judge

_S = 1_000_000_000
_TAGS = [number << 3 | kind for number in range(1, 15) for kind in (VARINT, FIXED64, LENGTH)]
_ENDS = (b"p", b"f", b"q", b"\xff" * 9 + b"\x01", b"\xff" * 10)
WORDS = (*(bytes([tag]) for tag in _TAGS), bytes([2 << 3 | FIXED32]), *_ENDS)


def admit_corpus() -> list[bytes]:
    """Return right AdmitRequests."""
    whole = pb.AdmitRequest(
        request_id="request", tenant="f", pools=["p", "q"], input_tokens=[3, 400], n=2,
        max_output_tokens=9, deadline_ms=99, adapter="l", prefix_block_hashes=[1, 2],
        queue_ttl_ms=5, reports_progress=True,
    )  # fmt: skip
    short = pb.AdmitRequest(request_id="r", api_key_sha256=b"k" * 32, input_tokens=[1])
    return [whole.SerializeToString(), short.SerializeToString()]


def admit(data: bytes) -> None:
    """Admit one call: all that protobuf takes and the contract allows is taken, nothing else."""
    if not has_a_group(data):
        judge(data)


# Streams: messages one after the other, each after its size in two bytes.


def _framed(*messages: pb.SessionRequest) -> bytes:
    parts = [message.SerializeToString() for message in messages]
    return b"".join(len(part).to_bytes(2, "little") + part for part in parts)


def _messages(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + 2 <= len(data):
        size = int.from_bytes(data[at : at + 2], "little")
        yield data[at + 2 : at + 2 + size]
        at += 2 + size


def session_corpus() -> list[bytes]:
    """A stream that says everything a stream can say."""
    event = pb.SessionEvent
    hello = event(hello=pb.SessionHello(client_id="shim", incarnation=1))
    pool = pool_pb2.PoolRegistration(
        pool="p", epoch=1, capacity_tokens=2_000, block_size_tokens=16, max_running=8
    )
    told = pool_pb2.EngineTelemetry(pool="p", epoch=1, running=1, used_tokens=90, preemptions=2)
    request = pb.AdmitRequest.FromString(admit_corpus()[0])
    lease = 1
    events = [
        event(pool=pool),
        event(telemetry=told),
        event(admit=pb.SessionAdmit(tag=1, request=request)),
        event(progress=pb.LeaseProgress(lease_id=lease, pool_epoch=1, output_tokens=4)),
        event(complete=pb.CompleteRequest(lease_id=lease, pool_epoch=1, output_tokens=9)),
        event(cancel=pb.SessionCancel(tag=1)),
        event(
            replay=pb.LeaseReplay(
                lease_id=77,
                request_id="old",
                tenant="f",
                pool="p",
                pool_epoch=1,
                reserved_tokens=64,
                prompt_tokens=20,
                max_output_tokens=30,
                sequences=2,
            )
        ),
    ]
    one_by_one = [pb.SessionRequest(seq=2 + n, events=[e]) for n, e in enumerate(events)]
    first = pb.SessionRequest(seq=1, events=[hello])
    return [
        _framed(first, *one_by_one),
        _framed(pb.SessionRequest(seq=1, events=[hello, *events])),
        _framed(first, pb.SessionRequest(seq=2, events=[events[0], *[events[2]] * 3])),
    ]


def _core_of(key: int) -> _core.Scheduler:
    core = _core.Scheduler(hash_key=bytes([key]) * 16, leases_max=64, queue_max=64)
    core.set_flow(b"f", 1_000)
    core.set_unknown(core.set_flow(b"unknown", 100))
    core.set_pool(0, b"q", 1, 600, 16, 4)
    return core


class _Stream:
    """Holds a stream of a core of its own, and what it sent."""

    def __init__(self) -> None:
        self.core = _core_of(7)
        self.session = self.core.open_session(1)
        self.said: list[bytes] = []
        self.is_over = False
        self.faults = 0

    def push(self, now_ns: int, data: bytes) -> None:
        try:
            self.session.receive(now_ns, data)
        except _core.CallerError:
            self.is_over = True
            self.session.close(now_ns)
        self.core.poll(now_ns)
        while not self.is_over and (answer := self.session.take(now_ns)) is not None:
            self.said.append(answer)
            self.faults += len(pb.SessionResponse.FromString(answer).faults)
        self.core.check()


def session(data: bytes) -> None:
    """Run a stream that lies: it ends, or gets its faults, and no invariant ever breaks."""
    raw, again = _Stream(), _Stream()
    differs = False
    for number, message in enumerate(_messages(data), 1):
        now_ns = number * _S
        try:
            parsed = pb.SessionRequest.FromString(message)
        except DecodeError:
            before = raw.faults
            raw.push(now_ns, message)
            assert raw.is_over or raw.faults > before, "what is no message was taken"
            differs = True
        else:
            differs = differs or _says_twice(parsed, message)
            raw.push(now_ns, message)
            if not differs:
                again.push(now_ns, parsed.SerializeToString())
        if raw.is_over:
            break
    if not differs:
        assert raw.is_over == again.is_over
        assert raw.said == again.said
        assert raw.core.digest() == again.core.digest()


def _says_twice(parsed: Message, data: bytes) -> bool:
    """Return whether a message repeats what can stand only once, so that protobuf merges both."""
    return parsed.ByteSize() != len(data)


# The core's calls, in any order and with any numbers.


def life_corpus() -> list[bytes]:
    """A few orders of calls."""
    return [bytes(range(0, 250, 3)), bytes(range(250, 0, -7)) * 3, b"\1\5\1\5\2\3\4" * 20]


def life(data: bytes) -> None:
    """Admit, cancel, report, complete, time and pools as bytes say: the books balance."""
    core = _core_of(3)
    now_ns, serial = 0, 0
    leases: list[tuple[int, int]] = []
    handles: list[int] = []
    numbers = iter(data)

    def draw() -> int:
        return next(numbers, 0)

    for what in numbers:
        now_ns += draw() ** 3 * 1_000
        try:
            if what % 8 < 3:
                serial += draw() % 4 > 0
                handle = core.admit(
                    now_ns, draw() % 3, b"%d" % serial, 1 + draw() ** 2, 1 + draw() ** 2,
                    pool=draw() % 3 - 1, reports_progress=draw() % 2 > 0,
                )  # fmt: skip
                handles.append(handle)
            elif what % 8 == 3 and handles:
                core.cancel(now_ns, handles[draw() % len(handles)])
            elif what % 8 == 4 and leases:
                lease = leases[draw() % len(leases)]
                core.progress(now_ns, *lease, draw() ** 3, draw(), draw() ** 3)
            elif what % 8 == 5 and leases:
                lease = leases[draw() % len(leases)]
                core.complete(now_ns, *lease, draw() % 2 * 49, draw(), draw(), draw() ** 2)
            elif what % 8 == 6:
                core.set_pool(now_ns, b"q", draw() // 64, 16 + draw() * 8, 16, draw() % 9)
            else:
                core.telemetry(now_ns, 0, draw() // 64, 1, 0, draw() ** 2, draw())
        except _core.CallerError:
            pass
        for decision in core.poll(now_ns):
            if decision.outcome == _core.GRANTED:
                leases.append((decision.lease_id, decision.pool_epoch))
    core.check()
    while (deadline_ns := core.next_deadline()) >= 0:
        now_ns = max(now_ns, deadline_ns)
        core.poll(now_ns)
    core.check()
    totals = core.stats(now_ns)["totals"]
    assert (totals["queued"], totals["live_leases"], totals["promised_tokens"]) == (0, 0, 0)
