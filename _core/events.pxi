# Reading the events of a Session other than Admit.

ctypedef struct Notice:
    int64_t lease_id
    int32_t state


# What is read of a Progress, a Complete or a Replay.
ctypedef struct LeaseMessage:
    int64_t lease_id, epoch, outcome
    Usage usage


cdef uint64_t tag_of(Cursor c) noexcept:
    """Field 1 of an Admit or a Cancel, 0 where it is missing."""
    return read_first(&c)


cdef uint64_t read_first(Cursor* c) noexcept:
    """The number in field 1, 0 where it is missing, of a message that is read to its end."""
    cdef uint64_t value = 0
    cdef int64_t tag
    while True:
        tag = read_tag(c)
        if tag == 0:
            return value
        if tag == 1 << 3 | VARINT:
            value = read_varint(c)
        else:
            skip(c, tag)


cdef void read_figures(Cursor* c, Slice* name, int64_t* values, int count) noexcept:
    """A name in field 1 and numbers in the fields from 2 on."""
    cdef int64_t tag
    memset(values, 0, count * sizeof(int64_t))
    name.at, name.size = c.at, 0
    while True:
        tag = read_tag(c)
        if tag == 0:
            return
        if tag == 1 << 3 | LENGTH:
            name[0] = read_slice(c)
        elif tag & 7 == VARINT and 2 <= tag >> 3 < 2 + count:
            values[(tag >> 3) - 2] = <int64_t>read_varint(c)
        else:
            skip(c, tag)


cdef int read_lease(Cursor* c, LeaseMessage* m, int totals) except -1:
    """A LeaseProgress (totals from field 3 on) or a CompleteRequest (from 4 on, outcome in 3)."""
    cdef int64_t v[3]
    cdef int64_t tag, field
    memset(m, 0, sizeof(LeaseMessage))
    v[0] = v[1] = v[2] = NONE
    while True:
        tag = read_tag(c)
        if tag == 0:
            break
        field = tag >> 3
        if tag == 1 << 3 | FIXED64:
            m.lease_id = <int64_t>read_fixed64(c)
        elif tag == 2 << 3 | VARINT:
            m.epoch = <int64_t>read_varint(c)
        elif tag & 7 == VARINT and totals <= field < totals + 3:
            v[field - totals] = <int64_t>read_varint(c)
            if v[field - totals] < 0:
                check_range(TOTALS[field - totals], v[field - totals], 0, TOKENS_MAX)
        elif tag == 3 << 3 | VARINT:
            m.outcome = <int64_t>read_varint(c)
        else:
            skip(c, tag)
    m.usage = checked_usage(v[0], v[1], v[2])
    return 0


cdef tuple TOTALS = ("input_tokens", "cached_input_tokens", "output_tokens")


cdef int read_replay(
    Scheduler core, Cursor* c, Ask* ask, Usage* usage, int64_t* lease_id, int64_t* epoch,
    int64_t* reserved,
) except -1:
    """Read, check and resolve a LeaseReplay."""
    cdef Slice request_id, tenant, key, pool, adapter, request_class
    cdef int64_t v[8]  # fields 6 to 13, by number - 6
    cdef int64_t tag
    memset(v, 0, sizeof(v))
    request_id.at, request_id.size = c.at, 0
    tenant = key = pool = adapter = request_class = request_id
    lease_id[0] = 0
    while True:
        tag = read_tag(c)
        if tag == 0:
            break
        if tag == 1 << 3 | FIXED64:
            lease_id[0] = <int64_t>read_fixed64(c)
        elif tag == 2 << 3 | LENGTH:
            read_text(c, &request_id)
        elif tag == 3 << 3 | LENGTH:
            read_text(c, &tenant)
        elif tag == 4 << 3 | LENGTH:
            key = read_slice(c)
        elif tag == 5 << 3 | LENGTH:
            read_text(c, &pool)
        elif tag & 7 == VARINT and 6 <= tag >> 3 <= 13:
            v[(tag >> 3) - 6] = <int64_t>read_varint(c)
        elif tag == 14 << 3 | LENGTH:
            read_text(c, &adapter)
        elif tag == 15 << 3 | LENGTH:
            read_text(c, &request_class)
        else:
            skip(c, tag)
    check_whole(c, "replay")
    check_text("request_id", &request_id, 1, ID_BYTES_MAX)
    check_text("tenant", &tenant, 0, NAME_BYTES_MAX)
    check_text("pool", &pool, 0, ID_BYTES_MAX)
    check_text("adapter", &adapter, 0, NAME_BYTES_MAX)
    check_text("request_class", &request_class, 0, NAME_BYTES_MAX)
    check_range("reserved_tokens", v[1], 0, TOKENS_MAX)
    check_range("prompt_tokens", v[2], 1, TOKENS_MAX)
    check_range("sequences", v[7], 0, SEQUENCES_MAX)
    check_output(v[2], v[3], max(<int64_t>1, v[7]))
    epoch[0], reserved[0] = v[0], v[1]
    usage[0] = checked_usage(v[4], v[5], v[6])
    ask.adapter = adapter
    hash_adapter(core, ask)
    ask.flow = flow_of(core, &tenant, &key)
    ask.target = target_of(core, &pool)
    ask.prompt_tokens = ask.prompt_max_tokens = <int32_t>v[2]
    ask.output_max_tokens = <int32_t>v[3]
    ask.sequences = <int32_t>max(<int64_t>1, v[7])
    ask.n = 1  # what n adds to the prompts is part of what was reserved
    if ask.flow != NONE:
        replayed_class(core, ask, request_class.at, request_class.size)
        identify(
            core, ask, request_id.at, request_id.size,
            tenant_salt(core, ask.flow, &tenant, &key), 0,
        )
    return 0
