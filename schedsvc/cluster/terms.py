"""Says which member leads a set, by its term in the store.

A member calls `look()` and, if no member leads, `take()`; a leader calls `renew()`, and `release()`
when it stops. Every method raises StoreError. Rows are sealed with the cluster's secret. A row that
is not, or whose term is lower than one of the same set that was seen, has no effect: it is logged,
counted and replaced. A sealed term that is more than JUMP_MAX above the highest known one of the
cluster is refused: a person has to look at it, because terms grow by one with each new leader.

All sets of a cluster count their terms together. So the highest term of the cluster is often that
of another set, and the leader of this one goes on in a lower term.
"""

from dataclasses import dataclass

import structlog

from schedsvc.cluster.errors import StoreError, StoreRefusedError
from schedsvc.cluster.joining import Identity
from schedsvc.cluster.library import notes_key_of, term_keys_of
from schedsvc.cluster.signing import ForgedRowError, open_row, seal_row
from schedsvc.cluster.store import StoreConnection
from schedsvc.driver.clock import boot_ns

__all__ = ["JUMP_MAX", "TERM_MS", "Term", "Terms", "term_end_ns"]

_log = structlog.get_logger("schedsvc.cluster")

#: A term lasts this long in the store, unless its leader renews it.
TERM_MS = 2_000
#: The part that a leader takes off its term, because no two clocks run alike.
_MARGIN = 50
JUMP_MAX = 1_000
#: A member that may take the next term counts for this long after its last try.
_STANDBY_MS = 3_000
_COUNTER = b"terms"


@dataclass(frozen=True)
class Term:
    """Describes a term of a set, and the member that leads in it."""

    number: int
    #: The member's name, a slash, and one life of its process.
    leader: str
    #: At which clients and followers reach the leader.
    target: str


def term_end_ns(began_ns: int) -> int:
    """Return when a term ends that was taken or renewed by a call begun then, by boot_ns()."""
    lasts_ns = TERM_MS * 1_000_000
    return began_ns + lasts_ns - lasts_ns // _MARGIN


class Terms:
    """Holds the terms of a member's set, as that member knows them."""

    def __init__(
        self,
        who: Identity,
        pool_set: str,
        target: str,
        secret: bytes,
        highest: int = 0,
        led: tuple[int, str] = (0, ""),
    ) -> None:
        """Begin with the highest term known from an earlier life of this member; 0: none.

        `led`: the highest term of the set that it knew, and its leader.
        """
        self._set, self._target, self._secret = pool_set, target, secret
        self._keys = term_keys_of(who.cluster, pool_set)
        self._notes_key = notes_key_of(who.cluster, pool_set)
        self._member, self._leader = who.member, f"{who.member}/{who.life}"
        self._place = f"term:{pool_set}".encode()
        #: The highest term of any set that this member has seen in sealed rows, or followed.
        self.highest = highest
        #: The highest term that a client reported. Only a hint: clients prove nothing.
        self.reported = 0
        #: Rows that were not sealed with the secret, or older than one that was seen.
        self.forged = 0
        #: Whether the last look found a lower counter than the one before it, or none, or that the
        #: store may have forgotten a term.
        self.lost_data = False
        #: For how long the store counts it among those that may lead; None: it has not asked yet.
        self._stands_until_ns: int | None = None
        self._counted = 0  # the counter that the last look found
        self._refused = 0  # the term that was logged as a jump
        #: The last term of the set, also if it is over.
        self.last: Term | None = None
        self._seen = b"", b""  # hold and counter of the last look
        self._mine = b"", b""
        #: The highest term of this set that this member has seen or taken, and its leader.
        self.led = led

    @property
    def is_first(self) -> bool:
        """Return whether neither the store nor anyone else has stated a term yet."""
        return not self.highest and not self.reported

    def follow(self, number: int, leader: str) -> bool:
        """Note a term that an authenticated member stated. Returns whether it can be."""
        if self.highest and number > self.highest + JUMP_MAX:
            self._refuse(number)
            return False
        if self._is_repeated(number, leader):
            return False
        self.highest = max(self.highest, number)
        return True

    def hint(self, number: int) -> bool:
        """Note a term that a client reported; returns whether it is above those of this set.

        A client can raise the next term by JUMP_MAX - 1 at most.
        """
        if not self.led[0] < number < self.highest + JUMP_MAX:
            return False
        self.reported = max(self.reported, number)
        return True

    async def look(self, link: StoreConnection, *, may_lead: bool) -> Term | None:
        """Return the term that runs, or None if no member leads the set.

        `may_lead`: the leader hears that this member may take the next term.
        """
        name = self._member if may_lead else ""
        began_ns = boot_ns()
        hold, counter, last, is_new = await link.call(
            "schedsvc_term_look", self._keys, self._set, name, _STANDBY_MS
        )
        self._seen = hold, counter
        self.last = self._read(last) if last else None
        found = self._open(_COUNTER, counter) if counter else None
        number = found[0] if found else 0
        # A term that was lost before this member saw it leaves no other trace. A member that was
        # away longer, or led, sees that only if the store has no row of the set: the counter may be
        # another set's.
        is_forgotten = (
            is_new == 1
            and self._stands_until_ns is not None
            and (began_ns < self._stands_until_ns or self.last is None)
        )
        self.lost_data, self._counted = is_forgotten or number < self._counted, number
        if may_lead:
            self._stands_until_ns = began_ns + _STANDBY_MS * 1_000_000
        term = self._read(hold) if hold else None
        # A leader whose term the store lost writes its row again, and the counter stays behind.
        number = max(number, self.last.number if self.last else 0)
        self._check_jump(max(number, term.number if term else 0))
        # The two rows are written together, so no sealed hold is above the counter for long.
        known = max(self.led[0], self.last.number if self.last else 0)
        if term is not None and term.number < known:
            self._forge(f"term {term.number} is older than term {known} of the same set")
            term = None
        if term is not None and self._is_repeated(term.number, term.leader):
            term = None
        self.highest = max(self.highest, number, term.number if term else 0)
        if self.last is not None and self.led[0] < self.last.number <= self.highest:
            self.led = self.last.number, self.last.leader
        return term

    def _is_repeated(self, number: int, leader: str) -> bool:
        """Return whether another member had this term: the store lost it, and gave it again.

        Clients of the one ignore the other. So neither goes on: the next term is taken.
        """
        known, holder = self.led
        if number == known and leader != holder:
            _log.error(
                "cluster_term_repeated",
                term=number,
                leaders=[holder, leader],
                effect="the next term begins",
            )
            return True
        if number > known:
            self.led = number, leader
        return False

    async def take(self, link: StoreConnection) -> tuple[Term, int] | None:
        """Take the next term, after a `look()` that found no leader.

        Returns the term and when it ends by boot_ns(); None if another member was faster.
        """
        number = max(self.highest, min(self.reported, self.highest + JUMP_MAX - 1)) + 1
        term = Term(number, self._leader, self._target)
        mine = self._sealed(term)
        began_ns = boot_ns()
        answer = await link.call(
            "schedsvc_term_take", self._keys, self._set, *self._seen, *mine, TERM_MS, self._member
        )
        if answer != b"taken":
            return None
        self.highest, self._mine = number, mine
        self.led, self._stands_until_ns = (number, self._leader), 0
        return term, term_end_ns(began_ns)

    async def renew(self, link: StoreConnection) -> tuple[int, tuple[str, ...]] | Term:
        """Renew the own term.

        Returns when it ends by boot_ns(), and the members that may take the next term; or the term
        of another leader, if this member leads no more.
        """
        replaced = b""
        for _ in range(3):
            began_ns = boot_ns()
            what, detail, *counter = await link.call(
                "schedsvc_term_renew", self._keys, self._set, *self._mine, TERM_MS, replaced
            )
            if what == b"held":
                self._count(*counter)
                return term_end_ns(began_ns), tuple(detail.decode(errors="replace").split())
            term = self._read(detail)
            if term is not None and term.number > self.led[0]:
                self._check_jump(term.number)
                self.highest = max(self.highest, term.number)
                self.led = term.number, term.leader
            if term is not None and term.number >= self.led[0]:
                return term
            if term is not None:
                self._forge(f"term {term.number} is older than term {self.led[0]} of the same set")
            replaced = detail
        raise StoreError(f"store {link.address.text}: another program writes the rows of terms")

    async def is_known(self, link: StoreConnection) -> bool:
        """Return whether the store knows a term of the set.

        A leader asks if its term is over by its own clock. A store that lost its data would renew
        that term, although another member may have led since.
        """
        await self.look(link, may_lead=False)
        return self.last is not None

    async def note(self, link: StoreConnection, text: str) -> None:
        """Leave a note about this member for `schedsvc cluster status`."""
        await link.call("schedsvc_set_note", [self._notes_key], self._member, text)

    async def release(self, link: StoreConnection) -> None:
        """End the own term, so that another member can take the next one at once."""
        await link.call("schedsvc_term_release", self._keys, self._set, self._mine[0])

    def _count(self, row: bytes) -> None:
        """Note the highest term of the cluster, so that none of another set looks like a jump.

        A leader goes on whatever the row says.
        """
        found = self._open(_COUNTER, row)
        if found is not None and found[0] <= self.highest + JUMP_MAX:
            self.highest = max(self.highest, found[0])

    def _sealed(self, term: Term) -> tuple[bytes, bytes]:
        content = f"{term.leader} {term.target}".encode()
        return (
            seal_row(self._secret, self._place, term.number, content),
            seal_row(self._secret, _COUNTER, term.number, b""),
        )

    def _read(self, row: bytes) -> Term | None:
        found = self._open(self._place, row)
        if found is None:
            return None
        leader, _, target = found[1].decode(errors="replace").partition(" ")
        return Term(found[0], leader, target)

    def _open(self, place: bytes, row: bytes) -> tuple[int, bytes] | None:
        try:
            return open_row(self._secret, place, row)
        except ForgedRowError as error:
            self._forge(str(error))
            return None

    def _forge(self, reason: str) -> None:
        self.forged += 1
        effect = "the row is ignored"
        _log.error("cluster_row_forged", peer="store", reason=reason, effect=effect)

    def _check_jump(self, number: int) -> None:
        if self.highest and number > self.highest + JUMP_MAX:
            self._refuse(number)
            raise StoreRefusedError(
                f"the store states term {number}, and the highest known term is {self.highest}; a"
                f" jump of more than {JUMP_MAX:,} is refused: check who wrote it; then remove the"
                " members' files STATE.term beside their state files, and restart them"
            )

    def _refuse(self, number: int) -> None:
        if number == self._refused:
            return  # each look finds it
        self._refused = number
        _log.critical("cluster_term_jump", term=number, known=self.highest, effect="refused")
