"""Checks a principal with grants: what it may name and holds, and that others are unaffected.

The rule for all other principals: no lease, quota, stored answer or pool of theirs is created,
changed or ended by an event of the hostile one, except by dispatch. The books of the auditor state
what each event may change, so each answer to a later event of the others shows it. Beside them,
`unchanged()` compares what Stats and the list of leases show before and after each event of the
hostile principal, before anything is dispatched.
"""

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import itemgetter
from typing import Any

from schedsvc_lab.faults.auditor.comparison import Granted
from schedsvc_lab.faults.auditor.implied_state import UNKNOWN_FLOW, ImpliedState
from schedsvc_lab.faults.auditor.records import Grants, Lease, Pool, Terms, require

_POOLS_MAX, _STREAM_POOLS_MAX = 64, 8
_PPM = 1_000_000

_flow_figures = itemgetter(
    "weight_milli", "vtc_micro", "queued", "queued_input_tokens", "live_leases", "input_tokens",
    "cached_input_tokens", "output_tokens", "received", "granted", "completed", "cancelled",
    "expired", "refusals", "audit",
)  # fmt: skip
_pool_figures = itemgetter(
    "epoch", "capacity_tokens", "block_size_tokens", "max_running", "attached", "draining",
    "engine_running", "engine_waiting", "engine_used_tokens", "engine_preemptions",
)  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """Holds the scheduler's figures at one moment."""

    stats: dict[str, Any]
    leases: list[dict[str, Any]]


class Shares:
    """Lists the names that the principal with grants may use, and its part of each table."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._grants: Grants | None = terms.grants
        self._principal = -1 if terms.grants is None else terms.grants.principal
        self.granted: list[Granted] = []  # to all others
        self.restart()

    def restart(self) -> None:
        """Begin with nothing, as another process does."""
        self.answers = 0
        self._streams: dict[int, int] = {}  # open streams, and their principals

    def is_limited(self, principal: int) -> bool:
        """Return whether this is the principal that has grants."""
        return principal == self._principal

    def places(self, most: int) -> int:
        """Return how much of a table of `most` places the principal may hold."""
        return max(1, most * self._grants.share_ppm // _PPM) if self._grants else most

    def may_offer(self, principal: int, pool: str) -> bool:
        """Return whether a principal may offer a pool."""
        return (
            self._grants is None or principal != self._principal or fits(self._grants.pools, pool)
        )

    def may_name(self, principal: int, tenant: str) -> bool:
        """Return whether a principal may vouch for a tenant."""
        return (
            self._grants is None
            or principal != self._principal
            or fits(self._grants.tenants, tenant)
        )

    # Streams.

    def opened(self, conn: int, principal: int) -> None:
        """Count a stream."""
        self._streams[conn] = principal
        if self.is_limited(principal):
            most = self.places(self._terms.sessions_max)
            count = self._open_streams(principal)
            require(count <= most, "a principal has more sessions than its share", count, most)

    def refused(self, principal: int) -> None:
        """Hold the refusal of a stream to the share."""
        is_full = self._open_streams(principal) >= self.places(self._terms.sessions_max)
        require(
            self.is_limited(principal) and is_full, "a session was refused within the share",
            principal, len(self._streams),
        )  # fmt: skip

    def closed(self, conn: int) -> None:
        """Count a stream no more."""
        self._streams.pop(conn, None)

    def _open_streams(self, principal: int) -> int:
        return sum(whose == principal for whose in self._streams.values())

    # Pools.

    def may_register(
        self,
        books: ImpliedState,
        now_ns: int,
        conn: int,
        principal: int,
        name: str,
        claimed: Collection[str] = (),
    ) -> bool:
        """Return whether grants and places let a stream offer a pool, owned or not. O(pools).

        `claimed`: the pools of other engines that it claims; they count as offered.
        """
        if not self.may_offer(principal, name):
            return False
        if not self.is_limited(principal):
            return True
        pools, pool = books.pools.values(), books.pools.get(name)
        held = {p.name for p in pools if conn in p.offers}.union(claimed)
        if len(held) >= _STREAM_POOLS_MAX and name not in held:
            return False
        if pool is not None and is_owned(pool, now_ns):
            return True
        owned = sum(p.principal == principal and is_owned(p, now_ns) for p in pools)
        return owned < self.places(_POOLS_MAX)

    # Requests and leases.

    def note(self, lease: Lease) -> None:
        """Note a grant to another principal, for the comparison of two runs."""
        r = lease.request
        if self._grants is not None and r.principal != self._principal:
            self.granted.append(Granted(r.key[0], r.key[2], r.asked_ns, lease.granted_ns))

    def lacks_lease(self, books: ImpliedState, principal: int) -> bool:
        """Return whether the principal has its share of the leases. O(leases)."""
        if not self.is_limited(principal):
            return False
        live = sum(lease.request.principal == principal for lease in books.live.values())
        return live >= self.places(self._terms.leases_max)

    def lacks_replay(
        self, books: ImpliedState, principal: int, pool: Pool, replay: Any, *, audited: bool
    ) -> bool:
        """Whether a replay finds no place, or is more than can have been granted; count it. O(1).

        Audit grants without room. If the auditor is unsure of the saved state, it drops its books.
        """
        if self.lacks_lease(books, principal):
            return True
        if audited:
            return False
        sequences = max(1, replay.sequences)
        beyond = pool.replays_beyond(replay.reserved_tokens, sequences)
        if beyond > pool.debt[1]:
            books.counts["replays_refused"] += 1
            books.replays_unsure += bool(books.lagging)
            return True
        if beyond > pool.debt[0]:
            books.is_lost = True
        tokens, count = pool.replayed
        pool.replayed = tokens + replay.reserved_tokens, count + sequences
        return False

    def has_all_answers(self, lease: Lease) -> bool:
        """Return whether the answer of a lease that just ended exceeds its principal's share."""
        return self.is_limited(lease.request.principal) and (
            self.answers > self.places(self._terms.answers_max)
        )

    def check(self, books: ImpliedState) -> None:
        """Hold what the principal has of each table to its share. O(what is open)."""
        if self._grants is None:
            return
        terms, mine = self._terms, self._principal
        waiting = [
            r for queue in books.queues.values() for r in queue.values() if r.principal == mine
        ]
        running = [
            lease.request for lease in books.live.values() if lease.request.principal == mine
        ]
        queued = self.places(terms.queue_max)
        require(len(waiting) <= queued, "more waits than the share", len(waiting), queued)
        most = self.places(terms.leases_max) + queued  # waiting requests may be granted too
        require(len(running) <= most, "more leases than the share", len(running), most)
        others = {
            r.adapter
            for r in books.requests.values()
            if r.principal != mine and (r.queued or (r.lease and not r.lease.outcome))
        }
        adapters = {r.adapter for r in (*waiting, *running)} - others - {""}
        most = self.places(terms.adapters_max)
        require(len(adapters) <= most, "more adapters than the share", len(adapters), most)

    # The rows of other principals.

    def unchanged(
        self, books: ImpliedState, before: Rows, after: Rows, *, dispatched: bool
    ) -> None:
        """Hold that an event of the principal changed no row of others. O(flows + leases).

        `dispatched`: the scheduler may have granted something after it.
        """
        grants = self._grants
        if grants is None:
            return
        own = {name for name, pool in books.pools.items() if pool.principal == self._principal}

        def flows(rows: Rows) -> dict[Any, Any]:
            return {
                (row["tenant"], row["request_class"]): _flow_figures(row)
                for row in rows.stats["flows"]
                if row["tenant"] != UNKNOWN_FLOW and not fits(grants.tenants, row["tenant"])
            }

        def pools(rows: Rows) -> dict[Any, Any]:
            return {
                row["name"]: _pool_figures(row)
                for row in rows.stats["pools"]
                if row["name"] not in own
            }

        def leases(rows: Rows) -> dict[Any, Any]:
            return {
                row["lease_id"]: row
                for row in rows.leases
                if row["principal"] != self._principal and row["pool"] not in own
            }

        compared = [("pool", pools(before), pools(after))]
        if before.leases != after.leases:
            compared.append(("lease", leases(before), leases(after)))
        if not dispatched:
            compared.append(("flow", flows(before), flows(after)))
        for what, first, second in compared:
            if first == second:
                continue
            for key in first if dispatched else {**first, **second}:
                one, other = first.get(key), second.get(key)
                require(one == other, f"a {what} of another principal was changed", key, one, other)


def fits(patterns: tuple[str, ...], name: str) -> bool:
    """Return whether a name fits one of some patterns, in which * stands for any text."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_owned(pool: Pool, now_ns: int) -> bool:
    """Return whether a pool has an owner, whose streams may have ended a moment ago."""
    return bool(pool.offers) or now_ns < pool.owned_until_ns
