# Verdicts: fills them, and puts each where its caller reads it.

cdef object as_decision(Core core, Verdict* v):
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


cdef list take_verdicts(Core core):
    """Return the verdicts that belong to no session. O(work_max)."""
    cdef int32_t i, first = core.verdict_taken
    # More than timers and grants can make: only evict_queued() leaves a rest for later.
    cdef int32_t last = <int32_t>min(core.verdict_count, first + 4 * core.settings.work_max)
    if core.verdict_count == 0:
        return []
    out = [as_decision(core, &core.verdicts[i]) for i in range(first, last)]
    core.verdict_taken = last
    if last == core.verdict_count:
        core.verdict_count = core.verdict_taken = 0
    return out


cdef void fill_grant(Core core, Verdict* v, int32_t i) noexcept:
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


cdef int deliver_verdict(Core core, Verdict* v, int32_t owner) except -1:
    """Put a verdict where its caller finds it. O(1) amortised."""
    cdef int32_t size
    if owner > 0:
        (<SessionState>core.sessions[owner]).push(v)
        return 0
    if core.verdict_count == core.verdicts_max:
        size = doubled(core.verdicts_max, 0, 64)
        core.verdicts = <Verdict*>grow(
            core.verdicts, core.verdicts_max, size, sizeof(Verdict)
        )
        core.verdicts_max = size
    core.verdicts[core.verdict_count] = v[0]
    core.verdict_count += 1
    return 0


cdef bint take_verdict(Core core, int64_t handle, int32_t first, Verdict* v) noexcept:
    """Take the verdict on a request out of those that fell from the `first` on; False: there is
    none. O(verdicts from there)."""
    cdef int32_t i
    for i in range(first, core.verdict_count):
        if core.verdicts[i].handle == handle:
            v[0] = core.verdicts[i]
            core.verdict_count -= 1
            memmove(
                &core.verdicts[i], &core.verdicts[i + 1],
                <size_t>(core.verdict_count - i) * sizeof(Verdict),
            )
            return True
    return False


cdef int link_owner(Core core, int32_t i) except -1:
    # Requests and leases of a session form a chain, for the day when its stream ends.
    cdef Request* r = &core.requests.items[i]
    if r.owner > 0:
        (<SessionState>core.sessions[r.owner]).link(i)
        if r.state == QUEUED:
            core.tags.put(r.tag, <uint64_t>r.owner, i)
    return 0


cdef int adopt(Core core, int32_t i, int32_t owner, uint64_t tag) except -1:
    # The caller that sent the request last becomes its owner.
    cdef Request* r = &core.requests.items[i]
    unlink_owner(core, i)
    r.owner = owner
    r.tag = tag
    link_owner(core, i)
    return 0


cdef void untag(Core core, int32_t i) noexcept:
    cdef Request* r = &core.requests.items[i]
    if r.owner > 0:
        core.tags.remove(r.tag, <uint64_t>r.owner)


cdef void unlink_owner(Core core, int32_t i) noexcept:
    cdef Request* r = &core.requests.items[i]
    if r.owner > 0:
        if r.state == QUEUED:
            untag(core, i)
        (<SessionState>core.sessions[r.owner]).unlink(i)


cdef void log_decision(
    Core core, int32_t flow, int outcome, int64_t waited_ns, int64_t blocks, int32_t pool,
    uint64_t tag,
) noexcept:
    # The digest of the decision log. Only what is relative, so that a second identical run has
    # the same digest.
    cdef uint64_t d = mix(core.digest_value, (<uint64_t>outcome << 32) | <uint32_t>flow)
    d = mix(d, <uint64_t>waited_ns)
    d = mix(d, (<uint64_t>blocks << 24) ^ (<uint64_t>(pool + 1) << 56) ^ tag)
    core.digest_value = mix(d, <uint64_t>pool) if pool >= 255 else d  # beyond the eight bits above


cdef int count_refusal(Core core, int32_t flow, int outcome) except -1:
    refusals_of(core, flow).counts[refusal_place(outcome)] += 1
    return 0


cdef bint is_only_named(Core core) noexcept:
    """Return whether pools are connected, and each takes only requests that name it. O(pools)."""
    cdef int32_t pool
    cdef bint some = False
    for pool in range(core.ledger.count):
        if core.ledger.pools[pool].attached:
            some = True
            if core.flows.may_take(pool, NONE):
                return False
    return some


cdef void fill_refusal(
    Core core, Verdict* v, int32_t flow, int32_t target, int outcome, uint64_t key,
    int32_t principal,
) except *:
    # Fills every field of a refusal. A request without a flow (-1) learns nothing of queues, and a
    # principal learns how full a pool is only if Stats would show it the pool.
    cdef Pool* p
    cdef int64_t free
    memset(v, 0, sizeof(Verdict))
    v.outcome = outcome
    v.pool = NONE if is_set(target) else target
    v.flow = flow
    if flow == NONE:
        return
    v.retry_after_ms = retry_after_ms(core, flow, outcome, key)
    if outcome == OUT_REJECTED_QUOTA and core.quotas.budget_until_ns > core.now_ns:
        # The time to the next period, and up to 10 s, so that not all come at its begin.
        v.retry_after_ms = (core.quotas.budget_until_ns - core.now_ns + NS_PER_MS - 1) // NS_PER_MS
        v.retry_after_ms += <int64_t>(key % 1001) * 10
        v.spent_budget = core.quotas.spent_budget
    if outcome == OUT_REJECTED_NO_POOL:
        v.only_named = is_only_named(core)
    v.position = core.flows.items[flow].queued
    v.queue_max = <int32_t>core.settings.flow_queue_max
    v.queue_left = max(
        0, v.queue_max - <int32_t>slots_kept(v.queue_max) - core.flows.items[flow].queued
    )
    if target == NONE and core.ledger.count == 1 and core.flows.may_take(0, NONE):
        target = 0
    if is_one_pool(target) and core.principals.sees_pool(principal, core.pool_list[target]):
        p = &core.ledger.pools[target]
        v.pool_capacity_tokens = p.capacity_blocks * p.block_size
        # Where headroom is below nothing an idle pool may promise more than it holds.
        free = p.capacity_blocks - p.headroom_blocks - p.promised_blocks
        v.pool_free_tokens = p.block_size * max(<int64_t>0, min(free, p.capacity_blocks))
