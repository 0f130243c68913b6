

cdef enum:
    DRY_RUN_WAIT = REFUSAL_KINDS  # place of the requests that would have waited


cdef int set_dry_run(Core core, int32_t flow, bint dry_run) except -1:
    # The mode is of a tenant, in all its classes.
    cdef Flow* f
    cdef bint dry_run_counts
    while flow != NONE:
        f = &core.flows.items[flow]
        dry_run_counts, f.dry_runs = f.dry_runs, dry_run
        if dry_run:
            core.dry_run_counts.setdefault(flow, [0] * (REFUSAL_KINDS + 1))
            let_flow_in(core, flow)
            if f.queued:
                core.dry_running.put(flow, flow, 0)
        else:
            core.dry_running.remove(flow)
            if dry_run_counts:
                give_back_all(core, flow)
        flow = f.sibling
    return 0


cdef int count_dry_run(Core core, int32_t flow, int place) except -1:
    if core.flows.items[flow].dry_runs:
        core.dry_run_counts[flow][place] += 1
    return 0


cdef int note_dry_run(Core core, int32_t i, int outcome) except -1:
    """Count what would become of a request: the outcome that refuses it nevertheless, or 0."""
    cdef Request* r = &core.requests.items[i]
    if outcome in (OUT_REJECTED_NO_POOL, OUT_REJECTED_DRAINING, OUT_REJECTED_LIMIT):
        return outcome
    if outcome:
        count_dry_run(core, r.flow, refusal_place(outcome))
    elif would_wait(core, i):
        count_dry_run(core, r.flow, DRY_RUN_WAIT)
    return 0


cdef bint would_wait(Core core, int32_t i) except -1:
    """Return whether a request that arrives now would not be granted at once. O(pools + levels)."""
    cdef Request* r = &core.requests.items[i]
    cdef int32_t node = core.flows.items[r.flow].quota, pool = dry_run_pool(core, i)
    cdef bint exempt = core.flows.items[r.flow].exempt
    cdef Take t
    if node != NONE:
        t = take_for(core, i)
        while node != NONE:
            if not core.quotas.fits(node, &t) or core.quotas.is_awaited(node):
                return True
            node = core.quotas.nodes[node].parent
    if core.quotas.guarantees.count and is_saturated(core, r.target):
        know_shares(core)
        if core.flows.items[r.flow].guarantee != NONE:
            if funding_source_of(core, r.flow).source == PAID_NOT:
                return True
    if pool == NONE:
        return True
    if not exempt and (core.flows.queued_for[pool + 1] or core.flows.queued_for[0]):
        return True
    node = core.ledger.pools[pool].quota
    if node != NONE and not exempt:
        t = take_for(core, i)
        if not core.quotas.fits(node, &t):
            return True
    if is_full(core, r.flow):
        return True
    forget_engine_excess(core, pool)
    core.ledger.expire_prefill_budget(pool, core.now_ns)
    return plan_for(core, pool, r).reason != WAIT_NONE


cdef int32_t dry_run_pool(Core core, int32_t i) noexcept:
    """Return where an audited request runs: its pool, or the one that has promised the least of
    those that can hold it, else of all; -1: none serves. O(pools)."""
    cdef Request* r = &core.requests.items[i]
    cdef int32_t p, best = NONE
    cdef int64_t share, least = 0
    cdef bint holds, holding = False
    if is_one_pool(r.target):
        return r.target if core.ledger.serves(r.target) else NONE
    for p in range(core.ledger.count):
        if not core.ledger.serves(p) or not core.flows.may_take(p, r.target):
            continue
        holds = core.ledger.can_hold(p, r)
        share = promised_ppm(core, p)
        if best == NONE or holds > holding or (holds == holding and share < least):
            best, least, holding = p, share, holds
    return best


cdef int32_t next_dry_run(Core core, int32_t flow) noexcept:
    # The oldest head that has a pool, while there is a lease to give.
    cdef int32_t q = core.flows.items[flow].first_queue, i, oldest = NONE
    while q != NONE and not is_full(core, flow):
        i = core.flows.queues[q].chain.head
        if i != NONE and dry_run_pool(core, i) != NONE:
            if oldest == NONE or core.requests.items[i].seq < core.requests.items[oldest].seq:
                oldest = i
        q = core.flows.queues[q].next_queue
    return oldest


cdef dict dry_run_rows(Core core, int32_t flow):
    counts = core.dry_run_counts.get(flow)
    return {
        "audited_refusals": {
            outcome: counts[refusal_place(outcome)]
            for outcome in REFUSALS
            if counts[refusal_place(outcome)]
        } if counts else {},
        "audited_waits": counts[DRY_RUN_WAIT] if counts else 0,
    }
