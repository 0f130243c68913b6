# Who runs next in a pool.
#
# Least (counter, seq) first. Where that head does not fit, strict order stops; EASY backfill (Lifka
# 1995) lets a later request go first if it fits now and does not move the head's projected start.
# The start is projected from what the running leases have left, counted in tokens, which is time on
# an engine that batches. A request whose flow stays below its share may also go before a head whose
# flow is above: for it something is kept free (see headroom). One head is bypassed `bypass_max`
# times and for `bypass_ns` at most.

cdef enum:
    LOOKAHEAD = 8  # so many heads of flows are looked at

# What a request would reserve in a pool now.
ctypedef struct Plan:
    int64_t blocks
    int64_t output_tokens  # of each sequence
    int32_t reason  # to wait
    uint8_t evidence  # what the output was predicted from; 0: nothing, or it cannot fail
    bint above  # its flow would be above its share


cdef inline uint64_t adapter_of(Scheduler core, const Request* r) noexcept:
    return core.adapters.items[r.adapter].lo if r.adapter != NONE else 0


cdef inline void asked_of(Scheduler core, const Request* r, Asked* asked) noexcept:
    """Whose output the predictor is asked for, and how many leases run. O(1)."""
    asked.flow = r.flow
    asked.adapter = adapter_of(core, r)
    asked.live = core.flows.items[r.flow].live
    asked.live_of_all = core.requests.states[LIVE] + core.requests.states[SUSPECT]


cdef Plan plan_for(Scheduler core, int32_t pool, const Request* r) noexcept:
    """O(1), in the peak form O(leases of the pool)."""
    cdef Plan plan
    cdef Asked asked
    cdef Pool* p = &core.ledger.pools[pool]
    asked_of(core, r, &asked)
    plan.output_tokens = core.predictor.promise(&asked, &plan.evidence)
    if plan.output_tokens == NONE or plan.output_tokens >= r.output_max_tokens:
        plan.output_tokens = r.output_max_tokens
        plan.evidence = BY_NOTHING
    plan.blocks = core.ledger.need(pool, r, plan.output_tokens)
    plan.above = is_above_share(core, r.flow, plan.blocks * p.block_size)
    plan.reason = core.ledger.verdict(
        pool, r, plan.blocks, plan.output_tokens,
        kept_tokens(p, core.now_ns) if plan.above else 0,
    )
    return plan


cdef int32_t head_for(Scheduler core, int32_t pool) except -2:
    """The request that is next for a pool: the least (counter, seq) among those that must run
    there and those that may. -1: none. O(1)."""
    cdef Heap own = <Heap>core.flows.candidates[pool + 1]
    cdef Heap free = <Heap>core.flows.candidates[0]
    cdef int32_t shared = NONE
    if free.count:
        shared = core.flows.queues[free.nodes[0].id].chain.head
        if not core.ledger.can_hold(pool, &core.requests.items[shared]):
            shared = NONE  # another pool's
    if own.count == 0:
        return shared
    if shared != NONE and less(&free.nodes[0], &own.nodes[0]):
        return shared
    return core.flows.queues[own.nodes[0].id].chain.head


cdef inline bint is_for_room(int32_t reason) noexcept nogil:
    return reason == WAIT_KV or reason == WAIT_MAX_TOTAL or reason == WAIT_HEADROOM


cdef inline void forget_foreign(Scheduler core, Pool* p) noexcept:
    if p.foreign_tokens and core.now_ns - p.telemetry_at_ns > TELEMETRY_FRESH_NS:
        p.foreign_tokens = 0  # nobody knows any more


cdef int serve_pool(Scheduler core, int32_t pool) except -1:
    """Grant or evict one request of a pool: 1; 0 where the pool has to wait."""
    cdef Pool* p = &core.ledger.pools[pool]
    cdef int32_t i
    cdef Request* r
    cdef Plan plan
    if core.pool_wakes.count:
        core.pool_wakes.remove(pool)
    if not p.attached:
        p.reason = WAIT_DETACHED
        return 0
    i = head_for(core, pool)
    if i == NONE:
        p.reason = WAIT_STRICT if (<Heap>core.flows.candidates[0]).count else WAIT_NONE
        return evict_unholdable(core)
    r = &core.requests.items[i]
    if r.due_ns <= core.now_ns:  # its timer has not been reached yet
        evict(core, i, OUT_EVICTED_TTL)
        return 1
    if not core.ledger.can_hold(pool, r):  # the pool has shrunk
        evict(core, i, OUT_EVICTED_TOO_LARGE)
        return 1
    if core.requests.states[LIVE] + core.requests.states[SUSPECT] >= core.leases_max:
        p.reason = WAIT_LIMIT
        return 0
    if model_waits(core, i, pool):
        return 0
    forget_foreign(core, p)
    core.ledger.end_round(pool, core.now_ns)
    plan = plan_for(core, pool, r)
    p.reason = plan.reason
    if plan.reason != WAIT_NONE:
        if plan.reason == WAIT_ROUND:
            core.pool_wakes.put(pool, core.ledger.round_ends_ns(pool), pool)
        if not is_for_room(plan.reason):
            return 0
        p.pressed = True
        i = who_may_pass(core, pool, i, &plan)
        if i == NONE:
            return 0
        r = &core.requests.items[i]
    if not plan.above and core.flows.items[r.flow].queued == 1 and has_shares(core):
        note_light(p, core.now_ns, plan.blocks * p.block_size)
    r.evidence = plan.evidence
    grant(core, i, pool, plan.blocks, plan.output_tokens)
    return 1


cdef int32_t who_may_pass(Scheduler core, int32_t pool, int32_t head, Plan* plan) except -2:
    """The first request behind a head that waits for cache which may go before it, and its plan;
    -1: none. O(LOOKAHEAD), in the peak form times the leases of the pool."""
    cdef int32_t found[LOOKAHEAD]
    cdef Request* first = &core.requests.items[head]
    cdef Request* r
    cdef Plan its
    cdef Projection start
    cdef bint is_light
    cdef int32_t k, count
    if not core.backfills or first.bypassed >= core.bypass_max or (
        first.bypassed and core.now_ns - first.bypassed_ns >= core.bypass_ns
    ):
        return NONE
    start = project(core, pool, first, plan)
    count = next_in_line(core, pool, found)
    for k in range(count):
        r = &core.requests.items[found[k]]
        if found[k] == head or r.due_ns <= core.now_ns or not core.ledger.can_hold(pool, r):
            continue
        its = plan_for(core, pool, r)
        if its.reason != WAIT_NONE:
            continue
        is_light = plan.above and not its.above
        if not is_light and not leaves(&start, &core.ledger.pools[pool], r, &its):
            continue
        if not model_allows(core, found[k], pool):
            continue
        if first.bypassed == 0:
            first.bypassed_ns = core.now_ns
        first.bypassed += 1
        plan[0] = its
        return found[k]
    return NONE


# When the head of a pool can start.
ctypedef struct Projection:
    int64_t left  # after so many tokens of every running sequence
    int64_t spare_tokens  # what will then be free beside it


cdef Projection project(
    Scheduler core, int32_t pool, const Request* r, const Plan* plan
) noexcept:
    """O(leases of the pool)."""
    cdef const Pool* p = &core.ledger.pools[pool]
    cdef Projection start
    cdef int64_t room = (p.capacity_blocks - p.headroom_blocks - plan.blocks) * p.block_size
    if plan.above:
        room -= kept_tokens(p, core.now_ns)
    runs_project(
        &core.ledger.pools[pool].runs, core.requests, room - p.foreign_tokens, &start.left,
        &start.spare_tokens,
    )
    return start


cdef bint leaves(
    const Projection* start, const Pool* p, const Request* r, const Plan* its
) noexcept:
    """Whether the head still starts when it would: the request ends before, or fits beside it."""
    if its.blocks * p.block_size <= start.spare_tokens:
        return True
    return start.left == NEVER or (r.reports_progress and its.output_tokens <= start.left)


cdef int32_t next_in_line(Scheduler core, int32_t pool, int32_t* found) noexcept:
    """The heads of the first flows in the pool's order, at most LOOKAHEAD; how many. Best first
    through both heaps: O(LOOKAHEAD^2)."""
    cdef Heap own = <Heap>core.flows.candidates[pool + 1]
    cdef Heap free = <Heap>core.flows.candidates[0]
    cdef Node* open[4 * LOOKAHEAD + 2]  # whoever may be next
    cdef bint is_free[4 * LOOKAHEAD + 2]
    cdef Node* base
    cdef int32_t count = 0, taken = 0, k, best, at, child, size
    if own.count:
        open[count], is_free[count] = own.nodes, False
        count += 1
    if free.count:
        open[count], is_free[count] = free.nodes, True
        count += 1
    while count and taken < LOOKAHEAD:
        best = 0
        for k in range(1, count):
            if less(open[k], open[best]):
                best = k
        base, size = (free.nodes, free.count) if is_free[best] else (own.nodes, own.count)
        at = <int32_t>(open[best] - base)
        found[taken] = core.flows.queues[open[best].id].chain.head
        taken += 1
        count -= 1
        k = is_free[best]
        open[best], is_free[best] = open[count], is_free[count]
        for child in range(4 * at + 1, min(4 * at + 5, size)):
            open[count], is_free[count] = &base[child], k
            count += 1
    return taken
