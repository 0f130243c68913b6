"""Holds the requests of one run in columns: what was asked, and what became of each."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random

from schedsvc_lab.sim.contents import Contents
from schedsvc_lab.workload import TraceRequest, read_trace

NEVER = -1
"""The time of what has not happened."""

TOKENS_MAX = 1 << 27
"""The core's own bound on the tokens of one request."""

_NS_PER_S = 1_000_000_000


class RequestsError(ValueError):
    """Says that a trace has a request that no core can take."""


class Requests:
    """Holds the requests of a trace, sorted by arrival. Times are ns after the trace's start.

    `clients` are the tenants in order of name, `client[i]` is an index into them. `place[i]` is the
    request's place in the trace, by which `contents` finds its prefix hashes. `classes` are the
    priority classes in the trace ("": none), `sessions` its conversations by place ("": none). Some
    50 bytes for each request.
    """

    __slots__ = (
        "arrival_ns",
        "classes",
        "client",
        "clients",
        "contents",
        "output_tokens",
        "place",
        "prompt_tokens",
        "sessions",
    )

    def __init__(
        self,
        clients: Sequence[str],
        rows: Iterable[tuple[int, int, int, int]],
        *,
        place: Sequence[int] | None = None,
        contents: Contents | None = None,
        classes: Sequence[str] | None = None,
        sessions: Sequence[str] | None = None,
    ) -> None:
        self.clients = tuple(clients)
        self.classes = classes
        self.sessions = sessions
        self.contents = contents
        self.arrival_ns = array("q")
        self.client = array("i")
        self.prompt_tokens = array("i")
        self.output_tokens = array("i")
        for arrival_ns, client, prompt_tokens, output_tokens in rows:
            self.arrival_ns.append(arrival_ns)
            self.client.append(client)
            self.prompt_tokens.append(prompt_tokens)
            self.output_tokens.append(output_tokens)
        self.place = range(len(self.arrival_ns)) if place is None else place

    @classmethod
    def read(cls, path: Path, tenant: str = "default") -> "Requests":
        """Read a trace; `tenant` labels what names none. O(requests).

        Raises TraceError, RequestsError and OSError.
        """
        requests = cls.from_trace(read_trace(path, tenant=tenant, keep_records=True))
        for at, prompt in enumerate(requests.prompt_tokens):
            if prompt + requests.output_tokens[at] > TOKENS_MAX:
                raise RequestsError(
                    f"{path}: request {at + 1} of client "
                    f"{requests.clients[requests.client[at]]!r} has {prompt} input and "
                    f"{requests.output_tokens[at]} output tokens; at most {TOKENS_MAX} in all"
                )
        return requests

    @classmethod
    def from_trace(cls, trace: Iterable[TraceRequest]) -> "Requests":
        """Take over a trace, which is in order of arrival. O(requests)."""
        seen: dict[str, int] = {}
        contents = Contents()
        classes: list[str] = []
        sessions: list[str] = []

        def columns() -> Iterator[tuple[int, int, int, int]]:
            for request in trace:
                contents.append(request.record)
                classes.append((request.record and request.record.request_class) or "")
                sessions.append((request.record and request.record.conversation) or "")
                yield (
                    round(request.arrival_s * _NS_PER_S),
                    seen.setdefault(request.tenant, len(seen)),
                    request.prompt_tokens,
                    request.output_tokens,
                )

        rows = cls((), columns())
        if contents.has_prefixes or contents.adapters:
            rows.contents = contents
        if any(classes):
            rows.classes = classes
        if any(sessions):
            rows.sessions = sessions
        rows.clients = tuple(sorted(seen))
        place = {name: index for index, name in enumerate(rows.clients)}
        renamed = [place[name] for name in seen]
        rows.client = array("i", (renamed[client] for client in rows.client))
        return rows

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def jittered(self, seed: int, jitter_ns: int) -> "Requests":
        """Delay each arrival by 0 to `jitter_ns`, drawn from the seed. O(n log n)."""
        if jitter_ns == 0:
            return self
        draws = Random(seed)  # noqa: S311 - a simulation, no secret
        rows = sorted(
            (arrival_ns + draws.randrange(jitter_ns + 1), at)
            for at, arrival_ns in enumerate(self.arrival_ns)
        )
        return Requests(
            self.clients,
            (
                (arrival_ns, self.client[at], self.prompt_tokens[at], self.output_tokens[at])
                for arrival_ns, at in rows
            ),
            place=array("q", (self.place[at] for _, at in rows)),
            contents=self.contents,
            classes=self.classes,
            sessions=self.sessions,
        )

    def denser(self, factor: float) -> "Requests":
        """Let the same requests arrive in 1/`factor` of the time. O(n)."""
        return Requests(
            self.clients,
            (
                (round(arrival_ns / factor), self.client[at], prompt, self.output_tokens[at])
                for at, (arrival_ns, prompt) in enumerate(
                    zip(self.arrival_ns, self.prompt_tokens, strict=True)
                )
            ),
            place=self.place,
            contents=self.contents,
            classes=self.classes,
            sessions=self.sessions,
        )


class Outcomes:
    """Holds the outcome of each request: times in ns (NEVER: not), and the order of verdicts.

    `outcome[i]` is the core's word for the verdict, 0 while there is none; `pool[i]` the engine
    that ran it. `order` lists requests in the order of their verdicts.
    """

    __slots__ = ("decided_ns", "end_ns", "first_ns", "order", "outcome", "pool")

    def __init__(self, count: int) -> None:
        self.decided_ns = array("q", [NEVER]) * count
        self.first_ns = array("q", [NEVER]) * count
        self.end_ns = array("q", [NEVER]) * count
        self.outcome = array("i", [0]) * count
        self.pool = array("i", [NEVER]) * count
        self.order = array("q")
