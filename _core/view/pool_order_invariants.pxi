# Verifies which pools a dispatch may leave out.

cdef int check_pool_order(Core core) except -1:
    """That a pool is left out only if another look at it would change nothing. O(pools)."""
    cdef PoolOrder order = core.ledger.order
    cdef const Pool* p
    cdef int32_t pool, reason
    check_invariant(core, order.open.valid() and order.restless.valid(), "order of the pools")
    check_invariant(core, order.served_count == 0, "no pool is left out between events")
    if core.ledger.count == 1:
        return 0
    for pool in range(core.ledger.count):
        if set_has(&order.touched, pool):
            continue
        p = &core.ledger.pools[pool]
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
    return 0
