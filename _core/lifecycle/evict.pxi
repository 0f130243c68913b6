# Evict: takes queued requests out without a grant.

cdef int evict(Core core, int32_t i, int outcome) except -1:
    """Take a queued request out and answer its caller. A retry is a new request. O(log n)."""
    cdef Request* r = &core.requests.items[i]
    cdef int32_t flow = r.flow
    cdef bint was_capped = core.requests.rare_of(r).hold != NONE
    cdef bint hopeless = core.requests.rare_of(r).shed_watch == 1 + SHED_WAIT
    cdef int64_t ahead = 0 if was_capped else ahead_of(core.flows, i)
    cdef int64_t quota_ns = quota_wait_ns(core, i)
    cdef Verdict v
    cdef Hash128 key
    if r.state != QUEUED:
        raise core.fuse.blow("queue: a request that is not queued was evicted")
    key.hi, key.lo = r.key_hi, r.key_lo
    log_rejection(core.rejection_log, core.requests, i, &key, r.principal, outcome, core.now_ns)
    if was_capped:
        leave_cap(core, i)
    else:
        take_from_queue(core, i)
    if core.requests.rare_of(r).session != NONE:
        leave_session(core, i)
    if core.requests.rare_of(r).shed_watch:
        settle_shed(core, r, True)
    if outcome == OUT_EVICTED_TTL or outcome == OUT_EVICTED_DEADLINE:
        if not hopeless:
            core.flows.items[flow].gave_up_ns = core.now_ns
        note_waited(core, r, core.now_ns < r.due_ns)
        core.refused_wait_ns = turn_again_ns(core, r)
    close_bill(core, i, False)
    count_refusal(core, flow, outcome)
    core.evicted += 1
    observe(
        core.time_bounds, &core.flows.items[flow].times.evicted, core.now_ns - r.arrival_ns,
    )
    log_decision(core, flow, outcome, core.now_ns - r.arrival_ns, 0, r.target, r.tag)
    if r.owner >= 0:
        fill_refusal(core, &v, flow, r.target, outcome, r.key_lo, r.principal)
        v.handle = core.requests.handle(i)
        v.tag = r.tag
        if quota_ns and v.retry_after_ms:
            v.retry_after_ms = max(v.retry_after_ms, later(r.key_lo, quota_ns))
        v.position = <int32_t>ahead
        v.waited_ns = core.now_ns - r.arrival_ns
        deliver_verdict(core, &v, r.owner)
    untag(core, i)
    core.places.left(i)
    core.deadlines.remove(i)
    unlink_owner(core, i)
    drop_id(core, i)
    core.adapters.let_go(core.requests.rare_of(r).adapter)
    core.prefixes.drop(i)
    core.requests.release(i)
    if not was_capped:
        core.flows.settle(flow)
    return 0


cdef int evict_late(Core core, int32_t i) except -1:
    """Evict a request whose longest wait is over; its outcome says whether its deadline was that.
    O(log n)."""
    cdef const Request* r = &core.requests.items[i]
    cdef int64_t deadline_ns = core.requests.rare_of(r).deadline_ns
    return evict(core, i, OUT_EVICTED_DEADLINE if 0 < deadline_ns <= r.due_ns else OUT_EVICTED_TTL)


cdef int evict_unholdable(Core core, int32_t pool) except -1:
    """Evict a request for several pools, at the head of its class, that none of them can hold any
    more: it would hide those behind it; whether that was done. O(classes), where the head is
    another pool's O(classes * pools)."""
    if evict_unholdable_in(core, free_line(core.flows, pool), pool):
        return 1
    if core.flows.sets.used == 0:
        return 0
    return evict_unholdable_in(core, <Line>core.flows.candidates[pool + 1], pool)


cdef int evict_unholdable_in(Core core, Line line, int32_t pool) except -1:
    # One that must run in this pool is evicted at its turn, see evict_head().
    cdef int32_t i, k
    cdef Heap heap
    if line.count == 0:
        return 0
    for k in range(core.classes.count):
        heap = line.heap(core.classes.order[k])
        if heap.count == 0:
            continue
        i = first_head(core.flows, heap, pool)
        if not is_one_pool(core.requests.items[i].target) and is_unholdable(core, i, pool):
            evict(core, i, OUT_EVICTED_TOO_LARGE)
            return 1
    return 0


cdef bint is_unholdable(Core core, int32_t i, int32_t pool) noexcept:
    """Return whether no pool can hold a request, this one the least. O(1), else O(pools)."""
    cdef int32_t p, target = core.requests.items[i].target
    if core.ledger.can_hold(pool, &core.requests.items[i]):
        return False
    for p in range(core.ledger.count):
        if core.flows.may_take(p, target) and core.ledger.can_hold(p, &core.requests.items[i]):
            return False
    return True


cdef bint shed_head(Core core, int32_t i, int32_t pool) except -1:
    """Evict a request with a deadline, whose turn has come, where its prefill would end beyond it;
    whether that was done. O(log n), O(1) where not."""
    cdef Request* r = &core.requests.items[i]
    cdef const Pool* p = &core.ledger.pools[pool]
    cdef int64_t left_ns = core.requests.rare_of(r).deadline_ns - core.now_ns
    if not core.settings.early_refusal or not may_shed(core, r):
        return False
    if not sheds(core, i, SHED_PREFILL, prefill_expected_ns(core, p, fresh_of(core, r)), left_ns):
        return False
    evict(core, i, OUT_EVICTED_DEADLINE)
    return True


cdef bint evict_head(Core core, int32_t i, int32_t pool) except -1:
    """Evict a head that cannot be granted any more, or not in time; whether that was done."""
    cdef Request* r = &core.requests.items[i]
    if r.due_ns <= core.now_ns:  # its timer has not been reached yet
        evict_late(core, i)
        return True
    if core.requests.rare_of(r).deadline_ns and shed_head(core, i, pool):
        return True
    # The pool has shrunk below what it had accepted. One for several pools is next only where a
    # pool can hold it, see first_in_class().
    if is_one_pool(r.target) and not core.ledger.can_hold(pool, r):
        evict(core, i, OUT_EVICTED_TOO_LARGE)
        return True
    return False
