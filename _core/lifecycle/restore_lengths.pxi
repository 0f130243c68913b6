# Output lengths out of saved rows, checked, and put back into the predictor: see restore.

# Lengths of one kind, as they were read.
ctypedef struct SavedLengths:
    int64_t count, level_ppm, learned_at
    uint64_t adapter
    int32_t waiting  # how many stand in `first`
    int32_t mass
    int32_t first[1000]
    uint16_t counts[BUCKETS]


cdef int restore_lengths(Core core, bytes name, Cursor* c, bint applies) except -1:
    cdef int64_t v[4]  # fields 3 to 6
    cdef int64_t tag
    cdef SavedLengths lengths
    cdef FlowLengths* f = NULL
    cdef Pair* pair
    cdef int pairs = 0
    cdef int32_t flow = flow_of_row(core, name, applies)
    if flow != NONE:
        f = core.predictor._flow(flow)
    memset(v, 0, sizeof(v))
    while True:
        tag = read_tag(c)
        if tag == 0:
            break
        if tag == 1 << 3 | LENGTH or tag == 2 << 3 | LENGTH:
            read_lengths(read_message(c), &lengths)
            if tag >> 3 == 2:
                pairs += 1
                check_range("pairs", pairs, 1, PAIRS_MAX)
                check_range("adapter", lengths.adapter != 0, 1, 1)
            if f != NULL and tag >> 3 == 1:
                place_lengths(core.predictor, &f.own, &lengths)
            elif f != NULL and core.predictor._pair(flow, lengths.adapter) == NULL:
                pair = core.predictor._make_pair(flow, lengths.adapter)
                pair.learned_at = lengths.learned_at
                place_lengths(core.predictor, &pair.lengths, &lengths)
        elif tag & 7 == VARINT and 3 <= tag >> 3 <= 6:
            v[(tag >> 3) - 3] = <int64_t>read_varint(c)
        else:
            skip(c, tag)
    check_whole(c, "it")
    check_sums(v)
    if f == NULL:
        return 0
    f.judged, f.covered, f.reserved_tokens, f.used_tokens = v[0], v[1], v[2], v[3]
    return 1


cdef int check_sums(int64_t* v) except -1:
    # The sums of promises: judged, covered, and tokens reserved and used.
    check_range("judged", v[0], 0, 1 << 40)
    check_range("covered", v[1], 0, v[0])
    check_range("reserved_tokens", v[2], 0, SUM_MAX)
    return check_range("used_tokens", v[3], 0, SUM_MAX)


cdef int read_lengths(Cursor c, SavedLengths* out) except -1:
    """Read and check lengths of one kind. O(bytes)."""
    cdef Cursor packed
    cdef int64_t tag, value, bucket = NONE
    memset(out, 0, sizeof(SavedLengths))
    while True:
        tag = read_tag(&c)
        if tag == 0:
            break
        if tag == 1 << 3 | VARINT:
            out.count = <int64_t>read_varint(&c)
        elif tag == 2 << 3 | VARINT:
            out.level_ppm = <int64_t>read_varint(&c)
        elif tag == 3 << 3 | VARINT:
            out.learned_at = <int64_t>read_varint(&c)
        elif tag == 6 << 3 | FIXED64:
            out.adapter = read_fixed64(&c)
        elif tag == 4 << 3 | LENGTH:
            packed = read_message(&c)
            while packed.at < packed.end and not packed.bad:
                value = <int64_t>read_varint(&packed)
                check_range("length", value, 0, LENGTH_MAX)
                check_range("lengths", out.waiting + 1, 1, 1_000)
                out.first[out.waiting] = <int32_t>value
                out.waiting += 1
            c.bad = c.bad or packed.bad
        elif tag == 5 << 3 | LENGTH:
            packed = read_message(&c)
            while packed.at < packed.end and not packed.bad:
                value = <int64_t>read_varint(&packed)
                check_range("bucket", value, 1, BUCKETS - 1 - bucket)
                bucket += value
                value = <int64_t>read_varint(&packed)
                check_range("count", value, 1, WINDOW - 1 - out.mass)
                out.counts[bucket] = <uint16_t>value
                out.mass += <int32_t>value
            c.bad = c.bad or packed.bad
        else:
            skip(&c, tag)
    check_whole(&c, "it")
    check_range("level_ppm", out.level_ppm, out.mass != 0, WHOLE_PPM)
    check_range("learned_at", out.learned_at, 0, SUM_MAX)
    if out.mass:
        check_range("lengths", out.waiting, 0, 0)  # one or the other
        return check_range("count", out.count, 1, COUNT_MAX)
    return check_range("count", out.count, out.waiting, out.waiting)


cdef int place_lengths(Predictor p, Lengths* e, const SavedLengths* s) except -1:
    cdef int64_t missed_ppm = WHOLE_PPM - p.ppm, level
    cdef int32_t k
    lengths_clear(e)  # if two rows have one key, the last counts
    if s.mass == 0:
        for k in range(s.waiting):
            p._add(e, s.first[k])
        return 0
    e.count = <int32_t>s.count
    e.sketch = <Sketch*>grow(NULL, 0, 1, sizeof(Sketch))
    level = max(s.level_ppm, max(<int64_t>1, WHOLE_PPM - 3 * missed_ppm))
    e.sketch.level_ppm[LEDGER] = <int32_t>level
    e.sketch.level_ppm[MEDIAN] = 500_000
    e.sketch.mass = s.mass
    memcpy(e.sketch.counts, s.counts, sizeof(s.counts))
    for k in range(TRACKED):
        sketch_settle(e.sketch, k)
    return 0


cdef int64_t latest_sample(Core core) noexcept:
    # Places of a flow's adapters are given up in the order of these numbers, which only grow.
    cdef int64_t latest = 0
    cdef int32_t i, k
    for i in range(core.predictor.flows_max):
        if core.predictor.lengths_of[i].pairs != NULL:
            for k in range(PAIRS_MAX):
                latest = max(latest, core.predictor.lengths_of[i].pairs[k].learned_at)
    return latest


cdef int64_t SUM_MAX = <int64_t>1 << 53


cdef int32_t flow_of_row(Core core, bytes name, bint applies) except -2:
    """Return the flow of a row; -1: no such tenant is configured. Makes the flow if the tenant has
    none in that class yet. If `applies` is false, checks the name alone."""
    cdef int64_t size
    cdef Ask ask
    if len(name) < 2:
        invalid("key", "names no flow")
    size = (name[0] << 8) + name[1]
    if size > NAME_BYTES_MAX or len(name) - 2 < size:
        invalid("key", "names no flow")
    base = core.flow_names.get(name[2 + size:])
    ask.cls = core.classes.find(name[2:2 + size]) if size else 0
    if not applies or base is None or ask.cls == NONE or core.classes.items[ask.cls].gone:
        return NONE
    ask.flow = base
    enter_class(core, &ask)
    return ask.flow
