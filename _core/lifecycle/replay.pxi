# Restores the leases that their holders report after a restart.
#
# A replay grants no rights by itself. The core accepts an unknown lease only from the principal
# that offers the pool. It does so until the lease TTL and grace have passed since the pool was
# first offered or configured. Every other replay of an unknown lease is UNKNOWN, and counted.
# For what such a lease used, see late_usage.pxi. A pool that only the configuration lists has no
# owner: every principal that may offer it can replay into it then.

cdef int replay_lease(
    Core core, Ask* ask, int64_t lease_id, int64_t epoch, int64_t reserved_tokens, Usage* u
) except -1:
    """Renew a lease that its holder still runs, or restore it after a restart. O(log n)."""
    cdef int32_t i = find_lease(core, lease_id, ask.principal)
    cdef Request* r
    cdef Pool* p = &core.ledger.pools[ask.target]
    cdef bint is_new = i == NONE
    cdef int state
    if i == NONE:
        if epoch != p.epoch:
            return LS_VOID
        if (
            p.principal not in (NONE, ask.principal)
            or core.now_ns >= p.replays_until_ns
            or not core.principals.may_offer(ask.principal, core.pool_list[ask.target])
        ):
            core.replays_refused += 1
            return LS_UNKNOWN
        if (
            not 0 < lease_id <= LEASE_ID_MAX
            or core.leases.get(<uint64_t>lease_id, 0) != NONE
            or find_request(core, ask) != NONE
            or (ask.adapter.size and not core.adapters.has_room(&ask.adapter_key, ask.principal))
        ):
            return LS_UNKNOWN
        enter_class(core, ask)
        if is_full(core, ask.flow) or lacks_lease(core, ask.principal, 0):
            return LS_UNKNOWN
        i = restore_lease(core, ask, lease_id, reserved_tokens)
    r = &core.requests.items[i]
    if ask.owner and r.owner != ask.owner and r.state != ENDED:
        adopt(core, i, ask.owner, 0)
    state = progress_lease(core, lease_id, epoch, u, ask.principal)
    if is_new:
        # The process that granted it has counted its service up to now in totals of its own.
        count_served(core, r.flow, r.pool, -r.lease.charged, r.lease.weight_milli)
        resume_books(core, i)
    return state


cdef int resume_books(Core core, int32_t i) except -1:
    """Take a lease's part out of the restored debts, so that it counts only once.
    O(levels + log n)."""
    cdef Request* r = &core.requests.items[i]
    cdef Flow* f = &core.flows.items[r.flow]
    cdef Pool* p = &core.ledger.pools[r.pool]
    cdef int64_t paid = min(f.owed, r.lease.charged)
    if core.resume_until_ns == 0:
        return 0
    f.owed -= paid
    charge_nodes(core.flows, r.flow, r.lease.weight_milli, paid, 0, r.pool)
    charge_flow(core.flows, r.flow, -paid, r.pool)
    core.ledger.order.touch(r.pool)
    p.owed_tokens = max(<int64_t>0, p.owed_tokens - r.lease.reserved_blocks * p.block_size)
    if r.bill:
        core.quotas.resume(r.bill)
    return 0


cdef int32_t restore_lease(
    Core core, Ask* ask, int64_t lease_id, int64_t reserved_tokens
) except -1:
    # As admit_request() and grant() would have left it. Also where that overdraws the pool.
    cdef int32_t i = core.requests.allocate()
    cdef Request* r = &core.requests.items[i]
    cdef Flow* f = &core.flows.items[ask.flow]
    cdef Pool* p = &core.ledger.pools[ask.target]
    core.requests.open_lease(i)
    core.seq += 1
    r.seq = core.seq
    r.payload = 0  # the holder does not report the original request
    r.flow, r.target, r.pool, r.lease.epoch = ask.flow, ask.target, ask.target, p.epoch
    r.principal, r.lease.weight_milli = ask.principal, f.weight_milli
    r.sequences, r.n = ask.sequences, ask.n
    if ask.adapter.size:
        r.adapter = core.adapters.hold(&ask.adapter_key, &ask.adapter, ask.principal)
    r.prompt_tokens, r.prompt_max_tokens = ask.prompt_tokens, ask.prompt_max_tokens
    r.output_max_tokens = ask.output_max_tokens
    r.lease.predicted_output = r.lease.promised_output = ask.output_max_tokens
    r.reports_progress, r.whole_answer = True, ask.whole_answer
    r.arrival_ns = core.now_ns
    r.lease.lease_id = lease_id
    r.owner = r.forecast_wait_us = NONE
    take_quota(core, i)
    pay_share(core, i)
    if p.quota != NONE:
        take_model_quota(core, i)
    core.flows.activate(r.flow, False)
    f.live += 1
    core.flows.exempt_live += f.exempt
    r.lease.engine_priority = core.classes.priority(f.cls)
    f.received += 1
    f.granted += 1
    core.received += 1
    core.granted += 1
    put_id(core, i, ask)
    core.leases.put(<uint64_t>lease_id, 0, i)
    if not core.draws_lease_ids:
        core.lease_next = max(core.lease_next, lease_id + 1)
    core.requests.enter(i, LIVE)
    core.ledger.reserve(i, (reserved_tokens + p.block_size - 1) // p.block_size)
    r.lease.granted_tokens = r.lease.reserved_blocks * p.block_size
    renew(core, i)
    log_decision(core, r.flow, OUT_GRANTED, 0, r.lease.reserved_blocks, r.pool, r.tag)
    return i
