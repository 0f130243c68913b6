# The cap on the footprint of active sessions of agents in a pool (`sessions_max_tokens`).
#
# More sessions than the cache holds take each other's prefixes out of it between their turns, so
# that each turn computes its whole prompt again. So a session begins in a pool only if its
# footprint and those of the active ones are within the cap, or if none is active there. Until then
# its requests are in no queue, so that no other request waits behind them. The turns of active
# sessions go on.
#
# The best class that waits in a pool is first, or the one that has aged. In a class the flow is
# first whose active sessions hold the least for its weight, and in a flow the session that came
# first. After SESSION_ACTIVE_NS, or half of the queue TTL if that is less, the next one begins in
# any case. The sessions that have been active for longest then give up their places, and their next
# turns wait behind those that wait already. So no session waits without end.

cdef inline int64_t turn_wait_ns(Core core) noexcept:
    """Return how long the first that waits for a cap waits at most."""
    return min(SESSION_ACTIVE_NS, core.settings.queue_ttl_ns // 2)


cdef inline Line cap_line(Core core, int32_t pool):
    """Return the shares that wait for the cap of a pool. O(1) amortised."""
    cdef list lines = core.flows.agents.cap_lines
    while <int32_t>len(lines) <= pool:
        lines.append(Line(core.classes))
    return <Line>lines[pool]


cdef inline bint waits_for_cap(Core core, int32_t pool):
    """Return whether a session waits for the cap of a pool."""
    cdef list lines = core.flows.agents.cap_lines
    return pool < <int32_t>len(lines) and (<Line>lines[pool]).count > 0


cdef int64_t turn_tokens(Core core, int32_t i) noexcept:
    """Return the footprint that a request is expected to leave: its prompts, and its output as
    promised. O(1)."""
    cdef const Request* r = &core.requests.items[i]
    cdef Asked asked
    cdef uint8_t evidence
    cdef int64_t each
    asked_of(core, r, &asked)
    each = core.predictor.promise(&asked, &evidence)
    if each == NONE or each > r.output_max_tokens:
        each = r.output_max_tokens
    return r.prompt_tokens + each * r.sequences


cdef inline bint fits_cap(Core core, int32_t pool, int64_t tokens) noexcept:
    cdef const Pool* p = &core.ledger.pools[pool]
    cdef int64_t most = p.limits.sessions_max_tokens
    return most == 0 or p.sessions_active == 0 or p.sessions_tokens + tokens <= most


cdef int rank_share(Core core, int32_t n) except -1:
    """Give a share its place among those that wait for the cap of its pool. O(log n)."""
    cdef const SessionShare* h = &core.flows.agents.shares[n]
    cdef const Flow* f = &core.flows.items[h.flow]
    cdef Line line = cap_line(core, h.pool)
    cdef int32_t first
    if h.held == 0:
        line.remove(f.cls, n)
        return 0
    first = core.flows.agents.holds[h.first_hold].requests.head
    return line.put(
        f.cls, n, <int64_t>(<wide>h.tokens * 1000 // f.weight_milli),
        core.requests.items[first].seq, core.now_ns,
    )


cdef int rank_shares(Core core, int32_t flow) except -1:
    """The weight of a flow has changed: give its shares that wait their places. O(pools * log n)
    while one waits, else O(1)."""
    cdef AgentSessions agents = core.flows.agents
    cdef int32_t pool, n
    if core.flows.items[flow].held == 0:
        return 0
    for pool in range(core.ledger.count):
        n = agents.share_index.get(<uint64_t>flow, <uint64_t>pool)
        if n != NONE and agents.shares[n].held:
            rank_share(core, n)
    return 0


# Active sessions.

cdef int begin_activity(Core core, int32_t s, int32_t pool, int64_t tokens) except -1:
    """Let a session be active in a pool, with a footprint, and nowhere else. O(log n)."""
    cdef AgentSessions agents = core.flows.agents
    cdef Pool* p = &core.ledger.pools[pool]
    cdef AgentSession* a
    end_activity(core, s)
    a = &agents.items[s]
    a.share = agents.share_of(a.flow, pool)
    a.pool, a.footprint, a.retired = pool, tokens, False
    a.next, a.prev = NONE, p.newest_session
    if p.newest_session == NONE:
        p.oldest_session = s
    else:
        agents.items[p.newest_session].next = s
    p.newest_session = s
    p.sessions_active += 1
    agents.shares[a.share].active += 1
    return count_footprint(core, a, tokens)


cdef int count_footprint(Core core, const AgentSession* a, int64_t more) except -1:
    core.ledger.pools[a.pool].sessions_tokens += more
    core.flows.agents.shares[a.share].tokens += more
    if core.flows.agents.shares[a.share].held:
        rank_share(core, a.share)
    core.ledger.order.touch(a.pool)
    return 0


cdef int end_activity(Core core, int32_t s) except -1:
    """A session is not active any more. O(log n)."""
    cdef AgentSessions agents = core.flows.agents
    cdef AgentSession* a = &agents.items[s]
    cdef Pool* p
    if a.pool == NONE:
        return 0
    p = &core.ledger.pools[a.pool]
    count_footprint(core, a, -a.footprint)
    p.sessions_active -= 1
    if a.prev == NONE:
        p.oldest_session = a.next
    else:
        agents.items[a.prev].next = a.next
    if a.next == NONE:
        p.newest_session = a.prev
    else:
        agents.items[a.next].prev = a.prev
    agents.shares[a.share].active -= 1
    agents.drop_share(a.share)
    agents.dues.remove(s)
    a.pool = a.share = NONE
    core.has_more = core.has_more or agents.held > 0
    return 0


cdef int forget_footprints(Core core, int32_t pool) except -1:
    """The cache of a pool is gone: its sessions are not active there. O(active sessions)."""
    cdef AgentSessions agents = core.flows.agents
    cdef int32_t s
    while core.ledger.pools[pool].oldest_session != NONE:
        s = core.ledger.pools[pool].oldest_session
        end_activity(core, s)
        settle_session(core, s)
    return 0


cdef int make_room(Core core, int32_t pool, int64_t tokens) except -1:
    """Let those that have been active for longest give their places to another session.
    O(log n) each."""
    cdef int32_t s
    while not fits_cap(core, pool, tokens):
        s = core.ledger.pools[pool].oldest_session
        end_activity(core, s)
        core.flows.agents.items[s].retired = True
        settle_session(core, s)
    return 0


cdef int begin_turn(Core core, int32_t i, int32_t pool) except -1:
    """A request of a session is granted in a pool: the session is active there. O(log n)."""
    cdef int32_t s = core.requests.rare_of(&core.requests.items[i]).session
    cdef const AgentSession* a = &core.flows.agents.items[s]
    if a.pool == pool or a.retired:
        return 0
    begin_activity(core, s, pool, turn_tokens(core, i))
    return note_begun(core, s)


cdef inline int note_begun(Core core, int32_t s) except -1:
    """A session has become active by a grant, a replay or a request for another pool: let in the
    next poll what waits of it for a cap. O(1)."""
    if core.flows.agents.items[s].first_hold != NONE:
        core.flows.agents.begun.append(s)
        core.has_more = True
    return 0


cdef int end_turn(Core core, int32_t i) except -1:
    """A lease of a session has ended: its footprint is what this turn was. O(log n)."""
    cdef Request* r = &core.requests.items[i]
    cdef AgentSession* a = &core.flows.agents.items[core.requests.rare_of(r).session]
    cdef int64_t tokens = r.lease.input_tokens + r.lease.output_tokens
    if tokens:  # else it has never run
        a.turn_ns = core.now_ns
        if a.pool != NONE:
            count_footprint(core, a, tokens - a.footprint)
        a.footprint = tokens
        core.has_more = core.has_more or core.flows.agents.held > 0
    return leave_session(core, i)


cdef int leave_session(Core core, int32_t i) except -1:
    """A request of a session is neither queued nor running any more. O(log n)."""
    cdef RareFields* rare = core.requests.own_rare(i)
    cdef int32_t s = rare.session
    rare.session = NONE
    core.flows.agents.items[s].open_requests -= 1
    return settle_session(core, s)


cdef int settle_session(Core core, int32_t s) except -1:
    """A session may have nothing left to do: it is active for some time yet, or idle, or forgotten.
    O(log n)."""
    cdef AgentSessions agents = core.flows.agents
    cdef AgentSession* a = &agents.items[s]
    if a.open_requests:
        return 0
    a.retired = False
    if a.pool != NONE and a.turn_ns >= 0 and core.now_ns < a.turn_ns + SESSION_ACTIVE_NS:
        return agents.dues.put(s, a.turn_ns + SESSION_ACTIVE_NS, s)
    end_activity(core, s)
    return rest_session(core, s)


cdef int end_active(Core core, int64_t work) except -1:
    """Let sessions go that had no turn for long, until `work_max`: the work done so far.
    O(log n) each."""
    cdef Heap dues = core.flows.agents.dues
    cdef int32_t s
    while dues.count and dues.nodes[0].key <= core.now_ns and work < core.settings.work_max:
        s = dues.nodes[0].id
        end_activity(core, s)
        rest_session(core, s)
        work += 1
    return <int>work


# Those that wait.

cdef int line_up(Core core, int32_t i) except -1:
    """Queue a request that has come, or let it wait for the cap of its pool.
    O(levels + log n), with a session O(pools) more."""
    cdef int32_t pool = NONE
    if core.requests.rare_of(&core.requests.items[i]).session != NONE:
        pool = pool_to_wait_for(core, i)
    return put_in_queue(core, i) if pool == NONE else hold_back(core, i, pool)


cdef int32_t pool_to_wait_for(Core core, int32_t i) except -2:
    """Return the pool whose cap makes a request wait; -1: none does, and its session begins if it
    is not active. If several do, it is the one with the most room.
    O(pools + holds of the session)."""
    cdef AgentSessions agents = core.flows.agents
    cdef const Request* r = &core.requests.items[i]
    cdef int32_t s = core.requests.rare_of(r).session
    cdef const AgentSession* a = &agents.items[s]
    cdef const Pool* p
    cdef const Flow* f = &core.flows.items[r.flow]
    cdef int64_t tokens = turn_tokens(core, i), room, most = 0
    cdef int32_t pool, best = NONE
    if a.pool != NONE and core.flows.may_take(a.pool, r.target):
        return NONE
    for pool in range(core.ledger.count):
        p = &core.ledger.pools[pool]
        if not core.flows.may_take(pool, r.target) or not core.ledger.serves(pool):
            continue
        if not core.ledger.can_hold(pool, r):
            continue
        if f.exempt or f.dry_runs or (
            fits_cap(core, pool, tokens) and not waits_for_cap(core, pool)
        ):
            begin_activity(core, s, pool, tokens)
            note_begun(core, s)
            return NONE
        room = p.limits.sessions_max_tokens - p.sessions_tokens
        if best == NONE or room > most:
            best, most = pool, room
    return best if best != NONE or is_one_pool(r.target) else pool_of_others(core, s, r.target)


cdef int32_t pool_of_others(Core core, int32_t s, int32_t target) noexcept:
    """Return a pool for whose cap others of a session wait, so that a request that no pool can hold
    now does not overtake them in the queue; -1: none that its set has. O(holds of the session)."""
    cdef AgentSessions agents = core.flows.agents
    cdef int32_t n = agents.items[s].first_hold, pool
    while n != NONE:
        pool = agents.shares[agents.holds[n].share].pool
        if not is_set(target) or core.flows.may_take(pool, target):
            return pool
        n = agents.holds[n].next_hold
    return NONE


cdef int hold_back(Core core, int32_t i, int32_t pool) except -1:
    """Let a request wait for the cap of a pool, with others of its session that wait there
    already. O(log n + pools for which the session waits)."""
    cdef AgentSessions agents = core.flows.agents
    cdef Request* r = &core.requests.items[i]
    cdef Flow* f = &core.flows.items[r.flow]
    cdef RareFields* rare = core.requests.own_rare(i)
    cdef int32_t n = agents.find_hold(rare.session, pool)
    if n == NONE:
        begin_waiting(core, pool)
        n = agents.add_hold(rare.session, agents.share_of(r.flow, pool))
    chain_push(&agents.holds[n].requests, core.requests.items, i)
    rare.hold, r.forecast_wait_us = n, NONE
    vouch(core.flows, r, 1)
    f.held += 1
    f.held_tokens += r.prompt_tokens
    core.flows.held_tokens += r.prompt_tokens
    agents.held += 1
    if r.head_state.head_ns < 0:
        core.requests.head_state_of(i).head_ns = core.now_ns
        r.head_state.lined_ns = core.now_ns
    wait_for(core.requests, i, WAITS_POOL + WAIT_SESSION_CAP, core.now_ns)
    return rank_share(core, agents.holds[n].share)


cdef int begin_waiting(Core core, int32_t pool) except -1:
    """A session begins to wait for the cap of a pool. The time until one begins in any case runs on
    if others have waited just before: a request that was refused may be the same session's."""
    cdef Pool* p = &core.ledger.pools[pool]
    if cap_line(core, pool).count:
        return 0
    if p.turns_ended_ns == 0 or core.now_ns - p.turns_ended_ns > SESSION_ACTIVE_NS:
        p.turn_ns = core.now_ns
    core.ledger.order.touch(pool)
    return core.flows.agents.turns.put(pool, p.turn_ns + turn_wait_ns(core), pool)


cdef int leave_cap(Core core, int32_t i) except -1:
    """A request does not wait for a cap any more.
    O(log n + pools for which the session waits)."""
    cdef AgentSessions agents = core.flows.agents
    cdef Request* r = &core.requests.items[i]
    cdef RareFields* rare = core.requests.own_rare(i)
    cdef SessionHold* hold = &agents.holds[rare.hold]
    cdef int32_t n = hold.share, pool = agents.shares[n].pool
    chain_remove(&hold.requests, core.requests.items, i)
    if hold.requests.count == 0:
        agents.release_hold(rare.hold)
    rare.hold = NONE
    vouch(core.flows, r, -1)
    core.flows.items[r.flow].held -= 1
    core.flows.items[r.flow].held_tokens -= r.prompt_tokens
    core.flows.held_tokens -= r.prompt_tokens
    agents.held -= 1
    rank_share(core, n)
    agents.drop_share(n)
    if not waits_for_cap(core, pool):
        core.ledger.pools[pool].turns_ended_ns = core.now_ns
        agents.turns.remove(pool)
    return 0


cdef int let_hold_in(Core core, int32_t n) except -1:
    """Queue what waits of a session for one cap, but for what another one holds back. O(log n)
    each."""
    cdef list waited = []
    leave_hold(core, n, False, NONE, waited)
    for i in waited:
        line_up(core, i)
    return 0


cdef int let_session_in(Core core, int32_t s) except -1:
    """A session has become active in a pool: queue what waited for that, and what may run in any.
    O(requests of the session that wait * log n)."""
    cdef AgentSessions agents = core.flows.agents
    cdef int32_t n = agents.items[s].first_hold, after, pool
    cdef list waited = []
    while n != NONE:
        after = agents.holds[n].next_hold
        pool = agents.items[s].pool
        leave_hold(core, n, agents.shares[agents.holds[n].share].pool != pool, pool, waited)
        n = after
    for i in waited:
        line_up(core, i)
    return 0


cdef int leave_hold(Core core, int32_t n, bint only_any, int32_t pool, list waited) except -1:
    """Take the requests of a hold out, or only those for any pool or a set with `pool` (-1: any
    pool), and append them."""
    cdef int32_t i = core.flows.agents.holds[n].requests.head, after, target
    while i != NONE:
        after = core.requests.items[i].next
        target = core.requests.items[i].target
        if not only_any or target == NONE or (
            pool != NONE and is_set(target) and core.flows.may_take(pool, target)
        ):
            leave_cap(core, i)
            waited.append(i)
            wait_for(core.requests, i, WAITS_QUEUE, core.now_ns)
            core.requests.items[i].head_state.head_ns = NONE
            core.requests.items[i].head_state.lined_ns = NONE
        i = after
    return 0


cdef int let_flow_in(Core core, int32_t flow) except -1:
    """No cap binds a flow any more: queue all its requests that waited for one.
    O(pools + requests * log n)."""
    cdef AgentSessions agents = core.flows.agents
    cdef int32_t pool, n
    for pool in range(core.ledger.count):
        while core.flows.items[flow].held:
            n = agents.share_index.get(<uint64_t>flow, <uint64_t>pool)
            if n == NONE or agents.shares[n].held == 0:
                break
            let_hold_in(core, agents.shares[n].first_hold)
    return 0


cdef int time_turns(Core core) except -1:
    """The longest wait has changed: a session begins at the latest by what it is now. O(pools)."""
    cdef int32_t pool
    for pool in range(core.ledger.count):
        if waits_for_cap(core, pool):
            core.flows.agents.turns.put(
                pool, core.ledger.pools[pool].turn_ns + turn_wait_ns(core), pool
            )
    return 0


cdef int forget_turns(Core core, int32_t pool) except -1:
    """Nothing waits for the cap of a pool: let what has waited there count no more. O(1)."""
    cdef Pool* p = &core.ledger.pools[pool]
    if not waits_for_cap(core, pool):
        p.turn_ns = p.turns_ended_ns = 0
        cap_line(core, pool).aged = False
    return 0


cdef bint serve_caps(Core core) except -1:
    """Begin the sessions that wait for a cap, as far as there is room or it is their turn, at most
    `work_max`; whether all are. O(pools + begins * log n)."""
    cdef bint all_begun
    let_begun_in(core)
    all_begun = serve_each_cap(core)
    # A pool that stopped may have let one request of a session in elsewhere: its earlier ones come
    # before this poll grants it.
    let_begun_in(core)
    return all_begun


cdef bint serve_each_cap(Core core) except -1:
    cdef int64_t work = 0
    cdef int32_t pool
    for pool in range(core.ledger.count):
        while waits_for_cap(core, pool):
            if work >= core.settings.work_max:
                core.has_more = True
                return False
            if not serve_cap(core, pool):
                break
            work += 1
    return True


cdef int let_begun_in(Core core) except -1:
    """Queue what waits of sessions that have become active since. O(log n) for each request."""
    cdef int32_t s
    while core.flows.agents.begun:
        s = core.flows.agents.begun.pop()
        if core.flows.agents.items[s].pool != NONE:
            let_session_in(core, s)
    return 0


cdef bint serve_cap(Core core, int32_t pool) except -1:
    """Begin the next session that waits for the cap of a pool, if it may. In a pool that grants
    nothing, its requests wait in their queue. O(log n)."""
    cdef AgentSessions agents = core.flows.agents
    cdef Pool* p = &core.ledger.pools[pool]
    cdef Line line = cap_line(core, pool)
    cdef int32_t cls = line.first(core.now_ns)
    cdef int32_t n = agents.shares[line.heap(cls).nodes[0].id].first_hold
    cdef int32_t s = agents.holds[n].session
    cdef int32_t i = agents.holds[n].requests.head
    cdef int64_t tokens = turn_tokens(core, i)
    if not core.ledger.serves(pool) or not core.ledger.can_hold(pool, &core.requests.items[i]):
        let_hold_in(core, n)
        return True
    if not fits_cap(core, pool, tokens):
        if core.now_ns < p.turn_ns + turn_wait_ns(core):
            return False
        make_room(core, pool, tokens)
    line.served(cls, core.now_ns)
    p.turn_ns = core.now_ns
    begin_activity(core, s, pool, tokens)
    let_session_in(core, s)
    if waits_for_cap(core, pool):
        agents.turns.put(pool, p.turn_ns + turn_wait_ns(core), pool)
    return True
