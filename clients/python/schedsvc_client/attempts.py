"""Tries a unary call at one target after another, and probes while a call is held.

No socket, no clock: the caller passes monotonic seconds in. With one target there is one attempt.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from schedsvc_client.channel import ClientOptions
from schedsvc_client.errors import CallError, asks_elsewhere, is_silence
from schedsvc_client.targets import Targets

_PROBES = 3
"""Probes in a row without an answer after which a scheduler is silent."""
# gRPC's words for a call that was never sent.
_NOT_SENT = "failed to connect"


class Method(NamedTuple):
    """Describes a unary method, before it is known which scheduler is called."""

    stub: Any
    name: str


class Service:
    """Names the methods of a service: `Service(SchedulerServiceStub).Stats` is a Method."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub

    def __getattr__(self, name: str) -> Method:
        return Method(self._stub, name)


class Attempts:
    """Makes the attempts of one call, inside its deadline.

    `once`: the call must not be done twice. It is repeated only if it was surely not done.
    """

    def __init__(
        self,
        targets: Targets,
        options: ClientOptions,
        now_s: float,
        deadline_s: float,
        *,
        once: bool = False,
    ) -> None:
        self._targets, self._options, self._once = targets, options, once
        self._deadline_s = deadline_s
        self._ends_s = now_s + deadline_s
        self._began_s = self._first_s = now_s
        self._failures = 0
        # The time from which no scheduler has answered.
        self._away_since_s = now_s

    @property
    def before_us(self) -> int:
        """Return the time that the call took before the last attempt began, in us."""
        return int((self._began_s - self._first_s) * 1e6)

    def timeout_s(self, now_s: float, *, held: bool = False) -> float:
        """Begin an attempt; return how long it may take. `held`: an answer may take its time."""
        self._began_s = now_s
        if not self._targets.several:
            return self._deadline_s
        left_s = max(0.001, self._ends_s - now_s)
        silent_s = self._options.failover_silent_after_s
        # A call that must not be done twice cannot be repeated after a silence.
        return left_s if held or self._once or not silent_s else min(left_s, silent_s)

    def failed(self, target: str, error: CallError, now_s: float) -> float:
        """Move on after a failure; return the pause before the next attempt.

        Raises the error if there is none: with one target, if the scheduler answered, at the
        deadline, or if no scheduler has answered for the failover wait.
        """
        if not (self._targets.several and asks_elsewhere(error)):
            raise error
        silent_s = self._options.failover_silent_after_s if is_silence(error) else 0.0
        self._targets.move_on(target, error.leader, now_s=now_s, silent_s=silent_s)
        if self._once and not (error.leader or _NOT_SENT in error.message):
            raise error
        if now_s - self._began_s > self._options.failover_wait_s:
            # It was held by a scheduler that answered until then.
            self._away_since_s, self._failures = now_s, 0
        self._failures += 1
        away_s = now_s - self._away_since_s
        pause_s = self._targets.pause_s(self._options, self._failures, away_s, now_s)
        if away_s > self._options.failover_wait_s or now_s + pause_s >= self._ends_s:
            raise error
        return pause_s


class Probes:
    """Finds out whether the scheduler that holds calls still answers.

    A probe is a call that every scheduler answers at once. All held calls of a client share them.
    Each has its own deadline, so a client that stood still loses one probe at most.
    """

    def __init__(self, options: ClientOptions) -> None:
        #: Between two probes, and the deadline of each.
        self.step_s = options.failover_silent_after_s / _PROBES
        self._target = ""
        self._probed_s = 0.0
        self._missed = 0

    def due(self, target: str, now_s: float) -> bool:
        """Return whether the caller has to probe the target now."""
        if target != self._target:
            self._target, self._missed = target, 0
        elif now_s < self._probed_s + self.step_s:
            return False
        self._probed_s = now_s
        return True

    def judged(self, target: str, *, answered: bool) -> None:
        """Take note of the result of a probe."""
        if target == self._target:
            self._missed = 0 if answered else self._missed + 1

    def is_silent(self, target: str) -> bool:
        """Return whether that target has answered none of the last probes."""
        return target == self._target and self._missed >= _PROBES
