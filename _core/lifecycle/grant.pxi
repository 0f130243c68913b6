# Grant: makes a queued request a lease.

cdef int seed_lease_ids(Core core, str seed) except -1:
    """Draw random lease ids from this seed. O(1)."""
    cdef bytes key
    try:
        key = bytes.fromhex(seed)
    except ValueError:
        key = b""
    if len(key) != 16:
        invalid("lease_seed", "must be 32 hexadecimal digits")
    memcpy(&core.lease_k0, <const char*>key, 8)
    memcpy(&core.lease_k1, <const char*>key + 8, 8)
    core.draws_lease_ids, core.lease_drawn_from = True, 0
    return 0


cdef int64_t lease_id_ahead(Core core) noexcept:
    """Return the lease id that is next, if it is free: the next number, or with a seed a random
    one, which other ids do not reveal. A number is drawn from once, however often it is asked for.
    O(1)."""
    cdef Hash128 drawn
    cdef uint64_t number = <uint64_t>core.lease_next
    if not core.draws_lease_ids:
        return core.lease_next
    if core.lease_drawn_from != core.lease_next:
        drawn = sip128(core.lease_k0, core.lease_k1, <const uint8_t*>&number, sizeof(number))
        core.lease_drawn = <int64_t>(drawn.lo & <uint64_t>(LEASE_ID_MAX - 1))
        core.lease_drawn_from = core.lease_next
    return core.lease_drawn


cdef int64_t next_lease_id(Core core) noexcept:
    """Return a free lease id, see lease_id_ahead(). Expected O(1)."""
    cdef int64_t lease_id = 0
    while lease_id == 0 or (
        core.draws_lease_ids and core.leases.get(<uint64_t>lease_id, 0) != NONE
    ):
        lease_id = lease_id_ahead(core)
        core.lease_next += 1
    return lease_id


cdef int grant(
    Core core, int32_t i, int32_t pool, int64_t blocks, int64_t output_tokens, bint aged,
    bint passed,
) except -1:
    """Turn the head of a queue into a lease, and charge its flow, less the surplus if it passed
    the head of the pool. If ageing brought it before better classes, it is as urgent to the engine
    as they are. O(log n)."""
    cdef Request* r = &core.requests.items[i]
    cdef Flow* f = &core.flows.items[r.flow]
    cdef Verdict v
    core.requests.open_lease(i).discount_ppm = (
        <int32_t>core.settings.backfill_surplus_ppm if passed else 0
    )
    core.passes += r.lease.discount_ppm > 0
    r.lease.ahead_output = output_ahead(core, r)
    rate_add(&core.ledger.pools[pool].drain, core.now_ns, work_done(core, r), f.queued > 1)
    rate_add(&f.served, core.now_ns, work_done(core, r), True)
    note_waited(core, r, True)
    if core.requests.rare_of(r).shed_watch:
        settle_granted(core, r)
    core.flows.raise_levels(r.flow)
    if core.flows.local:
        raise_levels_in(core.flows, r.flow, pool)
        core.flows.positions.pace[pool] = pace_micro(&core.ledger.pools[pool].drain)
    if f.agents:
        raise_level_of_queue(core.flows, r)
    take_from_queue(core, i)
    if core.requests.rare_of(r).session != NONE:
        begin_turn(core, i, pool)
    f.live += 1
    core.flows.exempt_live += f.exempt
    r.lease.engine_priority = (
        core.classes.best_priority() if aged else core.classes.priority(f.cls)
    )
    core.flows.settle(r.flow)
    f.granted += 1
    core.granted += 1
    note_grant(core.flows, r.flow, core.now_ns)
    if core.prefixes.queued:
        note_prefix(core, i, pool)
    r.pool = pool
    r.lease.epoch = core.ledger.pools[pool].epoch
    r.lease.weight_milli = f.weight_milli
    r.lease.waited_ns = core.now_ns - r.arrival_ns
    observe(core.time_bounds, &f.times.waited, r.lease.waited_ns)
    r.lease.predicted_output = r.lease.promised_output = <int32_t>output_tokens
    r.lease.lease_id = next_lease_id(core)
    core.leases.put(<uint64_t>r.lease.lease_id, 0, i)
    core.requests.enter(i, LIVE)
    core.places.left(i)
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


cdef int32_t output_ahead(Core core, const Request* r) noexcept:
    """Return the output that is charged at the grant, of each sequence (section 1). O(1)."""
    cdef int64_t tokens = 0
    cdef Asked asked
    if core.ahead == AHEAD_AVERAGE:
        tokens = core.flows.items[r.flow].average_milli // 1000
    elif core.ahead == AHEAD_TOLD:
        tokens = core.requests.rare_of(r).told_output
    elif not r.reports_progress:
        asked_of(core, r, &asked)
        tokens = max(<int64_t>0, core.predictor.quantile(&asked, MEDIAN))
    return <int32_t>min(tokens, <int64_t>r.output_max_tokens)


cdef bint grant_dry_run(Core core) except -1:
    """Grant all that is queued of flows in a dry run, by arrival in each, at most `work_max`:
    True where there may be more. O(work_max * (targets * pools + log n))."""
    cdef int64_t work = 0
    cdef int32_t flow, i
    cdef list stay = []
    while core.dry_running.count and work < core.settings.work_max:
        flow = core.dry_running.nodes[0].id
        core.dry_running.remove(flow)
        while work < core.settings.work_max:
            i = next_dry_run(core, flow)
            if i == NONE:
                break
            work += 1
            if core.requests.items[i].due_ns <= core.now_ns:  # its timer has not been reached yet
                evict_late(core, i)
            else:
                grant_anyway(core, i, dry_run_pool(core, i))
        if core.flows.items[flow].queued:
            stay.append(flow)
    core.has_more = core.has_more or work == core.settings.work_max
    for flow in stay:
        core.dry_running.put(flow, flow, 0)
    return work == core.settings.work_max


cdef int grant_anyway(Core core, int32_t i, int32_t pool) except -1:
    cdef Request* r = &core.requests.items[i]
    cdef Plan plan = plan_for(core, pool, r)
    cdef Take t = take_for(core, i)
    r.evidence = plan.evidence
    r.quota_output = <int32_t>t.output_tokens
    if r.bill == 0:
        take_quota(core, i)
    return grant(
        core, i, pool, min(plan.blocks, core.ledger.pools[pool].capacity_blocks),
        plan.output_tokens, False, False,
    )
