# Verifies which pools a dispatch may leave out.

cdef int check_pool_order(Core core) except -1:
    """Check that a pool is left out only if another look at it would change nothing. O(pools)."""
    cdef PoolOrder order = core.ledger.order
    cdef const Pool* p
    cdef int32_t pool, reason, asleep = 0
    check_invariant(core, order.open.valid() and order.restless.valid(), "order of the pools")
    check_invariant(core, order.served_count == 0, "no pool is left out between events")
    if core.ledger.count == 1:
        return 0
    for pool in range(core.ledger.count):
        if set_has(&order.touched, pool):
            asleep += order.resting.has(pool)
            continue
        p = &core.ledger.pools[pool]
        if order.resting.has(pool):
            check_rest(core, pool)
            asleep += 1
            continue
        check_invariant(
            core, order.open.has(pool) and order.open.keys[pool] == promised_ppm(core, pool),
            "a pool stands by what it has promised",
        )
        check_invariant(
            core, order.restless.has(pool) != set_has(&order.calm, pool), "a pool is calm or not"
        )
        if not set_has(&order.calm, pool):
            continue
        reason = WAIT_NONE if core.ledger.serves(pool) else WAIT_DRAINING
        check_invariant(
            core, is_calm(core, pool) and p.reason == (reason if p.attached else WAIT_DETACHED),
            "a calm pool is as it was left",
        )
        check_invariant(
            core, reason != WAIT_NONE or not p.attached or (
                (<Line>core.flows.candidates[pool + 1]).count == 0
                and not waits_for_cap(core, pool)
            ), "nothing waits for a calm pool that serves",
        )
    return check_invariant(
        core, asleep == order.asleep and order.resting.valid(), "pools that rest are counted"
    )


cdef int check_rest(Core core, int32_t pool) except -1:
    """Check that a look at a pool that rests would find what the last one found. Whether another
    request may pass its next one is left to the twin. O(classes)."""
    cdef PoolOrder order = core.ledger.order
    cdef const Pool* p = &core.ledger.pools[pool]
    cdef int32_t reason = p.reason
    cdef bint aged
    check_invariant(
        core, not order.open.has(pool) and not order.restless.has(pool), "what rests is not open"
    )
    if order.stirred or order.resting.keys[pool] <= core.now_ns or core.flows.stale_count:
        return 0
    if p.next != NONE:
        if is_full(core, core.requests.items[p.next].flow):
            reason = WAIT_LIMIT
        else:
            reason = plan_for(core, pool, &core.requests.items[p.next]).reason
    return check_invariant(
        core,
        reason == p.reason
        and (not core.ledger.serves(pool) or head_for(core, pool, &aged) == p.next),
        "a pool that rests is as it was left",
    )
