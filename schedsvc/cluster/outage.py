"""Decides, for one of a member's tasks, whether the store is away and when it counts as back.

A store near its limit of memory takes small writes and refuses large ones, or each second one. So:

- A refused call is tried again by its size: the write that begins a new connection carries its
  words, and the store is back once it has taken them.
- A store that refuses writes again soon after it was back has to take them for a while first, and
  twice as long each time.
"""

from schedsvc.cluster.errors import Words, WritesRefusedError
from schedsvc.driver.clock import boot_ns

__all__ = ["Outage"]

#: The second refusal of writes within this time after the store was back is a relapse.
_RELAPSE_NS = 60_000_000_000
#: How long the store has to answer after the first relapse, and after many.
_WAIT_NS, _WAIT_MAX_NS = 1_000_000_000, 32_000_000_000


class Outage:
    """Follows a store that is away, and what it has to do to be back."""

    def __init__(self) -> None:
        """Begin with a store of which nothing is known."""
        #: The time by boot_ns() from which the store is away; 0: it is not.
        self.since_ns = 0
        #: The largest call that the store refused since it was well for long.
        self.refused: Words = ()
        #: How long the store has to answer before it is back; 0: its first answer is enough.
        self.wait_ns = 0
        self._is_refusal = False
        self._answers_ns = 0  # since when the store has answered all of this outage; 0: it did not
        self._back_ns = 0
        self._told: set[str] = set()

    def failed(self, error: Exception, reason: str) -> bool:
        """Note a failure; return whether a person has to hear of it: the reason is new."""
        now_ns = boot_ns()
        if not self.since_ns:
            self._begin(now_ns, is_refusal=isinstance(error, WritesRefusedError))
        self._answers_ns = 0
        if isinstance(error, WritesRefusedError):
            self._is_refusal = True
            self.refused = max(self.refused, error.words, key=_size)
        is_new = reason not in self._told
        self._told.add(reason)
        return is_new

    def _begin(self, now_ns: int, *, is_refusal: bool) -> None:
        is_relapse = is_refusal and self._is_refusal and now_ns - self._back_ns < _RELAPSE_NS
        self.wait_ns = min(2 * self.wait_ns or _WAIT_NS, _WAIT_MAX_NS) if is_relapse else 0
        if not is_relapse:
            self.refused, self._is_refusal = (), False
        self.since_ns = now_ns
        self._told.clear()

    def holds(self) -> bool:
        """Note an answer of the store; return whether it has to answer for longer to be back."""
        if not self.since_ns:
            return False
        self._answers_ns = self._answers_ns or boot_ns()
        return boot_ns() - self._answers_ns < self.wait_ns

    def answered(self) -> bool:
        """Note that the store took all; return whether it is back, or was never away."""
        if self.since_ns and not self.holds():
            self.since_ns, self._back_ns = 0, boot_ns()
        return not self.since_ns


def _size(words: Words) -> int:
    return sum(len(word) if isinstance(word, (str, bytes)) else 8 for word in words)
