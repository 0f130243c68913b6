# The target of a request: any pool, one pool, or a set of pools, see pool_sets.pxi.

cdef int32_t target_of(Core core, Slice* pool) except? -1:
    return core.pool_names.get(slice_bytes(pool), NONE) if pool.size else NONE


cdef int32_t named_target(Core core, AdmitMessage* m) except? -1:
    """Return the target that a message names; -1: it names no pool, or none that is known. Names
    that are not known are left out. O(names), for several O(bytes + pools)."""
    cdef Cursor c = m.body
    cdef Slice name
    cdef IndexSet members
    cdef int64_t tag, left = m.pools
    cdef int32_t pool, first = NONE, count = 0
    if left <= 1:
        return target_of(core, &m.pool)
    set_clear(&members, core.ledger.count)
    while left:
        tag = read_tag(&c)
        if tag != 4 << 3 | LENGTH:
            skip(&c, tag)
            continue
        left -= 1
        name = read_slice(&c)
        m.pools_hash += sip128(core.k0, core.k1 ^ NAME_SALT, name.at, name.size).lo
        pool = target_of(core, &name)
        if pool == NONE:
            continue
        if count:
            check_domain(core, first, pool)
        else:
            first = pool
        set_add(&members, pool)
        count += 1
    m.pools_hash |= 1
    return first if count <= 1 else target_of_set(core, &members)


cdef int32_t numbered_target(Core core, tuple pools) except? -1:
    """Return the target of some pools, by their numbers. O(pools)."""
    cdef IndexSet members
    cdef int32_t pool
    if len(pools) > SET_POOLS_MAX:
        invalid("pools", f"at most {<int64_t>SET_POOLS_MAX} are allowed, not {len(pools):,}")
    set_clear(&members, core.ledger.count)
    for pool in pools:
        if not 0 <= pool < core.ledger.count:
            invalid("pools", f"no pool has the index {pool}")
        check_domain(core, pools[0], pool)
        set_add(&members, pool)
    return pools[0] if len(set(pools)) == 1 else target_of_set(core, &members)


cdef int check_domain(Core core, int32_t first, int32_t other) except -1:
    """Refuse pools whose service does not count together: no order is fair in both. O(1)."""
    if core.flows.positions.counts(first, other):
        return 0
    invalid(
        "pools",
        f"names {core.pool_list[first].decode()} and {core.pool_list[other].decode()}, which lie in"
        " two fairness domains: name pools of one, or set scheduler.fairness_domain",
    )
    return 0


cdef int32_t target_of_set(Core core, const IndexSet* members) except? -1:
    cdef int32_t target = core.flows.sets.target_of(members, core.ledger.count)
    if target == NONE:
        raise CallerError(
            CODE_RESOURCE_EXHAUSTED, "pools",
            f"the queued requests name {<int64_t>SETS_MAX:,} sets of pools, the most at a time;"
            " name one of these, or retry",
        )
    return target


cdef bint lacks_set(Flows flows, int32_t flow, int32_t target) noexcept:
    """Return whether the queued requests of a flow name as many other sets as they may. O(targets).
    """
    cdef int32_t q = flows.items[flow].first_queue, others = 0
    while q != NONE:
        if flows.queues[q].chain.count and flows.queues[q].target > POOLS_MAX:
            if flows.queues[q].target == target + 1:
                return False
            others += 1
        q = flows.queues[q].next_queue
    return others >= FLOW_SETS_MAX
