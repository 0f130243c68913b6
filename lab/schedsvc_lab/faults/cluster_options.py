"""Seeds that are runs of a cluster, and what is done to one."""

CLUSTER = 1 << 54
"""Seeds from here on are runs of a cluster."""

ENDED = 1 << 55
"""Seeds from here on also draw CLUSTER_ENDED."""

SETS = ENDED + (1 << 54)
"""Seeds from here on also draw CLUSTER_SETS."""

STRICT = SETS + (1 << 53)
"""From here on nothing passes a request that does not fit: so books on fair shares are exact."""

REFUSING = STRICT + (1 << 52)
"""Seeds from here on also draw CLUSTER_REFUSES."""

CLUSTER_ENDED, CLUSTER_SETS = "member-ended", "other-set-led"
CLUSTER_REFUSES = "store-refuses-writes"

CLUSTER_FAULTS = {
    "store-killed": (3, "the store dies, with the last second of its writes or without, and starts"
        " again"),
    "store-flushed": (2, "the store loses all its data"),
    "store-stopped": (2, "the store's process stands still for seconds, then reads what came"),
    "store-black-hole": (2, "no message passes to or from the store for seconds"),
    "store-fails-over": (2, "a replica takes over, without the last second"),
    CLUSTER_REFUSES: (3, "the store answers, and refuses writes for seconds, for one of five"
        " reasons"),
    "store-clock-step": (1, "the store's clock jumps by up to an hour"),
    "store-link-cut": (4, "a member does not reach the store for seconds; messages may come late"),
    "store-link-slow": (2, "messages between a member and the store take up to a second"),
    "peer-links-cut": (2, "members that lead one set do not reach one of them for seconds"),
    "member-killed": (3, "a scheduler dies and starts again, as another origin"),
    "member-paused": (3, "a scheduler's process stands still for seconds"),
    CLUSTER_ENDED: (3, "a scheduler gets SIGTERM and starts again; a leader hands its term over"),
    CLUSTER_SETS: (3, "a member of another set takes the next term of the cluster"),
    "member-burst": (2, "thirty requests arrive at one member in one moment"),
}  # fmt: skip
"""Faults of a cluster: of its store, of the ways there, and of its members."""
