# Timers: evicts queued requests and expires leases whose time is over.

cdef int64_t first_due_ns(Core core) except -2:
    """Return when the first timer ends; -1: there is none. O(1 + contests)."""
    cdef int64_t first = first_key(<void*>core.deadlines, NONE)
    first = first_key(<void*>core.quotas.guarantees.dues, first)
    first = first_key(<void*>core.pool_wakes, first_key(<void*>core.quotas.wakes, first))
    first = first_key(<void*>core.flows.agents.turns, first)
    first = first_key(<void*>core.flows.agents.dues, first)
    if core.resume_until_ns and not 0 <= first <= core.resume_until_ns:
        first = core.resume_until_ns
    if core.awaits_until_ns and not 0 <= first <= core.awaits_until_ns:
        first = core.awaits_until_ns
    for due_ns, _ in core.contests.values():
        if not 0 <= first <= due_ns:
            first = due_ns
    return first


cdef int64_t next_due_ns(Core core) except -2:
    """Return when something has to be done at the latest; -1: never. O(1 + contests)."""
    return core.now_ns if core.has_more or core.verdict_count else first_due_ns(core)


cdef bint is_due(Core core) except -1:
    """Return whether a timer has ended since the last poll, so that a grant could rest on what is
    true no more: a pool that another engine has by now, a lease that was not renewed in time, a
    quota that has room again. O(1 + contests)."""
    cdef int64_t first_ns = first_due_ns(core)
    return 0 <= first_ns <= core.now_ns


cdef int end_awaiting(Core core) except -1:
    """Let pools grant for whose streams was waited long enough. O(1), O(pools) while some wait."""
    cdef int32_t pool
    cdef Pool* p
    if core.awaits_until_ns == 0 or core.now_ns < core.awaits_until_ns:
        return 0
    core.awaits_until_ns = 0
    for pool in range(core.ledger.count):
        p = &core.ledger.pools[pool]
        p.awaits_replays = p.awaits_replays and core.now_ns < p.replays_until_ns
        if p.awaits_replays and not 0 < core.awaits_until_ns <= p.replays_until_ns:
            core.awaits_until_ns = p.replays_until_ns
    return 0


cdef int run_timers(Core core) except -1:
    """Evict and expire what is due, at most `work_max`. O(work_max * log n)."""
    cdef int64_t work = 0
    cdef int32_t i
    cdef Request* r
    end_awaiting(core)
    if core.flows.unsorted:
        sort_queues(core)
    if core.quotas.wakes.count:
        work = core.quotas.run_timers(core.settings.work_max)
    if core.quotas.guarantees.dues.count:
        work = run_share_dues(core, work)
    if core.flows.agents.dues.count:
        work = end_active(core, work)
    while core.deadlines.count and core.deadlines.nodes[0].key <= core.now_ns:
        if work >= core.settings.work_max:
            core.has_more = True
            break
        work += 1
        i = core.deadlines.nodes[0].id
        r = &core.requests.items[i]
        if r.due_ns > core.deadlines.nodes[0].key:  # renewed since
            core.deadlines.put(i, r.due_ns, r.seq)
        elif r.state == QUEUED:
            evict_late(core, i)
        elif r.state == LIVE and core.settings.lease_grace_ns:
            set_suspect(core, i, True)
            r.due_ns += core.settings.lease_grace_ns
            core.deadlines.put(i, r.due_ns, r.seq)
        elif r.state == LIVE or r.state == SUSPECT:
            end_lease(core, i, OUT_EXPIRED)
        else:
            raise core.fuse.blow("deadlines: a request that has ended is still timed")
    while core.answers.count and work < core.settings.work_max:
        if core.requests.items[core.answers.head].due_ns > core.now_ns:
            break
        work += 1
        forget(core, core.answers.head)
    return 0
