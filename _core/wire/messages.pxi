# The messages of the contract, as they are read from their bytes.

# Totals of a report; -1: absent.
ctypedef struct Usage:
    int64_t input_tokens, cached_tokens, output_tokens

ctypedef struct AdmitMessage:
    Slice request_id, client_id, tenant, key, adapter, request_class, session
    Slice pool  # the first that it names
    int64_t pools  # how many it names
    uint64_t pools_hash  # of several names, once found, in any order
    int64_t prompt_tokens, prompt_max_tokens, prompts
    int64_t n, max_output_tokens, hashes, deadline_ms, queue_ttl_ms, proof
    uint64_t prompts_hash
    bint reports_progress, whole_answer, has_exact_input
    Cursor body  # the whole message, for fields that are read only if needed
    int32_t flow  # its tenant's flow, once found; -1: none
    int32_t target  # the pool or set of pools that it names, once found; -1: none


cdef int check_output(int64_t prompt_tokens, int64_t output_max, int64_t sequences) except -1:
    check_range("max_output_tokens", output_max, 1, PROMPT_TOKENS_MAX)
    if prompt_tokens + output_max * sequences > TOKENS_MAX:
        invalid(
            "max_output_tokens",
            f"times {sequences:,} sequences, plus all input, must be at most {TOKENS_MAX:,}",
        )
    return 0


cdef int check_text(str field, Slice* s, int64_t least, int64_t most) except -1:
    if not least <= s.size <= most:
        invalid(field, f"must have {least} to {most} bytes, not {s.size:,}")
    if not is_utf8(s):
        invalid(field, "is not valid UTF-8")
    if has_control(s):
        invalid(field, "has a control character, or one that turns the direction of text")
    return 0


cdef int check_client_id(Slice* id, const Slice* request_id) except -1:
    """Check the id of a client; one that is the request's own says nothing more."""
    check_text("client_request_id", id, 0, ID_BYTES_MAX)
    if id.size == request_id.size and memcmp(id.at, request_id.at, <size_t>id.size) == 0:
        id.size = 0
    return 0


cdef tuple POOL_FIELDS = tuple(f"pools[{place}]" for place in range(SET_POOLS_MAX))


cdef int check_pool_names(const AdmitMessage* m) except -1:
    """Check the names of the pools in which a request may run. O(bytes + names^2)."""
    cdef Slice names[SET_POOLS_MAX]
    cdef Cursor c = m.body
    cdef int32_t k = 0, other
    cdef int64_t tag
    names[0] = m.pool
    if m.pools > SET_POOLS_MAX:
        invalid(
            "pools", f"has {m.pools:,} names; at most {<int64_t>SET_POOLS_MAX} are allowed"
        )
    if m.pools == 1:
        return check_text(POOL_FIELDS[0], &names[0], 1, ID_BYTES_MAX)
    while k < m.pools:
        tag = read_tag(&c)
        if tag != 4 << 3 | LENGTH:
            skip(&c, tag)
            continue
        names[k] = read_slice(&c)
        check_text(POOL_FIELDS[k], &names[k], 1, ID_BYTES_MAX)
        for other in range(k):
            if names[other].size == names[k].size and memcmp(
                names[other].at, names[k].at, <size_t>names[k].size
            ) == 0:
                invalid(POOL_FIELDS[k], f"repeats pools[{other}]")
        k += 1
    return 0


cdef int check_names(Slice* adapter, Slice* request_class, Slice* session) except -1:
    check_text("adapter", adapter, 0, NAME_BYTES_MAX)
    check_text("request_class", request_class, 0, NAME_BYTES_MAX)
    return check_text("session", session, 0, NAME_BYTES_MAX)


cdef inline void read_text(Cursor* c, Slice* s) noexcept:
    # The last of several counts, but none may be wrong.
    if s.size and not is_utf8(s):
        c.bad = True
    s[0] = read_slice(c)


cdef int check_id(bytes request_id) except -1:
    if not 1 <= len(request_id) <= ID_BYTES_MAX:
        invalid("request_id", f"must have 1 to {ID_BYTES_MAX} bytes, not {len(request_id):,}")
    return 0


cdef Usage checked_usage(int64_t input_tokens, int64_t cached, int64_t output_tokens) except *:
    cdef Usage u
    check_range("input_tokens", input_tokens, NONE, TOKENS_MAX)
    check_range("cached_input_tokens", cached, NONE, TOKENS_MAX)
    check_range("output_tokens", output_tokens, NONE, TOKENS_MAX)
    u.input_tokens = input_tokens
    u.cached_tokens = cached
    u.output_tokens = output_tokens
    return u


cdef int add_prompt(AdmitMessage* m, int64_t tokens) except -1:
    check_range(f"input_tokens[{m.prompts}]" if not 1 <= tokens <= PROMPT_TOKENS_MAX else "",
                tokens, 1, PROMPT_TOKENS_MAX)
    m.prompts += 1
    if m.prompts > SEQUENCES_MAX:
        invalid("input_tokens", f"at most {SEQUENCES_MAX:,} prompts")
    m.prompt_tokens += tokens
    m.prompt_max_tokens = max(m.prompt_max_tokens, tokens)
    m.prompts_hash = mix(m.prompts_hash, tokens)
    return 0


cdef int parse_admit(AdmitMessage* m, Cursor c) except -1:
    """Read and check an AdmitRequest. O(bytes)."""
    cdef Cursor packed
    cdef int64_t tag
    memset(m, 0, sizeof(AdmitMessage))
    m.body = c
    while True:
        tag = read_tag(&c)
        if tag == 0:
            break
        if tag == 1 << 3 | LENGTH:
            read_text(&c, &m.request_id)
        elif tag == 2 << 3 | LENGTH:
            read_text(&c, &m.tenant)
        elif tag == 3 << 3 | LENGTH:
            m.key = read_slice(&c)
        elif tag == 4 << 3 | LENGTH:
            if m.pools == 0:
                m.pool = read_slice(&c)
            else:
                read_slice(&c)
            m.pools += 1
        elif tag == 5 << 3 | LENGTH:
            packed = read_message(&c)
            while packed.at < packed.end and not packed.bad:
                add_prompt(m, <int64_t>read_varint(&packed))
            c.bad = c.bad or packed.bad
        elif tag == 5 << 3 | VARINT:
            add_prompt(m, <int64_t>read_varint(&c))
        elif tag == 6 << 3 | VARINT:
            m.n = <int32_t>read_varint(&c)
        elif tag == 7 << 3 | VARINT:
            m.max_output_tokens = <int64_t>read_varint(&c)
        elif tag == 8 << 3 | LENGTH:
            packed = read_message(&c)
            m.hashes += (packed.end - packed.at) >> 3
            c.bad = c.bad or packed.bad or (packed.end - packed.at) & 7 != 0
        elif tag == 8 << 3 | FIXED64:
            read_fixed64(&c)
            m.hashes += 1
        elif tag == 9 << 3 | LENGTH:
            read_text(&c, &m.adapter)
        elif tag == 10 << 3 | LENGTH:
            read_text(&c, &m.request_class)
        elif tag == 11 << 3 | VARINT:
            m.deadline_ms = <int64_t>read_varint(&c)
        elif tag == 12 << 3 | VARINT:
            m.queue_ttl_ms = <int64_t>read_varint(&c)
        elif tag == 13 << 3 | VARINT:
            m.reports_progress = read_varint(&c) != 0
        elif tag == 14 << 3 | VARINT:  # absent: an estimate
            m.has_exact_input = read_varint(&c) == 0
        elif tag == 15 << 3 | VARINT:
            m.proof = <int64_t>read_varint(&c)
        elif tag == 16 << 3 | VARINT:
            m.whole_answer = read_varint(&c) != 0
        elif tag == 17 << 3 | LENGTH:
            read_text(&c, &m.client_id)
        elif tag == 18 << 3 | LENGTH:
            read_text(&c, &m.session)
        else:
            skip(&c, tag)
    check_whole(&c, "AdmitRequest")
    return check_admit(m)


cdef int check_admit(AdmitMessage* m) except -1:
    check_text("request_id", &m.request_id, 1, ID_BYTES_MAX)
    check_client_id(&m.client_id, &m.request_id)
    check_text("tenant", &m.tenant, 0, NAME_BYTES_MAX)
    check_pool_names(m)
    check_names(&m.adapter, &m.request_class, &m.session)
    if m.key.size != 0 and m.key.size != 32:
        invalid("api_key_sha256", f"must have 32 bytes, not {m.key.size:,}")
    if m.prompts == 0:
        invalid("input_tokens", "is missing: give one entry for each prompt")
    check_range("n", m.n, 0, 128)
    m.n = max(<int64_t>1, m.n)
    if m.prompts * m.n > SEQUENCES_MAX:
        invalid("n", f"prompts times n must be at most {SEQUENCES_MAX:,}")
    check_range("input_tokens", m.prompt_tokens * m.n, 1, TOKENS_MAX)
    check_output(m.prompt_tokens * m.n, m.max_output_tokens, m.prompts * m.n)
    if m.hashes > HASHES_MAX:
        invalid(
            "prefix_block_hashes",
            f"has {m.hashes:,} hashes; at most {<int64_t>HASHES_MAX:,} are allowed",
        )
    check_range("deadline_ms", m.deadline_ms, 0, <int64_t>1 << 40)
    check_range("queue_ttl_ms", m.queue_ttl_ms, 0, <int64_t>1 << 40)
    return 0


# The fields of a Progress, a Complete or a Replay.
ctypedef struct LeaseMessage:
    int64_t lease_id, epoch, outcome
    Usage usage


cdef uint64_t tag_of(Cursor c) noexcept:
    """Return field 1 of an Admit or a Cancel, 0 if it is missing."""
    return read_first(&c)


cdef uint64_t read_first(Cursor* c) noexcept:
    """Return the number in field 1, 0 if it is missing, of a message that is read to its end."""
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
    """Read a name in field 1 and numbers in the fields from 2 on."""
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
    """Read a LeaseProgress (totals from field 3 on) or a CompleteRequest (from 4 on, outcome in
    3)."""
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


cdef int check_leadership(Cursor c) except -1:
    """Refuse what is no Leadership. The server reads it; the core needs nothing of it."""
    cdef Slice leader
    cdef int64_t tag
    while True:
        tag = read_tag(&c)
        if tag == 0:
            break
        if tag == 2 << 3 | LENGTH:
            leader = read_slice(&c)
            if not is_utf8(&leader):
                invalid("leadership_seen.leader", "must be UTF-8")
        else:
            skip(&c, tag)
    return check_whole(&c, "leadership_seen")
