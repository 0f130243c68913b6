# Keys order the sessions of a flow; those of all targets are compared or not (session_order.pxi).

cdef inline int64_t session_key(Flows flows, int32_t s) noexcept:
    return flows.agents.items[s].vtc // flows.grain if flows.order == ORDER_COUNTER else 0


cdef inline int32_t counted_session(Flows flows, const Request* r) noexcept:
    """Return the session whose counter orders a request: its own, or the rest of its flow; -1: the
    flow has none. O(1)."""
    cdef int32_t n = flows.items[r.flow].agents, s
    if n == 0:
        return NONE
    s = flows.requests.rare_of(r).session
    if s != NONE and flows.agents.items[s].has_node:
        return s
    return flows.agents.of_flows[n].rest


cdef inline bint has_one_order(Flows flows, int32_t flow) noexcept:
    """Return whether the sessions of a flow stand in one order, whatever their requests name."""
    return (
        flows.items[flow].agents != 0 and not flows.local and flows.order == ORDER_COUNTER
    )
