# Sessions of agents for Stats, and the proof that what is kept of them balances.

cdef int64_t oldest_held(Core core, int32_t flow) noexcept:
    """Return when the oldest request of a flow arrived that waits for a cap; NEVER: none waits.
    O(sessions of the flow that wait)."""
    cdef AgentSessions agents = core.flows.agents
    cdef int64_t oldest = NEVER
    cdef int32_t n, pool
    if core.flows.items[flow].held == 0:
        return NEVER
    for pool in range(core.ledger.count):
        n = agents.share_index.get(<uint64_t>flow, <uint64_t>pool)
        n = NONE if n == NONE else agents.shares[n].first_hold
        while n != NONE:
            oldest = min(oldest, core.requests.items[agents.holds[n].requests.head].arrival_ns)
            n = agents.holds[n].next
    return oldest


cdef dict session_row(Core core, int32_t flow):
    cdef const Flow* f = &core.flows.items[flow]
    cdef const FlowSessions* of
    if f.agents == 0:
        return {"sessions": 0, "sessions_sharing": 0, "held_by_session_cap": 0}
    of = &core.flows.agents.of_flows[f.agents]
    return {
        "sessions": of.count,
        "sessions_sharing": of.count - of.nodes,
        "held_by_session_cap": f.held,
    }


cdef int64_t sessions_waiting(Core core, int32_t pool):
    """Count the sessions that wait for the cap of a pool. O(shares that wait)."""
    cdef AgentSessions agents = core.flows.agents
    cdef int64_t count = 0
    cdef int32_t c, k
    cdef Heap heap
    if not waits_for_cap(core, pool):
        return 0
    for c in range(CLASSES_MAX):
        heap = cap_line(core, pool).heap(c)
        for k in range(heap.count):
            count += agents.shares[heap.nodes[k].id].held
    return count


cdef int check_sessions(Core core) except -1:
    """Check the records of sessions against the requests. O(requests + sessions + strands)."""
    cdef AgentSessions agents = core.flows.agents
    cdef int32_t i, s, held = 0
    cdef const Request* r
    cdef const RareFields* rare
    cdef list opened = [0] * agents.used
    for i in range(core.requests.used):
        r = &core.requests.items[i]
        rare = core.requests.rare_of(r)
        if r.state == FREE or rare.session == NONE:
            check_invariant(
                core, r.state == FREE or rare.hold == NONE, "what waits for a cap has a session"
            )
            continue
        check_invariant(
            core, r.state in (QUEUED, LIVE, SUSPECT) and agents.items[rare.session].flow == r.flow,
            "who has a session is queued or runs, in the session's flow",
        )
        opened[rare.session] += 1
        held += rare.hold != NONE
        check_invariant(
            core, rare.hold == NONE or agents.holds[rare.hold].session == rare.session,
            "who waits for a cap waits with its session",
        )
    check_invariant(core, held == agents.held, "what waits for caps = sum over requests")
    for s in range(agents.used):
        if agents.items[s].flow != NONE:
            check_invariant(
                core, opened[s] == agents.items[s].open_requests,
                "open requests of a session = those that are queued or run",
            )
            check_session(core, s)
    check_session_lines(core)
    return check_shares_of_caps(core)


cdef int check_session(Core core, int32_t s) except -1:
    cdef AgentSessions agents = core.flows.agents
    cdef const AgentSession* a = &agents.items[s]
    cdef int32_t n = core.flows.items[a.flow].agents
    check_invariant(core, n > 0, "a flow knows that it has sessions")
    if s == agents.of_flows[n].rest:
        return check_invariant(
            core, not a.has_node and a.pool == NONE and a.open_requests == 0,
            "the rest is no session",
        )
    check_invariant(
        core, agents.index.get(a.key_hi, a.key_lo) == s, "the name of a session finds it"
    )
    check_invariant(
        core, agents.dues.has(s) == (a.pool != NONE and a.open_requests == 0),
        "an active session without open requests has its time",
    )
    check_invariant(
        core, a.is_idle == (a.pool == NONE and a.open_requests == 0),
        "a session that does nothing is idle",
    )
    check_invariant(
        core, a.vtc >= 0 and a.vtc <= max(agents.of_flows[n].highest, a.vtc * (not a.has_node)),
        "no counter of a session is above the highest",
    )
    return check_holds(core, s)


cdef int check_holds(Core core, int32_t s) except -1:
    """Check that a session waits once for each cap, with requests of its own that may run there."""
    cdef AgentSessions agents = core.flows.agents
    cdef int32_t n = agents.items[s].first_hold, i, count, pool
    cdef set pools = set()
    while n != NONE:
        pool, count = agents.shares[agents.holds[n].share].pool, 0
        check_invariant(core, pool not in pools, "a session waits once for each cap")
        pools.add(pool)
        i = agents.holds[n].requests.head
        while i != NONE:
            count += 1
            check_invariant(
                core, core.requests.rare_of(&core.requests.items[i]).hold == n
                and (
                    core.requests.items[i].target == NONE
                    or core.flows.may_take(pool, core.requests.items[i].target)
                ),
                "who waits for the cap of a pool may run there",
            )
            i = core.requests.items[i].next
        check_invariant(
            core, 0 < count == agents.holds[n].requests.count, "requests of a hold = its chain"
        )
        n = agents.holds[n].next_hold
    return 0


cdef int check_session_lines(Core core) except -1:
    """Check that the head of each queue is of the session with the least counter, and that
    those that compete have lines."""
    cdef Flows flows = core.flows
    cdef AgentSessions agents = flows.agents
    cdef int32_t q, i, t, k, count
    cdef SessionLine line
    cdef Queue* queue
    for q in range(flows.queue_count):
        queue = &flows.queues[q]
        if queue.line == 0:
            check_invariant(
                core, is_node(flows, queue.flow) or queue.head == queue.chain.head,
                "without sessions the first of a queue is its head",
            )
            check_invariant(
                core, queue.chain.count == 0 or not has_one_order(flows, queue.flow)
                or not has_line(flows, queue.flow),
                "with one pool all queues of a flow have lines, or none",
            )
            continue
        line = agents.line(queue.line)
        count = 0
        check_invariant(core, line.heap.valid(), "heap order of a line of sessions")
        for k in range(line.heap.count):
            t = line.strands[line.heap.nodes[k].id]
            i = first_of_strand(flows, t)
            count += agents.treaps.items[agents.strands[t].root].count
            check_invariant(
                core, agents.treaps.valid(agents.strands[t].root)
                and agents.strands[t].queue == q
                and line.heap.nodes[k].tie == core.requests.items[i].seq
                and line.heap.nodes[k].key <= session_key(flows, agents.strands[t].session),
                "a strand stands at its counter and its first request",
            )
        check_invariant(core, count == queue.chain.count, "strands of a queue = its chain")
        check_invariant(
            core, queue.head == (
                NONE if line.heap.count == 0
                else first_of_strand(flows, line.strands[line.heap.nodes[0].id])
            ),
            "the head of a queue is of the session that was served least",
        )
    return 0


cdef int check_shares_of_caps(Core core) except -1:
    """Verify the footprints in each pool, and the sessions that wait there."""
    cdef AgentSessions agents = core.flows.agents
    cdef int32_t pool, s, n, count, c
    cdef int64_t tokens
    cdef Pool* p
    cdef dict sums = {}
    for pool in range(core.ledger.count):
        p = &core.ledger.pools[pool]
        s, count, tokens = p.oldest_session, 0, 0
        while s != NONE:
            check_invariant(core, agents.items[s].pool == pool, "an active session knows its pool")
            count += 1
            tokens += agents.items[s].footprint
            of_share = sums.setdefault(agents.items[s].share, [0, 0])
            of_share[0] += 1
            of_share[1] += agents.items[s].footprint
            s = agents.items[s].next
        check_invariant(
            core, count == p.sessions_active and tokens == p.sessions_tokens,
            "footprints of a pool = sum over its active sessions",
        )
        check_invariant(
            core, agents.turns.has(pool) == waits_for_cap(core, pool)
            and (
                not agents.turns.has(pool)
                or agents.turns.entry(pool).key == p.turn_ns + turn_wait_ns(core)
            ), "who waits for a cap has a time to begin",
        )
        if pool < <int32_t>len(agents.cap_lines):
            check_line(core, cap_line(core, pool))
    for n in range(agents.share_used):
        if agents.shares[n].flow == NONE:
            continue
        check_invariant(
            core, sums.get(n, [0, 0]) == [agents.shares[n].active, agents.shares[n].tokens],
            "what a flow's sessions hold of a pool = sum over them",
        )
        c = core.flows.items[agents.shares[n].flow].cls
        check_invariant(
            core, (agents.shares[n].held > 0)
            == cap_line(core, agents.shares[n].pool).has(c, n),
            "a share with sessions that wait is in the line",
        )
        if agents.shares[n].held:
            check_invariant(
                core, cap_line(core, agents.shares[n].pool).heap(c).entry(n).key
                == agents.shares[n].tokens * 1000
                // core.flows.items[agents.shares[n].flow].weight_milli,
                "a share stands by what it holds for its flow's weight",
            )
    return 0
