"""Serves callers of the driver: a record of a call that waits, and errors of the service."""

import asyncio
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from schedsvc._core import EVICTED_TTL, CallerError, Decision
from schedsvc.driver.clock import SteadyClock, boot_ns
from schedsvc.driver.upkeep import Leading, Ledgering, Loading, Saving, Sharing

if TYPE_CHECKING:
    from schedsvc._core import Scheduler

__all__ = [
    "Broken",
    "EscrowWatch",
    "NotLeading",
    "Records",
    "Waiting",
    "guarded",
    "out_of_patience",
]

P = ParamSpec("P")
R = TypeVar("R")
D = TypeVar("D", bound="Records")

#: Less than the margin by which a member counts its chunks shorter than the store.
_SLEPT_NS = 20_000_000


class Broken(RuntimeError):
    """We have a defect: this call failed, and if `Driver.broken`, every later one will."""


class NotLeading(Broken):
    """The member does not lead its set, or not any more; `target` is the leader's, if known."""

    def __init__(self, pool_set: str, target: str) -> None:
        ask = f"ask {target}" if target else "its leader is not known; retry"
        super().__init__(f"this member does not lead set {pool_set}; {ask}")
        self.target = target


def guarded(method: Callable[Concatenate[D, P], R]) -> Callable[Concatenate[D, P], R]:
    """Let errors of the caller through, and stop the driver on ours."""

    @wraps(method)
    def call(self: D, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.broken:
            raise Broken(self.broken)
        try:
            return method(self, *args, **kwargs)
        except (CallerError, NotLeading):
            raise
        except Exception as error:
            raise self._defect(error) from error

    return call


def out_of_patience(waited_ns: int) -> Decision:
    """Give the verdict for a call that joined in, and whose own TTL passed before the request's."""
    nothing = Decision(**dict.fromkeys(Decision._fields, 0))
    return nothing._replace(outcome=EVICTED_TTL, retry_after_ms=1_000, waited_ns=waited_ns, flow=-1)


class EscrowWatch:
    """Ends chunks through which the process slept, and wakes the task that asks for chunks.

    The scheduler's clock stands still in a pause, and the store's does not.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        #: boot_ns() less the scheduler's clock, at the last call; None: no chunk is held.
        self.lag_ns: int | None = None

    def end_chunks(self, core: "Scheduler", now_ns: int) -> None:
        """Take all chunks away if the process or the machine slept since the last call. O(1)."""
        if self.lag_ns is None:
            return
        lag_ns = boot_ns() - now_ns
        if lag_ns - self.lag_ns > _SLEPT_NS:
            self.lag_ns = lag_ns
            core.set_escrow(now_ns)


class Waiting:
    """Holds a queued request and the calls that wait for its verdict; a repeated call joins in."""

    __slots__ = ("calls", "delivered", "handle", "verdict")

    def __init__(self, handle: int, verdict: asyncio.Future[bytes]) -> None:
        self.handle = handle
        self.verdict = verdict
        #: Calls that neither have their answer nor left.
        self.calls = 0
        #: Some call has its answer, so the request is no longer ours to withdraw.
        self.delivered = False


class Records:
    """Holds the state of a driver's other work, such as saving, and of its right to decide."""

    def __init__(self, clock: SteadyClock) -> None:
        self.clock = clock
        #: Why nothing works any more; empty while all is well.
        self.broken = ""
        #: How the state is kept; None if it is not.
        self.saving: Saving | None = None
        #: How service is shared with the other members of a cluster; None if it is not.
        self.sharing: Sharing | None = None
        #: Chunks of quotas that members of a cluster share; None if they do not.
        self.escrow: EscrowWatch | None = None
        #: How the configuration was reloaded.
        self.loading = Loading()
        #: How the usage ledger is kept; None if it is not.
        self.ledgering: Ledgering | None = None
        #: The leader of the set of pools; None if the member has no role in one.
        self.leading: Leading | None = None
        #: The core decides only until the time that `leading` holds.
        self.is_under_term = False
        #: The serialised Leadership that answers state; empty without a term.
        self.leadership = b""

    def begin(self, core: "Scheduler") -> int:
        """Return the time of an event that may take from quotas, and end chunks that are over."""
        now_ns = self.clock.now_ns()
        if self.escrow is not None:
            self.escrow.end_chunks(core, now_ns)
        return now_ns

    def unsynced_ns(self) -> int:
        """Return the time since the last complete exchange with the store, in ns."""
        return 0 if self.sharing is None else self.clock.now_ns() - self.sharing.synced_ns

    def unsaved_ns(self) -> int:
        """Return what a restart now would lose, in ns; 0 where nothing is kept anyway."""
        return 0 if self.saving is None else self.clock.now_ns() - self.saving.saved_ns

    @property
    def leads(self) -> bool:
        """Return whether this member has a role, and may decide now. O(1)."""
        leading = self.leading
        return self.is_under_term and leading is not None and boot_ns() < leading.until_ns

    def check_term(self) -> None:
        """Raise NotLeading if the core may not decide any more. O(1)."""
        if self.is_under_term and self.leading and boot_ns() >= self.leading.until_ns:
            raise self.not_leading()

    def not_leading(self) -> NotLeading:
        """Return the error of a member that does not lead."""
        leading = self.leading
        if leading is None:
            return NotLeading("", "")
        is_mine = leading.leader == leading.me
        return NotLeading(leading.pool_set, "" if is_mine else leading.target)

    def _defect(self, error: Exception) -> Broken:
        """Note an unexpected error of the core; the driver says what follows from it."""
        raise NotImplementedError
