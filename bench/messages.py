"""Builds serialised messages as a shim sends them, fast enough to keep a server busy."""

import struct
from array import array
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from schedsvc_client.v1 import scheduler_pb2 as pb

__all__ = [
    "INPUT_TOKENS",
    "OUTPUT_TOKENS",
    "OUTPUT_TOKENS_MAX",
    "POOL_EPOCH",
    "Traffic",
    "admits",
    "tenant",
    "zipf",
]

INPUT_TOKENS = 100
OUTPUT_TOKENS = 50
OUTPUT_TOKENS_MAX = 100
POOL_EPOCH = 1

_ZIPF_EXPONENT = 1.1
_DRAWS = 1 << 18
_DIGITS = 10
# Tags and lease ids from here on keep their length on the wire.
_TAG_FIRST = 1 << 21
_LEASE_MARK = 0x0102030405060708

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


def zipf(flows: int, seed: int = 1) -> Sequence[int]:
    """Draw 262,144 flows, the k-th most frequent of them in proportion to k^-1.1.

    It needs little memory, because the memory of the core is measured beside.
    """
    shares = np.arange(1, flows + 1, dtype=np.float64) ** -_ZIPF_EXPONENT
    drawn = np.random.default_rng(seed).choice(flows, size=_DRAWS, p=shares / shares.sum())
    return array("i", drawn.astype(np.int32).tobytes())


def tenant(flow: int) -> str:
    """Return the name of a flow, always of one length."""
    return f"tenant-{flow:06d}"


def admits(flows: int, seed: int = 1) -> Iterator[bytes]:
    """Make serialised AdmitRequests without end, each for another request."""
    at = 0
    while True:
        for flow in zipf(flows, seed):
            yield _admit(f"unary-{at:0{_DIGITS}d}", tenant(flow)).SerializeToString()
            at += 1


def _admit(request_id: str, tenant: str) -> pb.AdmitRequest:
    return pb.AdmitRequest(
        request_id=request_id,
        tenant=tenant,
        input_tokens=[INPUT_TOKENS],
        max_output_tokens=OUTPUT_TOKENS_MAX,
        reports_progress=True,
    )


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _framed(event: pb.SessionEvent) -> bytes:
    framed: bytes = pb.SessionRequest(events=[event]).SerializeToString()
    return framed


def _write_digits(rows: Bytes, at: int, values: Ints, digits: int) -> None:
    rest = values.copy()
    for column in range(at + digits - 1, at - 1, -1):
        rows[:, column] = rest % 10 + ord("0")
        rest //= 10


class Traffic:
    """Yields a Session's messages in steady state, without end.

    Each message ends the leases that the one before it began, and asks for as many: half of its
    events are Completes, half Admits. With one event a message, the two take turns. The leases
    are known beforehand because a scheduler with one caller counts them up.
    """

    def __init__(self, events: int, flows: Sequence[int], series: int = 0) -> None:
        """Make messages of `events` events (1, or an even number), of these flows in turn.

        Each series (0 to 99) has request ids of its own.
        """
        if events != 1 and events % 2:
            raise ValueError("events: has to be 1 or even")
        self.events = events
        self._half = max(1, events // 2)
        self._flows = np.asarray(flows, dtype=np.int64)
        self._ids_from = series * 10**8
        self._asked = 0
        self._ended = 0
        self._seq = 0
        self._first_lease = 0
        mark = _admit("s-" + "0" * _DIGITS, tenant(0))
        admit = pb.SessionAdmit(tag=_TAG_FIRST, request=mark)
        self._admit = np.frombuffer(_framed(pb.SessionEvent(admit=admit)), np.uint8)
        complete = pb.CompleteRequest(
            lease_id=_LEASE_MARK,
            pool_epoch=POOL_EPOCH,
            outcome=pb.OUTCOME_COMPLETED,
            input_tokens=INPUT_TOKENS,
            output_tokens=OUTPUT_TOKENS,
        )
        self._complete = np.frombuffer(_framed(pb.SessionEvent(complete=complete)), np.uint8)
        template = self._admit.tobytes()
        self._tag_at = template.index(_varint(_TAG_FIRST))
        self._id_at = template.index(b"s-0") + 2
        self._tenant_at = template.index(b"tenant-") + len(b"tenant-")
        self._lease_at = self._complete.tobytes().index(struct.pack("<Q", _LEASE_MARK))

    def hello(self) -> bytes:
        """Return the first message."""
        hello = pb.SessionEvent(hello=pb.SessionHello(client_id="bench", incarnation=1))
        return self._message(_framed(hello))

    def asks(self) -> bytes:
        """Return a message of Admits alone, half as many as there are events."""
        return self._message(self._admit_rows(1).tobytes())

    def learn(self, answer: bytes) -> None:
        """Take the first lease id from the SessionResponse to the first `asks()`."""
        verdicts = pb.SessionResponse.FromString(answer).verdicts
        if len(verdicts) != self._half or not all(v.response.grant.lease_id for v in verdicts):
            raise ValueError("the first Admits were not all granted at once")
        self._first_lease = verdicts[0].response.grant.lease_id

    def take(self, messages: int) -> list[bytes]:
        """Return the next messages. O(events), about 30 ns for each."""
        if self.events == 1:
            pairs = messages // 2
            ends, asks = self._complete_rows(pairs), self._admit_rows(pairs)
            bodies = [row.tobytes() for pair in zip(ends, asks, strict=True) for row in pair]
        else:
            rows = (self._complete_rows(messages), self._admit_rows(messages))
            bodies = [row.tobytes() for row in np.concatenate(rows, axis=1)]
        return [self._message(body) for body in bodies]

    def _message(self, events: bytes) -> bytes:
        self._seq += 1
        return b"\x08" + _varint(self._seq) + events

    def _admit_rows(self, messages: int) -> Bytes:
        count = messages * self._half
        numbers = np.arange(self._asked, self._asked + count, dtype=np.int64)
        self._asked += count
        rows = np.repeat(self._admit[None, :], count, axis=0)
        for k in range(4):
            last = k == 3
            septet = (numbers + _TAG_FIRST) >> (7 * k) & 0x7F
            rows[:, self._tag_at + k] = septet if last else septet | 0x80
        _write_digits(rows, self._id_at, self._ids_from + numbers, _DIGITS)
        _write_digits(rows, self._tenant_at, self._flows[numbers % len(self._flows)], 6)
        return rows.reshape(messages, -1)

    def _complete_rows(self, messages: int) -> Bytes:
        count = messages * self._half
        leases = self._first_lease + np.arange(self._ended, self._ended + count, dtype=np.uint64)
        self._ended += count
        rows = np.repeat(self._complete[None, :], count, axis=0)
        rows[:, self._lease_at : self._lease_at + 8] = (
            leases.astype("<u8").view(np.uint8).reshape(count, 8)
        )
        return rows.reshape(messages, -1)
