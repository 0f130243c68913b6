"""The task by which a member comes to lead its set, goes on leading, and stops.

A member calls `stand_by()`, which returns once it leads, then `lead()`, which returns once it does
not lead any more, and so on. `hand_over()` ends a term early. A driver may decide by
`Leading.until_ns` alone, which this task writes: a term ends by the clock, also if the task gets no
turn.

- A term's end counts from before the call that took or renewed it.
- A leader that does not reach the store goes on leading while no other member can start a term:
  each member that may take the next one has promised not to, or there is none.
- A member that does not reach the store, and does not lead, starts no term.
- Nor does it within a term after it connected to the store, or saw that the store lost data. A
  leader of which neither the store nor this life of the member knows has then ended, or is known.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from schedsvc.cluster.errors import StoreError, WritesRefusedError
from schedsvc.cluster.joining import Identity
from schedsvc.cluster.outage import Outage
from schedsvc.cluster.store import StoreConnection, open_any
from schedsvc.cluster.term_file import TermFile
from schedsvc.cluster.terms import TERM_MS, Term, Terms, term_end_ns
from schedsvc.config.cluster import Cluster
from schedsvc.config.files import read_file
from schedsvc.driver import Leading
from schedsvc.driver.clock import boot_ns

__all__ = ["Campaign"]

_log = structlog.get_logger("schedsvc.cluster")

_RENEW_S = 0.5
_TRY_S = 0.1
#: Between two looks of a member that has handed its term over, until another one leads.
_LOOK_S = 0.01
#: One try: connecting and one call.
_ATTEMPT_S = 1.0
#: One try to renew: two that hang, and the pauses before them, fit into a term.
_RENEW_ATTEMPT_S = 0.6
_NOTE_NS = 1_000_000_000
_TERM_NS = TERM_MS * 1_000_000


class Campaign:
    """Follows one member's way to lead its set, over all terms of this process."""

    def __init__(
        self,
        settings: Cluster,
        resolve: Callable[[str], Path],
        who: Identity,
        leading: Leading,
        state_file: Path,
    ) -> None:
        """Read the cluster's secret, and the highest term of earlier lives. Raises OSError."""
        secret = read_file(resolve(settings.secret_file or "")).strip()
        self._settings, self._resolve = settings, resolve
        self._servers = list(settings.store.urls)
        self._may_lead = settings.role == "auto"
        self._file = TermFile(state_file, settings.set or "")
        kept = self._file.number, self._file.led
        self._terms = Terms(who, settings.set or "", settings.advertised, secret, *kept)
        self._leading = leading
        leading.on_report = self._reported
        #: The last term of the set before the one in which this member leads.
        self.last: Term | None = None
        self._link: StoreConnection | None = None
        self._outage = Outage()
        self._hurried = asyncio.Event()
        #: Members that may take the next term, as the store said last; None: not in this term yet.
        self._rivals: frozenset[str] | None = None
        #: Until when others start no term, by boot_ns() of this member.
        self._promises: dict[str, int] = {}
        #: Until when this member starts no term, because it has promised a leader.
        self._promised_ns = 0
        self._noted_ns = 0  # when it left its last note
        #: Until when a leader may live of which the store knows nothing.
        self._unsure_ns = 0

    async def stand_by(
        self, leader_lives: Callable[[], bool], differs: Callable[[], bool] = lambda: False
    ) -> None:
        """Return once this member leads.

        `leader_lives()`: whether the leader whose rows this member follows was heard of just now.
        `differs()`: whether a leader has refused this member for its configuration.
        """
        missing_ns = 0
        while True:
            try:
                async with asyncio.timeout(_ATTEMPT_S):
                    link = await self._connected()
                    may_lead = self._may_lead and not differs()
                    term = await self._terms.look(link, may_lead=may_lead)
                    if self._terms.lost_data:
                        self._unsure_ns = boot_ns() + _TERM_NS
                    self._note(term)
                    await self._leave_note(link)
                    await self._keep()
                    for led in (term, self._terms.last):
                        if led is not None and (self.last is None or led.number > self.last.number):
                            self.last = led
                    if term is not None:
                        missing_ns = 0
                    elif may_lead:
                        missing_ns = missing_ns or boot_ns()
                        # A leader that lives writes its term again after the store lost it.
                        is_over = not leader_lives() or boot_ns() - missing_ns >= _TERM_NS
                        if is_over and self._may_take() and await self._take(link):
                            return
            except (StoreError, TimeoutError) as error:
                await self._failed(error)
                await self._keep()  # what the followed leader stated
            await self._pause(_TRY_S)

    def _may_take(self) -> bool:
        """Return whether no leader can live unknown to the store, or by a promise."""
        now_ns = boot_ns()
        is_sure = now_ns >= self._unsure_ns or self._terms.is_first
        return is_sure and now_ns >= self._promised_ns

    async def lead(self) -> None:
        """Renew the term until it is lost; at once at first, to hear of other members."""
        pause_s = 0.0
        while True:
            if pause_s:
                await self._pause(pause_s)
            try:
                async with asyncio.timeout(_RENEW_ATTEMPT_S):
                    link = await self._connected()
                    is_over = boot_ns() >= self._leading.until_ns
                    if is_over and not await self._terms.is_known(link):
                        self._lose("the term is over, and the store has lost its data")
                        return
                    await self._leave_note(link)
                    found = await self._terms.renew(link)
            except (StoreError, TimeoutError) as error:
                await self._failed(error, _RENEW_ATTEMPT_S)
                self._extend()
                pause_s = _TRY_S
            else:
                if isinstance(found, Term):
                    self._note(found)
                    self._lose(f"member {found.leader} leads in term {found.number}")
                    return
                self._leading.until_ns, self._rivals = found[0], frozenset(found[1])
                self._well()
                pause_s = _RENEW_S
            if boot_ns() >= self._leading.until_ns:
                self._lose("the store does not answer, and another member can start a term")
                return

    async def hand_over(self) -> None:
        """Stop leading, and let another member take the next term at once."""
        self._leading.until_ns = 0
        self._leading.leader = self._leading.target = ""
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(_ATTEMPT_S):
                await self._terms.release(await self._connected())
        _log.info("term_handed_over", set=self._leading.pool_set, term=self._leading.term)

    async def successor(self) -> str:
        """Return the target of the member that leads next, once the store names one.

        `Leading` has it from then on. "": the store does not answer. Waits without an end.
        """
        try:
            link = await self._connected()
            term = None
            while term is None:
                await asyncio.sleep(_LOOK_S)
                term = await self._terms.look(link, may_lead=False)
        except StoreError:
            return ""
        finally:
            await self._keep()
        self._note(term)
        return term.target

    async def close(self) -> None:
        """Hang up, once the highest term is on the disk."""
        await self._keep()
        await self._drop()

    def promise(self) -> bool:
        """Promise to start no term for TERM_MS, if this member does not reach the store."""
        if not self._leading.problem and self._may_lead:
            return False
        self._promised_ns = boot_ns() + _TERM_NS
        return True

    def promised(self, member: str, asked_ns: int) -> None:
        """Note the promise of a member that was asked for it then, by boot_ns()."""
        self._promises[member] = term_end_ns(asked_ns)

    def follow(self, term: int, leader: str) -> bool:
        """Note the term that a followed leader stated; returns whether it can be."""
        return self._terms.follow(term, leader)

    def handed_over(self, term: int) -> None:
        """Ask the store now, because the followed leader has handed its term over."""
        if term >= self._terms.led[0]:
            self._unsure_ns = 0  # no other leader lives than that one, which has ended
        self._hurried.set()

    async def _take(self, link: StoreConnection) -> bool:
        taken = await self._terms.take(link)
        if taken is None:
            return False
        term, until_ns = taken
        await self._keep()
        self._note(term)
        self._rivals, self._promises = None, {}
        self._leading.until_ns = until_ns
        self._leading.taken += 1
        _log.info("term_taken", set=self._leading.pool_set, term=term.number)
        return True

    def _extend(self) -> None:
        """Go on leading without the store, if no other member can start a term."""
        now_ns = boot_ns()
        if now_ns < self._leading.until_ns and self._rivals is not None:
            rivals = self._rivals.union(self._leading.followers)
            ends_ns = [self._promises.get(member, 0) for member in rivals]
            until_ns = min(ends_ns, default=term_end_ns(now_ns))
            self._leading.until_ns = max(self._leading.until_ns, until_ns)

    def _lose(self, reason: str) -> None:
        self._leading.until_ns = 0
        self._leading.lost += 1
        _log.error("term_lost", set=self._leading.pool_set, reason=reason)

    def _reported(self, term: int) -> bool:
        if not self._terms.hint(term):
            return False
        self._hurried.set()
        return True

    def _note(self, term: Term | None) -> None:
        leading = self._leading
        leading.term = self._terms.led[0]
        leading.leader, leading.target = ("", "") if term is None else (term.leader, term.target)
        self._well()

    async def _leave_note(self, link: StoreConnection) -> None:
        """Let the store know once a second what this member does, for a person who asks."""
        now_ns, leading = boot_ns(), self._leading
        if now_ns < self._noted_ns + _NOTE_NS:
            return
        self._noted_ns = now_ns
        leads, follows = now_ns < leading.until_ns, leading.followed_ns
        note = {
            "address": self._settings.advertised,
            "role": "leader" if leads else "standby" if self._may_lead else "follower",
            "term": leading.term,
            "followed_ms": (now_ns - follows) // 1_000_000 if follows and not leads else None,
            "lag_ms": (now_ns - leading.heard_ns) // 1_000_000 if follows and not leads else None,
        }
        await self._terms.note(link, json.dumps(note))

    async def _keep(self) -> None:
        """Have the highest term on the disk before this member acts on it."""
        known = self._terms.highest, self._terms.led
        if self._file.lacks(*known):
            await asyncio.to_thread(self._file.keep, *known)

    def _well(self) -> None:
        self._leading.forged = self._terms.forged
        if self._outage.answered() and self._leading.problem:
            self._leading.problem, self._leading.refuses_writes = "", False
            _log.info("cluster_terms_known")

    async def _pause(self, seconds: float) -> None:
        """Wait until the next try; a hurried one waits too, so that no client causes a flood."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurried.wait()
                self._hurried.clear()
                await asyncio.sleep(_TRY_S / 10)

    async def _connected(self) -> StoreConnection:
        if self._link is not None:
            return self._link
        self._link = await open_any(
            self._settings, self._resolve, self._servers, self._outage.refused
        )
        self._unsure_ns = boot_ns() + _TERM_NS
        return self._link

    async def _failed(self, error: Exception, attempt_s: float = _ATTEMPT_S) -> None:
        reason = str(error) or f"no answer within {attempt_s:g} s"
        if self._outage.failed(error, reason):
            _log.warning("cluster_terms_unknown", reason=reason)
        self._leading.problem = reason
        self._leading.refuses_writes = isinstance(error, WritesRefusedError)
        self._leading.forged = self._terms.forged
        await self._drop()

    async def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()
