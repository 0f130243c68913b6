# Counters of sessions of agents, from the rows that outlive the process: of each session with a
# counter of its own, at most SESSION_NODES of a flow. Footprints are not among them: a session is
# active again once a lease of it is replayed or granted.

cdef int restore_session(Core core, bytes name, Cursor* c, bint applies) except -1:
    """Check a session's row, or take it over; 1 if there is a place for it. O(1) expected."""
    cdef AgentSessions agents = core.flows.agents
    cdef int64_t counter
    cdef int32_t flow, s
    cdef Hash128 key
    cdef FlowSessions* of
    read_numbers(c, &counter, 1)
    check_range("counter", counter, 0, VTC_MAX)
    check_range("key", len(name), 18, 18 + 2 * NAME_BYTES_MAX)
    flow = flow_of_row(core, name[16:], applies)
    if flow == NONE or agents.count >= AGENT_SESSIONS_MAX:
        return 0
    memcpy(&key.hi, <const char*>name, 8)
    memcpy(&key.lo, <const char*>name + 8, 8)
    key.lo ^= <uint64_t>flow
    open_sessions(core, flow)
    of = &agents.of_flows[core.flows.items[flow].agents]
    if of.nodes >= SESSION_NODES:
        return 0
    s = new_session(core, flow, &key)
    agents.items[s].vtc, agents.items[s].has_node = counter, True
    agents.items[s].is_saved = True
    of.nodes += 1
    agents.make_idle(of, s)
    note_counter(core.flows, s)
    return 1


cdef int restore_rest(Core core, int32_t flow, int64_t level, int64_t counter) except -1:
    """Take over what a flow's row says of its sessions, if anything. O(1) amortised."""
    cdef AgentSessions agents = core.flows.agents
    cdef int32_t n
    if level == 0 and counter == 0:
        return 0
    open_sessions(core, flow)
    n = core.flows.items[flow].agents
    agents.of_flows[n].level = level
    agents.items[agents.of_flows[n].rest].vtc = counter
    note_counter(core.flows, agents.of_flows[n].rest)
    return 0


cdef int drop_rests(Core core) except -1:
    """All rows are read: a flow of which no session is left needs no counter of its rest.
    O(flows)."""
    cdef int32_t flow, n
    for flow in range(core.flows.count):
        n = core.flows.items[flow].agents
        if n and core.flows.agents.of_flows[n].count == 0:
            drop_lines(core, flow)
    return 0


cdef int forget_absent_sessions(Core core) except -1:
    """Forget the sessions of flows of which nothing waits or runs: no event of theirs would.
    O(flows + sessions)."""
    cdef int32_t flow
    if core.flows.agents.count == 0:
        return 0
    for flow in range(core.flows.count):
        if core.flows.items[flow].agents and is_at_rest(&core.flows.items[flow]):
            drop_sessions(core, flow)
    return 0
