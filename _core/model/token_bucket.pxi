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


cdef void bucket_fill(Bucket* b, int64_t now_ns) noexcept nogil:
    """Bring a level up to the present. O(1)."""
    cdef int64_t missing, ticks
    if b.rate == 0:
        return
    missing = b.rate * MICRO - b.level
    ticks = (now_ns - b.at_ns) // QUOTA_TICK_NS
    if missing <= 0 or ticks >= (missing + b.rate - 1) // b.rate:
        b.level = b.rate * MICRO
        b.at_ns = now_ns
    else:
        b.level += ticks * b.rate
        b.at_ns += ticks * QUOTA_TICK_NS


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
    """When one that was filled up to the present and is empty holds something again."""
    if b.rate == 0:
        return NEVER
    return b.at_ns + (b.rate - b.level) // b.rate * QUOTA_TICK_NS
