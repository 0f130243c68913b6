"""Tests when a scheduler counts as silent: by its beats and the time that the client ran."""

from __future__ import annotations

import pytest
from schedsvc_client.aio.heartbeat import Heartbeat
from schedsvc_client.pulse import Pulse

MS = 1_000_000
BOUND = 1_200 * MS


class Driven:
    """Drives a pulse: its ticks come every step, and it keeps the beats that are sent."""

    def __init__(self) -> None:
        self.pulse = Pulse(BOUND)
        self.now_ns = 5 * BOUND
        self.sent = 0
        self.pulse.begin(self.now_ns, beats=True)

    def run(self, duration_ns: int) -> None:
        for _ in range(duration_ns // self.pulse.step_ns):
            self.now_ns += self.pulse.step_ns
            self.sent += self.pulse.tick(self.now_ns)

    def hear(self, *, beat: bool) -> bool:
        return self.pulse.heard(self.now_ns, beat=beat)


def test_a_scheduler_that_answers_is_asked_seldom() -> None:
    driven = Driven()
    for _ in range(30):
        driven.run(BOUND // 2)
        driven.hear(beat=driven.pulse._is_asked)
    assert not driven.pulse.is_silent
    assert driven.sent == 30


def test_messages_that_come_anyway_spare_the_beats() -> None:
    driven = Driven()
    driven.run(driven.pulse.step_ns)
    driven.hear(beat=True)
    for _ in range(30):
        driven.run(BOUND // 4)
        driven.hear(beat=False)
    assert driven.sent == 1


def test_silence_counts_from_the_last_message() -> None:
    driven = Driven()
    driven.run(driven.pulse.step_ns)
    driven.hear(beat=True)
    driven.run(BOUND - driven.pulse.step_ns)
    assert not driven.pulse.is_silent
    driven.run(driven.pulse.step_ns)
    assert driven.pulse.is_silent


def test_time_in_which_the_client_stood_still_does_not_count() -> None:
    driven = Driven()
    driven.run(BOUND // 2)
    assert driven.pulse._is_asked
    for _ in range(4):
        driven.now_ns += 100 * BOUND
        driven.pulse.tick(driven.now_ns)
    assert not driven.pulse.is_silent
    driven.run(BOUND // 2)
    assert driven.pulse.is_silent


def test_a_silent_scheduler_is_back_after_two_beats() -> None:
    driven = Driven()
    driven.run(BOUND)
    assert driven.pulse.is_silent
    assert not driven.hear(beat=False)
    assert driven.pulse.is_silent
    assert driven.hear(beat=True)
    assert driven.pulse.is_silent
    assert driven.pulse.tick(driven.now_ns)  # the second one is sent at once
    assert not driven.hear(beat=True)
    assert not driven.pulse.is_silent


def test_two_beats_with_a_silence_between_are_not_in_a_row() -> None:
    driven = Driven()
    driven.run(BOUND)
    driven.hear(beat=True)
    driven.run(BOUND)
    driven.hear(beat=True)
    assert driven.pulse.is_silent
    driven.run(driven.pulse.step_ns)
    driven.hear(beat=True)
    assert not driven.pulse.is_silent


def test_a_new_stream_alone_does_not_end_the_silence() -> None:
    driven = Driven()
    driven.run(BOUND)
    driven.pulse.end()
    driven.pulse.begin(driven.now_ns, beats=True)
    assert driven.pulse.is_silent
    # A scheduler that acknowledges no beats gives its Welcome alone.
    driven.pulse.begin(driven.now_ns, beats=False)
    assert not driven.pulse.is_silent
    assert not driven.pulse.runs


def test_stream_that_stays_silent_is_dead() -> None:
    driven = Driven()
    driven.run(BOUND)
    assert driven.pulse.is_silent
    assert not driven.pulse.is_dead
    driven.hear(beat=True)
    driven.run(BOUND)
    assert not driven.pulse.is_dead
    driven.run(BOUND)
    assert driven.pulse.is_dead
    driven.pulse.begin(driven.now_ns, beats=True)
    assert not driven.pulse.is_dead


def test_a_bound_of_zero_never_asks() -> None:
    pulse = Pulse(0)
    pulse.begin(0, beats=True)
    assert not pulse.runs


@pytest.mark.parametrize("hangs_up", [True, False])
async def test_silence_ends_the_stream_if_another_may_lead(hangs_up: bool) -> None:
    changes: list[None] = []
    beat = Heartbeat(60.0, lambda: None, lambda: changes.append(None), hangs_up=hangs_up)
    beat.begin(beats=True)
    # The bound has passed, without an answer to its beat.
    beat._pulse._is_asked, beat._pulse._silence_ns = True, 60 * 1_000 * MS
    beat._tick()
    assert beat._died.is_set() is hangs_up
    beat.end()
    assert beat.is_silent is not hangs_up  # the next scheduler is judged by itself
    assert len(changes) == (0 if hangs_up else 1)
