# Restores the leases that their holders report after a restart.
#
# A replay grants no rights by itself. The core accepts an unknown lease only from the principal
# that offers the pool. It does so until the lease TTL and grace have passed since the pool was
# first offered or configured. Every other replay of an unknown lease is UNKNOWN, and counted.
# For what such a lease used, see late_usage.pxi. A pool that only the configuration lists has no
# owner: every principal that may offer it can replay into it then.
#
# All replays of a pool's epoch together reserve no more than leases that were granted can have. The
# bound is not the capacity: the peak form of the ledger grants leases whose reservations sum up to
# several times that, because they end at different times. But it has a limit:
#
# Let n sequences run, in descending order of the tokens l[k] that each still makes, and let e[k] be
# what each holds. The last grant found a peak of at most L, the pool's capacity less the least
# headroom, so that e[1] + ... + e[k] + k * l[k] <= L for every k. (Sequences of one lease have the
# same l, so this holds inside a lease too. Leases that count in full only lower L.) Hence
# l[k] <= L / k for k < n, and e[1] + ... + e[n] + l[n] <= L. All reservations are at most
#     e[1] + ... + e[n] + l[1] + ... + l[n] <= L + L * (1 + 1/2 + ... + 1/(n-1))
# and a block and a token more for each sequence, by which a reservation exceeds e + l. L itself
# takes one block and token more, because the headroom is whole blocks. The harmonic number of m is
# at most the number of binary digits of m. A reservation never falls while its lease runs, and a
# lease that ends takes its own away. So what was granted of the leases that run at any later time,
# which is what holders replay, is within the bound too, however they have grown.
#
# Beside it there is room for what the saved state says that the pool owes. It covers a capacity or
# a headroom that has changed over the restart. A flow in audit gets its grants without that test,
# so its replays do not count.

cdef int replay_lease(
    Core core, Ask* ask, int64_t lease_id, int64_t epoch, int64_t reserved_tokens, Usage* u
) except -1:
    """Renew a lease that its holder still runs, or restore it after a restart. O(log n); the first
    restored one places the tree of shares, as a poll would."""
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
        if core.tree_is_stale:
            settle_tree(core)  # the lease is charged to its groups before the next poll
        enter_class(core, ask)
        if is_full(core, ask.flow) or lacks_lease(core, ask.principal, 0):
            return LS_UNKNOWN
        if not core.flows.items[ask.flow].dry_runs:
            if exceeds_grants(core, ask, reserved_tokens):
                core.replays_refused += 1
                return LS_UNKNOWN
            p.replayed_tokens += reserved_tokens
            p.replayed_sequences += ask.sequences
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


cdef bint exceeds_grants(Core core, Ask* ask, int64_t reserved_tokens) except -1:
    """Return whether a pool's replays, with one more, reserve more than could have been granted.
    O(1)."""
    cdef Pool* p = &core.ledger.pools[ask.target]
    cdef int64_t sequences = p.replayed_sequences + ask.sequences
    cdef int64_t most = p.engine_tokens, left = sequences - 1
    most += most * max(<int64_t>0, -core.settings.headroom_min_ppm) // 1_000_000
    reserved_tokens += p.replayed_tokens - p.replay_debt - (sequences + 1) * (p.block_size + 1)
    while left and reserved_tokens > 0:
        reserved_tokens -= most
        left //= 2
    if reserved_tokens <= most:
        return False
    if not p.caps_replays:
        p.caps_replays = True
        note(
            core, "replays_capped", core.pool_list[ask.target], sequences,
            f"leases of these sequences reserve more than the {p.engine_tokens} tokens of the pool"
            " can have promised them; check what its shim reports as reserved_tokens",
        )
    return True


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
    charge_session(core, i, -paid)
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
        core.requests.own_rare(i).adapter = core.adapters.hold(
            &ask.adapter_key, &ask.adapter, ask.principal
        )
    r.prompt_tokens, r.prompt_max_tokens = ask.prompt_tokens, ask.prompt_max_tokens
    r.output_max_tokens = ask.output_max_tokens
    r.lease.predicted_output = r.lease.promised_output = ask.output_max_tokens
    r.reports_progress, r.whole_answer = True, ask.whole_answer
    if core.saved_passes:
        r.lease.discount_ppm = core.saved_passes.get(core.pool_list[r.pool], {}).pop(lease_id, 0)
        core.passes += r.lease.discount_ppm > 0
    r.arrival_ns = core.now_ns
    r.lease.lease_id = lease_id
    r.owner = r.forecast_wait_us = NONE
    take_quota(core, i)
    pay_share(core, i)
    if p.quota != NONE:
        take_model_quota(core, i)
    core.flows.end_idle(r.flow)
    core.ledger.order.stirred = True  # no lease may be left to give, and flows run more
    if ask.session.size:
        join_session(core, i, &ask.session)
        if core.requests.rare_of(r).session != NONE:
            begin_turn(core, i, r.pool)
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
