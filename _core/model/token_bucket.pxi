# A bucket that fills at a rate: quotas, guarantees and shares hold tokens in it.

cdef enum:
    QUOTA_TICK_NS = 60_000
    RATE_REQUESTS = 0
    RATE_INPUT = 1
    RATE_OUTPUT = 2
    RATE_TOTAL = 3
    RATES = 4

cdef int64_t MICRO = 1_000_000

# A rate in tokens a minute, and at most one minute's tokens at once; see quotas.pxi.
ctypedef struct Bucket:
    int64_t rate
    int64_t level  # millionths of a token; below 0: overdrawn
    int64_t at_ns  # start of the tick that runs


cdef inline int64_t ticks_for(int64_t micro, int64_t rate) noexcept nogil:
    """Return how many ticks gain this much. O(1)."""
    return (micro + rate - 1) // rate


cdef inline void fill(
    int64_t rate, int64_t most, int64_t tick_ns, int64_t* level, int64_t* at_ns, int64_t now_ns
) noexcept nogil:
    """Bring a level up to the present: it gains `rate` in a tick, and is `most` at most. O(1)."""
    cdef int64_t missing = most - level[0], ticks = (now_ns - at_ns[0]) // tick_ns
    if missing <= 0 or ticks >= ticks_for(missing, rate):
        level[0] = most
        at_ns[0] = now_ns
    else:
        level[0] += ticks * rate
        at_ns[0] += ticks * tick_ns


cdef void bucket_fill(Bucket* b, int64_t now_ns) noexcept nogil:
    """Bring a bucket's level up to the present. O(1)."""
    if b.rate:
        fill(b.rate, b.rate * MICRO, QUOTA_TICK_NS, &b.level, &b.at_ns, now_ns)


cdef void bucket_limit(Bucket* b, int64_t rate, int64_t now_ns) noexcept nogil:
    """Give a bucket another size: what was taken from it stays taken."""
    bucket_fill(b, now_ns)
    b.level += (rate - b.rate) * MICRO
    if b.rate == 0:
        b.level = rate * MICRO
        b.at_ns = now_ns
    b.rate = rate
    b.level = max(b.level, -rate * MICRO)  # what it owes, it owes of the new size


cdef void bucket_take(Bucket* b, int64_t micro, int64_t now_ns) noexcept nogil:
    bucket_fill(b, now_ns)
    # No sum of what it owes leaves the numbers: never more than a minute and the largest request.
    b.level = max(
        min(b.level - micro, b.rate * MICRO), -b.rate * MICRO - <int64_t>TOKENS_MAX * MICRO
    )


cdef bint bucket_has(Bucket* b, int64_t now_ns) noexcept nogil:
    bucket_fill(b, now_ns)
    return b.level > 0


cdef int64_t bucket_due(const Bucket* b) noexcept nogil:
    """Return when a bucket that was filled up to the present and is empty holds something again."""
    if b.rate == 0:
        return NEVER
    return b.at_ns + ticks_for(1 - b.level, b.rate) * QUOTA_TICK_NS
