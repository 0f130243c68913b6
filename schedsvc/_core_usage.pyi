"""Declares the core's methods for quotas, budgets, and the usage of ended leases.

Type checkers read this beside `_core.pyi`; at run time the class is part of `schedsvc._core`.
"""

from schedsvc._core_tenants import TenantsApi

#: Lease id, tenant, class, pool, LoRA adapter, and whether its tokens are estimated; then tokens:
#: input, cached of it, output; and whether an earlier process granted the lease, so that another
#: ledger may have it.
UsageRow = tuple[int, bytes, bytes, bytes, bytes, bool, int, int, int, bool]

class UsageApi(TenantsApi):
    """Keeps quotas and budgets, and the usage of ended leases in rows that are numbered from 1."""

    def set_quota(
        self, now_ns: int, name: bytes, parent: int = -1, requests: int = 0,
        input_tokens: int = 0, output_tokens: int = 0, total_tokens: int = 0, concurrency: int = 0,
        share: int = 0, lends: int = -1, borrows: int = -1,
        day_tokens: int = 0, month_tokens: int = 0, weight_milli: int = 0,
    ) -> int:  # fmt: skip
        """Add the quota of a group or a model, or give a known one new limits; 0 is no limit.

        The first four are token buckets: so much a minute, and at most so much
        at once. `parent` is the index of the next level up, -1: none; at most QUOTA_LEVELS_MAX
        levels, no circle, else CallerError. A bucket starts full; a changed limit leaves taken what
        was taken. A group may have a share, too: see `set_flow_quota()`. From the next poll on, one
        with a weight (0: none) shares with its siblings by weight what their parent gets, under
        policies with counters; CallerError if there are more than 64 pools.
        Returns its index (from 0). O(1); O(quotas) where a known one changes parents.
        """
    def set_flow_quota(
        self, now_ns: int, flow: int, parent: int = -1, refuse: bool = False, requests: int = 0,
        input_tokens: int = 0, output_tokens: int = 0, total_tokens: int = 0, concurrency: int = 0,
        share: int = 0, lends: int = -1, borrows: int = -1,
        day_tokens: int = 0, month_tokens: int = 0, max_wait_ns: int = 0,
    ) -> None:  # fmt: skip
        """Give a flow limits of its own (0: none), below the quota `parent` (-1: none).

        A request takes from every level its prompts and its outputs as predicted, before it runs;
        its usage is settled at its end. If a level does not hold enough, the flow waits for it.
        If the level `refuse`s, the request gets REJECTED_QUOTA at once, and queued requests keep
        what they took. A request larger than a bucket gets REJECTED_QUOTA_SIZE.

        `share`: tokens a minute that it can count on while the pools are saturated (0: none, it is
        never held). Others may borrow what it leaves unused, up to `lends` a minute (-1: all);
        beyond it the flow borrows at most `borrows` (-1: what there is). Members of the nearest
        group above with a share lend to each other, and the group as a whole to those beside it;
        the rest lend to each other. Below saturation no flow is held to a share. If shares bind, a
        flow beyond its share with nothing to borrow waits. Its next request is granted once its own
        share or a pool of unused ones holds something (requests may overdraw it), or the load is
        below saturation again. A request's charge is as above, settled at its end. O(targets * log
        n), and O(flows * log n) at the next `poll()`.
        """
    def set_budget_period(
        self, now_ns: int, name: bytes, which: int, period: int, ends_ns: int, spent: int = 0
    ) -> None:
        """Report the period of a budget: `which` is 0 for the day, 1 for the month.

        `name` is `tenant:` or `group:` and the name; `period` is a number above 0 that grows with
        each period. One below the known period changes nothing; the known one again only moves its
        end. A later one begins with `spent` tokens and those on open bills. Raises CallerError for
        a name without a quota of its own. O(1).
        """
    def set_budget_elsewhere(
        self, now_ns: int, name: bytes, which: int, period: int, spent: int
    ) -> None:
        """Count what other members of a cluster have spent of a budget in this period.

        It has no effect if the core knows another period. Raises CallerError for an unknown name.
        O(1), and O(waiting flows).
        """
    def budget_spent(self, name: bytes, which: int) -> int:
        """Return what was spent here in the period, with what runs. Raises CallerError. O(1)."""
    def set_budget_refund(self, now_ns: int, tenant: bytes, tokens: int) -> None:
        """Take tokens back that a restart charged twice to a tenant's budgets. O(levels)."""

    def set_usage_kept(self, now_ns: int, kept: bool) -> None:
        """Make a row of each lease that ends from now on, or of none. O(1).

        A lease whose holder reports that it used no token has none. One that expired and whose
        holder completes it later gets a second row, with what the holder reports.
        """
    def take_usage(self) -> list[UsageRow]:
        """Take the rows that were made since the last call. O(1).

        If nothing takes them, 65,536 are kept, and then the oldest are dropped.
        """
    def set_usage_saved(self, now_ns: int, row: int) -> None:
        """Report that the rows up to a number are saved, or lost for good. O(sessions).

        Streams report the ends of leases as saved only then (UsageSaved), so that their holders
        keep a Complete until a restart cannot lose it. Raises CallerError if the number is below
        an earlier one, or beyond the last row.
        """
