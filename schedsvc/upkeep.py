"""How the work beside the serving goes: saving, reloading, the usage ledger. For Stats and metrics.

Each record is written by the one that does the work, and hangs on the driver.
"""

from dataclasses import dataclass

__all__ = ["Ledgering", "Loading", "Saving"]


@dataclass(slots=True)
class Saving:
    """How well the core's state is kept for a restart."""

    #: By the driver's clock: all that happened until then is saved.
    saved_ns: int
    #: Why the file cannot be written; empty while it can.
    problem: str = ""
    #: How often the file was found deleted, or changed by another program.
    files_lost: int = 0


@dataclass(slots=True)
class Loading:
    """How the last reload of the configuration went; the start counts as one that succeeded."""

    #: By the wall clock.
    succeeded_ms: int = 0
    #: Why the last reload changed nothing; empty if it succeeded.
    problem: str = ""
    failures: int = 0
    #: Settings of the file that need a restart.
    waiting: tuple[str, ...] = ()


@dataclass(slots=True)
class Ledgering:
    """How well the usage ledger is kept; counts are of ended leases, since the start."""

    saved_rows: int = 0
    #: In the queue.
    waiting_rows: int = 0
    #: Dropped, because the queue was full.
    lost_rows: int = 0
    #: Why the file cannot be written; empty while it can.
    problem: str = ""
