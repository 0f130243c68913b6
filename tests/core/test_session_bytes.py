"""Sends random events, and random bytes where a SessionRequest should be."""

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from schedsvc_client.v1 import pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .stream import HELLO, Stream, asking, completing, offering, replaying, reporting
from .support import SECOND, is_drained, make
from .test_wire import QUICK

numbers = st.one_of(st.integers(-2, 50), st.sampled_from((1 << 27, 1 << 40, (1 << 63) - 1)))
names = st.sampled_from(("p", "q", "", "x" * 200, "ü"))


def built(kind: Any, **strategies: Any) -> Any:
    return st.fixed_dictionaries({}, optional=strategies).map(lambda given: kind(**given))


requests = built(
    pb.AdmitRequest,
    request_id=st.sampled_from(("r1", "r2", "r3", "")),
    tenant=st.sampled_from(("f", "f", "g", "")),
    pools=st.lists(names, max_size=3),
    input_tokens=st.lists(numbers, max_size=3),
    n=st.integers(-1, 3),
    max_output_tokens=numbers,
    deadline_ms=numbers,
)
ids = st.sampled_from((0, 1, 2, 3, 50, (1 << 64) - 1))
events = st.one_of(
    built(pb.SessionEvent, hello=built(pb.SessionHello, client_id=names)),
    built(
        pb.SessionEvent,
        pool=built(
            pool_pb2.PoolRegistration, pool=names, epoch=numbers, capacity_tokens=numbers,
            block_size_tokens=numbers, max_running=numbers, max_model_tokens=numbers,
        ),
    ),
    built(
        pb.SessionEvent,
        telemetry=built(
            pool_pb2.EngineTelemetry,
            pool=names,
            epoch=numbers,
            running=numbers,
            used_tokens=numbers,
        ),
    ),
    built(
        pb.SessionEvent,
        replay=built(
            pb.LeaseReplay, lease_id=ids, request_id=names, tenant=st.just("f"), pool=names,
            pool_epoch=numbers, reserved_tokens=numbers, prompt_tokens=numbers,
            max_output_tokens=numbers, input_tokens=numbers, output_tokens=numbers,
            sequences=st.integers(-1, 9),
        ),
    ),
    built(
        pb.SessionEvent,
        admit=built(pb.SessionAdmit, tag=st.integers(0, 4), request=requests),
    ),
    built(
        pb.SessionEvent,
        progress=built(
            pb.LeaseProgress, lease_id=ids, pool_epoch=numbers, input_tokens=numbers,
            cached_input_tokens=numbers, output_tokens=numbers,
        ),
    ),
    built(
        pb.SessionEvent,
        complete=built(
            pb.CompleteRequest, lease_id=ids, pool_epoch=numbers,
            outcome=st.sampled_from((0, 1, 48, 49, 50)), output_tokens=numbers,
        ),
    ),
    built(pb.SessionEvent, cancel=built(pb.SessionCancel, tag=st.integers(0, 4))),
)  # fmt: skip
GOOD = (
    asking(3, "good", 5, max_output_tokens=5),
    offering("q", 1, 50),
    replaying(50, "restored", input_tokens=3, output_tokens=4),
    reporting(1, 1, input_tokens=1, cached_input_tokens=0, output_tokens=3),
    completing(2, 1, output_tokens=3),
)


def receive(stream: Stream, now_ns: int, data: bytes) -> None:
    """Give it the bytes; a stream that cannot go on is closed. The books balance either way."""
    try:
        stream.session.receive(now_ns, data)
    except core.CallerError as e:
        stream.session.close(now_ns)
        if e.code not in (3, 8):
            raise
    stream.core.check()
    stream.core.poll(now_ns)
    stream.pull(now_ns)
    stream.core.check()


def prepared() -> tuple[core.Scheduler, Stream]:
    s = make(capacity=100)
    stream = Stream(s)
    stream.send(0, *(asking(i + 1, f"lease{i}") for i in range(2)))
    return s, stream


def finish(s: core.Scheduler, stream: Stream) -> None:
    stream.session.close(SECOND)
    s.poll(SECOND)
    s.poll(60 * SECOND)
    assert is_drained(s, 60 * SECOND)


@QUICK
@given(st.lists(st.lists(events, max_size=6), max_size=6))
def test_random_events(messages: list[list[pb.SessionEvent]]) -> None:
    s, stream = prepared()
    for sent in messages:
        stream.seq += 1
        data = pb.SessionRequest(seq=stream.seq, events=sent).SerializeToString()
        receive(stream, stream.seq, data)
    finish(s, stream)


@QUICK
@given(st.data(), st.binary(max_size=5), st.integers(0, 3))
def test_mutated_messages(data: st.DataObject, junk: bytes, drop: int) -> None:
    s, stream = prepared()
    whole = bytearray(pb.SessionRequest(seq=3, events=GOOD).SerializeToString())
    place = data.draw(st.integers(0, len(whole)))
    whole[place : place + drop] = junk
    receive(stream, 1, bytes(whole))
    finish(s, stream)


def test_every_flipped_bit_of_a_message() -> None:
    whole = pb.SessionRequest(seq=3, events=GOOD).SerializeToString()
    for bit in range(8 * len(whole)):
        s, stream = prepared()
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        receive(stream, 1, bytes(flipped))
        finish(s, stream)


def test_noise_instead_of_a_greeting() -> None:
    rnd = random.Random(9)
    s = make()
    for size in (1, 5, 60, 3_000):
        for _ in range(50):
            stream = Stream(s, greets=False)
            receive(stream, 0, rnd.randbytes(size))
            stream.session.close(0)
    assert is_drained(s, 0)


def test_unknown_fields_are_passed_over() -> None:
    stream = Stream(make(), greets=False)
    unknown = b"\xf2\x7f\x03abc" + b"\xf8\x7f\x05" + b"\xf9\x7f12345678" + b"\xfd\x7f1234"
    hello = HELLO.hello.SerializeToString() + unknown
    event = b"\x0a" + bytes([len(hello)]) + hello + unknown
    whole = b"\x08\x01" + unknown + b"\x12" + bytes([len(event)]) + event + unknown
    assert pb.SessionRequest.FromString(whole).events[0].hello.client_id == "shim"
    stream.session.receive(0, whole)
    assert stream.pull(0).welcome.lease_ttl_ms == 10_000
