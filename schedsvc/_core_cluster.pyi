"""Declares the methods of the core's Scheduler for a member of a cluster.

Type checkers read this beside `_core.pyi`; at run time the class is part of `schedsvc._core`.
"""

from schedsvc._core_usage import UsageApi

#: Tenant, class, domain, and what was charged and refunded, in micro-tokens times price before
#: weights. The domain is the model whose pools count together; b"": pools without one, or all.
ServiceRow = tuple[bytes, bytes, bytes, int, int]

#: Amounts of the four kinds of limits: requests, input, output, and all tokens.
FourKinds = tuple[int, ...]
#: Key, amounts granted (below 0: to return), the times from which the store can have enough for
#: what waits (0: unknown), what its buckets hold, and when the chunks end (0: as before).
GrantRow = tuple[bytes, FourKinds, FourKinds, FourKinds, int]
#: Key, what is lacking of each kind, and what the queue can use.
WantedPart = tuple[bytes, FourKinds, FourKinds]

class ClusterApi(UsageApi):
    """Shares service and quotas with members of a cluster."""

    def set_shared(self, now_ns: int) -> None:
        """Count what flows are served, for `take_served()`. Call it before the first pool.

        From then on `lead_max` also binds with a single pool, because other pools of a domain are
        at other members. O(1); O(flows + queues * log n) if there is a pool.
        """
    def take_served(self, rows_max: int) -> list[ServiceRow]:
        """Return the service of flows here since the last call, at most `rows_max` rows.

        Empty once all were returned. It changes no decision. O(rows).
        """
    def set_remote_service(self, now_ns: int, rows: list[ServiceRow]) -> int:
        """Charge flows for what other members served; returns how many rows counted here.

        A row counts if its tenant has a flow in its class here, and a pool may be of its domain.
        A flow gets no further ahead in a pool than `lead_max`; the rest is forgiven there. An
        amount is from 0 to 2^62, else CallerError. O(rows * (classes + positions * log n)).
        """
    def set_escrow(self, now_ns: int, share: int = 0) -> None:
        """Let chunks of the store fill the buckets of tenants and groups from now on.

        `share`: instead, time fills them at this part of their limits, until the next call. Each
        call takes away what buckets hold and which slots are granted, if chunks fill them from now
        on; debts stay. Limits of models stay this scheduler's own. O(quotas).
        """
    def set_escrow_away(self, now_ns: int, away: bool) -> None:
        """Say whether the store is away: then what a tenant with `refuse` lacks is refused at once.

        Without it such a request waits until the store has answered. O(1).
        """
    def set_escrow_grants(self, now_ns: int, rows: list[GrantRow]) -> list[FourKinds]:
        """Grant or return chunks; returns which amounts were.

        A return takes what is held at most. A row without a bucket in escrow has no effect.
        Raises CallerError, and grants nothing, if a row is malformed. O(rows + waiting flows).
        """
    def escrow_is_wanted(self) -> bool:
        """Return whether a flow began to wait for a chunk since the last `escrow_wants()`. O(1)."""
    def escrow_wants(self) -> list[tuple[bytes, list[WantedPart]]]:
        """Return what the first flow that waits at each node needs, for its whole path.

        The key is that of the node at which it waits. O(waiting nodes * levels).
        """
    def escrow_drawn(self, rows_max: int) -> list[bytes]:
        """Return keys of buckets that were drawn from since the last call. O(rows)."""
    def escrow_levels(self, keys: list[bytes]) -> list[tuple[FourKinds, FourKinds] | None]:
        """Return limits and held amounts of buckets; None for a key without one. O(keys).

        Held amounts below 0 are owed.
        """
    def set_slots(self, now_ns: int, rows: list[tuple[bytes, int, int, int]]) -> None:
        """Let a number of each key's requests run at once here; those that run beyond it go on.

        A row is a key, its slots, how many no member held, and when the slots end. A key without
        a cap in escrow has no effect. Raises CallerError, and sets nothing, if a row is malformed.
        O(rows + waiting flows).
        """
    def slot_wants(self) -> list[tuple[bytes, int]]:
        """Return keys that lack slots for requests that wait, and how many could use one.

        O(waiting nodes * levels).
        """
    def slot_rows(self, keys: list[bytes]) -> list[tuple[int, int, int] | None]:
        """Return cap, running requests and slots of keys; None for a key without a cap. O(keys)."""
    def set_term_begun(
        self, now_ns: int, places: list[tuple[bytes, int]], cold: bool = False
    ) -> None:
        """Keep the places of queued requests for the next leader, and take over an earlier one's.

        `cold`: leases of an earlier leader run, and its rows are not known. Then a pool grants
        nothing until its streams have replayed their leases, or lease TTL and grace have passed,
        also if it is the configuration's. If a stream does not say how many there are, it is one.

        A place is a key of `take_places()` there, and for how long that request has waited by now,
        in ns, of which the queue TTL counts at most. A core with the same hash key finds the
        request when it is asked for again, by the same principal for the same tenant, within lease
        TTL and grace. It then has its place, once, and its limits count from its arrival.
        Raises CallerError after the first request, or if a place is malformed.
        O(places + pools).
        """
    def take_places(self, rows_max: int) -> list[tuple[int, bytes, int]]:
        """Return places that changed since the last call; empty once all were returned.

        A row is the place's number, its key (b"": no request has it any more), and for how long its
        request had waited at the last event, in ns. At most 100,000 have a number. It changes no
        decision. O(changes).
        """
    def set_leadership(self, now_ns: int, leadership: bytes) -> None:
        """State this serialised Leadership in each AdmitResponse and SessionWelcome from now on.

        It has at most 512 bytes, else CallerError; with none nothing is stated. It changes no
        decision. O(1).
        """
    def forgiven_micro(self) -> int:
        """Return what leads have forgiven so far, in weighted micro-tokens."""
