"""Judges from beats whether the scheduler answers: no socket, no clock, no task.

The driver of a Session calls `tick` every `step_ns` while it `runs`, sends a beat whenever `tick`
returns True, and reports what it reads to `heard`. Only time in which the driver's own loop ran
counts: a tick that comes late counts as one step. So a process that stood still never blames the
scheduler.

    state     event                                     then
    answers   nothing heard for the bound               silent
    silent    nothing heard for the bound once more     silent, and the stream is dead
    silent    two beats in a row are acknowledged       answers
    silent    a stream of a scheduler without beats     answers
"""

from __future__ import annotations

_STEPS = 12
"""Ticks within the bound."""
_STEPS_UNTIL_ASKED = 4
"""After this many ticks without a message, a beat asks for one."""
_BEATS_UNTIL_BACK = 2


class Pulse:
    """The scheduler's signs of life. A bound of 0 switches the judgement off."""

    def __init__(self, bound_ns: int) -> None:
        #: The scheduler gave no sign of life for the bound.
        self.is_silent = False
        #: This stream brought no message for twice the bound: another connection is worth a try.
        self.is_dead = False
        #: Between two ticks.
        self.step_ns = max(1, bound_ns // _STEPS)
        self._is_on = bound_ns > 0
        self._runs = False
        self._ticked_ns = 0
        # Time without a message that counts, in whole steps and parts of one.
        self._silence_ns = 0
        self._is_asked = False
        self._is_due = False
        self._beats = 0

    @property
    def runs(self) -> bool:
        """Return whether `tick` has to be called: a stream is open, and its scheduler beats."""
        return self._runs

    def begin(self, now_ns: int, *, beats: bool) -> None:
        """Take note of a Welcome; `beats`: its scheduler acknowledges beats."""
        self._runs = beats and self._is_on
        if not self._runs:
            self.is_silent = False
        self._ticked_ns = now_ns
        self._silence_ns = self._beats = 0
        self._is_asked = self.is_dead = False
        self._is_due = True

    def end(self) -> None:
        """Take note that the stream has ended. A silent scheduler stays silent."""
        self._runs = False

    def heard(self, now_ns: int, *, beat: bool) -> bool:
        """Take note of a message, `beat`: that acknowledges one; whether to `tick` at once."""
        self._ticked_ns, self._silence_ns = now_ns, 0
        if not beat:
            return False
        self._is_asked = False
        self._beats += 1
        if self._beats >= _BEATS_UNTIL_BACK:
            self.is_silent = False
        self._is_due = self.is_silent
        return self._is_due

    def tick(self, now_ns: int) -> bool:
        """Let time pass; return whether to send a beat now."""
        self._silence_ns += min(max(0, now_ns - self._ticked_ns), self.step_ns)
        self._ticked_ns = now_ns
        if self._is_asked and self._silence_ns >= _STEPS * self.step_ns:
            # Not after a beat in between: this stream carried something since it fell silent.
            self.is_dead = self.is_silent and not self._beats
            self.is_silent = True
            self._silence_ns = self._beats = 0
        asks_ns = 0 if self._is_due else _STEPS_UNTIL_ASKED * self.step_ns
        if self._is_asked or self._silence_ns < asks_ns:
            return False
        self._is_asked, self._is_due = True, False
        return True
