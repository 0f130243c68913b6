# Histograms of times, for each tenant and class: how long requests waited until they were granted,
# or until they were evicted, when their first output was reported, how long those took that
# completed, and each of their output tokens after the first. They are views: no decision reads
# them, and the digest does not hold them.
#
# A flow counts in histograms of its own if its tenant is shown by name (`show_histograms()`), else
# in those that all other tenants of its class share. So an event costs the same with any number of
# tenants, and the page of metrics reads only the shown ones. A histogram never shrinks, and no
# event is counted twice: a tenant that is shown no more keeps its own, in case it is shown again.
#
# The bounds follow from the queue TTL at the start, because waits gather below it and first tokens
# just above it: between half of it and twice it, each bound is 9 % above the one before, so a
# quantile there is within a tenth of the exact value.
#
# Memory: 1,320 bytes for each class that a shown tenant uses, and once for each class of others.

cdef enum:
    TIME_BUCKETS = 32  # the last has no upper bound
    COARSE_BOUNDS = 14  # those outside the fine section

# Bounds outside the fine section: 5, 10, 25, 50 ms, and so on.
COARSE_BOUNDS_MS = tuple(
    step * 10 ** exponent // 2 for exponent in range(10) for step in (10, 20, 50)
)


def bounds_of(queue_ttl_ms):
    """Return the upper bounds in ms of all buckets but the last, inclusive, for a queue TTL."""
    found = {max(1, round(queue_ttl_ms * 1.09 ** step)) for step in range(-8, 9)}
    low, high = 0.8 * min(found), 1.25 * max(found)
    found.update([ms for ms in COARSE_BOUNDS_MS if ms <= low][:COARSE_BOUNDS - 1])
    for ms in COARSE_BOUNDS_MS:
        if ms >= high and len(found) < TIME_BUCKETS - 1:
            found.add(ms)
    while len(found) < TIME_BUCKETS - 1:
        found.add(2 * max(found))
    return tuple(sorted(found))

cdef class TimeBounds:
    """Holds the bounds of all histograms of a scheduler."""

    cdef tuple ms
    cdef int64_t ns[TIME_BUCKETS]  # behind them what no time exceeds

    def __cinit__(self, int64_t queue_ttl_ns):
        cdef int k
        self.ms = bounds_of(max(1, queue_ttl_ns // NS_PER_MS))
        for k in range(TIME_BUCKETS - 1):
            self.ns[k] = <int64_t>self.ms[k] * NS_PER_MS
        self.ns[TIME_BUCKETS - 1] = NEVER

ctypedef struct TimeHistogram:
    int64_t counts[TIME_BUCKETS]  # each bucket's own count
    uint64_t sum_us  # each time rounded down; lasts 584,000 years of waiting

# The times of one flow, or of all that share them.
ctypedef struct FlowTimes:
    TimeHistogram waited  # from the admission to the grant
    TimeHistogram evicted  # from the admission to the eviction
    TimeHistogram first_output  # from the admission to the first report of output
    TimeHistogram completed  # from the admission to the end
    TimeHistogram output_token  # from the first output to the end, for each further token

# Zeros, for a flow that was never shown. The core only reads it.
cdef FlowTimes NO_TIMES
memset(&NO_TIMES, 0, sizeof(FlowTimes))


cdef inline void observe(TimeBounds bounds, TimeHistogram* h, int64_t ns) noexcept:
    """Count a time. O(1): five comparisons without a branch find the bucket."""
    cdef int k = (ns > bounds.ns[15]) << 4
    k += (ns > bounds.ns[k + 7]) << 3
    k += (ns > bounds.ns[k + 3]) << 2
    k += (ns > bounds.ns[k + 1]) << 1
    k += ns > bounds.ns[k]
    h.counts[k] += 1
    h.sum_us += <uint64_t>ns // 1000


cdef inline int64_t counted(const TimeHistogram* h) noexcept:
    """Return how many times a histogram holds. O(TIME_BUCKETS)."""
    cdef int64_t count = 0
    cdef int k
    for k in range(TIME_BUCKETS):
        count += h.counts[k]
    return count
