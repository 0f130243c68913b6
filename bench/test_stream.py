"""Measures a Session stream through gRPC beside the same stream with an empty handler."""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count

import pytest

from bench.calls import give_answer
from bench.compare import Comparison, abba, compare
from bench.echo import MESSAGES_METHOD
from bench.peers import Peer
from bench.record import Recorder
from bench.sizes import SIZES
from bench.streams import SESSION_METHOD, Pump, Stream

_series = count()


@pytest.fixture(scope="module")
def pump() -> Iterator[Pump]:
    """Run streams on one event loop."""
    pump = Pump()
    yield pump
    pump.close()


@pytest.fixture(scope="module")
def steady(ours: Peer, pump: Pump) -> None:
    """Let the scheduler store the most answers that it ever does."""
    with Stream(pump, ours, SESSION_METHOD, 128, counts_acks=True, series=next(_series)) as stream:
        stream.greet()
        stream.slice(SIZES.answers // 64)


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("events", SIZES.slice_messages)
def test_stream(record: Recorder, ours: Peer, theirs: Peer, pump: Pump, events: int) -> None:
    """Measure one stream that is never short of messages; the server has one core."""
    messages, rounds = SIZES.slice_messages[events], SIZES.rounds
    with ExitStack() as stack:

        def opened(peer: Peer, method: str) -> Stream:
            is_ours = peer is ours
            return stack.enter_context(
                Stream(pump, peer, method, events, counts_acks=is_ours, series=next(_series))
            )

        stream = opened(ours, SESSION_METHOD)
        stream.greet()
        give_answer(theirs, stream.answer)
        empty, again = opened(theirs, SESSION_METHOD), opened(theirs, SESSION_METHOD)
        record.once(lambda: stream.slice(messages))
        control = abba(lambda: empty.slice(messages), lambda: again.slice(messages), rounds)
        beside_empty = abba(lambda: empty.slice(messages), lambda: stream.slice(messages), rounds)
        beside_parsed = None
        if events == max(SIZES.slice_messages):
            parsed = opened(theirs, MESSAGES_METHOD)
            beside_parsed = abba(
                lambda: parsed.slice(messages), lambda: stream.slice(messages), rounds
            )
    record.control(
        f"stream, {events} a message: the empty handler beside itself", compare(control[:, :, 0])
    )
    _rung(record, "stream", events, "empty", compare(beside_empty[:, :, 0]))
    _rung(record, "stream.wall", events, "empty", compare(beside_empty[:, :, 1]))
    if beside_parsed is not None:
        _rung(record, "stream.messages", events, "empty, parsed", compare(beside_parsed[:, :, 0]))


_WHAT = {"stream": "server CPU", "stream.wall": "time", "stream.messages": "server CPU"}


def _rung(record: Recorder, name: str, events: int, reference: str, comparison: Comparison) -> None:
    record.rung(
        name,
        f"{events} a message: {_WHAT[name]}",
        {"events_per_message": events, "answers": SIZES.answers},
        # Both are times of an event, so reference/ours is the ratio of the rates ours/reference.
        figures={"median_ns": comparison.b, "events_per_s": 1e9 / comparison.b},
        reference=reference,
        comparison=comparison,
        reference_ns=comparison.a,
    )
