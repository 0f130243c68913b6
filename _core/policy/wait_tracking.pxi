# The reason for which the next request of each pool waits, noted as it changes.

cdef inline int waits_of_pool(int32_t reason) noexcept:
    """The reason of a pool's wait, as a request would state it; 0: none."""
    if reason == WAIT_SHARE:
        return WAITS_SHARE
    return WAITS_POOL + reason if reason else 0


cdef inline bint is_for_pool(Core core, int32_t i) noexcept:
    return core.requests.items[i].head_state.waits_for > WAITS_POOL


cdef int note_next(Core core, int32_t pool) except -1:
    """Note the reason for which the next request of an idle pool waits; the one that was next
    before waits for its turn again. Of one that is the next of several pools the first of them
    counts that is served: the emptiest. O(1)."""
    cdef Pool* p = &core.ledger.pools[pool]
    cdef int32_t i = core.requests.lookup(p.named) if p.named else NONE
    cdef WaitTimes* w
    p.named = 0
    if i != NONE and i != p.next and core.requests.items[i].state == QUEUED:
        w = wait_times_of(core.requests, i)
        if w.pool == pool and w.round != core.rounds and is_for_pool(core, i):
            wait_for(core.requests, i, WAITS_TURN, core.now_ns)
    i = p.next
    if i == NONE:
        return 0
    w = wait_times_of(core.requests, i)
    if w.round == core.rounds and w.pool != pool and (
        core.requests.items[i].head_state.waits_for != WAITS_POOL + WAIT_DETACHED
    ):
        return 0
    w.round, w.pool = core.rounds, pool
    p.named = core.requests.handle(i)
    return wait_for(core.requests, i, WAITS_POOL + p.reason, core.now_ns)
