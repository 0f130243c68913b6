"""Keeps a scheduler's state as messages imply it: requests, leases, pools, streams."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection

from schedsvc_lab.faults.auditor.records import Lease, Pool, Request, Terms

UNKNOWN_FLOW = "unknown"
_NS_PER_US = 1_000
COUNTS = (
    "received", "granted", "rejected", "evicted", "completed", "cancelled", "expired",
    "replays_refused",
    "reports_limited",
)  # fmt: skip


class ImpliedState:
    """Holds the records alone. `Books` changes them; what checks one of its aspects reads them."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.forget_all()

    def forget_all(self) -> None:
        """Forget everything, as another process does."""
        self.requests: dict[tuple[str, str, str, int], Request] = {}
        self.queues: dict[tuple[str, tuple[str, ...]], dict[int, Request]] = {}
        self.queued = 0
        self.live: dict[int, Lease] = {}
        self.ended: dict[int, Lease] = {}  # oldest end first
        self.expired: list[Lease] = []  # in this round; their answers are not in `ended` yet
        self.orphans: dict[int, Lease] = {}  # live leases whose expiry is sent to no stream
        self.pools: dict[str, Pool] = {}
        self.closed = set(self.terms.closed)  # pools that take only requests that name them
        self.tags: dict[tuple[int, int], Request] = {}
        self.counts = dict.fromkeys(COUNTS, 0)
        self.replays_unsure = 0  # counted as refused, or an unread grant had taken their lease id
        self.above_limit = Counter[str]()  # output charged above what requests can use, by pool
        self.usage: dict[str, list[int]] = {}  # input, cached, output tokens by flow
        # Input and cached input that it may be more, of leases that are charged by time.
        self.unsure: dict[str, list[int]] = {}
        self.lagging: set[int] = set()
        self.said_goodbye: set[int] = set()  # streams
        self.is_lost = False  # unread verdicts changed what later messages mean
        self.fresh: list[Request] = []  # granted in this round
        self.dropped: list[Request] = []  # evicted in it, not as withdrawn
        self.voided: list[Lease] = []  # their holders are owed a notice
        self.seq = 0
        self.draining = False
        self.last_ns = -1
        self.rounds_ns: list[int] = []  # when rounds began while a stream had verdicts unread
        self.weights = {**self.terms.tenants, UNKNOWN_FLOW: self.terms.unknown_weight}

    def flow_names(self, tenant: str) -> tuple[str, str]:
        """Return the flow of a tenant, and the tenant's name if it shares that of the unknown."""
        return (tenant, "") if tenant in self.terms.tenants else (UNKNOWN_FLOW, tenant)

    def note_computed(self, lease_id: int, tokens: int, time_ns: int) -> None:
        """Record the tokens that an engine computed of a prompt whose client leaves now."""
        lease = self.live.get(lease_id)
        if lease is not None:
            lease.computed = (tokens, time_ns)

    def note_prefill(self, now_ns: int, lease: Lease) -> None:
        """Record the time in which a prompt was computed: from its grant to its first token."""
        if not (lease.output_tokens or lease.is_void or lease.request.ask is None):
            tokens = max(1, lease.request.prompt_tokens - lease.cached_tokens)
            lease.pool.prefills.append((tokens, now_ns - lease.granted_ns))

    def charge_by_time(self, now_ns: int, lease: Lease) -> None:
        """Charge a lease that ran and was not counted: a token at least, at most its prompt.

        It is charged at least the tokens that the engine has computed, less one, and no more time
        counts than the scheduler has counted since the grant. A pace above all that the scheduler
        has seen counts only where it charges the whole prompt. The next Stats report the charge.
        """
        most, least = lease.input_tokens, 1
        tokens, time_ns = lease.computed
        if tokens and not lease.pool.prefills:
            least = most
        elif tokens:
            time_ns = min(time_ns, now_ns - lease.granted_ns)
            least = max(1, min(tokens, lease.pool.computed_in(time_ns, most)) - 1)
        lease.input_tokens = least
        cached = min(lease.cached_tokens, least)
        unsure = self.unsure.setdefault(lease.request.flow, [0, 0])
        unsure[0] += most - least
        unsure[1] += lease.cached_tokens - cached
        self.usage.setdefault(lease.request.flow, [0, 0, 0])[1] += cached - lease.cached_tokens
        lease.cached_tokens = cached

    def holds(self, r: Request) -> bool:
        """Return whether a pool could ever run a request. O(pools)."""
        return any(pool.can_hold(r) for pool in self.pools.values())

    def takes(self, pool: Pool, target: Collection[str], *, late: bool = False) -> bool:
        """Return whether a pool takes requests for a target; (): they name none. O(names).

        `late`: include what it may have taken before it closed to these.
        """
        return pool.name in target or (not target and (late or pool.name not in self.closed))

    def first_of(self, queue: dict[int, Request]) -> Request:
        """Return the next request of a queue. O(1), by deadline O(n)."""
        if self.terms.by_deadline:
            return min(queue.values(), key=lambda r: r.place)
        return next(iter(queue.values()))

    def begin_round(self, now_ns: int) -> None:
        """Note when the scheduler may grant next, for as long as a grant may stay unread."""
        if not self.lagging:
            self.rounds_ns.clear()
        self.rounds_ns.append(now_ns)

    def granted_at(self, told_ns: int) -> int:
        """Return when a grant was made that was read late. O(log rounds).

        A verdict gives its time in whole microseconds, and the scheduler grants in rounds.
        """
        rounds_ns = self.rounds_ns
        at = bisect_left(rounds_ns, told_ns)
        if at == len(rounds_ns) or rounds_ns[at] >= told_ns + _NS_PER_US:
            return told_ns
        return rounds_ns[at]

    def hold(self, lease: Lease, low: int, high: int) -> None:
        """Note how many blocks the lease holds, at least and at most."""
        lease.pool.low += low - lease.low
        lease.pool.high += high - lease.high
        lease.low, lease.high = low, high

    def release(self, lease: Lease) -> None:
        """Let a lease hold nothing of its pool."""
        if lease.pool.leases.pop(lease.lease_id, None) is not None:
            self.hold(lease, 0, 0)

    def void(self, lease: Lease) -> None:
        """Void a lease whose engine has restarted: it holds nothing, and continues."""
        lease.is_void = True
        self.release(lease)
        self.voided.append(lease)
