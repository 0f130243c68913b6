"""Keeps books on who leads a set, from terms that begin and from verdicts.

The promises: no term repeats or goes back. A scheduler decides nothing once the next leader has
begun, or once it has handed its term over. An engine that fences obeys one leader at a time.
"""

from typing import Any

from schedsvc_lab.faults.auditor.records import require

__all__ = ["Fence", "TermBooks"]

#: After the store's clock was set forward, two members may lead for a term: the earlier one counts
#: its term from before the step.
_OVERLAP_NS = 2_000_000_000
#: The rows in the answers of functions. A renewal also states the counter, which is that of other
#: sets: a leader promises nothing about it.
_ROWS = {"schedsvc_term_look": slice(0, 3), "schedsvc_term_renew": slice(1, 2)}


class Fence:
    """Remembers the highest leadership that the processes of one engine have seen."""

    def __init__(self) -> None:
        self.highest: tuple[int, str] = (0, "")

    def obeys(self, term: int, leader: str) -> bool:
        """Return whether a verdict has an effect: its term is the highest, and of one leader.

        O(1).
        """
        highest, holder = self.highest
        if term < highest or (term == highest and leader != holder):
            return False
        self.highest = term, leader
        return True


class TermBooks:
    """Keeps the terms of one set."""

    def __init__(self) -> None:
        #: Term and leader, in the order in which they began.
        self.begun: list[tuple[int, str]] = []
        self._highest = 0
        #: Terms that began after a higher one that the store had lost.
        self._late: set[tuple[int, str]] = set()
        #: Since the highest term began.
        self._has_lost = False
        self._overlap_until_ns = 0
        self.began_ns = 0  # the last one
        #: Terms and leaders that have been handed over.
        self._released: set[tuple[int, str]] = set()
        #: Targets that schedulers named to calls that waited when they stopped leading.
        self.named: list[str] = []
        self._obeyed: tuple[int, str] = (0, "")
        #: The highest term that each member has read in the store, in all lives of its process.
        self._known: dict[str, int] = {}
        #: The members that may take the next term, by leader and by the store's last answer to it.
        self._rivals: dict[str, set[str]] = {}

    def began(self, term: int, leader: str, now_ns: int) -> None:
        """Note that a member begins to lead.

        A store that lost a term may give it, or a lower one, again, but to no member that has seen
        it.
        """
        member = leader.partition("/")[0]
        has_known = any(
            led >= term and other.partition("/")[0] == member for led, other in self.begun
        )
        require(
            not has_known and (term > self._highest or self._has_lost),
            "a term repeats or goes back",
            f"{leader} leads in term {term}, after term {self._highest}",
        )
        require(
            term >= self._known.get(member, 0),
            "a member takes a term that it knows to be over",
            f"{leader} leads in term {term}, and has seen term {self._known.get(member)}",
        )
        if term > self._highest:
            self._highest, self._has_lost = term, False
        elif term < self._highest:
            self._late.add((term, leader))
        self.begun.append((term, leader))
        self.began_ns = now_ns

    def lost(self) -> None:
        """Note that the store lost data."""
        self._has_lost = True

    def overlap(self, now_ns: int) -> None:
        """Note that the term in the store may have ended too early: its clock was set forward."""
        self._overlap_until_ns = now_ns + _OVERLAP_NS

    def stored(self, words: tuple[Any, ...]) -> None:
        """Look at a call that the store has run."""
        if "schedsvc_term_release" in words[:2]:
            term, _, leader, *_ = words[7].split(b" ")
            self._released.add((int(term), leader.decode()))

    def heard(self, member: str, words: tuple[Any, ...], answer: Any) -> None:
        """Look at an answer of the store that its caller reads."""
        function = words[1] if len(words) > 1 else ""
        if function == "schedsvc_term_renew" and answer[0] == b"held":
            leader = words[7].split(b" ")[2].decode()
            self._rivals[leader] = set(answer[1].decode().split())
        if function in _ROWS:
            for row in answer[_ROWS[function]]:
                term = int(row.partition(b" ")[0] or 0) if row[:1].isdigit() else 0
                self._known[member] = max(self._known.get(member, 0), term)

    def _is_unknown(self, leader: str) -> bool:
        """Return whether the leader was no rival of another one when that reached the store.

        A leader that does not reach the store continues if there is no other member. A member that
        starts in that time, or resumes, takes the next term all the same.
        """
        present = self.begun[-1][1].partition("/")[0]
        return leader in self._rivals and present not in self._rivals[leader]

    def _may_end(self, term: int, now_ns: int) -> bool:
        """Return whether the next term has just begun after one that a loss of the store explains.

        The store gave that term twice, or it is lower than one before. A member that knows of the
        loss takes the next term, and the other member leads until its next renewal. Engines that
        have seen the new term ignore it.
        """
        is_repeated = len({leader for begun, leader in self.begun if begun == term}) > 1
        is_late = any(begun == term for begun, _ in self._late)
        return (is_repeated or is_late) and now_ns < self.began_ns + _OVERLAP_NS

    def decided(self, term: int, leader: str, now_ns: int) -> None:
        """Look at a verdict that leaves a scheduler."""
        require(
            (term, leader) in self.begun,
            "a verdict of a term that its scheduler does not lead",
            f"{leader} in term {term}",
        )
        require(
            (term, leader) not in self._released,
            "a scheduler decides after it has handed its term over",
            f"{leader} in term {term}",
        )
        require(
            (term, leader) == self.begun[-1]
            or now_ns < self._overlap_until_ns
            or self._is_unknown(leader)
            or self._may_end(term, now_ns),
            "a scheduler decides after the next leader has begun",
            f"{leader} in term {term}, while {self.begun[-1][1]} leads in {self.begun[-1][0]}",
        )

    def obeyed(self, term: int, leader: str) -> None:
        """Look at a grant that an engine obeys."""
        last, holder = self._obeyed
        require(
            term > last or (term == last and leader == holder),
            "an engine that fences obeyed two leaders",
            f"{leader} in term {term} after {holder} in {last}",
        )
        self._obeyed = term, leader
