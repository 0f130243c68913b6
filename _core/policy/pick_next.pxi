# The choice of the request that runs next in a pool. The head of a class is chosen by
# head_in_class() in locality.pxi, the least served in a line by tree_lines.pxi.
#
# The best class first, or the one that ageing brings forward (see classes), at most every second
# time; in it least (counter, seq) first. If that head does not fit, strict order stops; under
# backfill another request may pass it, see backfill.pxi.

# The reservation that a request would get in a pool now.
ctypedef struct Plan:
    int64_t blocks
    int64_t tokens  # their tokens, and those of an inactive adapter
    int64_t output_tokens  # output of each sequence
    int32_t reason  # to wait
    uint8_t evidence  # what the output was predicted from; 0: nothing, or it cannot fail
    bint above  # its flow would be above its share


cdef inline Plan plan_for(Core core, int32_t pool, const Request* r) noexcept:
    """Return the reservation that a request would get. O(1), in the peak form O(leases of the
    pool)."""
    return plan_unless(core, pool, r, core.ledger.shut_to(pool, r))


cdef Plan plan_unless(Core core, int32_t pool, const Request* r, int32_t shut) noexcept:
    """Return the same if it is known why the pool is shut to the request: see Ledger.shut_to()."""
    cdef Plan plan
    cdef Asked asked
    cdef Pool* p = &core.ledger.pools[pool]
    cdef bint exempt = core.flows.items[r.flow].exempt
    asked_of(core, r, &asked)
    plan.output_tokens = core.predictor.promise(&asked, &plan.evidence)
    if plan.output_tokens == NONE or plan.output_tokens >= r.output_max_tokens:
        plan.output_tokens = r.output_max_tokens
        plan.evidence = BY_NOTHING
    plan.blocks = core.ledger.need(pool, r, plan.output_tokens)
    plan.tokens = plan.blocks * p.block_size + core.ledger.lora_more(pool, r, False)
    plan.above = not exempt and is_above_share(core, pool, r.flow, plan.blocks)
    plan.reason = shut
    if shut != WAIT_NONE:
        return plan
    plan.reason = core.ledger.verdict(
        pool, r, plan.blocks, plan.output_tokens,
        kept_tokens(p, core.now_ns) if plan.above else 0,
    )
    if exempt and plan.reason == WAIT_HEADROOM:
        plan.reason = WAIT_NONE
    return plan


cdef int32_t head_for(Core core, int32_t pool, bint* aged) except -2:
    """Return the request that is next for a pool, and whether ageing brought it before better
    classes. -1: none. O(classes)."""
    cdef Line line
    cdef Heap heap
    cdef int32_t k, c, target, best = NONE, i = NONE, head
    cdef int64_t due_ns = core.now_ns + 1
    aged[0] = False
    if free_line(core.flows, pool).count == 0 and (
        (<Line>core.flows.candidates[pool + 1]).count == 0
    ):
        return NONE
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
            if target == 0 and not core.flows.may_take(pool, NONE):
                continue
            line = <Line>core.flows.candidates[target]
            if line.heap(c).count and line.due_ns(c) < due_ns:
                if target == 0:
                    heap = free_line(core.flows, pool).heap(c)
                else:
                    heap = line.heap(c)
                head = least_served(core.flows, first_head(core.flows, heap, pool), pool)
                if core.requests.items[head].target == pool or (
                    core.ledger.can_hold(pool, &core.requests.items[head])
                ):
                    i, due_ns, aged[0] = head, line.due_ns(c), True
    return i


cdef inline bint is_for_room(int32_t reason) noexcept nogil:
    return reason == WAIT_KV or reason == WAIT_MAX_TOTAL or reason == WAIT_HEADROOM


cdef inline bint may_be_passed(int32_t reason) noexcept nogil:
    """Return whether other requests may pass a head that waits for this, see backfill.pxi."""
    return is_for_room(reason) or reason == WAIT_ADAPTERS


cdef inline void forget_engine_excess(Core core, int32_t pool) noexcept:
    cdef Pool* p = &core.ledger.pools[pool]
    if p.engine_excess_tokens and core.now_ns - p.telemetry_at_ns > TELEMETRY_FRESH_NS:
        p.engine_excess_tokens = 0  # unknown from now on
        core.flows.pool_order.touch(pool)


cdef inline int wake_for(Core core, int32_t pool, int32_t reason) except -1:
    """Have a pool served when that reason to wait is over, where the time alone ends it.
    O(log pools)."""
    cdef int64_t due_ns
    if reason != WAIT_ROUND:
        return 0
    due_ns = core.ledger.prefill_budget_ends_ns(pool)
    # The earliest time that a request waits for counts.
    if not core.pool_wakes.has(pool) or due_ns < core.pool_wakes.key_of(pool):
        core.pool_wakes.put(pool, due_ns, pool)
    return 0


cdef inline bint is_full(Core core, int32_t flow) noexcept:
    """Return whether there is no lease left to give a flow; exempt ones have as many of their
    own."""
    cdef int64_t leases = core.flows.exempt_live
    if not core.flows.items[flow].exempt:
        leases = core.requests.states[LIVE] + core.requests.states[SUSPECT] - leases
    return leases >= core.settings.leases_max


cdef int32_t next_in_line(
    Core core, int32_t pool, int32_t first_class, int32_t* found
) noexcept:
    """Find the heads of the first flows in the pool's order, at most LOOKAHEAD; return their
    number. Those of one class first, then by class: O(LOOKAHEAD^2 + classes)."""
    cdef int32_t k, taken = next_in_class(core, pool, first_class, found, 0)
    for k in range(core.classes.count):
        if core.classes.order[k] != first_class:
            taken = next_in_class(core, pool, core.classes.order[k], found, taken)
    if taken == LOOKAHEAD:  # else none is behind them that a charge could bring into sight
        for k in range(taken):
            watch(core.flows, core.requests.items[found[k]].flow)
    return taken


cdef int32_t next_of_detached(Core core, int32_t pool) except -2:
    """Return the request that waits for a pool to come; -1: none, or the next of its own may run in
    another pool. O(pools + classes)."""
    cdef Line own = <Line>core.flows.candidates[pool + 1]
    cdef int32_t p, cls, i
    cdef bint aged, some = False
    if core.requests.states[QUEUED] == 0:
        return NONE
    for p in range(core.ledger.count):
        some = some or (core.ledger.pools[p].attached and core.flows.may_take(p, NONE))
    if not some:
        return head_for(core, pool, &aged)
    cls = own.best()
    i = NONE if cls == NONE else first_head(core.flows, own.heap(cls), pool)
    return NONE if i != NONE and is_set(core.requests.items[i].target) else i
