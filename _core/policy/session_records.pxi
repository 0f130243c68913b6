# Records of sessions of agents: made at first sight, forgotten when that earns them nothing.
#
# A session is forgotten when nothing of it is queued or runs, it is not active, and its counter is
# at a newcomer's or below. Until then it is idle, and the events of its flow's other sessions look
# at it again. If nothing of its tenant waits or runs, no session is behind another one: then the
# levels pass all their counters.

cdef int join_session(Core core, int32_t i, const Slice* name) except -1:
    """Let a request be of the session with this name, known or new. Expected O(log n)."""
    cdef AgentSessions agents = core.flows.agents
    cdef int32_t flow = core.requests.items[i].flow, s
    cdef AgentSession* a
    cdef FlowSessions* of
    cdef Hash128 key = sip128(
        core.k0, core.k1 ^ SESSION_SALT, name.at, name.size
    )
    key.lo ^= <uint64_t>flow
    s = agents.index.get(key.hi, key.lo)
    if s == NONE:
        s = new_session(core, flow, &key)
        if s == NONE:
            agents.unnamed += 1
            return 0
    a = &agents.items[s]
    of = &agents.of_flows[core.flows.items[flow].agents]
    if a.is_idle:
        agents.leave_idle(of, s)
    agents.dues.remove(s)
    if a.open_requests == 0 and not a.has_node and of.nodes < SESSION_NODES:
        a.has_node, a.vtc = True, 0
        of.nodes += 1
    a.open_requests += 1
    core.requests.own_rare(i).session = s
    return 0


cdef int32_t new_session(Core core, int32_t flow, const Hash128* key) except -2:
    """Make a record for a session; -1: there are AGENT_SESSIONS_MAX. O(1) amortised."""
    cdef AgentSessions agents = core.flows.agents
    cdef Flow* f = &core.flows.items[flow]
    cdef int32_t s
    if agents.count >= AGENT_SESSIONS_MAX:
        return NONE
    open_sessions(core, flow)
    s = agents.add(flow)
    agents.items[s].key_hi, agents.items[s].key_lo = key.hi, key.lo
    agents.index.put(key.hi, key.lo, s)
    agents.of_flows[f.agents].count += 1
    return s


cdef int open_sessions(Core core, int32_t flow) except -1:
    """Let a flow have sessions, if it has none: first the one of its rest. O(1) amortised."""
    cdef AgentSessions agents = core.flows.agents
    cdef Flow* f = &core.flows.items[flow]
    if f.agents == 0:
        f.agents = agents.add_flow()
        agents.of_flows[f.agents].rest = agents.add(flow)
    return 0


cdef int rest_session(Core core, int32_t s) except -1:
    """A session has nothing open and is not active: forget it, or let it be idle; and look at some
    of the other idle ones of its flow. O(SESSION_LOOKS * targets)."""
    cdef AgentSessions agents = core.flows.agents
    cdef int32_t flow = agents.items[s].flow
    cdef FlowSessions* of = &agents.of_flows[core.flows.items[flow].agents]
    cdef int k
    if not agents.items[s].is_idle:
        agents.make_idle(of, s)
    if is_at_rest(&core.flows.items[flow]):
        raise_to_highest(core.flows, flow)
    for k in range(SESSION_LOOKS):
        if of.first_idle == NONE:
            break
        try_forget(core, of, of.first_idle)
    if of.count == 0 and is_at_rest(&core.flows.items[flow]):
        drop_lines(core, flow)
    return 0


cdef inline bint is_at_rest(const Flow* f) noexcept:
    return f.queued == 0 and f.live == 0 and f.held == 0


cdef int try_forget(Core core, FlowSessions* of, int32_t s) except -1:
    """Forget an idle session if it gains nothing by that, else put it behind the others.
    O(targets)."""
    cdef AgentSessions agents = core.flows.agents
    cdef AgentSession* a = &agents.items[s]
    agents.leave_idle(of, s)
    if a.has_node and not is_newcomer(core.flows, s):
        agents.make_idle(of, s)
        return 0
    if a.is_saved:
        core.gone_rows.append(session_key_of(core, s))
    agents.index.remove(a.key_hi, a.key_lo)
    of.count -= 1
    of.nodes -= a.has_node
    agents.release(s)
    return 0


cdef int drop_lines(Core core, int32_t flow) except -1:
    """A flow without sessions, and without anything queued, needs no lines. O(targets)."""
    cdef AgentSessions agents = core.flows.agents
    cdef Flow* f = &core.flows.items[flow]
    cdef int32_t q = f.first_queue
    while q != NONE:
        if core.flows.queues[q].line:
            agents.drop_line(core.flows.queues[q].line)
            core.flows.queues[q].line = 0
        q = core.flows.queues[q].next_queue
    agents.release(agents.of_flows[f.agents].rest)
    agents.release_flow(f.agents)
    f.agents = 0
    return 0


cdef bint drop_sessions(Core core, int32_t flow) except -1:
    """Forget the sessions of a flow of which nothing waits or runs; False: one is still active, or
    what it was served counts for ever, as without lifts. O(sessions of the flow)."""
    cdef FlowSessions* of = &core.flows.agents.of_flows[core.flows.items[flow].agents]
    cdef int32_t k
    raise_to_highest(core.flows, flow)
    for k in range(of.count):  # each once: those that stay are put behind the others
        if of.first_idle == NONE:
            break
        try_forget(core, of, of.first_idle)
    if of.count:
        return False
    drop_lines(core, flow)
    return True


cdef int forget_sessions(Core core) except -1:
    """Let all counters of sessions be as new. O(sessions + strands * log n)."""
    cdef AgentSessions agents = core.flows.agents
    cdef int32_t s, n
    for s in range(agents.used):
        agents.items[s].vtc = 0
        if agents.items[s].flow != NONE and agents.items[s].has_node:
            agents.changed.mark(s)
    for n in range(1, agents.flow_used):
        agents.of_flows[n].highest = agents.of_flows[n].level = 0
    for n in range(1, <int32_t>len(agents.lines)):
        if agents.lines[n] is not None:
            agents.line(n).level = 0
    return rekey_sessions(core, NONE)
