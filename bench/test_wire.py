"""Passes serialised messages into the core and out of it, without a socket."""

import pytest

from bench.cores import Wire
from bench.messages import Traffic, zipf
from bench.record import Recorder
from bench.sizes import SIZES


def test_admit_wire(record: Recorder) -> None:
    """Measure a serialised AdmitRequest, granted at once."""
    world = Wire()
    world.store_answers(SIZES.answers)
    figures = record.steps(world.admit, world.next_admit, SIZES.steps)
    world.core.check()
    record.rung(
        "wire.admit",
        "Admit",
        {"flows": Wire.FLOWS, "answers": SIZES.answers},
        figures=figures,
        digest=world.core.digest(),
    )


@pytest.mark.parametrize("events", SIZES.slice_messages)
def test_session_wire(record: Recorder, events: int) -> None:
    """A SessionRequest, half Completes and half Admits."""
    world = Wire()
    world.store_answers(SIZES.answers)
    traffic = Traffic(events, zipf(Wire.FLOWS))
    world.open(traffic)
    count = max(10, 4 * SIZES.steps // events)
    # One message in twenty warms up.
    prepared = iter(traffic.take(2 * count))
    figures = record.steps(world.exchange, lambda: (next(prepared),), count, events)
    world.core.check()
    record.rung(
        "wire.session",
        f"Session, {events} a message",
        {"events_per_message": events, "answers": SIZES.answers},
        figures=figures,
        digest=world.core.digest(),
    )
