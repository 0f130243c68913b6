# Histograms of times, for each tenant and class: how long requests waited until they were granted,
# or until they were evicted, and when their first output was reported. They are views: no decision
# reads them, and the digest does not hold them.
#
# A flow counts in histograms of its own if its tenant is shown by name (`show_histograms()`), else
# in those that all other tenants of its class share. So an event costs the same with any number of
# tenants, and the page of metrics reads only the shown ones. A histogram never shrinks, and no
# event is counted twice: a tenant that is shown no more keeps its own, in case it is shown again.
#
# Memory: 360 bytes for each class that a shown tenant uses, and once for each class of the others.

# Upper bounds of all buckets but the last, inclusive, in ms. The only table of them.
HISTOGRAM_BOUNDS_MS = (
    5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000
)

cdef enum:
    TIME_BUCKETS = 14  # the last has no upper bound
    TIME_BOUNDS = 15  # as `observe()` searches them

# Those, in ns; behind them what no time exceeds.
cdef int64_t TIME_BOUNDS_NS[TIME_BOUNDS]

cdef int read_bounds() except -1:
    cdef int k
    if len(HISTOGRAM_BOUNDS_MS) != TIME_BUCKETS - 1:
        raise ValueError(f"HISTOGRAM_BOUNDS_MS: must have {TIME_BUCKETS - 1} bounds")
    for k in range(TIME_BOUNDS):
        TIME_BOUNDS_NS[k] = NEVER
    for k in range(TIME_BUCKETS - 1):
        TIME_BOUNDS_NS[k] = <int64_t>HISTOGRAM_BOUNDS_MS[k] * NS_PER_MS
    return 0

read_bounds()

ctypedef struct TimeHistogram:
    int64_t counts[TIME_BUCKETS]  # each bucket's own count
    uint64_t sum_us  # each time rounded down; lasts 584,000 years of waiting

# The times of one flow, or of all that share them.
ctypedef struct FlowTimes:
    TimeHistogram waited  # from the admission to the grant
    TimeHistogram evicted  # from the admission to the eviction
    TimeHistogram first_output  # from the admission to the first report of output

# Zeros, for a flow that was never shown. The core only reads it.
cdef FlowTimes NO_TIMES
memset(&NO_TIMES, 0, sizeof(FlowTimes))


cdef inline void observe(TimeHistogram* h, int64_t ns) noexcept nogil:
    """Count a time. O(1): four comparisons without a branch find the bucket."""
    cdef int k = (ns > TIME_BOUNDS_NS[7]) << 3
    k += (ns > TIME_BOUNDS_NS[k + 3]) << 2
    k += (ns > TIME_BOUNDS_NS[k + 1]) << 1
    k += ns > TIME_BOUNDS_NS[k]
    h.counts[k] += 1
    h.sum_us += <uint64_t>ns // 1000


cdef inline int64_t counted(const TimeHistogram* h) noexcept:
    """Return how many times a histogram holds. O(TIME_BUCKETS)."""
    cdef int64_t count = 0
    cdef int k
    for k in range(TIME_BUCKETS):
        count += h.counts[k]
    return count
