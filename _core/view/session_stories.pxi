# The session of an agent in Explain: what precedes a request in it, and what it waits for.

cdef enum:
    PLACE_MAX = 1_024  # requests ahead that are counted; one more means all that there are


cdef str pool_name_of(Core core, int32_t pool):
    return core.pool_list[pool].decode() if is_one_pool(pool) else ""


cdef int32_t requests_before(Core core, int32_t i) noexcept:
    """Count the requests that precede one in its own queue, or among those of its session that wait
    for a cap; more than PLACE_MAX are not counted. O(PLACE_MAX)."""
    cdef int32_t count = 0
    i = core.requests.items[i].prev
    while i != NONE and count <= PLACE_MAX:
        count += 1
        i = core.requests.items[i].prev
    return count


cdef dict session_story(Core core, int64_t now_ns, int32_t i):
    """Return the session of a request that waits or runs, and what precedes it there; None: it has
    none. O(SCAN_MAX + PLACE_MAX)."""
    cdef AgentSessions agents = core.flows.agents
    cdef const Request* r = &core.requests.items[i]
    cdef const RareFields* rare = core.requests.rare_of(r)
    cdef const AgentSession* a
    cdef int32_t q, t
    if rare.session == NONE:
        return None
    a = &agents.items[rare.session]
    row = {
        "open_requests": a.open_requests,
        "active_in": pool_name_of(core, a.pool),
        "footprint_tokens": a.footprint if a.pool != NONE else 0,
        "shares_counter": not a.has_node,
    }
    if rare.hold != NONE:
        row["requests_ahead"] = requests_before(core, i)
        row["cap"] = cap_story(core, now_ns, i)
    elif r.state == QUEUED:
        q = core.flows.find_queue(r.flow, r.target + 1)
        t = agents.find_strand(counted_session(core.flows, r), q)
        row["requests_ahead"] = agents.treaps.place(i)
        row["sessions_ahead"] = strands_before(core.flows, t)
    return row


cdef int32_t strands_before(Flows flows, int32_t t) noexcept:
    """Count the sessions of the same flow that precede one in its queue; more than SCAN_MAX are not
    counted. O(SCAN_MAX)."""
    cdef const Strand* mine = &flows.agents.strands[t]
    cdef SessionLine line = flows.agents.line(flows.queues[mine.queue].line)
    cdef Node own, other
    cdef int32_t open[4 * SCAN_MAX + 8]
    cdef int32_t left = 1, at, child, seen = 0, count = 0
    own.key = session_key(flows, mine.session)
    own.tie = line.heap.entry(mine.place).tie
    open[0] = 0
    while left and seen <= SCAN_MAX:
        left -= 1
        at = open[left]
        other = line.heap.nodes[at]
        if not less(&other, &own):  # a key in the line may be too small, but none is too large
            continue
        other.key = session_key(flows, flows.agents.strands[line.strands[other.id]].session)
        count += less(&other, &own)
        seen += 1
        for child in range(4 * at + 1, min(4 * at + 5, line.heap.count)):
            open[left] = child
            left += 1
    return count if seen <= SCAN_MAX else SCAN_MAX + 1


cdef dict cap_story(Core core, int64_t now_ns, int32_t i):
    """Return the cap that a request waits for whose session has not begun. O(SCAN_MAX)."""
    cdef AgentSessions agents = core.flows.agents
    cdef const SessionHold* hold = &agents.holds[
        core.requests.rare_of(&core.requests.items[i]).hold
    ]
    cdef int32_t pool = agents.shares[hold.share].pool, n = hold.prev, ahead = 0
    cdef const Pool* p = &core.ledger.pools[pool]
    while n != NONE and ahead <= SCAN_MAX:
        ahead += 1
        n = agents.holds[n].prev
    return {
        "pool": core.pool_list[pool].decode(),
        "needs_tokens": turn_tokens(core, i),
        "active_tokens": p.sessions_tokens,
        "active_sessions": p.sessions_active,
        "limit_tokens": p.limits.sessions_max_tokens,
        "sessions_ahead": ahead,
        "next_in_ms": max(<int64_t>0, p.turn_ns + turn_wait_ns(core) - now_ns) // NS_PER_MS,
    }
