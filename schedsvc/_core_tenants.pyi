"""Declares the core's methods for tenants that the configuration does not list.

Type checkers read this beside `_core.pyi`; at run time the class is part of `schedsvc._core`.
"""

from typing import Any

class TenantsApi:
    """Refuses unknown tenants, puts them into one flow, or gives them flows of their own."""

    def set_unknown(self, flow: int, refused: bool = False, own: bool = False) -> None:
        """Serve unknown tenants in this flow; -1 (the default) refuses them.

        `refused`: they would be, but the flow is in audit: each counts as such. `own`: a tenant
        whose name the caller has proved gets a flow of its own at its first request, as the first
        rule says that its name fits. With `flows_max` flows it gets that of a tenant that can be
        forgotten: nothing of it is queued, runs or is stored, its counters are where a newcomer
        begins or before, its buckets are full, and it has too few outputs to be predicted by them.
        If there is none among the flows that are looked at next, it shares `flow`.
        """
    def set_tenant_rule(
        self, now_ns: int, pattern: bytes, weight_milli: int = 1_000, default_class: int = 0,
        named: tuple[int, ...] = (), dry_run: bool = False, parent: int = -1, refuse: bool = False,
        requests: int = 0, input_tokens: int = 0, output_tokens: int = 0, total_tokens: int = 0,
        concurrency: int = 0, max_wait_ns: int = 0,
    ) -> None:  # fmt: skip
        """Append a rule for tenants at first sight; * in the pattern is any text.

        The rest is as in `set_flow()`, `set_flow_class()`, `set_flow_mode()`, `set_flow_quota()`.
        """
    def set_no_tenant_rules(self, now_ns: int, dry_run: bool = False) -> None:
        """Forget all rules; a name that fits none gets weight 1 and no limits."""
    def set_rules_followed(self, now_ns: int) -> None:
        """Give the flows of tenants at first sight what the rules say now. O(flows * rules).

        Without `own` in `set_unknown()` their names are unknown from then on.
        """
    def may_see_tenant(self, principal: int, name: bytes) -> bool:
        """Return whether a principal may vouch for this tenant. O(patterns)."""
    def may_see_pool(self, principal: int, name: bytes) -> bool:
        """Return whether a principal may know how full a pool of this name is. O(patterns)."""
    def flow_keys(
        self, first: int, end: int, principal: int = -1
    ) -> tuple[int, list[tuple[bool, int, int]]]:
        """Return what `stats()` chooses flows by: it waits, its service, and its negated number.

        It covers the flows from `first` to before `end` that the principal may see; before them
        `end`, or 0 if there are no more flows. O(end - first).
        """
    def unlisted_stats(self) -> dict[str, Any]:
        """Sum up tenants at first sight, keyed as `flow_stats()`; counters never fall. O(flows)."""
    def set_retired(self, now_ns: int, name: bytes) -> None:
        """Let the name of a listed tenant be unknown, because an operator has deleted it.

        Its requests and leases go on. The next new tenant gets its flow once the deleted tenant
        loses nothing by that. O(1).
        """
    def set_key_gone(self, api_key_sha256: bytes) -> None:
        """Let this key hash stand for no flow. O(1)."""
    def is_known(self, name: bytes) -> bool:
        """Return whether a name stands for a flow, listed or at first sight. O(1)."""
    def class_index(self, name: bytes) -> int:
        """Return the index of a class, -1 if there is none. O(classes)."""
    def quota_index(self, name: bytes) -> int:
        """Return the index of a quota that `set_quota()` made, -1 if there is none. O(1)."""
    def born_tenants(self, start: int, scan_max: int) -> tuple[int, list[bytes]]:
        """Return tenants at first sight among the next `scan_max` flows from `start` on.

        The first item is the `start` of the next call, 0 after the last flow. O(scan_max).
        """
    def first_sight(self, now_ns: int, name: bytes) -> int:
        """Return the flow in which a request of a proved name is queued, -1: it is refused.

        `admit_wire()` and sessions do the same. O(1); O(rules + classes * pools) for a new flow.
        """
