"""Keeps priority classes in one pool, in strict order: better ones go first, but for ageing.

A class that has waited for its ageing time without a grant may overtake better ones, though never
an exempt one, and never twice in a row.
"""

from schedsvc_lab.faults.auditor.implied_state import ImpliedState
from schedsvc_lab.faults.auditor.records import PriorityClass, Request, Terms, require

_LONG_AGO_NS = -(1 << 60)


def goes_before(one: PriorityClass, other: PriorityClass) -> bool:
    """Return whether a class is better than another."""
    return (not one.exempt, one.rank) < (not other.exempt, other.rank)


class ClassOrder:
    """Holds each grant to the order of classes. O(queued) for each grant, O(queues) for a round."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self.restart()

    def restart(self) -> None:
        """Start again with no request waiting."""
        self._since: dict[tuple[str, str], int] = {}  # class, pool or "": in line, or served
        self._seq = 0  # number of the last arrival before this round
        self._brought = False  # the last grant came before better classes
        self._is_blind = False  # verdicts were left unread: the order of service is unknown

    def settle(self, now_ns: int, books: ImpliedState) -> None:
        """Close a round."""
        if not self._terms.strict_classes:
            return
        waiting = [r for queue in books.queues.values() for r in queue.values() if not r.withdrawn]
        if books.lagging:
            self._is_blind, self._brought = True, False
            self._since.clear()
        elif books.fresh:
            # Lease ids give the order of the grants: requests that were granted later still waited.
            fresh = sorted(books.fresh, key=lambda r: r.lease.lease_id if r.lease else 0)
            for at, r in enumerate(fresh):
                self._check(now_ns, r, [*fresh[at + 1 :], *waiting])
        self._seq = books.seq
        if books.lagging:
            return
        lines = {(r.cls.name, name) for r in waiting if r.ask for name in r.target or ("",)}
        since_ns = _LONG_AGO_NS if self._is_blind else now_ns
        self._since = {line: self._since.get(line, since_ns) for line in lines}
        self._is_blind = False

    def _waits_since(self, line: tuple[str, str], unknown_ns: int) -> int:
        """Return since when a line of a class waits.

        With one pool a tenant's sessions are in one order. So if a class is due in one line, a
        request of the other line may run.
        """
        if not (self._terms.has_sessions and self._terms.pools == 1):
            return self._since.get(line, unknown_ns)
        return min(
            (at for known, at in self._since.items() if known[0] == line[0]), default=unknown_ns
        )

    def _check(self, now_ns: int, r: Request, others: list[Request]) -> None:
        line = r.cls.name, r.lease.pool.name if r.target and r.lease else ""
        better = [
            other
            for other in others
            if other.seq <= self._seq and goes_before(other.cls, r.cls) and other.due_ns > now_ns
        ]
        if better:
            best = min(better, key=lambda other: (not other.cls.exempt, other.cls.rank)).cls
            what = r.cls.name, "before", best.name
            require(not best.exempt, "granted before an exempt class", *what)
            unknown_ns = _LONG_AGO_NS if self._is_blind else now_ns
            waited_ns = now_ns - self._waits_since(line, unknown_ns)
            require(waited_ns >= r.cls.ageing_ns, "granted before a better class", *what, waited_ns)
            require(not self._brought, "ageing brought two in a row", *what)
        self._brought = bool(better)
        if line in self._since:
            self._since[line] = now_ns
