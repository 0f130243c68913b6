# Predicts how much output a request will produce: a quantile of what its flow produced with its
# adapter; without evidence for that, of its flow; without that, of all flows. If nothing is known,
# max_output_tokens is reserved.
#
# Evidence counts once WARM times as many requests have ended as run. Until then most of those that
# have ended are short ones. The coverage of each promise is measured and steers the level of
# the sketch that made it (Gibbs and Candes, "Adaptive conformal inference under distribution
# shift", NeurIPS 2021): up by STEP * quantile where the output was longer, down by
# STEP * (1 - quantile) where it was not, so that in the long run the share that was covered is the
# quantile, however the lengths drift. A promise is judged when the output outgrows it or ends,
# whichever is first.

cdef enum:
    NEWCOMER_LEASES = 4
    PAIRS_MAX = 16  # adapters of a flow with lengths of their own
    WARM = 3
    STEP_PPM = 4_000
    COUNT_MAX = 1 << 30

cdef enum:  # what a promise was made from
    BY_NOTHING = 0
    BY_ALL = 1
    BY_FLOW = 2
    BY_PAIR = 3

# Lengths of one kind of request. The first ones wait in a short list until they are enough for a
# sketch: most of many flows never need one.
ctypedef struct Lengths:
    Sketch* sketch
    int32_t* first
    int32_t count  # learned so far

# A flow with one of its adapters.
ctypedef struct Pair:
    uint64_t adapter  # hash of its name; 0: free
    int64_t learned_at  # samples over all flows, when the last was learned
    Lengths lengths

ctypedef struct FlowLengths:
    Lengths own
    Pair* pairs  # PAIRS_MAX of them, or NULL
    int64_t judged, covered
    int64_t reserved_tokens, used_tokens


cdef void lengths_clear(Lengths* e) noexcept:
    free(e.sketch)
    free(e.first)
    memset(e, 0, sizeof(Lengths))


# Whose output is to be predicted.
ctypedef struct Asked:
    int32_t flow
    uint64_t adapter  # hash of its name; 0: none
    int64_t live  # leases of the flow
    int64_t live_of_all


@cython.final
cdef class Predictor:
    """Predicts lengths of outputs, for each flow, its adapters, and all flows together.

    Evidence are `samples_min` lengths, and no fewer than the quantile needs: of eight samples even
    the largest does not cover 90 % of what comes.
    """

    cdef FlowLengths* lengths_of
    cdef int32_t flows_max
    cdef Lengths overall
    cdef int64_t samples  # over all flows, since the start
    cdef int64_t ppm  # the quantile that is promised
    cdef int32_t enough
    cdef int64_t judged, covered  # promises from evidence, and those that held
    cdef int64_t reserved_tokens, used_tokens
    cdef DirtyQueue changed  # flows whose lengths or sums are new

    def __cinit__(self, int64_t quantile_ppm, int64_t samples_min):
        cdef int64_t least = 1
        self.changed = DirtyQueue()
        self.ppm = quantile_ppm
        # level * (mass + 1) <= mass, but at most half a window
        while least < WINDOW // 2 and quantile_ppm * (least + 1) > WHOLE_PPM * least:
            least += 1
        self.enough = <int32_t>max(samples_min, least)

    def __dealloc__(self):
        self.clear()
        free(self.lengths_of)

    cdef inline void prefetch(self, int32_t flow) noexcept:
        """Fetch the lengths of a flow, which are looked at soon."""
        if flow < self.flows_max:
            prefetch_record(&self.lengths_of[flow], sizeof(FlowLengths))

    cdef inline void prefetch_sketch(self, int32_t flow) noexcept:
        """Fetch the sketch to which the lengths of a flow, once they are here, lead."""
        if flow < self.flows_max:
            prefetch_line(self.lengths_of[flow].own.sketch)

    cdef FlowLengths* _flow(self, int32_t flow) except NULL:
        cdef int32_t size
        if flow >= self.flows_max:
            size = doubled(self.flows_max, flow, 64)
            self.lengths_of = <FlowLengths*>grow(
                self.lengths_of, self.flows_max, size, sizeof(FlowLengths)
            )
            self.changed.reserve(size)
            self.flows_max = size
        return &self.lengths_of[flow]

    cdef Pair* _pair(self, int32_t flow, uint64_t adapter) noexcept:
        """Return the lengths of a flow with this adapter, or NULL. O(PAIRS_MAX)."""
        cdef int32_t k
        cdef Pair* pairs
        if adapter == 0 or flow >= self.flows_max or self.lengths_of[flow].pairs == NULL:
            return NULL
        pairs = self.lengths_of[flow].pairs
        for k in range(PAIRS_MAX):
            if pairs[k].adapter == adapter:
                return &pairs[k]
        return NULL

    cdef Pair* _make_pair(self, int32_t flow, uint64_t adapter) except NULL:
        # Take the flow's own place that learned nothing for longest; never another flow's.
        cdef FlowLengths* f = self._flow(flow)
        cdef Pair* oldest
        cdef int32_t k
        if f.pairs == NULL:
            f.pairs = <Pair*>grow(NULL, 0, PAIRS_MAX, sizeof(Pair))
        oldest = &f.pairs[0]
        for k in range(1, PAIRS_MAX):
            if f.pairs[k].learned_at < oldest.learned_at:
                oldest = &f.pairs[k]
        lengths_clear(&oldest.lengths)
        oldest.adapter = adapter
        return oldest

    cdef int learn(self, int32_t flow, uint64_t adapter, int64_t length) except -1:
        """Take in the output length of one sequence. Amortised O(1)."""
        cdef Pair* pair
        self.samples += 1
        self._add(&self.overall, length)
        self._add(&self._flow(flow).own, length)
        self.changed.mark(flow)
        if adapter:
            pair = self._pair(flow, adapter)
            if pair == NULL:
                pair = self._make_pair(flow, adapter)
            pair.learned_at = self.samples
            self._add(&pair.lengths, length)
        return 0

    cdef int _add(self, Lengths* e, int64_t length) except -1:
        cdef int32_t i
        e.count += e.count < COUNT_MAX
        if e.sketch != NULL:
            sketch_add(e.sketch, length)
            return 0
        if e.first == NULL:
            e.first = <int32_t*>grow(NULL, 0, self.enough, sizeof(int32_t))
        e.first[e.count - 1] = <int32_t>min(length, LENGTH_MAX)
        if e.count == self.enough:
            e.sketch = <Sketch*>grow(NULL, 0, 1, sizeof(Sketch))
            e.sketch.level_ppm[LEDGER] = <int32_t>self.ppm
            e.sketch.level_ppm[MEDIAN] = 500_000
            for i in range(e.count):
                sketch_add(e.sketch, e.first[i])
            free(e.first)
            e.first = NULL
        return 0

    cdef Sketch* _evidence(self, const Asked* a, uint8_t* by) noexcept:
        """Return the narrowest sketch that is warm, and which it is; NULL if there is none.
        O(1)."""
        cdef Pair* pair = self._pair(a.flow, a.adapter)
        if pair != NULL and self._is_warm(&pair.lengths, a.live):
            by[0] = BY_PAIR
            return pair.lengths.sketch
        if a.flow < self.flows_max and self._is_warm(&self.lengths_of[a.flow].own, a.live):
            by[0] = BY_FLOW
            return self.lengths_of[a.flow].own.sketch
        if self._is_warm(&self.overall, a.live_of_all):
            by[0] = BY_ALL
            return self.overall.sketch
        by[0] = BY_NOTHING
        return NULL

    cdef inline bint _is_warm(self, const Lengths* e, int64_t live) noexcept:
        return e.sketch != NULL and e.count >= WARM * live

    cdef int64_t quantile(self, const Asked* a, int which) noexcept:
        """Return a tracked quantile (LEDGER or MEDIAN), at least 1; -1: unknown. O(1)."""
        cdef uint8_t by
        cdef Sketch* s = self._evidence(a, &by)
        return NONE if s == NULL else max(1, bucket_middle(s.at[which]))

    cdef int64_t promise(self, const Asked* a, uint8_t* by) noexcept:
        """Return the output to reserve for each sequence of the next request; -1: all of it. O(1).

        On the evidence of other flows alone a newcomer runs only a few requests at once, and a
        few more for each that has ended. Its outputs may be much longer than theirs, and it would
        else be granted the pool many times over.
        """
        cdef Sketch* s = self._evidence(a, by)
        cdef int64_t ended
        if by[0] == BY_ALL:
            ended = self.lengths_of[a.flow].own.count if a.flow < self.flows_max else 0
            if a.live >= NEWCOMER_LEASES * (1 + ended):
                by[0] = BY_NOTHING
                return NONE
        return NONE if s == NULL else max(1, bucket_middle(s.at[LEDGER]))

    cdef int64_t beyond(self, const Asked* a, int64_t produced) noexcept:
        """Return the ledger's quantile of a sequence that has outgrown its prediction.
        O(BUCKETS)."""
        cdef uint8_t by
        cdef Sketch* s = self._evidence(a, &by)
        cdef int64_t q = NONE if s == NULL else sketch_beyond(s, produced)
        # Longer than all that was seen: a quarter more at a time.
        return max(q, produced + max(<int64_t>16, produced >> 2))

    cdef int record_coverage(self, int32_t flow, uint64_t adapter, int by, bint covered) except -1:
        """Measure a promise, and steer the sketch that made it. Amortised O(1)."""
        cdef FlowLengths* f
        cdef Pair* pair
        if by == BY_NOTHING:
            return 0
        f = self._flow(flow)
        self.changed.mark(flow)
        f.judged += 1
        f.covered += covered
        self.judged += 1
        self.covered += covered
        if by == BY_ALL:
            self._steer(self.overall.sketch, covered)
        elif by == BY_FLOW:
            self._steer(f.own.sketch, covered)
        else:
            pair = self._pair(flow, adapter)
            if pair != NULL:  # it may have given way to another adapter
                self._steer(pair.lengths.sketch, covered)
        return 0

    cdef void _steer(self, Sketch* s, bint covered) noexcept:
        # Outputs that are all alike are covered at any level. The level sinks only so far that it
        # can rise again soon.
        cdef int64_t missed_ppm = WHOLE_PPM - self.ppm, level
        if s == NULL:  # forgotten since
            return
        level = s.level_ppm[LEDGER]
        if covered:
            level -= STEP_PPM * missed_ppm // WHOLE_PPM
        else:
            level += STEP_PPM * self.ppm // WHOLE_PPM
        level = max(level, max(<int64_t>1, WHOLE_PPM - 3 * missed_ppm))
        s.level_ppm[LEDGER] = <int32_t>min(level, WHOLE_PPM)
        sketch_settle(s, LEDGER)

    cdef int record_usage(
        self, int32_t flow, int64_t reserved_tokens, int64_t used_tokens
    ) except -1:
        """Add up what was reserved at the grant and what was used, of a sequence that ended."""
        cdef FlowLengths* f = self._flow(flow)
        self.changed.mark(flow)
        f.reserved_tokens += reserved_tokens
        f.used_tokens += used_tokens
        self.reserved_tokens += reserved_tokens
        self.used_tokens += used_tokens
        return 0

    cdef bint knows_little(self, int32_t flow) noexcept:
        """Return whether a flow's outputs are predicted from those of all flows. O(PAIRS_MAX)."""
        cdef const FlowLengths* f
        cdef int32_t k
        if flow >= self.flows_max:
            return True
        f = &self.lengths_of[flow]
        if f.pairs != NULL:
            for k in range(PAIRS_MAX):
                if f.pairs[k].lengths.sketch != NULL:
                    return False
        return f.own.sketch == NULL

    cdef void forget_lengths(self, int32_t flow) noexcept:
        """Forget how long a flow's outputs were; judgements stay counted. O(PAIRS_MAX)."""
        cdef FlowLengths* f
        cdef int32_t k
        if flow >= self.flows_max:
            return
        f = &self.lengths_of[flow]
        lengths_clear(&f.own)
        if f.pairs != NULL:
            for k in range(PAIRS_MAX):
                lengths_clear(&f.pairs[k].lengths)
            free(f.pairs)
            f.pairs = NULL
        self.changed.mark(flow)

    cdef void forget_flow(self, int32_t flow) noexcept:
        """Forget what a flow has taught about itself. O(PAIRS_MAX)."""
        if flow < self.flows_max:
            self.forget_lengths(flow)
            memset(&self.lengths_of[flow], 0, sizeof(FlowLengths))

    cdef void clear(self) noexcept:
        cdef int32_t i
        lengths_clear(&self.overall)
        for i in range(self.flows_max):
            self.forget_flow(i)

    cdef void forget(self) noexcept:
        self.clear()
        self.samples = 0
        self.judged = self.covered = 0
        self.reserved_tokens = self.used_tokens = 0
        self.changed.mark_all(self.flows_max)
