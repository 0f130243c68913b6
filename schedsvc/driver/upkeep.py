"""Records the work beside the serving, for Stats and metrics: saving, reloading, ledger, cluster.

Each record is written by the one that does the work, and hangs on the driver.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Leading", "Ledgering", "Loading", "Saving", "SettingsShared", "Sharing"]


@dataclass(slots=True)
class Saving:
    """Records how well the core's state is kept for a restart."""

    #: All that happened until then, by the driver's clock, is saved.
    saved_ns: int
    #: Why the file cannot be written; empty while it can.
    problem: str = ""
    #: How often the file was found deleted, or changed by another program.
    files_lost: int = 0
    #: The file's write-ahead log; it grows while another program is in the middle of a query.
    log_bytes: int = 0


@dataclass(slots=True)
class Loading:
    """Records the last reload of the configuration; the start counts as one that succeeded."""

    #: A time of the wall clock.
    succeeded_ms: int = 0
    #: Why the last reload changed nothing; empty if it succeeded.
    problem: str = ""
    failures: int = 0
    #: Settings of the file that need a restart.
    waiting: tuple[str, ...] = ()


@dataclass(slots=True)
class Ledgering:
    """Records how well the usage ledger is kept; counts are of ended leases, since the start."""

    saved_rows: int = 0
    #: In the queue.
    waiting_rows: int = 0
    #: Dropped because the queue was full, or lost because another program truncated the file.
    lost_rows: int = 0
    #: Why the file cannot be written; empty while it can.
    problem: str = ""
    #: How often another program deleted, replaced or truncated the file.
    files_lost: int = 0
    #: The file's write-ahead log; it grows while another program is in the middle of a query.
    log_bytes: int = 0


@dataclass(slots=True)
class SettingsShared:
    """Records how well operators' tenants, API keys and modes are shared with other members."""

    #: Why they are not shared; empty while they are.
    problem: str = "not connected yet"
    #: Rows in the store that this member has read or written.
    rows: int = 0
    #: Rows of other members that were put in force here.
    applied: int = 0
    #: Rows that a program without the cluster's secret wrote, or put back.
    forged: int = 0
    #: Rows of other members that do not fit this one's configuration.
    refused: int = 0


@dataclass(slots=True)
class Sharing:
    """Records how well service is shared with the other members of a cluster."""

    cluster: str
    member: str
    #: The last complete exchange with the store, by the driver's clock; before it, the start.
    synced_ns: int
    #: Why there is no exchange; empty while there is.
    problem: str = "not connected yet"
    #: The last exchange failed because the store answers and refuses writes.
    refuses_writes: bool = False
    #: The store's policy lets it evict keys, which was set after this member had connected.
    may_evict: bool = False
    #: Names of those that were alive at the last exchange, this one included.
    members: tuple[str, ...] = ()
    #: How many totals of others this member keeps, and how many of its own.
    seen: int = 0
    own: int = 0
    #: Service of others that this member has charged, before refunds and weights.
    charged_micro: int = 0
    #: Rows of the store that are malformed and were ignored.
    ignored: int = 0
    #: Buckets of quotas of which this member holds chunks, or waits for one.
    buckets: int = 0
    #: Chunks that were granted to this member.
    chunks: int = 0
    #: Times that the store lost buckets of quotas.
    losses: int = 0
    #: Concurrent requests that the store lets this member run, and those that run beyond the caps
    #: of their tenants and groups, over all members.
    slots: int = 0
    overlap: int = 0
    #: Budgets of which the members share what they spent.
    budgets: int = 0
    #: Tenants whose debt an operator has forgiven here, and the store not yet.
    forgiven: list[bytes] = field(default_factory=list)
    #: Without the store: by how much this member divides each limit; 0: it spends what it holds.
    divided_by: int = 1
    #: Why quotas are not shared; empty while they are.
    quota_problem: str = "not connected yet"
    #: Exchanges after which all totals were sent again, because the store may have lost some.
    repeats: int = 0
    #: None: this member shares no settings.
    settings: SettingsShared | None = None


@dataclass(slots=True)
class Leading:
    """Names the leader of the set of this member: itself, another member, or none that it knows."""

    pool_set: str
    #: Name of the member, a slash, and this life of its process.
    me: str
    #: This member may decide until then, by boot_ns(). 0: it does not lead.
    until_ns: int = 0
    #: The highest term known, its leader, and at which target that one is reached; "": unknown.
    term: int = 0
    leader: str = ""
    target: str = ""
    #: Terms that this process took, and those that it lost without handing them over.
    taken: int = 0
    lost: int = 0
    #: Rows of the store that a program without the cluster's secret wrote.
    forged: int = 0
    #: Why terms cannot be asked for; empty while they can.
    problem: str = ""
    #: The store answers, and refuses to write terms.
    refuses_writes: bool = False
    #: Names of the members that follow this leader.
    followers: tuple[str, ...] = ()
    #: Requests that wait at the followed leader, and would keep their places here.
    followed_places: int = 0
    #: When this standby began to follow the leader, and when it heard of it last, by boot_ns(); 0:
    #: it does not follow.
    followed_ns: int = 0
    heard_ns: int = 0
    #: This member leads, and knows nothing of the leases of the leader before.
    is_cold: bool = False
    #: Requests that waited at the last leader when its term ended: their keys in the core, and how
    #: long they had waited, in ns.
    places: list[tuple[bytes, int]] = field(default_factory=list)
    #: Gets a term that a client reported; returns whether the store has to be asked about it.
    on_report: Callable[[int], bool] = lambda term: False
