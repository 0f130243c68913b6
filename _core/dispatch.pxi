# What is due, who runs next, and who is told.

cdef object as_decision(Scheduler core, Verdict* v):
    row = new_row(DECISION_TYPE, DECISION_FIELDS)
    put_item(row, 0, v.handle)
    put_item(row, 1, v.tag)
    put_item(row, 2, v.outcome)
    put_item(row, 3, v.lease_id)
    put_item(row, 4, v.pool)
    put_item(row, 5, v.epoch)
    put_item(row, 6, v.reserved_tokens)
    put_item(row, 7, v.retry_after_ms)
    put_item(row, 8, v.position)
    put_item(row, 9, v.waited_ns)
    put_item(row, 10, v.queue_max)
    put_item(row, 11, v.queue_left)
    put_item(row, 12, v.pool_capacity_tokens)
    put_item(row, 13, v.pool_free_tokens)
    put_item(row, 14, v.flow)
    put_item(row, 15, v.engine_priority)
    return row


cdef object as_ended(const Lease* had, bint repeated):
    row = new_row(ENDED_TYPE, ENDED_FIELDS)
    put_item(row, 0, had.outcome)
    put_item(row, 1, max(<int32_t>0, had.input_tokens))
    put_item(row, 2, had.cached_tokens)
    put_item(row, 3, had.output_tokens)
    put_item(row, 4, repeated)
    return row


cdef list take_verdicts(Scheduler core):
    """The verdicts that belong to no session. O(work_max)."""
    cdef int32_t i, first = core.verdict_taken
    # More than timers and grants can make: only evict_queued() leaves a rest for later.
    cdef int32_t last = <int32_t>min(core.verdict_count, first + 4 * core.work_max)
    if core.verdict_count == 0:
        return []
    out = [as_decision(core, &core.verdicts[i]) for i in range(first, last)]
    core.verdict_taken = last
    if last == core.verdict_count:
        core.verdict_count = core.verdict_taken = 0
    return out


cdef int64_t next_due_ns(Scheduler core) noexcept:
    """When something has to be done at the latest; -1: never. O(1)."""
    cdef int64_t first = first_key(core.quotas.guarantees.dues, first_key(core.deadlines, NONE))
    if core.has_more or core.verdict_count:
        return core.now_ns
    first = first_key(core.pool_wakes, first_key(core.quotas.wakes, first))
    if core.resume_until_ns and not 0 <= first <= core.resume_until_ns:
        first = core.resume_until_ns
    return first


cdef int run_timers(Scheduler core) except -1:
    """Evict and expire what is due, at most `work_max`. O(work_max * log n)."""
    cdef int64_t work = 0
    cdef int32_t i
    cdef Request* r
    if core.flows.unsorted:
        sort_queues(core)
    if core.quotas.wakes.count:
        work = core.quotas.run_timers(core.work_max)
    if core.quotas.guarantees.dues.count:
        work = run_share_dues(core, work)
    while core.deadlines.count and core.deadlines.nodes[0].key <= core.now_ns:
        if work >= core.work_max:
            core.has_more = True
            break
        work += 1
        i = core.deadlines.nodes[0].id
        r = &core.requests.items[i]
        if r.due_ns > core.deadlines.nodes[0].key:  # renewed since
            core.deadlines.put(i, r.due_ns, r.seq)
        elif r.state == QUEUED:
            evict(core, i, OUT_EVICTED_TTL)
        elif r.state == LIVE and core.lease_grace_ns:
            set_suspect(core, i, True)
            r.due_ns += core.lease_grace_ns
            core.deadlines.put(i, r.due_ns, r.seq)
        elif r.state == LIVE or r.state == SUSPECT:
            end_lease(core, i, OUT_EXPIRED)
        else:
            raise core.fuse.blow("deadlines: a request that has ended is still timed")
    while core.answers.count and work < core.work_max:
        if core.requests.items[core.answers.head].due_ns > core.now_ns:
            break
        work += 1
        forget(core, core.answers.head)
    return 0


cdef int dispatch(Scheduler core) except -1:
    """Grant while a pool has room for its next request. O(grants * (log n + pools)), in the peak
    form with the leases of a pool for each."""
    cdef uint64_t blocked = 0
    cdef int64_t work = 0
    cdef int32_t pool
    core.rounds += 1
    if core.dry_running.count and grant_dry_run(core):
        return 0  # in the line, the rest could be refused
    while True:
        if core.quotas.has_work:
            run_quotas(core)
        pool = emptiest(core, blocked)
        if pool == NONE:
            return 0
        if core.ledger.count > 1:
            pool = placed(core, pool, blocked)
        if not serve_pool(core, pool):
            leave_pool(core, pool)
            blocked |= <uint64_t>1 << pool
            continue
        # Whoever was served makes way for another head, which a blocked pool may hold.
        blocked = 0
        core.rounds += 1
        work += 1
        if work >= core.work_max:
            core.has_more = True
            return 0


cdef inline int leave_pool(Scheduler core, int32_t pool) except -1:
    # It has granted what it can.
    cdef Pool* p = &core.ledger.pools[pool]
    note_next(core, pool)
    p.paced = p.reason == WAIT_STAGGER
    rate_run(
        &p.drain, core.now_ns, p.reason not in (WAIT_NONE, WAIT_DETACHED, WAIT_DRAINING)
    )
    judge_load(core, pool)
    return 0


cdef int evict_unholdable(Scheduler core, int32_t pool) except -1:
    """Evict a request for any pool, at the head of its class, that no registered pool can hold
    any more: it would hide those behind it; whether that was done. O(classes), where the head is
    another pool's O(classes * pools)."""
    cdef Line free = <Line>core.flows.candidates[0]
    cdef int32_t i, p, k
    cdef Heap heap
    for k in range(core.classes.count):
        heap = free.heap(core.classes.order[k])
        if heap.count == 0:
            continue
        i = core.flows.queues[heap.nodes[0].id].chain.head
        if core.ledger.can_hold(pool, &core.requests.items[i]):
            continue
        for p in range(core.ledger.count):
            if core.ledger.can_hold(p, &core.requests.items[i]):
                break
        else:
            evict(core, i, OUT_EVICTED_TOO_LARGE)
            return 1
    return 0


cdef int grant(
    Scheduler core, int32_t i, int32_t pool, int64_t blocks, int64_t output_tokens, bint aged
) except -1:
    """Turn the head of a queue into a lease, and charge its flow. Where it was brought before
    better classes, it is as urgent to the engine as they are. O(log n)."""
    cdef Request* r = &core.requests.items[i]
    cdef Flow* f = &core.flows.items[r.flow]
    cdef Verdict v
    core.requests.open_lease(i)
    r.lease.ahead_output = output_ahead(core, r)
    rate_add(&core.ledger.pools[pool].drain, core.now_ns, work_done(core, r), f.queued > 1)
    rate_add(&f.served, core.now_ns, work_done(core, r), True)
    note_waited(core, r, True)
    core.flows.dequeue(i)
    f.live += 1
    core.flows.exempt_live += f.exempt
    r.lease.engine_priority = (
        core.classes.best_priority() if aged else core.classes.priority(f.cls)
    )
    core.flows.settle(r.flow)
    f.granted += 1
    core.granted += 1
    core.flows.note_grant(r.flow, core.now_ns)
    if core.prefixes.queued:
        note_prefix(core, i, pool)
    r.pool = pool
    r.lease.epoch = core.ledger.pools[pool].epoch
    r.lease.weight_milli = f.weight_milli
    r.lease.waited_ns = core.now_ns - r.arrival_ns
    r.lease.predicted_output = r.lease.promised_output = <int32_t>output_tokens
    r.lease.lease_id = core.lease_next
    core.lease_next += 1
    core.leases.put(<uint64_t>r.lease.lease_id, 0, i)
    core.requests.enter(i, LIVE)
    enter_prefill(core, r)
    untag(core, i)
    if core.quotas.guarantees.count:
        pay_share(core, i)
    if core.ledger.pools[pool].quota != NONE:
        take_model_quota(core, i)
    core.ledger.reserve(i, blocks)
    r.lease.granted_tokens = r.lease.reserved_blocks * core.ledger.pools[pool].block_size
    renew(core, i)
    recharge(
        core, i, r.prompt_tokens, r.lease.matched_tokens,
        <int64_t>r.lease.ahead_output * r.sequences,
    )
    log_decision(core, r.flow, OUT_GRANTED, r.lease.waited_ns, blocks, pool, r.tag)
    if r.owner >= 0:
        fill_grant(core, &v, i)
        deliver_verdict(core, &v, r.owner)
    return 0


cdef int32_t output_ahead(Scheduler core, const Request* r) noexcept:
    """What of the output is charged at the grant, of each sequence (section 1). O(1)."""
    cdef int64_t tokens = 0
    cdef Asked asked
    if core.ahead == AHEAD_AVERAGE:
        tokens = core.flows.items[r.flow].average_milli // 1000
    elif core.ahead == AHEAD_TOLD:
        tokens = r.told_output
    elif not r.reports_progress:
        asked_of(core, r, &asked)
        tokens = max(<int64_t>0, core.predictor.quantile(&asked, MEDIAN))
    return <int32_t>min(tokens, <int64_t>r.output_max_tokens)


cdef void fill_grant(Scheduler core, Verdict* v, int32_t i) noexcept:
    cdef Request* r = &core.requests.items[i]
    memset(v, 0, sizeof(Verdict))
    v.handle = core.requests.handle(i)
    v.tag = r.tag
    v.outcome = OUT_GRANTED
    v.lease_id = r.lease.lease_id
    v.pool = r.pool
    v.epoch = r.lease.epoch
    v.waited_ns = r.lease.waited_ns
    v.reserved_tokens = r.lease.granted_tokens
    v.flow = r.flow
    v.engine_priority = r.lease.engine_priority


cdef int evict(Scheduler core, int32_t i, int outcome) except -1:
    """Take a queued request out and tell its caller. A retry is a new request. O(log n)."""
    cdef Request* r = &core.requests.items[i]
    cdef int32_t flow = r.flow
    cdef int64_t ahead = ahead_of(core.flows, i), quota_ns = quota_wait_ns(core, i)
    cdef Verdict v
    cdef Hash128 key
    if r.state != QUEUED:
        raise core.fuse.blow("queue: a request that is not queued was evicted")
    key.hi, key.lo = r.key_hi, r.key_lo
    log_rejection(core.rejection_log, core.requests, i, &key, r.principal, outcome, core.now_ns)
    core.flows.dequeue(i)
    if r.shed_watch:
        settle_shed(core, r)
    if outcome == OUT_EVICTED_TTL or outcome == OUT_EVICTED_DEADLINE:
        note_waited(core, r, outcome == OUT_EVICTED_DEADLINE)
        core.refused_wait_ns = turn_again_ns(core, r)
    close_bill(core, i, False)
    count_refusal(core, flow, outcome)
    core.evicted += 1
    log_decision(core, flow, outcome, core.now_ns - r.arrival_ns, 0, r.target, r.tag)
    if r.owner >= 0:
        fill_refusal(core, &v, flow, r.target, outcome, r.key_lo)
        v.handle = core.requests.handle(i)
        v.tag = r.tag
        if quota_ns and v.retry_after_ms:
            v.retry_after_ms = max(v.retry_after_ms, later(r.key_lo, quota_ns))
        v.position = <int32_t>ahead
        v.waited_ns = core.now_ns - r.arrival_ns
        deliver_verdict(core, &v, r.owner)
    untag(core, i)
    core.deadlines.remove(i)
    unlink_owner(core, i)
    core.ids.remove(r.key_hi, r.key_lo)
    core.adapters.let_go(r.adapter)
    core.prefixes.drop(i)
    core.requests.release(i)
    core.flows.settle(flow)
    return 0


cdef int deliver_verdict(Scheduler core, Verdict* v, int32_t owner) except -1:
    """Put a verdict where its caller finds it. O(1) amortised."""
    cdef int32_t size
    if owner > 0:
        (<Session>core.sessions[owner]).push(v)
        return 0
    if v.handle == core.capture and v.outcome != OUT_EXPIRED:
        core.captured = v[0]
        return 0
    if core.verdict_count == core.verdicts_max:
        size = max(64, core.verdicts_max * 2)
        core.verdicts = <Verdict*>grow(
            core.verdicts, core.verdicts_max, size, sizeof(Verdict)
        )
        core.verdicts_max = size
    core.verdicts[core.verdict_count] = v[0]
    core.verdict_count += 1
    return 0


cdef bint cancel_request(Scheduler core, int32_t i) except -1:
    cdef Usage nothing
    if i == NONE or core.requests.items[i].state == ENDED:
        return False
    if core.requests.items[i].state == QUEUED:
        evict(core, i, OUT_EVICTED_CANCELLED)
        return True
    # Granted, but its caller never heard of it: nothing ran, and a retry is a new request.
    nothing.input_tokens = nothing.cached_tokens = nothing.output_tokens = 0
    account(core, i, &nothing, True)
    close_bill(core, i, False)
    end_lease(core, i, OUT_CANCELLED)
    forget(core, i)
    return True


cdef int link_owner(Scheduler core, int32_t i) except -1:
    # Requests and leases of a session form a chain, for the day when its stream ends.
    cdef Request* r = &core.requests.items[i]
    if r.owner > 0:
        (<Session>core.sessions[r.owner]).link(i)
        if r.state == QUEUED:
            core.tags.put(r.tag, <uint64_t>r.owner, i)
    return 0


cdef int adopt(Scheduler core, int32_t i, int32_t owner, uint64_t tag) except -1:
    # The request changes hands, to whoever asked for it last.
    cdef Request* r = &core.requests.items[i]
    unlink_owner(core, i)
    r.owner = owner
    r.tag = tag
    link_owner(core, i)
    return 0


cdef void untag(Scheduler core, int32_t i) noexcept:
    cdef Request* r = &core.requests.items[i]
    if r.owner > 0:
        core.tags.remove(r.tag, <uint64_t>r.owner)


cdef void unlink_owner(Scheduler core, int32_t i) noexcept:
    cdef Request* r = &core.requests.items[i]
    if r.owner > 0:
        if r.state == QUEUED:
            untag(core, i)
        (<Session>core.sessions[r.owner]).unlink(i)
