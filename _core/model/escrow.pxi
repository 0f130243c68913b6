# Escrow: the buckets of a quota that the members of a cluster share. The store keeps them, and a
# member spends chunks that it was granted. A chunk ends at a time that is compared when it is used.
#
# Slots are a member's part of a cap on concurrent requests. They are free again when requests end.
# So the member states how many it keeps, and not how many it used.
#
# While the store is away, time fills the buckets at a part of their limits, if the configuration
# says so. The rest of a chunk is then spent as part of that.

cdef int64_t ESCROW_ASK_NS = 250_000_000  # a member asks the store at least this often

ctypedef struct Escrow:
    int64_t share  # 0: chunks alone fill the buckets; n: time does, at an n-th of their limits
    int64_t ends_ns  # end of the chunks
    int64_t due_ns[RATES]  # when the store can have enough for what waits; in the past: unknown
    int64_t left[RATES]  # what its buckets held at its last answer, 0 or more
    int64_t told_ns  # time of that answer
    int64_t slots, slots_left  # requests that may run here, and those that no member held
    int64_t slots_told_ns, slots_end_ns


cdef inline bint is_held(const Escrow* e) noexcept nogil:
    """Return whether only chunks fill the buckets."""
    return e != NULL and e.share == 0


cdef inline int64_t most_of(const Escrow* e, int64_t rate) noexcept nogil:
    """Return how much a bucket can hold, in millionths."""
    if e == NULL or e.share == 0:
        return rate * MICRO
    return rate * MICRO // e.share


cdef inline int64_t slots_of(const Escrow* e, int64_t concurrency, int64_t now_ns) noexcept nogil:
    """Return how many requests a node lets run at once here: its cap, or this member's part of
    it."""
    if e == NULL:
        return concurrency
    if e.share:
        return max(<int64_t>1, concurrency // e.share)
    return min(e.slots, concurrency) if now_ns < e.slots_end_ns else 0


cdef inline bint may_get_slot(
    const Escrow* e, int64_t concurrency, int64_t live, int64_t now_ns
) noexcept nogil:
    """Return whether the store may have a slot: its last answer says so, and is new enough."""
    if live >= concurrency:
        return False
    return e.slots_left > 0 or now_ns - e.slots_told_ns >= ESCROW_ASK_NS


cdef inline int64_t tick_of(const Escrow* e) noexcept nogil:
    """Return how long a bucket takes to gain its rate."""
    return QUOTA_TICK_NS if e == NULL else QUOTA_TICK_NS * e.share


cdef inline int64_t could_hold(
    const Escrow* e, int which, int64_t rate, int64_t level, int64_t now_ns
) noexcept nogil:
    """Return the most that a member could take by now, in millionths: its chunk, the level of the
    store at its last answer, and the growth since then. O(1)."""
    cdef int64_t ticks = min((now_ns - e.told_ns) // QUOTA_TICK_NS, MICRO)  # a minute fills it
    cdef int64_t stored = min(e.left[which] * MICRO + max(<int64_t>0, ticks) * rate, rate * MICRO)
    return min(max(<int64_t>0, level) + stored, rate * MICRO)


cdef inline int64_t escrow_due_ns(
    const Escrow* e, int which, int64_t at_ns, int64_t ticks, int64_t now_ns
) noexcept nogil:
    """Return when a bucket that lacks this number of ticks will have them, at the earliest."""
    if e.share:
        return at_ns + ticks * tick_of(e)
    return max(e.due_ns[which], now_ns + ESCROW_ASK_NS)
