"""Divides the event loop's time between callers that want it at the same moment.

gRPC's asyncio server takes several turns of the loop for each call before our code can refuse it,
so a call of one caller waits for a turn of each open call of another. But a caller that waits for
its answers sends no further calls. So a caller that has had its part is answered later, which costs
the loop nothing, and its Sessions are read later.

A caller's part is half of the loop's time while another caller is active, and all of it otherwise.
A caller that only reads, such as a dashboard, waits for its turns but does not count as active.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from schedsvc._core import CallerError

__all__ = ["Turns"]

_PARTS = 2
#: Another caller counts as active for this long after its last call or message.
_ACTIVE_NS = 1_000_000_000
#: The part of the loop's time that a short unary call takes, gRPC included, and each of its bytes.
_CALL_NS, _BYTE_NS = 500_000, 50
#: The same for gRPC's work on a message of a Session, in either direction.
_MESSAGE_NS, _MESSAGE_BYTE_NS = 50_000, 5
#: A caller that was quiet may take this much of its part at once: an Admit and its Complete, or
#: ten short messages. Work that takes longer than a short turn has no such credit.
_BURST_NS, _SHORT_NS = 1_000_000, 200_000
#: The event loop's timers are not finer.
_TIMER_NS = 500_000
#: Calls of one caller that wait at once, and the bytes of their messages.
_HELD_MAX, _HELD_BYTES_MAX = 1_024, 4 << 20
_RESOURCE_EXHAUSTED = 8


class Turns:
    """Says when each caller's next turn is; one object serves all listeners."""

    def __init__(self) -> None:
        """Begin without callers."""
        self._latest = 0
        self._latest_ns = 0
        self._alone_from_ns = 0
        self._due_ns: dict[int, int] = {}
        self._held: dict[int, tuple[int, int]] = {}

    def _is_alone(self, principal: int, now_ns: int, *, reads: bool) -> bool:
        """Return whether no other caller has been active for a while; one that `reads` is not.

        O(1).
        """
        if reads and principal != self._latest:
            return self._latest == 0 or now_ns >= self._latest_ns + _ACTIVE_NS
        if not reads:
            self._latest_ns = now_ns
        if principal == self._latest:
            return now_ns >= self._alone_from_ns
        # The first caller of all has no other one beside it.
        self._alone_from_ns = now_ns + _ACTIVE_NS if self._latest else 0
        self._latest = principal
        return self._alone_from_ns == 0

    def begin_call(self, principal: int, size: int, *, reads: bool = False) -> int:
        """Count a unary call of some bytes; return how many ns later its turn is. O(1).

        One that only reads, as Stats does, takes nothing from other callers' parts.
        """
        now_ns = time.monotonic_ns()
        if self._is_alone(principal, now_ns, reads=reads):
            return 0
        turn_ns = max(self._due_ns.get(principal, 0), now_ns - _BURST_NS)
        self._due_ns[principal] = turn_ns + _cost_ns(size)
        return max(0, turn_ns - now_ns)

    def spend(self, principal: int, work_ns: int, *, reads: bool = False) -> int:
        """Count work that is done; return how many ns later the next turn is. O(1)."""
        now_ns = time.monotonic_ns()
        if self._is_alone(principal, now_ns, reads=reads):
            return 0
        credit_ns = _BURST_NS if work_ns < _SHORT_NS else work_ns
        due_ns = max(self._due_ns.get(principal, 0), now_ns - credit_ns) + _PARTS * work_ns
        self._due_ns[principal] = due_ns
        pause_ns = due_ns - now_ns
        return pause_ns if pause_ns >= _TIMER_NS else 0

    def spend_on_message(self, principal: int, work_ns: int, size: int) -> float:
        """Count a message of some bytes; return after how many seconds to go on. O(1)."""
        cost_ns = work_ns + _MESSAGE_NS + size * _MESSAGE_BYTE_NS
        return self.spend(principal, cost_ns) / 1e9

    def rests(self, principal: int) -> Callable[[], Awaitable[None]]:
        """Return what reading in slices awaits after each: it counts the slice, and lets others on.

        The first slice begins now. A pause is as long as the slices since the last one. It does not
        wait behind the caller's other calls: these would come due meanwhile, and then all be served
        in one long turn.
        """
        began_ns, owed_ns = time.monotonic_ns(), 0

        async def rest() -> None:
            nonlocal began_ns, owed_ns
            work_ns = time.monotonic_ns() - began_ns
            pause_ns = self.spend(principal, work_ns, reads=True)
            owed_ns += (_PARTS - 1) * work_ns
            pause_ns = min(pause_ns, owed_ns) if owed_ns >= _TIMER_NS else 0
            if pause_ns:
                owed_ns = 0
            await asyncio.sleep(pause_ns / 1e9)
            began_ns = time.monotonic_ns()

        return rest

    async def hold(self, principal: int, pause_ns: int, size: int) -> None:
        """Let a unary call of some bytes wait for its turn. O(1).

        Raises CallerError if too many of them wait, or of their bytes; then it was not counted.
        """
        count, held = self._held.get(principal, (0, 0))
        if count >= _HELD_MAX or held + size > _HELD_BYTES_MAX:
            self._due_ns[principal] = self._due_ns.get(principal, 0) - _cost_ns(size)
            what = f"{count:,} calls of this caller, {held:,} bytes, wait while others are served"
            raise CallerError(_RESOURCE_EXHAUSTED, "", f"{what}; retry, or use a Session")
        self._held[principal] = count + 1, held + size
        try:
            await asyncio.sleep(pause_ns / 1e9)
        finally:
            count, held = self._held.pop(principal)
            if count > 1:
                self._held[principal] = count - 1, held - size


def _cost_ns(size: int) -> int:
    return _PARTS * (_CALL_NS + size * _BYTE_NS)
