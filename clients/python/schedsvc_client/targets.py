"""Target lists: the schedulers that a client may ask, and which of them it asks now.

Every client takes one target, or several separated by commas. It asks one of them and moves on to
another when that one fails. No socket, no clock: the caller reports what happened.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from schedsvc_client.channel import ClientOptions, backoff_ceiling_s, check_target

TARGETS_MAX = 16
"""The most targets of one client."""
FAILOVER_JITTER_S = 0.2
"""With several targets: the longest pause before the next attempt, during the failover wait."""
NAMED_JITTER_S = 0.02
"""The same for NAMED_S after a target has named the leader, which is then about to serve."""
NAMED_S = 0.5
NAMED_AGAIN_S = 2.0
"""The same name shortens the pauses again after this time: a target may name a dead leader for as
long as a term lasts."""


def check_targets(text: str) -> tuple[str, ...]:
    """Return the targets of a comma-separated list. Raises ValueError that names the wrong one."""
    if not isinstance(text, str):
        raise TypeError(f"target is {text!r}; it has to be a str, such as 127.0.0.1:7600")
    targets = tuple(check_target(part.strip()) for part in text.split(","))
    for index, target in enumerate(targets):
        if target in targets[:index]:
            raise ValueError(f"target {target!r} is listed twice; list each scheduler once")
    if len(targets) > TARGETS_MAX:
        raise ValueError(f"{len(targets)} targets are listed; list at most {TARGETS_MAX}")
    return targets


class Targets:
    """Lists the targets of one client."""

    def __init__(self, text: str) -> None:
        self.all = check_targets(text)
        self.current = self.all[0]
        self._jitter: Callable[[], float] = random.SystemRandom().random
        # Targets that failed since one last answered.
        self._failed: set[str] = set()
        # Until when each silent target is passed over, as the caller counts time.
        self._silent_until_s: dict[str, float] = {}
        # The leader that was named last, since when, and until when pauses are short for it.
        self._named, self._named_s, self._quick_until_s = "", 0.0, 0.0

    @property
    def several(self) -> bool:
        """Return whether there is another target to move on to."""
        return len(self.all) > 1

    def answered(self) -> None:
        """Take note that the current target serves this client."""
        if self._failed:
            self._failed.clear()
            self._silent_until_s.clear()

    def move_on(
        self, failed: str, leader: str = "", *, now_s: float = 0.0, silent_s: float = 0.0
    ) -> None:
        """Move on from a target that failed. O(targets).

        To `leader`, whom that target named, if it is in the list and has not failed itself; else to
        the next one of the list. `silent_s`: it gave no answer, and is skipped for that time while
        others answer, because asking it again would take as long. So a client waits at a standby
        until the standby leads. No effect if another call has moved on already.
        """
        if failed != self.current or not self.several:
            return
        self._failed.add(failed)
        if silent_s:
            self._silent_until_s[failed] = now_s + silent_s
        at = self.all.index(failed) + 1
        ring = self.all[at:] + self.all[:at]
        heard = [each for each in ring if self._silent_until_s.get(each, 0.0) <= now_s]
        if leader in heard and leader not in self._failed:
            self.current = leader
            if leader != self._named or now_s >= self._named_s + NAMED_AGAIN_S:
                self._named, self._named_s = leader, now_s
                self._quick_until_s = now_s + NAMED_S
        else:
            self.current = next(iter(heard or ring))
        if len(self._failed) == len(self.all):
            self._failed.clear()

    def pause_s(self, options: ClientOptions, failures: int, away_s: float, now_s: float) -> float:
        """Return how long to pause before the next attempt.

        `failures`: attempts in a row that failed; `away_s`: time since a scheduler last answered.
        During the failover wait the pause is short, because a standby leads within seconds. It is
        shorter still after a target has named the leader. `now_s`: as in `move_on`.
        """
        if self.several and away_s < options.failover_wait_s:
            most_s = NAMED_JITTER_S if now_s < self._quick_until_s else FAILOVER_JITTER_S
            return most_s * self._jitter()
        return backoff_ceiling_s(options, failures) * (0.5 + 0.5 * self._jitter())
