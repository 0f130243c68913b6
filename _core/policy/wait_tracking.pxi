# The reason for which the next request of each pool waits, noted as it changes.

cdef inline int waits_of_pool(int32_t reason) noexcept:
    """Return the reason of a pool's wait, as a request would state it; 0: none."""
    if reason == WAIT_SHARE:
        return WAITS_SHARE
    return WAITS_POOL + reason if reason else 0


cdef inline bint is_for_pool(Core core, int32_t i) noexcept:
    return core.requests.items[i].head_state.waits_for > WAITS_POOL


cdef int note_next(Core core, int32_t pool) except -1:
    """Note the reason for which the next request of an idle pool waits; the one that was next
    before waits for its turn again. A request that is next in several pools waits in the one that
    is served first: the emptiest. O(1); where others rest and that one has got fuller, it is sought
    in O(pools)."""
    cdef Pool* p = &core.ledger.pools[pool]
    cdef int32_t i = core.requests.lookup(p.named) if p.named else NONE
    cdef WaitTimes* w
    p.named = 0
    if i != NONE and i != p.next and core.requests.items[i].state == QUEUED:
        w = wait_times_of(core.requests, i)
        if w.pool == pool and w.round != core.rounds and is_for_pool(core, i):
            wait_for(core.requests, i, WAITS_TURN, core.now_ns)
            core.ledger.order.stirred = True  # it may be the next of one that rests
    i = p.next
    if i == NONE:
        return 0
    w = wait_times_of(core.requests, i)
    if w.round == core.rounds and w.pool != pool and (
        core.requests.items[i].head_state.waits_for != WAITS_POOL + WAIT_DETACHED
    ):
        return 0
    if w.round != core.rounds and core.ledger.order.asleep:
        pool = emptiest_with(core, i, pool, w.pool)
        p = &core.ledger.pools[pool]
    w.round, w.pool = core.rounds, pool
    p.named = core.requests.handle(i)
    return wait_for(core.requests, i, WAITS_POOL + p.reason, core.now_ns)


cdef inline bint is_emptier(Core core, int32_t a, int32_t b) noexcept:
    cdef int64_t one = promised_ppm(core, a), other = promised_ppm(core, b)
    return one < other or (one == other and a < b)


cdef int32_t emptiest_with(Core core, int32_t i, int32_t pool, int32_t before) noexcept:
    """Return the emptiest pool whose next request is i, of `pool` and those that rest. `before`:
    which it was; while that rests none of the others has become emptier. O(1), else O(pools)."""
    cdef PoolOrder order = core.ledger.order
    cdef int32_t q, best = pool
    if is_one_pool(core.requests.items[i].target):
        return pool
    if before != NONE and before != pool and order.is_asleep(before) and (
        core.ledger.pools[before].next == i
    ):
        return before if is_emptier(core, before, pool) else pool
    for q in range(core.ledger.count):
        if order.is_asleep(q) and core.ledger.pools[q].next == i and is_emptier(core, q, best):
            best = q
    return best
