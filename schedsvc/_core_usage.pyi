"""The part of the core's Scheduler that feeds a ledger with the usage of ended leases.

Type checkers read this beside `_core.pyi`; at run time the class is part of `schedsvc._core`.
"""

from schedsvc._core_tenants import TenantsApi

#: Lease id, tenant, class, pool, LoRA adapter, outcome; then tokens: input, cached of it, output.
UsageRow = tuple[int, bytes, bytes, bytes, bytes, int, int, int, int]

class UsageApi(TenantsApi):
    """The usage of ended leases, in rows that are numbered from 1."""

    def set_usage_kept(self, now_ns: int, kept: bool) -> None:
        """Make a row of each lease that ends from now on, or of none. O(1).

        A lease that is cancelled before any token has none. One that expired and whose holder
        completes it later gets a second row, with what the holder reports.
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
