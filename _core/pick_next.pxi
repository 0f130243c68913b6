# Who runs next in a pool.
#
# The best class first, or the one that ageing brings forward (see classes), at most every second
# time; in it least (counter, seq) first. Where that head does not fit, strict order stops; EASY
# backfill (Lifka 1995) lets a later request go first if it fits now and does not move the head's
# projected start. The start is projected from what the running leases have left, counted in tokens,
# which is time on an engine that batches. A request whose flow stays below its share may also go
# before a head of its class whose flow is above: for it something is kept free (see headroom).
# One head is bypassed `bypass_max` times and for `bypass_ns` at most, an exempt one never.

cdef enum:
    LOOKAHEAD = 8  # so many heads of flows are looked at

# What a request would reserve in a pool now.
ctypedef struct Plan:
    int64_t blocks
    int64_t tokens  # of these, and of its adapter where that is not active yet
    int64_t output_tokens  # of each sequence
    int32_t reason  # to wait
    uint8_t evidence  # what the output was predicted from; 0: nothing, or it cannot fail
    bint above  # its flow would be above its share
    int64_t pacing_gap_ns  # so long its grant keeps the next of its kind away, see stagger


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
    cdef bint exempt = core.flows.items[r.flow].exempt
    cdef int64_t promise
    asked_of(core, r, &asked)
    plan.output_tokens = promise = core.predictor.promise(&asked, &plan.evidence)
    if plan.output_tokens == NONE or plan.output_tokens >= r.output_max_tokens:
        plan.output_tokens = r.output_max_tokens
        plan.evidence = BY_NOTHING
    plan.blocks = core.ledger.need(pool, r, plan.output_tokens)
    plan.tokens = plan.blocks * p.block_size + core.ledger.lora_more(pool, r, False)
    plan.above = not exempt and is_above_share(core, r.flow, plan.blocks * p.block_size)
    plan.reason = core.ledger.verdict(
        pool, r, plan.blocks, plan.output_tokens,
        kept_tokens(p, core.now_ns) if plan.above else 0,
    )
    if exempt and plan.reason == WAIT_HEADROOM:
        plan.reason = WAIT_NONE
    plan.pacing_gap_ns = 0
    if plan.reason == WAIT_NONE:
        plan.pacing_gap_ns = pacing_gap_ns(core, p, r, plan.blocks, plan.above, promise)
        if plan.pacing_gap_ns and core.now_ns < p.paced_until_ns < r.due_ns:
            plan.reason = WAIT_STAGGER
    return plan


cdef int32_t head_for(Scheduler core, int32_t pool, bint* aged) except -2:
    """The request that is next for a pool, and whether ageing brought it before better classes.
    -1: none. O(classes)."""
    cdef Line line
    cdef int32_t k, c, target, best = NONE, i = NONE, head
    cdef int64_t due_ns = core.now_ns + 1
    aged[0] = False
    for k in range(core.classes.count):
        c = core.classes.order[k]
        if best == NONE:
            i = head_in_class(core, pool, c)
            if i != NONE:
                best = c
                if core.classes.items[c].exempt or core.ledger.pools[pool].aged:
                    break
            continue
        for target in (pool + 1, 0):
            line = <Line>core.flows.candidates[target]
            if line.heap(c).count and line.due_ns(c) < due_ns:
                head = core.flows.queues[line.heap(c).nodes[0].id].chain.head
                if target or core.ledger.can_hold(pool, &core.requests.items[head]):
                    i, due_ns, aged[0] = head, line.due_ns(c), True
    return i


cdef int32_t first_in_class(Scheduler core, int32_t pool, int32_t cls) except -2:
    """The least (counter, seq) of a class among those that must run in a pool and those that may.
    -1: none. O(1)."""
    cdef Heap own = (<Line>core.flows.candidates[pool + 1]).heap(cls)
    cdef Heap free = (<Line>core.flows.candidates[0]).heap(cls)
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


cdef inline bint may_be_passed(int32_t reason) noexcept nogil:
    """Whether a head that waits for this may be bypassed, so often and for so long."""
    return is_for_room(reason) or reason == WAIT_ADAPTERS or reason == WAIT_STAGGER


cdef inline void forget_engine_excess(Scheduler core, Pool* p) noexcept:
    if p.engine_excess_tokens and core.now_ns - p.telemetry_at_ns > TELEMETRY_FRESH_NS:
        p.engine_excess_tokens = 0  # nobody knows any more


cdef int serve_pool(Scheduler core, int32_t pool) except -1:
    """Grant or evict one request of a pool: 1; 0 where the pool has to wait."""
    cdef Pool* p = &core.ledger.pools[pool]
    cdef int32_t i, head
    cdef bint aged
    cdef Request* r
    cdef Plan plan
    cdef int64_t ends_ns
    if core.pool_wakes.count:
        core.pool_wakes.remove(pool)
    if not p.attached:
        p.reason = WAIT_DETACHED
        p.next = next_of_detached(core, pool)
        return 0
    if not core.ledger.serves(pool):
        p.reason, p.next = WAIT_DRAINING, NONE
        return 0
    if core.quotas.guarantees.count:
        know_shares(core)
        note_saturation(core)
    if evict_unholdable(core, pool):
        return 1
    head = i = p.next = head_for(core, pool, &aged)
    if i == NONE:
        p.reason = WAIT_STRICT if (<Line>core.flows.candidates[0]).count else WAIT_NONE
        if p.reason == WAIT_NONE and has_throttled(core.flows, pool):
            p.reason = WAIT_SHARE
            return let_one_go(core, pool)
        return 0
    if evict_head(core, i, pool):
        return 1
    r = &core.requests.items[i]
    if is_full(core, r.flow):
        p.reason = WAIT_LIMIT
        return 0
    if core.quotas.guarantees.count and must_throttle(core, i):
        throttle(core, i)
        return 1
    if model_waits(core, i, pool):
        return 0
    forget_engine_excess(core, p)
    core.ledger.expire_prefill_budget(pool, core.now_ns)
    plan = plan_for(core, pool, r)
    p.reason = plan.reason
    if plan.reason != WAIT_NONE:
        wake_for(core, pool, plan.reason)
        if not may_be_passed(plan.reason):
            return 0
        p.pressed = p.pressed or is_for_room(plan.reason)
        i = who_may_pass(core, pool, i, &plan)
        if i == NONE:
            return 0
        r = &core.requests.items[i]
        if r.deadline_ns and shed_head(core, i, pool):
            return 1
    elif core.delay_factor_milli:
        ends_ns = hold_ends_ns(core, pool, r)
        if ends_ns:
            p.reason = WAIT_DELAY
            core.pool_wakes.put(pool, ends_ns, pool)
            return 0
    if not plan.above and core.flows.items[r.flow].queued == 1 and has_shares(core):
        note_light(p, core.now_ns, plan.blocks * p.block_size)
    if plan.pacing_gap_ns:
        pace_next(p, plan.pacing_gap_ns, core.now_ns)
    r.evidence = plan.evidence
    if i == head:
        note_turn(core, pool, r, aged)
    grant(core, i, pool, plan.blocks, plan.output_tokens, i == head and aged)
    return 1


cdef inline int wake_for(Scheduler core, int32_t pool, int32_t reason) except -1:
    """Have a pool served when that reason to wait is over, where the time alone ends it.
    O(log pools)."""
    cdef int64_t due_ns
    if reason == WAIT_ROUND:
        due_ns = core.ledger.prefill_budget_ends_ns(pool)
    elif reason == WAIT_STAGGER:
        due_ns = core.ledger.pools[pool].paced_until_ns
    else:
        return 0
    # Of all that wait for a time, whoever can go first counts.
    if not core.pool_wakes.has(pool) or due_ns < core.pool_wakes.key_of(pool):
        core.pool_wakes.put(pool, due_ns, pool)
    return 0


cdef bint evict_head(Scheduler core, int32_t i, int32_t pool) except -1:
    """Evict a head that cannot be granted any more, or not in time; whether that was done."""
    cdef Request* r = &core.requests.items[i]
    if r.due_ns <= core.now_ns:  # its timer has not been reached yet
        evict(core, i, OUT_EVICTED_TTL)
        return True
    if r.deadline_ns and shed_head(core, i, pool):
        return True
    # The pool has shrunk below what it had accepted. One that names no pool waits for another.
    if r.target != NONE and not core.ledger.can_hold(pool, r):
        evict(core, i, OUT_EVICTED_TOO_LARGE)
        return True
    return False


cdef inline bint is_full(Scheduler core, int32_t flow) noexcept:
    """Whether there is no lease left to give a flow; exempt ones have as many of their own."""
    cdef int64_t leases = core.flows.exempt_live
    if not core.flows.items[flow].exempt:
        leases = core.requests.states[LIVE] + core.requests.states[SUSPECT] - leases
    return leases >= core.leases_max


cdef void note_turn(Scheduler core, int32_t pool, const Request* r, bint aged) noexcept:
    # The class of the head has been served: it is due again when it has waited as long as now.
    cdef int32_t cls = core.flows.items[r.flow].cls
    (<Line>core.flows.candidates[r.target + 1]).since_ns[cls] = core.now_ns
    core.ledger.pools[pool].aged = aged
    core.classes.items[cls].aged += aged


cdef int32_t who_may_pass(Scheduler core, int32_t pool, int32_t head, Plan* plan) except -2:
    """The first request behind a head that waits for cache, or for a place among the active
    adapters, which may go before it, and its plan; -1: none. O(LOOKAHEAD), in the peak form times
    the leases of the pool."""
    cdef int32_t found[LOOKAHEAD]
    cdef Request* first = &core.requests.items[head]
    cdef Request* r
    cdef Plan its
    cdef Projection start
    cdef bint is_light
    cdef int32_t k, count, cls = core.flows.items[first.flow].cls
    if core.flows.items[first.flow].exempt:
        return NONE
    if not core.backfills or first.head_state.bypassed >= core.bypass_max or (
        first.head_state.bypassed and core.now_ns - first.head_state.bypassed_ns >= core.bypass_ns
    ):
        return NONE
    start = project(core, pool, first, plan)
    count = next_in_line(core, pool, cls, found)
    for k in range(count):
        r = &core.requests.items[found[k]]
        if found[k] == head or r.due_ns <= core.now_ns or not core.ledger.can_hold(pool, r):
            continue
        its = plan_for(core, pool, r)
        wake_for(core, pool, its.reason)
        if its.reason != WAIT_NONE:
            continue
        is_light = plan.above and not its.above and core.flows.items[r.flow].cls == cls
        if not is_light and not leaves(&start, r, &its):
            continue
        if core.quotas.guarantees.count and must_throttle(core, found[k]):
            continue
        if not model_allows(core, found[k], pool):
            continue
        if first.head_state.bypassed == 0:
            first.head_state.bypassed_ns = core.now_ns
        first.head_state.bypassed += 1
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
    cdef int64_t room = (p.capacity_blocks - p.headroom_blocks) * p.block_size - plan.tokens
    if plan.above:
        room -= kept_tokens(p, core.now_ns)
    growing_project(
        &core.ledger.pools[pool].growing, core.requests,
        room - unaccounted_tokens(p) - p.loras.tokens, &start.left, &start.spare_tokens,
    )
    return start


cdef bint leaves(
    const Projection* start, const Request* r, const Plan* its
) noexcept:
    """Whether the head still starts when it would: the request ends before, or fits beside it."""
    if its.tokens <= start.spare_tokens:
        return True
    return start.left == NEVER or (r.reports_progress and its.output_tokens <= start.left)


cdef int32_t next_in_line(
    Scheduler core, int32_t pool, int32_t first_class, int32_t* found
) noexcept:
    """The heads of the first flows in the pool's order, at most LOOKAHEAD; how many. Those of one
    class first, then by class: O(LOOKAHEAD^2 + classes)."""
    cdef int32_t k, taken = next_in_class(core, pool, first_class, found, 0)
    for k in range(core.classes.count):
        if core.classes.order[k] != first_class:
            taken = next_in_class(core, pool, core.classes.order[k], found, taken)
    return taken


cdef int32_t next_in_class(
    Scheduler core, int32_t pool, int32_t cls, int32_t* found, int32_t taken
) noexcept:
    """The same of one class, behind those that were taken."""
    cdef Heap own = (<Line>core.flows.candidates[pool + 1]).heap(cls)
    cdef Heap free = (<Line>core.flows.candidates[0]).heap(cls)
    cdef int32_t k, count = best_first(own, free, found, taken)
    for k in range(taken, count):
        found[k] = core.flows.queues[found[k]].chain.head
    return count


cdef int32_t best_first(Heap own, Heap free, int32_t* found, int32_t taken) noexcept:
    """The first ids of two heaps together, behind those that were taken, LOOKAHEAD at most with
    them. O(LOOKAHEAD^2)."""
    cdef Node* open[4 * LOOKAHEAD + 2]  # whoever may be next
    cdef bint is_free[4 * LOOKAHEAD + 2]
    cdef Node* base
    cdef int32_t count = 0, k, best, at, child, size
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
        found[taken] = open[best].id
        taken += 1
        count -= 1
        k = is_free[best]
        open[best], is_free[best] = open[count], is_free[count]
        for child in range(4 * at + 1, min(4 * at + 5, size)):
            open[count], is_free[count] = &base[child], k
            count += 1
    return taken
