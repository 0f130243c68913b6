"""Tests that a Session message applied in parts has the effect of one applied in one piece."""

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .stream import HELLO, Stream, asking, cancelling, completing, faults, offering, reporting
from .support import is_drained, make


def message(seq: int, *events: pb.SessionEvent) -> bytes:
    return pb.SessionRequest(seq=seq, events=events).SerializeToString()


def mixed(count: int) -> list[pb.SessionEvent]:
    """Yield events of every kind that a running stream sends, with wrong ones between them."""
    events: list[pb.SessionEvent] = []
    for n in range(count):
        events += [asking(n + 1, f"r{n}"), asking(0, "r"), reporting(n, output_tokens=1)]
        events += [cancelling(n), completing(n), offering(f"p{n}")]
    return events


@pytest.mark.parametrize("at_once", [1, 7, 64, 599, 600, 4_096])
def test_parts_of_a_message_do_what_the_whole_does(at_once: int) -> None:
    whole, parted = (Stream(make(capacity=500)) for _ in range(2))
    events = mixed(100)
    whole.push(5, *events)
    parts = 1
    has_more = parted.session.receive(5, message(2, *events), at_once)
    while has_more:
        has_more = parted.session.receive_rest(5, at_once)
        parts += 1
    parted.core.poll(5)
    assert parts == (1 if at_once == 4_096 else 600 // at_once + 1)
    assert parted.pull(5) == whole.pull(5)
    assert parted.core.digest() == whole.core.digest()
    parted.core.check()


def test_message_is_acknowledged_after_its_last_part() -> None:
    stream = Stream(make())
    assert stream.session.receive(0, message(2, *[asking(0, "r")] * 3), 2)
    answer = stream.pull(0)
    assert (answer.ack_seq, len(faults(answer))) == (1, 2)
    assert not stream.session.receive_rest(0, 2)
    answer = stream.pull(0)
    assert (answer.ack_seq, len(faults(answer))) == (2, 1)


def test_rest_comes_before_the_next_message() -> None:
    stream = Stream(make())
    with pytest.raises(ValueError, match="nothing is left"):
        stream.session.receive_rest(0, 1)
    assert stream.session.receive(0, message(2, cancelling(1), cancelling(2)), 1)
    with pytest.raises(ValueError, match="receive_rest"):
        stream.session.receive(0, message(3))
    assert stream.session.receive_rest(0, 1)  # it has not seen the end
    assert not stream.session.receive_rest(0, 1)
    assert not stream.session.receive(0, message(3))


def test_4097_events_are_refused_in_parts_too() -> None:
    stream = Stream(make())
    assert stream.session.receive(0, message(2, *[cancelling(9)] * 4_097), 4_000)
    with pytest.raises(core.CallerError, match="at most 4,096 in a message"):
        stream.session.receive_rest(0, 4_000)


def test_stream_that_ends_within_a_message_leaves_nothing() -> None:
    stream = Stream(make())
    assert stream.session.receive(0, message(2, asking(1, "a"), asking(2, "b"), HELLO), 2)
    with pytest.raises(core.CallerError) as caught:
        stream.session.receive_rest(0, 2)
    assert caught.value.field == "hello"
    stream.session.close(0)
    stream.core.poll(0)
    assert is_drained(stream.core, 0)
