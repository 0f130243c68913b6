# Reading a LeaseReplay.

cdef int read_replay(
    Core core, Cursor* c, Ask* ask, Usage* usage, int64_t* lease_id, int64_t* epoch,
    int64_t* reserved,
) except -1:
    """Read, check and resolve a LeaseReplay."""
    cdef Slice request_id, tenant, key, pool, request_class
    cdef int64_t v[8]  # fields 6 to 13, by number - 6
    cdef int64_t tag, proof = 0
    memset(v, 0, sizeof(v))
    request_id.at, request_id.size, lease_id[0] = c.at, 0, 0
    tenant = key = pool = request_class = request_id
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
            read_text(c, &ask.adapter)
        elif tag == 15 << 3 | LENGTH:
            read_text(c, &request_class)
        elif tag == 16 << 3 | VARINT:
            proof = <int64_t>read_varint(c)
        elif tag == 17 << 3 | VARINT:
            ask.whole_answer = read_varint(c) != 0
        elif tag == 18 << 3 | LENGTH:
            read_text(c, &ask.client_id)
        elif tag == 19 << 3 | LENGTH:
            read_text(c, &ask.session)
        else:
            skip(c, tag)
    check_whole(c, "replay")
    check_text("request_id", &request_id, 1, ID_BYTES_MAX)
    check_client_id(&ask.client_id, &request_id)
    check_text("tenant", &tenant, 0, NAME_BYTES_MAX)
    check_text("pool", &pool, 0, ID_BYTES_MAX)
    check_names(&ask.adapter, &request_class, &ask.session)
    check_range("reserved_tokens", v[1], 0, TOKENS_MAX)
    check_range("prompt_tokens", v[2], 1, TOKENS_MAX)
    check_range("sequences", v[7], 0, SEQUENCES_MAX)
    check_output(v[2], v[3], max(<int64_t>1, v[7]))
    epoch[0], reserved[0] = v[0], v[1]
    usage[0] = checked_usage(v[4], v[5], v[6])
    hash_adapter(core, ask)
    ask.flow = flow_of(core, &tenant, &key)
    # A tenant that the principal may not name any more does not end what runs.
    if not grants_tenant(core, ask.principal, ask.flow, &tenant):
        ask.flow = core.unknown_flow
    elif is_born(core, ask.flow, &tenant, proof):
        ask.flow = flow_at_sight(core, &tenant, ask.principal)
    ask.target = target_of(core, &pool)
    ask.prompt_tokens = ask.prompt_max_tokens = <int32_t>v[2]
    ask.output_max_tokens, ask.sequences = <int32_t>v[3], <int32_t>max(<int64_t>1, v[7])
    ask.n = 1  # what n adds to the prompts is part of what was reserved
    if ask.flow != NONE:
        replayed_class(core, ask, request_class.at, request_class.size)
        identify(
            core, ask, request_id.at, request_id.size, tenant_salt(core, ask.flow, &tenant, &key), 0
        )
    return 0
