"""Books on who leads a set, kept from terms that begin and from verdicts.

The promises: no term repeats or goes back; a verdict of an ended term comes from no scheduler once
the next leader has begun; and an engine that fences obeys one leader at a time.
"""

from schedsvc.lab.faults.auditor.records import require

__all__ = ["Fence", "TermBooks"]

_S = 1_000_000_000
#: After the store lost data, or its clock was set forward, two members may lead for a term and the
#: time in which the earlier one hears of the other.
_OVERLAP_NS = 4 * _S


class Fence:
    """The highest leadership that the processes of one engine have seen."""

    def __init__(self) -> None:
        self.highest: tuple[int, str] = (0, "")

    def obeys(self, term: int, leader: str) -> bool:
        """Whether a verdict has an effect: its term is the highest, and of one leader. O(1)."""
        highest, holder = self.highest
        if term < highest or (term == highest and leader != holder):
            return False
        self.highest = term, leader
        return True


class TermBooks:
    """The terms of one set."""

    def __init__(self) -> None:
        #: Term and leader, in the order in which they began.
        self.begun: list[tuple[int, str]] = []
        self._overlap_until_ns = 0
        self._obeyed: tuple[int, str] = (0, "")

    def began(self, term: int, leader: str, now_ns: int) -> None:
        """Note that a member begins to lead.

        A store that loses its last second may lose a term of which only its leader knew.
        """
        last = self.begun[-1][0] if self.begun else 0
        may_repeat = now_ns < self._overlap_until_ns
        require(
            term > last or (may_repeat and term == last),
            "a term repeats or goes back",
            f"{leader} leads in term {term}, after term {last}",
        )
        self.begun.append((term, leader))

    def excused(self, now_ns: int) -> None:
        """Note that the store lost data, or that its clock was set forward."""
        self._overlap_until_ns = now_ns + _OVERLAP_NS

    def decided(self, term: int, leader: str, now_ns: int) -> None:
        """Look at a verdict that leaves a scheduler."""
        require(
            (term, leader) in self.begun,
            "a verdict of a term that its scheduler does not lead",
            f"{leader} in term {term}",
        )
        require(
            (term, leader) == self.begun[-1] or now_ns < self._overlap_until_ns,
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
