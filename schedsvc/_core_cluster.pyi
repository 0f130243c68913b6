"""Methods of the core's Scheduler for a member of a cluster.

Type checkers read this beside `_core.pyi`; at run time the class is part of `schedsvc._core`.
"""

from schedsvc._core_usage import UsageApi

#: Tenant, class, domain, and what was charged and refunded, in micro-tokens times price before
#: weights. The domain is the model whose pools count together; b"": pools without one, or all.
ServiceRow = tuple[bytes, bytes, bytes, int, int]

class ClusterApi(UsageApi):
    """Service that members of a cluster share."""

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
    def set_leadership(self, now_ns: int, leadership: bytes) -> None:
        """State this serialised Leadership in each AdmitResponse and SessionWelcome from now on.

        It has at most 512 bytes, else CallerError; with none nothing is stated. It changes no
        decision. O(1).
        """
    def forgiven_micro(self) -> int:
        """Return what leads have forgiven so far, in weighted micro-tokens."""
