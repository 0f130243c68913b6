# Output-length quantiles per flow: a log-bucket histogram with integer counts that forgets.
#
# Lengths up to 127 have a bucket each; above, 64 buckets an octave (as HdrHistogram does), so the
# middle of a bucket is within 0.8 % of every length in it. When the mass reaches WINDOW all counts
# are halved, the remainders carried to the next bucket so that no mass is lost: an exponential
# decay with a half-life of WINDOW/2 samples. The two quantiles in use are kept by a pointer each,
# which moves with every sample, so that reading one is O(1).

cdef enum:
    EXACT = 128
    SUB_BITS = 6
    BUCKETS = 768
    LENGTH_MAX = (1 << 17) - 1
    WINDOW = 512
    TRACKED = 2
    NEWCOMER_LEASES = 4


ctypedef struct Sketch:
    int32_t mass
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


cdef void sketch_settle(Sketch* s, int which, int64_t ppm) noexcept nogil:
    # Move to the least bucket b with sum(counts[:b + 1]) * 10^6 >= ppm * mass.
    cdef int64_t want = ppm * s.mass
    while s.at[which] > 0 and <int64_t>s.below[which] * 1_000_000 >= want:
        s.at[which] -= 1
        s.below[which] -= s.counts[s.at[which]]
    while (
        s.at[which] < BUCKETS - 1
        and <int64_t>(s.below[which] + s.counts[s.at[which]]) * 1_000_000 < want
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


cdef void sketch_add(Sketch* s, int64_t length, int64_t* ppm) noexcept nogil:
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
        sketch_settle(s, which, ppm[which])


cdef int64_t sketch_beyond(const Sketch* s, int64_t produced, int64_t ppm) noexcept nogil:
    """Quantile of length, given that it exceeds `produced`; -1 without evidence. O(BUCKETS)."""
    cdef int32_t first = bucket_of(produced) + 1
    cdef int32_t i
    cdef int64_t mass = 0, seen = 0
    for i in range(first, BUCKETS):
        mass += s.counts[i]
    if mass == 0:
        return NONE
    for i in range(first, BUCKETS):
        seen += s.counts[i]
        if seen * 1_000_000 >= ppm * mass:
            return bucket_middle(i)
    return NONE


ctypedef struct FlowLengths:
    Sketch* sketch
    int32_t* first
    int32_t count


@cython.final
cdef class Predictor:
    """A sketch for each flow that has samples enough, and one over all flows.

    A flow's first `samples_min` lengths wait in a short list: most of many flows never need more.
    Ten by default: of fewer than nine samples even the largest does not cover 90 % of what comes.
    """

    cdef FlowLengths* lengths_of
    cdef int32_t flows_max
    cdef Sketch overall
    cdef int64_t samples  # over all flows, since the start
    cdef int64_t ppm[TRACKED]  # the ledger's quantile, the median
    cdef int64_t samples_min
    cdef int64_t judged, covered  # predictions from a sketch, and those that held
    cdef int64_t reserved_tokens, used_tokens

    def __cinit__(self, int64_t quantile_ppm, int64_t samples_min):
        self.ppm[0] = quantile_ppm
        self.ppm[1] = 500_000
        self.samples_min = samples_min

    def __dealloc__(self):
        self.clear()
        free(self.lengths_of)

    cdef int learn(self, int32_t flow, int64_t length) except -1:
        """One completed sequence. O(1) amortised."""
        cdef int32_t size, i
        cdef FlowLengths* e
        self.samples += 1
        sketch_add(&self.overall, length, self.ppm)
        if flow >= self.flows_max:
            size = max(16, max(flow + 1, self.flows_max * 2))
            self.lengths_of = <FlowLengths*>grow(
                self.lengths_of, self.flows_max, size, sizeof(FlowLengths)
            )
            self.flows_max = size
        e = &self.lengths_of[flow]
        if e.sketch != NULL:
            sketch_add(e.sketch, length, self.ppm)
            return 0
        if e.first == NULL:
            e.first = <int32_t*>grow(NULL, 0, self.samples_min, sizeof(int32_t))
        e.first[e.count] = <int32_t>min(length, LENGTH_MAX)
        e.count += 1
        if e.count == self.samples_min:
            e.sketch = <Sketch*>grow(NULL, 0, 1, sizeof(Sketch))
            for i in range(e.count):
                sketch_add(e.sketch, e.first[i], self.ppm)
            free(e.first)
            e.first = NULL
        return 0

    cdef Sketch* _evidence(self, int32_t flow) noexcept:
        # The flow's own sketch, else the one over all flows, else nothing.
        if flow < self.flows_max and self.lengths_of[flow].sketch != NULL:
            return self.lengths_of[flow].sketch
        if self.samples >= self.samples_min:
            return &self.overall
        return NULL

    cdef int64_t quantile(self, int32_t flow, int which) noexcept:
        """Tracked quantile (0: the ledger's, 1: the median), at least 1; -1: unknown. O(1)."""
        cdef Sketch* s = self._evidence(flow)
        if s == NULL:
            return NONE
        return max(1, bucket_middle(s.at[which]))

    cdef int64_t promise(self, int32_t flow, int64_t live) noexcept:
        """Output to reserve for the next request of a flow with so many leases; -1: all. O(1).

        On the evidence of other flows alone only a few may run at once: a newcomer whose outputs
        are much longer than everybody's would else be granted the pool many times over.
        """
        cdef bint is_known = flow < self.flows_max and self.lengths_of[flow].sketch != NULL
        if not is_known and live >= NEWCOMER_LEASES:
            return NONE
        return self.quantile(flow, 0)

    cdef int64_t beyond(self, int32_t flow, int64_t produced) noexcept:
        """The ledger's quantile of a sequence that has outgrown its prediction. O(BUCKETS)."""
        cdef Sketch* s = self._evidence(flow)
        cdef int64_t q = NONE if s == NULL else sketch_beyond(s, produced, self.ppm[0])
        # Longer than all that was seen: a quarter more at a time.
        return max(q, produced + max(<int64_t>16, produced >> 2))

    cdef void judge(self, int64_t promised, int64_t used, bint by_sketch) noexcept:
        """Measure a prediction against what came (section 5: coverage)."""
        self.reserved_tokens += promised
        self.used_tokens += used
        if by_sketch:
            self.judged += 1
            if used <= promised:
                self.covered += 1

    cdef void clear(self) noexcept:
        cdef int32_t i
        for i in range(self.flows_max):
            free(self.lengths_of[i].sketch)
            free(self.lengths_of[i].first)
        memset(self.lengths_of, 0, self.flows_max * sizeof(FlowLengths))

    cdef void forget(self) noexcept:
        self.clear()
        self.samples = 0
        memset(&self.overall, 0, sizeof(Sketch))
        self.judged = self.covered = 0
        self.reserved_tokens = self.used_tokens = 0
