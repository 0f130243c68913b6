# A pool that grants nothing rests: dispatches leave it out for a time that this file finds.
#
# Another look at such a pool depends on its ledger, on the line and what outputs taught, and on the
# time. Whatever changes the ledger touches the pool. Whatever changes the line stirs all pools. A
# charge stirs them only if its flow is watched: the flow of the next request of a pool, of the
# first of each class, and of all that were considered behind these if there were more. A charge of
# another flow puts its requests further back, and they could not pass before. The times at which a
# look would find something else are known.
#
# Some reasons to wait depend on more than that: quotas, the state of a round, a pace, deadlines.
# A pool that waits for one of these does not rest.

cdef int64_t rests_until_ns(Core core, int32_t pool) except -2:
    """Return until when a pool that has granted what it can may rest; -1: it does not.
    O(classes)."""
    cdef const Pool* p = &core.ledger.pools[pool]
    cdef int64_t until_ns = NEVER
    if (
        p.reason == WAIT_NONE or core.quotas.guarantees.count or p.quota != NONE
        or core.pool_wakes.has(pool) or p.awaits_replays
    ):
        return NONE
    if p.next == NONE:
        if p.reason not in (WAIT_STRICT, WAIT_DRAINING, WAIT_DETACHED):
            return NONE
    else:
        if not (is_for_room(p.reason) or p.reason in (
            WAIT_OVERDRAWN, WAIT_MAX_RUNNING, WAIT_ADAPTERS, WAIT_LIMIT,
        )):
            return NONE
        if core.requests.rare_of(&core.requests.items[p.next]).deadline_ns:
            return NONE
        until_ns = next_wait_ns(core, p)
        watch(core.flows, core.requests.items[p.next].flow)
    watch_first(core, pool)
    if p.calm_since_ns >= 0:
        until_ns = min(until_ns, p.calm_since_ns + core.settings.overload_hold_ns)
    if p.engine_excess_tokens:
        until_ns = min(until_ns, p.telemetry_at_ns + TELEMETRY_FRESH_NS + 1)
    until_ns = min(until_ns, next_ageing_ns(core, pool), next_fading_ns(core, p))
    return until_ns if until_ns > core.now_ns else NONE


cdef void watch_first(Core core, int32_t pool) noexcept:
    """Watch the first of each class that may run anywhere: where the pool cannot hold it, it hides
    others. O(classes * levels)."""
    cdef Line free = free_line(core.flows, pool)
    cdef int32_t c
    for c in range(core.classes.count if free.count else 0):
        if (<Heap>free.heap_at[c]).count:
            watch(
                core.flows,
                core.requests.items[first_head(core.flows, <Heap>free.heap_at[c], pool)].flow,
            )


cdef int64_t next_wait_ns(Core core, const Pool* p) noexcept:
    """Return when the wait of a pool's next request changes the level of load, or ends. O(1)."""
    cdef const Request* r = &core.requests.items[p.next]
    cdef int64_t lined_ns = r.head_state.lined_ns, until_ns = r.due_ns
    if lined_ns + core.settings.queue_target_ns >= core.now_ns:
        until_ns = min(until_ns, lined_ns + core.settings.queue_target_ns + 1)
    if lined_ns + core.settings.queue_target_ns // 2 >= core.now_ns:
        until_ns = min(until_ns, lined_ns + core.settings.queue_target_ns // 2 + 1)
    return until_ns


cdef int64_t next_ageing_ns(Core core, int32_t pool) noexcept:
    """Return when ageing may bring another class forward in a pool; NEVER: not to come.
    O(classes)."""
    cdef int64_t until_ns
    if core.classes.count == 1:
        return NEVER
    until_ns = next_due_in(core, <Line>core.flows.candidates[pool + 1])
    if not core.flows.may_take(pool, NONE):
        return until_ns
    return min(until_ns, next_due_in(core, <Line>core.flows.candidates[0]))


cdef int64_t next_due_in(Core core, Line line) noexcept:
    """Return when the next class of a line will have waited for its ageing time; NEVER: none.
    O(classes)."""
    cdef int64_t until_ns = NEVER
    cdef int32_t c
    for c in range(core.classes.count):
        if (<Heap>line.heap_at[c]).count and line.due_ns(c) > core.now_ns:
            until_ns = min(until_ns, line.due_ns(c))
    return until_ns


cdef int64_t next_fading_ns(Core core, const Pool* p) noexcept:
    """Return when a pool may keep less free for flows below their share; NEVER: it keeps nothing.
    O(1)."""
    cdef int64_t windows
    if p.light_since_ns < 0 or not (p.kept_milli or p.light_milli):
        return NEVER
    windows = (core.now_ns - p.light_since_ns) // LIGHT_WINDOW_NS
    if windows >= LIGHT_WINDOWS:
        return NEVER
    return p.light_since_ns + (windows + 1) * LIGHT_WINDOW_NS


cdef inline bint may_choose(Core core) noexcept:
    """Return whether a waiting request may prefer a pool to the emptiest, see placement.pxi. The
    order in which pools are looked at then depends on all of them."""
    return has_choice(core) and (
        (core.settings.adapter_affinity_ppm and core.adapters.count)
        or (core.settings.prefix_affinity_ppm and core.prefixes.queued)
    )


cdef int rouse(Core core) except -1:
    """Have pools looked at again whose rest is over. O(those * log pools)."""
    cdef PoolOrder order = core.ledger.order
    cdef int32_t pool = order.resting.first()
    cdef bint is_all = order.stirred or core.quotas.guarantees.count
    if order.stirred:
        order.stirred = False
        order.watch += 1
    if order.asleep and not is_all and may_choose(core):
        is_all = (
            order.touched_count or order.open.first() != NONE
            or order.resting.keys[pool] <= core.now_ns
        )
    while pool != NONE and (is_all or order.resting.keys[pool] <= core.now_ns):
        order.refresh(pool, promised_ppm(core, pool))
        pool = order.resting.first()
    return 0
