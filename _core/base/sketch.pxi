# A log-bucket histogram of lengths with integer counts, which forgets, and its two quantiles.
#
# Lengths up to 127 have a bucket each; above, 64 buckets an octave (as HdrHistogram does), so the
# middle of a bucket is within 0.8 % of every length in it. When the mass reaches WINDOW, all counts
# are halved, and the remainders go to the next bucket, so that no mass is lost. This is an
# exponential decay with a half-life of WINDOW/2 samples. A pointer for each of the two quantiles in
# use moves with every sample, so that reading one is O(1).
#
# A quantile is the least bucket with at least level * (mass + 1) of the mass up to it. The 1 stands
# for the next length, which is not in the histogram yet: so that length is below the quantile with
# probability `level` even with few samples (as in split conformal prediction).

cdef enum:
    EXACT = 128
    SUB_BITS = 6
    BUCKETS = 768
    LENGTH_MAX = (1 << 17) - 1
    WINDOW = 512
    LEDGER = 0  # the quantile that is reserved; its level is steered
    MEDIAN = 1
    TRACKED = 2

cdef int64_t WHOLE_PPM = 1_000_000

ctypedef struct Sketch:
    int32_t mass
    int32_t level_ppm[TRACKED]
    int32_t at[TRACKED]
    int32_t below[TRACKED]
    uint16_t counts[BUCKETS]


cdef inline int32_t bucket_of(int64_t length) noexcept nogil:
    cdef int e = 7
    if length < EXACT:
        return <int32_t>max(length, 0)
    length = min(length, LENGTH_MAX)
    while length >> (e + 1):
        e += 1
    return EXACT + (e - 7) * (1 << SUB_BITS) + <int32_t>((length >> (e - SUB_BITS)) & 63)


cdef inline int64_t bucket_middle(int32_t bucket) noexcept nogil:
    cdef int e
    cdef int64_t low
    if bucket < EXACT:
        return bucket
    e = 7 + ((bucket - EXACT) >> SUB_BITS)
    low = <int64_t>(64 + ((bucket - EXACT) & 63)) << (e - SUB_BITS)
    return low + ((<int64_t>1 << (e - SUB_BITS)) >> 1)


cdef void sketch_settle(Sketch* s, int which) noexcept nogil:
    # Move to the bucket of the quantile; where the level asks for more than there is, to the last.
    cdef int64_t want = min(s.level_ppm[which] * <int64_t>(s.mass + 1), WHOLE_PPM * s.mass)
    while s.at[which] > 0 and s.below[which] * WHOLE_PPM >= want:
        s.at[which] -= 1
        s.below[which] -= s.counts[s.at[which]]
    while (
        s.at[which] < BUCKETS - 1
        and (s.below[which] + s.counts[s.at[which]]) * WHOLE_PPM < want
    ):
        s.below[which] += s.counts[s.at[which]]
        s.at[which] += 1


cdef void sketch_halve(Sketch* s) noexcept nogil:
    cdef int32_t i, which, carry = 0, mass = 0
    for i in range(BUCKETS):
        carry += s.counts[i]
        s.counts[i] = <uint16_t>(carry >> 1)
        carry &= 1
        mass += s.counts[i]
    s.mass = mass
    for which in range(TRACKED):
        s.at[which] = 0
        s.below[which] = 0


cdef void sketch_add(Sketch* s, int64_t length) noexcept nogil:
    """Learn one length. O(BUCKETS) at worst, amortised O(1)."""
    cdef int32_t b = bucket_of(length)
    cdef int which
    s.mass += 1
    s.counts[b] += 1
    for which in range(TRACKED):
        if b < s.at[which]:
            s.below[which] += 1
    if s.mass >= WINDOW:
        sketch_halve(s)
    for which in range(TRACKED):
        sketch_settle(s, which)


cdef int64_t sketch_beyond(const Sketch* s, int64_t produced) noexcept nogil:
    """Return the ledger's quantile of lengths above `produced`; -1 without any. O(BUCKETS)."""
    cdef int32_t first = bucket_of(produced) + 1
    cdef int32_t i
    cdef int64_t mass = 0, seen = 0, want
    for i in range(first, BUCKETS):
        mass += s.counts[i]
    if mass == 0:
        return NONE
    want = min(s.level_ppm[LEDGER] * (mass + 1), WHOLE_PPM * mass)
    for i in range(first, BUCKETS):
        seen += s.counts[i]
        if seen * WHOLE_PPM >= want:
            return bucket_middle(i)
    return NONE
