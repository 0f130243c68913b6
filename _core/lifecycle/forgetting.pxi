# Tenants at first sight, and tenants that an operator has deleted, are forgotten, so that others
# may have their flows.
#
# A tenant at first sight is forgotten only if it gains nothing by that when it returns. So none of
# its requests waits or runs, none of its answers is stored, and nothing is owed to it or by it.
# Each of its counters is at a newcomer's or below, its buckets are full, and its outputs are
# predicted from those of all flows. Its flow then goes to the tenant that asks, so that each flow
# has a tenant.
#
# A tenant with enough outputs would keep its flow for good. So what they taught fades some time
# after its last grant, whether or not it is forgotten.
#
# A tenant that an operator deleted returns by an operator's act alone, so it cannot choose to.
# Therefore its counters and its outputs do not count. If they did, tenants that were served once
# and deleted would keep their flows for as long as no other tenant is served more.

cdef enum:
    FORGET_LOOKS = 32  # flows that one new name looks at

# Time after its last grant in which outputs of a first-sight flow are predicted from its own.
cdef int64_t FADE_NS = 3_600_000_000_000


cdef inline bint is_stale(Core core, int32_t flow) noexcept:
    """Return whether an idle flow had its last grant too long ago for what it taught. O(1)."""
    cdef const Flow* f = &core.flows.items[flow]
    return (
        f.queued == 0 and f.live == 0
        and f.granted_at_ns >= 0 and core.now_ns - f.granted_at_ns >= FADE_NS
    )


cdef inline bint has_faded(Core core, int32_t flow) noexcept:
    """Return whether what a flow's outputs taught counts no more. O(1)."""
    return core.flows.items[core.flows.items[flow].base].born and is_stale(core, flow)


cdef inline void fade(Core core, int32_t flow) noexcept:
    """Predict a flow as a newcomer if what it taught counts no more. O(1), then O(PAIRS_MAX)."""
    if has_faded(core, flow):
        core.predictor.forget_lengths(flow)
        core.flows.items[flow].average_milli = 0
        core.flows.changed.mark(flow)


cdef int32_t reclaim_flow(Core core, int32_t maker) except -2:
    """Forget a tenant for this, and return its flow; -1: among the next flows no tenant can be
    forgotten. Only tenants that the principal was the first to name count; -1: all count.
    O(FORGET_LOOKS * (classes * pools + levels))."""
    cdef int32_t flow
    cdef int k
    for k in range(min(FORGET_LOOKS, core.flows.count)):
        flow = core.forget_at if core.forget_at < core.flows.count else 0
        core.forget_at = flow + 1
        if maker != NONE and core.flows.items[flow].maker != maker + 1:
            continue
        if core.flows.items[flow].born and may_forget(core, flow, False):
            forget_tenant(core, flow)
            return flow
    return NONE


cdef int retire_tenant(Core core, bytes name) except -1:
    """Let the name of a listed tenant be unknown: what runs and waits goes on. A new tenant gets
    the flow once that takes nothing from this one. O(1)."""
    known = core.flow_names.get(name)
    if known is None or known == core.unknown_flow:
        raise CallerError(CODE_NOT_FOUND, "tenant", "no tenant of that name")
    put_name(core, name, NONE)
    core.retired[known] = None
    return 0


cdef int32_t reclaim_retired(Core core) except -2:
    """Forget a deleted tenant for this, and return its flow; -1: none can be forgotten.
    O(FORGET_LOOKS * (classes * pools + levels))."""
    cdef int32_t flow
    cdef int k
    for k in range(min(FORGET_LOOKS, len(core.retired))):
        flow, _ = core.retired.popitem(last=False)
        if is_named(core, flow):  # the tenant has returned
            continue
        if may_forget(core, flow, True):
            forget_tenant(core, flow)
            return flow
        core.retired[flow] = None
    return NONE


cdef bint is_named(Core core, int32_t flow) except -1:
    """Return whether the name of a flow's tenant stands for the flow. O(1)."""
    cdef bytes name = <bytes>core.flow_list[flow]
    cdef Hash128 h = sip128(
        core.k0, core.k1 ^ NAME_SALT, <const uint8_t*><const char*>name, len(name)
    )
    return core.names.get(h.hi, h.lo) == flow


cdef bint may_forget(Core core, int32_t flow, bint is_deleted) except -1:
    """Return whether a tenant has nothing that it would lose, or gain; a deleted one, nothing that
    it would lose. O(classes * pools)."""
    cdef Quota* n
    cdef int32_t own = core.flows.items[flow].own_quota
    cdef int k
    while flow != NONE:
        if not has_nothing_open(core, flow) or not (is_deleted or is_new_again(core, flow)):
            return False
        flow = core.flows.items[flow].sibling
    if own == NONE:
        return True
    n = &core.quotas.nodes[own]
    if n.live or n.owed_requests or n.owed_input or n.owed_output:
        return False
    for k in range(RATES):
        core.quotas.refill(n, k)
        if is_held(n.escrow):
            if n.level[k]:
                return False
            continue  # what its tenant spent is in the store's bucket
        if n.rate[k] and n.level[k] < n.rate[k] * MICRO:
            return False
    return True


cdef bint has_nothing_open(Core core, int32_t flow) except -1:
    """Whether nothing of a flow waits, runs or is owed; sessions without requests end. O(pools)."""
    cdef const Flow* f = &core.flows.items[flow]
    if f.held or (f.agents and f.queued == 0 and f.live == 0 and not drop_sessions(core, flow)):
        return False
    if f.queued or f.live or f.answers or f.resumed or f.linger_until_ns or f.open_charged:
        return False
    if f.owed and core.resume_until_ns:
        return False
    for positions in core.saved_positions.values():
        if flow in positions:
            return False
    return True


cdef bint is_new_again(Core core, int32_t flow) except -1:
    """Return whether a flow stands in no line behind a newcomer, and is predicted as one.
    O(pools)."""
    cdef Flows flows = core.flows
    cdef const Flow* f = &flows.items[flow]
    cdef int32_t n = f.first_position
    cdef int64_t newcomer = 0
    if flows.lifts:
        newcomer = max(<int64_t>0, flows.level_of(flow)[0] - flows.credit(f.depth))
    if f.vtc > newcomer:
        return False
    while n != NONE:
        if flows.positions.items[n].key > flows.newcomer_at(flow, flows.positions.items[n].pool):
            return False
        n = flows.positions.items[n].next_position
    if is_stale(core, flow):
        return True
    if core.ahead == AHEAD_AVERAGE and f.average_milli:
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
        core.granted_apart[flows.items[flow].cls] += flows.items[flow].granted
        leave_pools(flows, flow)
        core.predictor.forget_flow(flow)
        core.dry_run_counts.pop(flow, None)
        carry_served(flows, flow, 1)
        flows.clear(flow)
        flow = flows.items[flow].sibling
    if flows.items[base].own_quota != NONE and flows.changed.on:
        core.gone_rows.append(core.quota_keys[flows.items[base].own_quota])
    core.forgotten += 1
    return 0


cdef inline uint64_t name_salt(Core core, const Slice* name) noexcept:
    return sip128(core.k0, core.k1, name.at, name.size).hi


cdef int name_flow(Core core, int32_t flow, bytes name) except -1:
    """Give a new or reclaimed flow, and its siblings, to a tenant. O(classes).

    Ids of requests are found under a key of the name, not of the number of the flow, because the
    number may have been another tenant's.
    """
    cdef int32_t own = core.flows.items[flow].own_quota
    cdef Slice key
    core.flow_names[name] = flow
    key.at, key.size = <const uint8_t*><const char*>name, len(name)
    core.flows.items[flow].salt, core.flows.has_salts = name_salt(core, &key), True
    if own != NONE:
        core.quota_keys[own] = TENANT_QUOTA_ROW + name
    while flow != NONE:
        core.flow_list[flow] = name
        core.flows.changed.mark(flow)
        flow = core.flows.items[flow].sibling
    return 0
