"""Drives the core: the single writer of its state, the waiting futures, and one timer.

For each event it calls the core and polls it, resolves the futures of verdicts, wakes sessions,
and sets the timer to the core's next deadline. Call all methods from the event loop's thread.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from schedsvc._core import Ended, InvariantError, Scheduler, Session
from schedsvc.config import Config, EntryLog, ModeOverlay, configure, reconfigure
from schedsvc.driver.calls import Broken, NotLeading, Waiting, guarded, out_of_patience
from schedsvc.driver.clock import SteadyClock
from schedsvc.driver.upkeep import Leading, Ledgering
from schedsvc.driver.views import Views

if TYPE_CHECKING:
    from schedsvc._core_cluster import ServiceRow
    from schedsvc._core_usage import UsageRow

__all__ = ["WORK_MAX", "Driver", "new_core"]

#: The core handles at most this many due events of each kind (TTLs that pass, requests that may
#: run) in one poll; then the event loop has its turn. Each event may wake a call that waits, which
#: costs far more than the decision: with the core's own bound, 1,024, the loop stood for 20 ms.
WORK_MAX = 128

#: Events in one part of a Session message (a new pool takes 15 us); no part begins after this time.
#: A call of another caller needs several turns of the event loop, and can meet a part in each.
_EVENTS_AT_ONCE, _TURN_NS = 16, 250_000

R = TypeVar("R")

_TIMER_TICK_NS = 1_000_000
#: How often a scheduler whose term is over looks whether it was renewed late.
_TERM_LOOK_S = 0.1


def new_core(config: Config, now_ns: int, **options: Any) -> Scheduler:
    """Make a core as the configuration says; `options` are further arguments of it."""
    core = Scheduler(**config.core_options(), **options)
    configure(core, config, now_ns)
    return core


class Driver(Views):
    """Owns a core and passes it every event, with the time."""

    def __init__(
        self,
        core: Scheduler,
        clock: SteadyClock,
        on_defect: Callable[[Exception, str], None] | None = None,
        on_note: Callable[[str, bytes, int, str], None] | None = None,
    ) -> None:
        """Take over a core.

        `on_defect` gets an unexpected exception and, if an invariant is broken and the driver
        stops, the core's state as text (else ""). `on_note` gets what belongs into a log, see the
        core's `take_notes()`.
        """
        super().__init__(core, clock)
        #: The mode of the configuration, and an operator's modes over it.
        self.mode_configured = "enforce"
        self.mode_overlay = ModeOverlay()
        #: Operators' settings of tenants, for the state file.
        self.tenant_entries = EntryLog()
        self._on_defect = on_defect
        self._on_note = on_note
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, Waiting] = {}
        self._wakers: dict[int, Callable[[], None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = -1
        self._on_usage: Callable[[list[UsageRow]], None] | None = None

    @guarded
    def admit(self, principal: int, data: bytes, queue_ttl_ns: int = 0) -> bytes | Waiting:
        """Ask for one request, as a serialised AdmitRequest.

        Returns the serialised AdmitResponse, or what `wait()` has to be called with at once.
        Raises CallerError. O(log n).
        """
        now_ns = self.begin(self._core)
        answer = self._core.admit_wire(now_ns, principal, data, queue_ttl_ns)
        if isinstance(answer, bytes):
            self._settle(now_ns)
            return answer
        waiting = self._waiting.get(answer)
        if waiting is None:
            waiting = self._waiting[answer] = Waiting(answer, self._loop.create_future())
        waiting.calls += 1
        self._settle(now_ns)
        return waiting

    async def wait(self, waiting: Waiting, queue_ttl_ns: int = 0) -> bytes:
        """Wait for the verdict, as a serialised AdmitResponse.

        The core keeps the queue TTL of the call that asked first; one that joined in is answered
        after its own `queue_ttl_ns` (0: none). When the last call that waits is cancelled, the
        request is withdrawn. If it was granted and no call had the answer yet, its lease is
        cancelled.
        """
        patience_s = queue_ttl_ns / 1e9 if queue_ttl_ns and waiting.calls > 1 else None
        try:
            async with asyncio.timeout(patience_s):
                answer = await asyncio.shield(waiting.verdict)
        except TimeoutError:
            self._leave(waiting)
            return self._core.encode(out_of_patience(queue_ttl_ns))
        except asyncio.CancelledError:
            self._leave(waiting)
            raise
        waiting.calls -= 1
        self.check_term()  # the verdict may be older than a pause of the process
        waiting.delivered = True
        return answer

    def _leave(self, waiting: Waiting) -> None:
        waiting.calls -= 1
        if waiting.calls == 0 and not waiting.delivered:
            with suppress(Broken):
                self._withdraw(waiting.handle)

    @guarded
    def _withdraw(self, handle: int) -> None:
        now_ns = self.clock.now_ns()
        self._waiting.pop(handle, None)
        self._core.cancel(now_ns, handle)
        self._settle(now_ns)

    @guarded
    def progress(
        self,
        lease_id: int,
        pool_epoch: int,
        input_tokens: int,
        cached_input_tokens: int,
        output_tokens: int,
        principal: int,
    ) -> int:
        """Renew one lease; -1 is an absent total. Call `settle()` after a batch. O(log n)."""
        return self._core.progress(
            self.clock.now_ns(),
            lease_id,
            pool_epoch,
            input_tokens,
            cached_input_tokens,
            output_tokens,
            principal,
        )

    @guarded
    def complete(
        self,
        lease_id: int,
        pool_epoch: int,
        outcome: int,
        input_tokens: int,
        cached_input_tokens: int,
        output_tokens: int,
        principal: int,
    ) -> Ended | None:
        """End one lease; None if it is unknown. O(log n)."""
        now_ns = self.clock.now_ns()
        totals = (input_tokens, cached_input_tokens, output_tokens, principal)
        ended = self._core.complete(now_ns, lease_id, pool_epoch, outcome, *totals)
        self._settle(now_ns)
        return ended

    @guarded
    def settle(self) -> None:
        """Let the core act on the events that it received."""
        self._settle(self.clock.now_ns())

    @guarded
    def open_session(self, principal: int, wake: Callable[[], None]) -> Session:
        """Begin a stream; `wake` is called when it has something to `take()`."""
        session = self._core.open_session(principal)
        self._wakers[session.owner] = wake
        return session

    @guarded
    def receive(self, session: Session, data: bytes | None) -> bool:
        """Apply a serialised SessionRequest, or (None) go on with the last one.

        Returns whether to go on: a long one takes several turns of the event loop. Raises
        CallerError if the stream has to end. O(events * log n).
        """
        now_ns = self.begin(self._core)
        # Each turn applies something, also if the thread was interrupted before it began.
        if data is None:
            has_more = session.receive_rest(now_ns, _EVENTS_AT_ONCE)
        else:
            has_more = session.receive(now_ns, data, _EVENTS_AT_ONCE)
        while has_more and self.clock.now_ns() - now_ns < _TURN_NS:
            has_more = session.receive_rest(now_ns, _EVENTS_AT_ONCE)
        self._settle(now_ns)
        return has_more

    @guarded
    def take(self, session: Session) -> bytes | None:
        """Take the next serialised SessionResponse of a stream, or None. Raises NotLeading."""
        self.check_term()
        return session.take(self.clock.now_ns())

    def close_session(self, session: Session) -> None:
        """End a stream: what is queued on it is withdrawn. Idempotent."""
        if self._wakers.pop(session.owner, None) is not None and not self.broken:
            self._close(session)

    @guarded
    def _close(self, session: Session) -> None:
        now_ns = self.clock.now_ns()
        session.close(now_ns)
        self._settle(now_ns)

    @guarded
    def set_principal(self, number: int, name: bytes, grants: Mapping[str, Any]) -> None:
        """Grant a principal names and places; see the core's `set_principal()`."""
        now_ns = self.clock.now_ns()
        self._core.set_principal(now_ns, number, name, **grants)
        self._settle(now_ns)

    @guarded
    def show_histograms(self, tenant: bytes, shown: bool) -> None:
        """Count a known tenant's times in histograms of its own, or with all others. O(classes)."""
        for flow in self._core.flow_indices(tenant)[:1]:
            self._core.show_histograms(flow, shown)

    @guarded
    def save(self, rows_max: int) -> list[tuple[bytes, bytes | None]]:
        """Return rows that changed since they were last returned; none once all are. O(rows)."""
        return self._core.save(self.clock.now_ns(), rows_max)

    @guarded
    def save_all(self) -> None:
        """Let `save()` return everything again, because what was saved is lost. O(1)."""
        self._core.save_all()

    @guarded
    def keep_usage(
        self, ledgering: Ledgering, on_usage: "Callable[[list[UsageRow]], None]"
    ) -> None:
        """Give rows of ended leases to a ledger from now on; see the core's `take_usage()`."""
        self.ledgering, self._on_usage = ledgering, on_usage
        self._core.set_usage_kept(self.clock.now_ns(), True)

    @guarded
    def take_served(self, rows_max: int) -> "list[ServiceRow]":
        """Return what was served since the last call; see the core's `take_served()`. O(rows)."""
        return self._core.take_served(rows_max)

    @guarded
    def begin_term(self, leading: Leading) -> None:
        """Let the core keep places, and take over those of the last leader. O(places + pools)."""
        self._core.set_term_begun(self.clock.now_ns(), leading.places, leading.is_cold)

    @guarded
    def take_places(self, rows_max: int) -> list[tuple[int, bytes, int]]:
        """Return places of the queue that changed; see the core's `take_places()`. O(changes)."""
        return self._core.take_places(rows_max)

    @guarded
    def drain(self) -> None:
        """Refuse everything new from now on."""
        now_ns = self.clock.now_ns()
        self._core.drain(now_ns)
        self._settle(now_ns)

    @guarded
    def reconfigure(self, config: Config, before: Config) -> list[tuple[str, str]]:
        """Let another configuration be in force from now on; see `config.reconfigure()`."""
        now_ns = self.clock.now_ns()
        kept = reconfigure(self._core, config, before, now_ns)
        self._settle(now_ns)
        return kept

    @guarded
    def change(self, how: Callable[[Scheduler, int], R]) -> R:
        """Let a function change the core's settings at the time that it gets."""
        now_ns = self.clock.now_ns()
        result = how(self._core, now_ns)
        self._settle(now_ns)
        return result

    @guarded
    def set_draining(self, pool: bytes, draining: bool) -> None:
        """Drain a pool, or (b"") all, or let it serve again. Raises CallerError."""
        now_ns = self.clock.now_ns()
        self._core.set_draining(now_ns, pool, draining)
        self._settle(now_ns)

    @guarded
    def forgive(self, tenant: bytes) -> int:
        """Let a tenant's own quota owe nothing; returns how many of its limits were overshot.

        Raises CallerError. O(1).
        """
        now_ns = self.clock.now_ns()
        found: int = self._core.set_forgiven(now_ns, tenant)
        if self.sharing is not None and self.escrow is not None:
            self.sharing.forgiven.append(tenant)  # its bucket is the store's
            self.escrow.wake()
        self._settle(now_ns)
        return found

    @guarded
    def release_pool(self, pool: bytes) -> None:
        """Let another caller offer a pool whose owner is gone. Raises CallerError. O(1)."""
        self._core.set_released(self.clock.now_ns(), pool)

    @guarded
    def revoke(self, lease_ids: list[int]) -> list[int]:
        """Void leases; return what each of them was, as LEASE_* states. O(leases)."""
        now_ns = self.clock.now_ns()
        states = [self._core.revoke(now_ns, lease_id) for lease_id in lease_ids]
        self._settle(now_ns)
        return states

    @guarded
    def evict_queued(self) -> int:
        """Evict all that is queued. Returns how many."""
        now_ns = self.clock.now_ns()
        evicted = self._core.evict_queued(now_ns)
        self._settle(now_ns)
        return evicted

    def end_term(self) -> None:
        """Fail the calls that wait, because another member decides now. O(calls)."""
        waiting, self._waiting = list(self._waiting.values()), {}
        for each in waiting:
            if not each.verdict.done():
                each.verdict.set_exception(self.not_leading())

    def close(self) -> None:
        """Stop the timer. Nothing may be called after it."""
        self.broken = self.broken or "the scheduler has stopped"
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _settle(self, now_ns: int) -> None:
        # A term ends by the clock, also if no timer could run meanwhile.
        self.check_term()
        core, escrow = self._core, self.escrow
        if escrow is not None:
            escrow.end_chunks(core, now_ns)
        for decision in core.poll(now_ns):
            waiting = self._waiting.pop(decision.handle, None)
            if waiting is not None:
                waiting.verdict.set_result(core.encode(decision))
        for note in core.take_notes():
            if self._on_note is not None:
                self._on_note(*note)
        if self._on_usage is not None and (rows := core.take_usage()):
            self._on_usage(rows)
        for owner in core.ready():
            wake = self._wakers.get(owner)
            if wake is not None:
                wake()
        if escrow is not None and core.escrow_is_wanted():
            escrow.wake()
        deadline_ns = core.next_deadline()
        # A later deadline than the timer's is left to the timer: it looks again when it fires.
        if deadline_ns >= 0 and (self._timer is None or deadline_ns < self._timer_ns):
            if self._timer is not None:
                self._timer.cancel()
            ticks = -(-max(deadline_ns - now_ns, 0) // _TIMER_TICK_NS)
            self._timer = self._loop.call_later(ticks / 1_000, self._on_timer)
            self._timer_ns = deadline_ns

    def _on_timer(self) -> None:
        self._timer = None
        if not self.broken:
            try:
                self._settle(self.clock.now_ns())
            except NotLeading:
                # The term may still be renewed, and then no other event may come.
                self._timer = self._loop.call_later(_TERM_LOOK_S, self._on_timer)
                self._timer_ns = self.clock.now_ns() + int(_TERM_LOOK_S * 1e9)
            except Exception as error:
                self._defect(error)

    def _defect(self, error: Exception) -> Broken:
        """Say what went wrong; stop for good where the core's books do not balance."""
        try:
            if isinstance(error, InvariantError):
                raise error
            self._core.check()
        except InvariantError as broken:
            self.broken = f"an invariant is broken: {broken}"
        state = ""
        if self.broken:
            self._stop_waiting()
            try:
                state = self._core.describe(self.clock.now_ns())
            except Exception as second:
                state = f"describe() failed: {second!r}"
        if self._on_defect is not None:
            self._on_defect(error, state)
        return Broken(self.broken or "an unexpected error")

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for waiting in self._waiting.values():
            waiting.verdict.set_exception(Broken(self.broken))
        self._waiting.clear()
        for wake in self._wakers.values():
            wake()
