"""Measures the bound of VTC among the sessions of one tenant on what was served."""

from schedsvc_lab.faults.auditor.records import Request, Terms, require

_Session = tuple[str, str]
"""A flow, and a session of it; the one without a name is all that names none."""


class SessionFairness:
    """Compares the service of sessions of one flow while one of them waits.

    In one pool they all compete, whether their requests name the pool or not. A session that waits
    for a cap does not: with a cap nothing is compared.
    """

    def __init__(self, terms: Terms) -> None:
        self._is_on = (
            terms.has_sessions
            and terms.fair
            and terms.pools == 1
            and not terms.limits.sessions_max_tokens
        )
        self._served: dict[_Session, int] = {}
        self._asked: dict[_Session, int] = {}  # the part for requests that waited in this process
        self._waiting: dict[_Session, int] = {}
        self._least: dict[tuple[_Session, _Session], int] = {}  # since the second one began to wait

    def arrived(self, r: Request) -> None:
        """Count a request that waits from now on. O(1)."""
        if self._is_on and r.ask:
            session = r.flow, r.session
            self._waiting[session] = self._waiting.get(session, 0) + 1

    def left(self, r: Request) -> None:
        """Count a request that waits no more. O(1), and O(pairs) for the last of a session."""
        if not (self._is_on and r.ask):
            return
        session = r.flow, r.session
        self._waiting[session] -= 1
        if not self._waiting[session]:
            del self._waiting[session]
            self._least = {pair: lead for pair, lead in self._least.items() if pair[1] != session}

    def charge(self, r: Request, more: int) -> None:
        """Count service; negative: a refund. O(1)."""
        if not self._is_on:
            return
        session = r.flow, r.session
        self._served[session] = self._served.get(session, 0) + more
        if r.ask:
            self._asked[session] = self._asked.get(session, 0) + more

    def check(self, most: int, slack: dict[str, int]) -> None:
        """Hold each session to its bound beside the others of its flow. O(pairs).

        `most`: the bound and the credit; `slack`: the most that a flow is charged at the end.
        """
        for waits in self._waiting:
            for other, served in self._asked.items():
                if other == waits or other[0] != waits[0]:
                    continue
                lead = served - self._served.get(waits, 0)
                least = min(lead, self._least.get((other, waits), lead))
                self._least[other, waits] = least
                require(
                    lead - least <= most + 2 * slack.get(waits[0], 0),
                    "a session that waited all the time was served too little beside another",
                    f"of {waits[0]}, {other[1]!r} was served {lead - least} micro-tokens more than"
                    f" {waits[1]!r}, bound and credit {most}",
                )
