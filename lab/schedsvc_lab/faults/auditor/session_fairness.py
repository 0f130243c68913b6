"""The bound of VTC among the sessions of one tenant, measured on what was served."""

from schedsvc_lab.faults.auditor.records import Request, Terms, require

_Session = tuple[str, str]
"""A flow, and a session of it; the one without a name is all that names none."""


class SessionFairness:
    """Service of sessions of one flow, compared while one of them waits for a target.

    Each target has a line of sessions, and a session's counter holds its service through all. So of
    another one, what it is served through this target is compared with all that the waiting one is
    served. A session that waits for a cap is in no line: with a cap nothing is compared.
    """

    def __init__(self, terms: Terms) -> None:
        self._is_on = (
            terms.has_sessions
            and terms.fair
            and terms.pools == 1
            and not terms.limits.sessions_max_tokens
        )
        self._served: dict[_Session, int] = {}
        self._through: dict[tuple[_Session, str], int] = {}  # by target
        self._waiting: dict[tuple[_Session, str], int] = {}
        self._least: dict[tuple[_Session, _Session, str], int] = {}  # since the second one waits

    def arrived(self, r: Request) -> None:
        """Count a request that waits from now on. O(1)."""
        if self._is_on and r.ask:
            place = (r.flow, r.session), r.ask.pool
            self._waiting[place] = self._waiting.get(place, 0) + 1

    def left(self, r: Request) -> None:
        """Count a request that waits no more. O(1), and O(pairs) for the last of a session."""
        if not (self._is_on and r.ask):
            return
        place = (r.flow, r.session), r.ask.pool
        self._waiting[place] -= 1
        if not self._waiting[place]:
            del self._waiting[place]
            self._least = {key: lead for key, lead in self._least.items() if key[1:] != place}

    def charge(self, r: Request, more: int) -> None:
        """Count service; negative: a refund. O(1)."""
        if not self._is_on:
            return
        session = r.flow, r.session
        self._served[session] = self._served.get(session, 0) + more
        if r.ask:  # else it was asked for in an earlier process
            place = session, r.ask.pool
            self._through[place] = self._through.get(place, 0) + more

    def check(self, most: int, slack: dict[str, int]) -> None:
        """Hold each session to its bound beside the others of its flow. O(pairs).

        `most`: the bound and the credit; `slack`: what a flow may be charged at once in the end.
        """
        for waits, target in self._waiting:
            for (other, through), served in self._through.items():
                if through != target or other == waits or other[0] != waits[0]:
                    continue
                lead = served - self._served.get(waits, 0)
                least = min(lead, self._least.get((other, waits, target), lead))
                self._least[other, waits, target] = least
                require(
                    lead - least <= most + 2 * slack.get(waits[0], 0),
                    "a session that waited all the time was served too little beside another",
                    f"of {waits[0]}, {other[1]!r} was served {lead - least} micro-tokens more than"
                    f" {waits[1]!r}, bound and credit {most}",
                )
