# Tenants at first sight that are forgotten, so that others may have their flows.
#
# A tenant is forgotten only if that gives it nothing when it returns: nothing of it is queued or
# runs, no answer of it is stored, nothing is owed to it or by it, each of its counters is where a
# newcomer begins or before, its buckets are full, and its outputs are predicted from those of all
# flows. Its flow then goes to the tenant that asks, so no flow is ever without a tenant.

cdef enum:
    FORGET_LOOKS = 32  # flows that one new name looks at


cdef int32_t reclaim_flow(Core core) except -2:
    """The flow of a tenant that has been forgotten for this; -1: among the next flows no tenant can
    be. O(FORGET_LOOKS * (classes * pools + levels))."""
    cdef int32_t flow
    cdef int k
    for k in range(min(FORGET_LOOKS, core.flows.count)):
        flow = core.forget_at if core.forget_at < core.flows.count else 0
        core.forget_at = flow + 1
        if may_forget(core, flow):
            forget_tenant(core, flow)
            return flow
    return NONE


cdef bint may_forget(Core core, int32_t flow) except -1:
    """Whether a tenant at first sight has nothing that it would lose. O(classes * pools)."""
    cdef Quota* n
    cdef int32_t own = core.flows.items[flow].own_quota
    cdef int k
    if not core.flows.items[flow].born:
        return False
    while flow != NONE:
        if not may_forget_flow(core, flow):
            return False
        flow = core.flows.items[flow].sibling
    if own == NONE:
        return True
    n = &core.quotas.nodes[own]
    if n.live or n.owed_requests or n.owed_input or n.owed_output:
        return False
    for k in range(RATES):
        core.quotas.refill(n, k)
        if n.rate[k] and n.level[k] < n.rate[k] * MICRO:
            return False
    return True


cdef bint may_forget_flow(Core core, int32_t flow) except -1:
    cdef Flows flows = core.flows
    cdef const Flow* f = &flows.items[flow]
    cdef int32_t n = f.first_position
    cdef int64_t newcomer = 0
    if f.queued or f.live or f.answers or f.resumed or f.linger_until_ns or f.open_charged:
        return False
    if f.owed and core.resume_until_ns:
        return False
    if flows.lifts and flows.lifts_queued:
        newcomer = max(<int64_t>0, flows.level[f.cls] - flows.credit())
    if f.vtc > newcomer or (flows.last_active[f.cls] == flow and not flows.lifts_queued):
        return False
    if core.ahead == AHEAD_AVERAGE and f.average_milli:
        return False
    while n != NONE:
        if flows.positions.items[n].key > flows.newcomer_at(f.cls, flows.positions.items[n].pool):
            return False
        n = flows.positions.items[n].next_position
    for positions in core.saved_positions.values():
        if flow in positions:
            return False
    return core.predictor.knows_little(flow)


cdef int forget_tenant(Core core, int32_t base) except -1:
    """Let a flow, and the tenant's others, be as new and without a name. O(classes * pools)."""
    cdef Flows flows = core.flows
    cdef int32_t flow = base
    cdef bytes name = <bytes>core.flow_list[base]
    name_served(core)
    put_name(core, name, NONE)
    del core.flow_names[name]
    while flow != NONE:
        if flows.changed.on:
            core.gone_rows.append(FLOW_ROW + flow_name(core, flow))
            core.gone_rows.append(LENGTHS_ROW + flow_name(core, flow))
        core.granted_by_forgotten[flows.items[flow].cls] += flows.items[flow].granted
        flows.leave_pools(flow)
        if flows.last_active[flows.items[flow].cls] == flow:
            flows.last_active[flows.items[flow].cls] = NONE
        core.predictor.forget_flow(flow)
        core.dry_run_counts.pop(flow, None)
        flows.clear(flow)
        flow = flows.items[flow].sibling
    if flows.items[base].own_quota != NONE and flows.changed.on:
        core.gone_rows.append(core.quota_keys[flows.items[base].own_quota])
    core.forgotten += 1
    return 0


cdef int name_flow(Core core, int32_t flow, bytes name) except -1:
    """Give a reclaimed flow, and its siblings, to a tenant. O(classes)."""
    cdef int32_t own = core.flows.items[flow].own_quota
    core.flow_names[name] = flow
    if own != NONE:
        core.quota_keys[own] = TENANT_QUOTA_ROW + name
    while flow != NONE:
        core.flow_list[flow] = name
        core.flows.changed.mark(flow)
        flow = core.flows.items[flow].sibling
    return 0
