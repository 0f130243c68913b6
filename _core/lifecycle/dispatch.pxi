# Dispatch: grants each pool its next requests until nothing fits.

cdef int serve_pool(Core core, int32_t pool) except -1:
    """Grant or evict one request of a pool: 1; 0 where the pool has to wait."""
    cdef Pool* p = &core.ledger.pools[pool]
    cdef int32_t i, head
    cdef bint aged
    cdef Request* r
    cdef Plan plan
    cdef int64_t ends_ns
    if core.pool_wakes.count:
        core.pool_wakes.remove(pool)
    if not p.attached or p.awaits_replays:
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
        return serve_aside(core, pool)
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
    forget_engine_excess(core, pool)
    core.ledger.expire_prefill_budget(pool, core.now_ns)
    p.reason = core.ledger.shut_to(pool, r)
    if p.reason != WAIT_NONE:
        return 0  # whatever the request would reserve; a full pool is asked at each event
    plan = plan_unless(core, pool, r, WAIT_NONE)
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
        if core.requests.rare_of(r).deadline_ns and shed_head(core, i, pool):
            return 1
    elif core.settings.delay_factor_milli:
        ends_ns = hold_ends_ns(core, pool, r)
        if ends_ns:
            p.reason = WAIT_DELAY
            core.pool_wakes.put(pool, ends_ns, pool)
            return 0
    if not plan.above and core.flows.items[r.flow].queued == 1 and has_shares(core):
        note_light(p, core.now_ns, plan.blocks)
    r.evidence = plan.evidence
    if i == head:
        note_turn(core, pool, r, aged)
    grant(core, i, pool, plan.blocks, plan.output_tokens, i == head and aged, i != head)
    return 1


cdef bint serve_aside(Core core, int32_t pool) except -1:
    """Look at what is held aside while a pool has no next request: 1 where a queue was let go."""
    cdef Pool* p = &core.ledger.pools[pool]
    p.reason = WAIT_NONE
    if free_line(core.flows, pool).count or (<Line>core.flows.candidates[pool + 1]).count:
        p.reason = WAIT_STRICT
    if p.reason == WAIT_NONE and has_throttled(core.flows, pool):
        p.reason = WAIT_SHARE
        return let_one_go(core, pool)
    if p.reason == WAIT_NONE and waits_for_cap(core, pool):
        p.reason = WAIT_SESSION_CAP
    return False


cdef int dispatch(Core core) except -1:
    """Grant while a pool has room for its next request. O((grants + pools looked at) * log n), in
    the peak form with the leases of a pool for each; while something waits that may run anywhere,
    these are all that do not rest, see PoolOrder."""
    cdef bint several = core.ledger.count > 1, is_left = core.ledger.count == 0
    cdef int64_t work = 0
    cdef int32_t pool = 0
    core.rounds += 1
    if core.tree_is_stale:
        settle_tree(core)
    if core.dry_running.count and grant_dry_run(core):
        return 0  # in the line, the rest could be refused
    if core.flows.agents.held:
        serve_caps(core)
    open_pools(core)
    while True:
        if core.quotas.has_work:
            run_quotas(core)
        place_nodes(core.flows)
        if several:
            pool = next_pool(core)
            is_left = pool == NONE
        if is_left:
            return open_pools(core) if several else 0
        if several:
            pool = placed(core, pool)
        if not serve_pool(core, pool):
            leave_pool(core, pool)
            if several:
                core.ledger.order.leave(
                    pool, is_calm(core, pool), rests_until_ns(core, pool)
                )
            is_left = True
            continue
        # The granted request gives way to another head, which a pool left out may be able to hold.
        open_pools(core)
        core.ledger.order.touch(pool)  # what it was looked at for may be gone
        is_left = False
        core.rounds += 1
        work += 1
        if work >= core.settings.work_max:
            core.has_more = True
            return 0


cdef int32_t next_pool(Core core) except -2:
    """Return the emptiest of the pools that have to be looked at; -1: none is left. O(log pools)
    amortised."""
    cdef PoolOrder order = core.ledger.order
    cdef int32_t pool
    if order.stirred or order.resting.first() != NONE:
        rouse(core)
    while order.touched_count:
        order.touched_count -= 1
        pool = order.touched_list[order.touched_count]
        set_remove(&order.touched, pool)
        order.refresh(pool, promised_ppm(core, pool))
    if (<Line>core.flows.candidates[0]).count or core.quotas.guarantees.count:
        return order.first_open()
    return order.restless.first()


cdef int open_pools(Core core) except -1:
    """Let all pools be looked at again. O(pools left out * log pools)."""
    cdef PoolOrder order = core.ledger.order
    cdef int32_t pool
    while order.served_count:
        order.served_count -= 1
        pool = order.served_list[order.served_count]
        order.open_again(pool, promised_ppm(core, pool))
    return 0


cdef bint is_calm(Core core, int32_t pool) noexcept:
    """Return whether another look at a pool, which grants nothing, changes nothing until it is
    touched. O(1)."""
    cdef const Pool* p = &core.ledger.pools[pool]
    if p.next != NONE or p.reason not in (WAIT_NONE, WAIT_DETACHED, WAIT_DRAINING):
        return False
    if p.awaits_replays:
        return False
    return p.overload == load_level(
        core, p, NONE, core.settings.queue_target_ns, core.settings.saturation_ppm
    )


cdef inline int leave_pool(Core core, int32_t pool) except -1:
    # It has granted what it can.
    cdef Pool* p = &core.ledger.pools[pool]
    note_next(core, pool)
    rate_run(
        &p.drain, core.now_ns,
        p.reason not in (WAIT_NONE, WAIT_DETACHED, WAIT_DRAINING, WAIT_SESSION_CAP),
    )
    judge_load(core, pool)
    return 0
