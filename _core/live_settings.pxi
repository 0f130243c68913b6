# Enforce or audit, and settings that change while everything runs.
#
# Under audit a flow's requests are decided like all others, what would have become of them is
# counted, and they are granted at once, also where that overdraws a pool or a bucket. Refused are
# only those that nobody can serve: no engine, a draining scheduler, its own limits.

cdef enum:
    DRY_RUN_WAIT = REFUSAL_KINDS  # place of the requests that would have waited

LIVE_SETTINGS = frozenset((
    "queue_ttl_ns", "lease_ttl_ns", "lease_grace_ns", "flow_queue_max", "queue_max", "leases_max",
    "flow_queue_tokens_max", "queue_tokens_max", "queue_target_ns", "overload_hold_ns",
    "saturation_ppm", "early_refusal",
    "answers_max", "answer_ttl_ns", "input_price_micro", "output_price_micro", "cached_price_ppm",
    "session_open_max", "sessions_max", "saturation_band_ppm", "delay_factor_milli", "grant_pacing",
    "adapter_affinity_ppm", "prefix_affinity_ppm", "prefix_blocks_max", "quantum_tokens",
))


cdef int take_settings(Scheduler core, dict limits) except -1:
    core.settings = limits
    core.queue_ttl_ns, core.lease_ttl_ns = limits["queue_ttl_ns"], limits["lease_ttl_ns"]
    core.lease_grace_ns = limits["lease_grace_ns"]
    core.answer_ttl_ns, core.answers_max = limits["answer_ttl_ns"], limits["answers_max"]
    core.flow_queue_max, core.queue_max = limits["flow_queue_max"], limits["queue_max"]
    core.flow_queue_tokens_max = limits["flow_queue_tokens_max"]
    core.queue_tokens_max = limits["queue_tokens_max"]
    core.queue_target_ns = limits["queue_target_ns"]
    core.overload_hold_ns = limits["overload_hold_ns"]
    core.saturation_ppm = limits["saturation_ppm"]
    core.refuses_early = limits["early_refusal"]
    core.refusal_samples_min = limits["refusal_samples_min"]
    core.leases_max = limits["leases_max"]
    core.delay_factor_milli = limits["delay_factor_milli"]
    core.paces_grants = limits["grant_pacing"]
    core.affinity_ppm = limits["adapter_affinity_ppm"]
    core.prefix_ppm, core.prefix_max = limits["prefix_affinity_ppm"], limits["prefix_blocks_max"]
    core.quantum_tokens = limits["quantum_tokens"]
    core.session_open_max = limits["session_open_max"]
    core.sessions_max = limits["sessions_max"]
    core.input_price = limits["input_price_micro"]
    core.output_price = limits["output_price_micro"]
    core.cached_ppm = limits["cached_price_ppm"]
    core.saturation_band_ppm = limits["saturation_band_ppm"]
    return 0


cdef int check_name(str field, str what, name, known) except -1:
    if name not in known:
        invalid(field, f"unknown {what} {name!r}; known: {', '.join(known)}")
    return 0


cdef int change_settings(Scheduler core, policy, flow_order, dict limits) except -1:
    """Give a running core other settings; all that is checked first. O(1), O(queues * log n) for
    another policy."""
    for name in limits:
        if name not in LIVE_SETTINGS:
            invalid(name, f"cannot change while it runs; what can: {', '.join(LIVE_SETTINGS)}")
    if policy is not None:
        check_name("policy", "policy", policy, POLICIES)
    if flow_order is not None:
        check_name("flow_order", "order", flow_order, FLOW_ORDERS)
    take_settings(core, checked_limits({**core.settings, **limits}))
    while core.answers.count > core.answers_max:
        forget(core, core.answers.head)
    if policy is not None and policy != core.policy:
        core.policy = policy
        core.flows.order, core.flows.lifts, core.ahead, core.by_prefix = POLICIES[policy]
        ask_all_anew(core)
    if flow_order is not None and FLOW_ORDERS[flow_order] != core.flows.by_deadline:
        change_order(core, FLOW_ORDERS[flow_order])
    set_grain(core)
    return limit_prefixes(core)


cdef int forget_learned(Scheduler core) except -1:
    """Everything that earlier requests have taught, and the digest, as new."""
    cdef int32_t pool
    end_resume(core)
    core.predictor.forget()
    core.flows.forget()
    core.ledger.forget()
    for pool in range(core.ledger.count):
        core.prefixes.index(pool).forget()
    fill_quotas(core)
    core.digest_value = 0
    core.prompt_seen_max = 0
    forget_shed_accuracy(core)
    return 0


cdef int put_name(Scheduler core, bytes name, int32_t flow) except -1:
    """Let a name stand for a flow, or for none where it is gone."""
    cdef Hash128 h = sip128(
        core.k0, core.k1 ^ NAME_SALT, <const uint8_t*><const char*>name, len(name)
    )
    if flow == NONE:
        core.names.remove(h.hi, h.lo)
        end_share(core, name)
    else:
        core.names.put(h.hi, h.lo, flow)
    return 0


cdef int set_dry_run(Scheduler core, int32_t flow, bint dry_run) except -1:
    # Of a tenant, in all its classes.
    cdef Flow* f
    cdef bint dry_run_counts
    while flow != NONE:
        f = &core.flows.items[flow]
        dry_run_counts, f.dry_runs = f.dry_runs, dry_run
        if dry_run:
            core.dry_run_counts.setdefault(flow, [0] * (REFUSAL_KINDS + 1))
            if f.queued:
                core.dry_running.put(flow, flow, 0)
        else:
            core.dry_running.remove(flow)
            if dry_run_counts:
                give_back_all(core, flow)
        flow = f.sibling
    return 0


cdef int count_dry_run(Scheduler core, int32_t flow, int place) except -1:
    if core.flows.items[flow].dry_runs:
        core.dry_run_counts[flow][place] += 1
    return 0


cdef int note_dry_run(Scheduler core, int32_t i, int outcome) except -1:
    """Count what would become of a request: the outcome that refuses it nevertheless, or 0."""
    cdef Request* r = &core.requests.items[i]
    if outcome in (OUT_REJECTED_NO_POOL, OUT_REJECTED_DRAINING, OUT_REJECTED_LIMIT):
        return outcome
    if outcome:
        count_dry_run(core, r.flow, refusal_place(outcome))
    elif would_wait(core, i):
        count_dry_run(core, r.flow, DRY_RUN_WAIT)
    return 0


cdef bint would_wait(Scheduler core, int32_t i) except -1:
    """Whether a request that arrives now would not be granted at once. O(pools + levels)."""
    cdef Request* r = &core.requests.items[i]
    cdef int32_t node = core.flows.items[r.flow].quota, pool = dry_run_pool(core, i)
    cdef bint exempt = core.flows.items[r.flow].exempt
    cdef Take t
    if node != NONE:
        t = take_for(core, i)
        while node != NONE:
            if not core.quotas.fits(node, &t) or core.quotas.is_awaited(node):
                return True
            node = core.quotas.nodes[node].parent
    if core.quotas.guarantees.count and is_saturated(core, r.target):
        know_shares(core)
        if core.flows.items[r.flow].guarantee != NONE:
            if funding_source_of(core, r.flow).source == PAID_NOT:
                return True
    if pool == NONE:
        return True
    if not exempt and (core.flows.queued_for[pool + 1] or core.flows.queued_for[0]):
        return True
    node = core.ledger.pools[pool].quota
    if node != NONE and not exempt:
        t = take_for(core, i)
        if not core.quotas.fits(node, &t):
            return True
    if is_full(core, r.flow):
        return True
    forget_engine_excess(core, &core.ledger.pools[pool])
    core.ledger.expire_prefill_budget(pool, core.now_ns)
    return plan_for(core, pool, r).reason != WAIT_NONE


cdef int32_t dry_run_pool(Scheduler core, int32_t i) noexcept:
    """Where an audited request runs: its pool, or the one that has promised the least of those
    that can hold it, else of all; -1: none serves. O(pools^2), which are few."""
    cdef Request* r = &core.requests.items[i]
    cdef uint64_t left = 0
    cdef int32_t p, first = NONE
    if r.target != NONE:
        return r.target if core.ledger.serves(r.target) else NONE
    while True:
        p = emptiest(core, left)
        if p == NONE or (left >> p) & 1:
            return first
        left |= <uint64_t>1 << p
        if core.ledger.serves(p):
            if core.ledger.can_hold(p, r):
                return p
            if first == NONE:
                first = p
        if core.ledger.count == 1:
            return first


cdef bint grant_dry_run(Scheduler core) except -1:
    """Grant all that is queued of audited flows, each in the order of arrival, at most `work_max`:
    True where there may be more. O(work_max * (targets * pools + log n))."""
    cdef int64_t work = 0
    cdef int32_t flow, i
    cdef list stay = []
    while core.dry_running.count and work < core.work_max:
        flow = core.dry_running.nodes[0].id
        core.dry_running.remove(flow)
        while work < core.work_max:
            i = next_dry_run(core, flow)
            if i == NONE:
                break
            work += 1
            if core.requests.items[i].due_ns <= core.now_ns:  # its timer has not been reached yet
                evict(core, i, OUT_EVICTED_TTL)
            else:
                grant_anyway(core, i, dry_run_pool(core, i))
        if core.flows.items[flow].queued:
            stay.append(flow)
    core.has_more = core.has_more or work == core.work_max
    for flow in stay:
        core.dry_running.put(flow, flow, 0)
    return work == core.work_max


cdef int32_t next_dry_run(Scheduler core, int32_t flow) noexcept:
    # The oldest head that has a pool, while there is a lease to give.
    cdef int32_t q = core.flows.items[flow].first_queue, i, oldest = NONE
    while q != NONE and not is_full(core, flow):
        i = core.flows.queues[q].chain.head
        if i != NONE and dry_run_pool(core, i) != NONE:
            if oldest == NONE or core.requests.items[i].seq < core.requests.items[oldest].seq:
                oldest = i
        q = core.flows.queues[q].next_queue
    return oldest


cdef int grant_anyway(Scheduler core, int32_t i, int32_t pool) except -1:
    cdef Request* r = &core.requests.items[i]
    cdef Plan plan = plan_for(core, pool, r)
    cdef Take t = take_for(core, i)
    r.evidence = plan.evidence
    r.quota_output = <int32_t>t.output_tokens
    if r.bill == 0:
        take_quota(core, i)
    return grant(
        core, i, pool, min(plan.blocks, core.ledger.pools[pool].capacity_blocks),
        plan.output_tokens, False,
    )


cdef dict dry_run_rows(Scheduler core, int32_t flow):
    counts = core.dry_run_counts.get(flow)
    return {
        "audited_refusals": {
            outcome: counts[refusal_place(outcome)]
            for outcome in REFUSALS
            if counts[refusal_place(outcome)]
        } if counts else {},
        "audited_waits": counts[DRY_RUN_WAIT] if counts else 0,
    }
