# Flows, keys and pools, as the configuration and the shims declare them.

cdef int enter(Core core, int64_t now_ns) except -1:
    # Every event begins here.
    if core.fuse.what is not None:
        raise InvariantError(core.fuse.what)
    if now_ns < core.now_ns:
        invalid("now_ns", f"time went back by {core.now_ns - now_ns} ns")
    core.now_ns = core.quotas.now_ns = now_ns
    core.flows.enter(now_ns)
    if core.quotas.guarantees.stale and core.quotas.guarantees.stale_ns != now_ns:
        settle_shares(core)
    if core.resume_until_ns and now_ns >= core.resume_until_ns:
        end_resume(core)
    return 0


cdef int set_grants(
    Core core, int64_t number, bytes name, list pools, list tenants, list classes,
    int64_t share_ppm, bint sees_all,
) except -1:
    """Replace the grants of a principal; None: all names of a kind. O(1); O(requests + sessions +
    flows) for a number beyond all that have grants; for others than before what settle_grants()
    says."""
    cdef int32_t i, first = core.principals.count
    cdef Request* r
    check_range("number", number, 0, PRINCIPALS_MAX)
    check_range("share_ppm", share_ppm, 1, SHARE_PPM)
    core.principals.extend_to(<int32_t>number + 1)
    if first < core.principals.count:
        for i in range(core.requests.used):
            r = &core.requests.items[i]
            if r.principal >= first:
                core.principals.move(
                    r.principal, FREE, r.state, r.prompt_tokens if r.state == QUEUED else 0
                )
        for i in range(core.adapters.count):
            if core.adapters.items[i].users and core.adapters.items[i].principal >= first:
                core.principals.count_adapter(core.adapters.items[i].principal, 1)
        for session in core.sessions:
            if session is not None and (<SessionState>session).principal >= first:
                core.principals.count_session((<SessionState>session).principal, 1)
        for i in range(core.flows.count):
            if core.flows.items[i].maker > first:
                core.principals.count_tenant(core.flows.items[i].maker - 1, 1)
    before = (core.principals.pools[number], core.principals.tenants[number] == [])
    core.principals.grant(
        <int32_t>number, name, pools, tenants, classes, share_ppm, sees_all
    )
    return settle_grants(core, <int32_t>number) if before != (pools, tenants == []) else 0


cdef int32_t add_flow(Core core, bytes name, int64_t weight_milli) except -1:
    """Add a tenant, or give a known one another weight, in all its classes. O(classes), while its
    sessions wait for caps O(pools * log n) more for each class."""
    cdef int32_t flow
    known = core.flow_names.get(name)
    if known is None:
        flow = reclaim_retired(core)
        if flow != NONE:
            name_flow(core, flow, name)
            put_name(core, name, flow)
            apply_terms(core, flow, any_rule(False), True)
            core.flows.reweigh(flow, <int32_t>weight_milli)
            return flow
        flow = core.flows.add(<int32_t>weight_milli)
        core.flow_names[name] = flow
        core.flow_list.append(name)
        put_name(core, name, flow)
        return flow
    put_name(core, name, known)  # it may have been gone
    flow = known
    if core.flows.items[flow].born:
        set_born(core, flow, False)
    while flow != NONE:
        core.flows.reweigh(flow, <int32_t>weight_milli)
        rank_shares(core, flow)
        flow = core.flows.items[flow].sibling
    return known


cdef int64_t granted_in_class(Core core, int32_t c) noexcept:
    """Return how many requests the tenants that are here were granted in a class. O(flows)."""
    cdef int64_t granted = 0
    cdef int32_t i
    for i in range(core.flows.count):
        if core.flows.items[i].cls == c and not is_node(core.flows, i):
            granted += core.flows.items[i].granted
    return granted


cdef int32_t change_class(
    Core core, bytes name, int64_t rank, int64_t ageing_ns, bint exempt
) except -1:
    """Add a class, or give a known one another rank and ageing time. O(classes + quotas),
    and O(flows) where it takes the place of one that is gone."""
    cdef int32_t c, node
    cdef list before = core.classes.names[:]
    if not 0 < len(name) <= NAME_BYTES_MAX:
        invalid("classes", f"a name has 1 to {NAME_BYTES_MAX} bytes")
    check_range("rank", rank, -RANK_MAX, RANK_MAX)
    check_range("ageing_ns", ageing_ns, 1, <int64_t>1 << 60)
    c = core.classes.set(name, <int32_t>rank, ageing_ns, exempt)
    if c < len(before) and before[c] != name:
        clear_times(core.flows, c)
        core.classes.items[c].aged = 0
        core.granted_apart[c] = -granted_in_class(core, c)
    core.ledger.touch_all()
    for node in range(core.quotas.count):  # another class may be the first that waits, or sooner
        core.quotas.mark_ready(node)
    return c


# The settings of a registration.
ctypedef struct PoolFigures:
    int64_t epoch, capacity_tokens, block_size, max_running, max_model_tokens
    int64_t gates  # streams that will offer it, if a principal does; 0: not stated
    int32_t principal  # that offers it; -1: the configuration


cdef int check_pool(bytes name, PoolFigures* f) except -1:
    if not 0 < len(name) <= ID_BYTES_MAX:
        invalid("pool", f"a name has 1 to {ID_BYTES_MAX} bytes")
    if f.epoch < 0:
        invalid("epoch", "must not be negative")
    check_range("block_size_tokens", f.block_size, 1, 65_536)
    check_range("capacity_tokens", f.capacity_tokens, f.block_size, <int64_t>1 << 40)
    check_range("max_running", f.max_running, 0, 1 << 24)
    check_range("max_model_tokens", f.max_model_tokens, 0, TOKENS_MAX)
    return 0


cdef str rivals_text(bytes name):
    return (
        f"two engines claim pool {name.decode()}; set SCHEDSVC_POOL to a name of its own for each"
        " engine, and SCHEDSVC_POOL_EPOCH to one value for all API processes of an engine"
    )


cdef str owner_text(Core core, bytes name, const Pool* p):
    if p.attached > p.configured:
        return rivals_text(name)
    return (
        "was offered by another caller until a moment ago, and its leases may still run; retry in"
        f" {max(<int64_t>1, (p.owned_until_ns - core.now_ns) // NS_PER_S)} s"
    )


cdef int detach_pool(Core core, int32_t pool, int64_t epoch, bint for_good) except -1:
    """Note that a stream that offered a pool has ended; `for_good`: after a Goodbye. O(1)."""
    cdef Pool* p = &core.ledger.pools[pool]
    p.attached -= 1
    core.ledger.order.touch(pool)
    core.ledger.order.stirred = True  # it may have been the last that was attached
    if p.attached == 0:
        p.detached_at_ns = core.now_ns
    if p.attached == p.configured:
        p.owned_until_ns = core.now_ns
        p.said_goodbye = for_good
        if not for_good:
            p.owned_until_ns += core.settings.lease_ttl_ns + core.settings.lease_grace_ns
    core.ledger.claim(pool, epoch, -1)
    return 0


cdef int count_replayed(Core core, int32_t pool, int change) except -1:
    """Count streams of a pool that have replayed their leases, by a change. O(1)."""
    cdef Pool* p = &core.ledger.pools[pool]
    p.replayed += change
    if p.awaits_replays and p.replayed >= p.gates:
        p.awaits_replays = False
        core.has_more = True
    return 0


cdef void await_replays(Core core, int32_t pool) noexcept:
    """Let a pool grant nothing until its streams have replayed their leases, whose use is unknown
    until then, or these are over. O(1)."""
    cdef Pool* p = &core.ledger.pools[pool]
    if core.now_ns >= p.replays_until_ns:
        return
    p.awaits_replays = True
    core.ledger.order.touch(pool)
    if not 0 < core.awaits_until_ns <= p.replays_until_ns:
        core.awaits_until_ns = p.replays_until_ns


cdef void lead_cold(Core core) noexcept:
    """Begin with leases of an earlier leader of which nothing is known. Pools of the configuration
    wait for a stream that replays, too. O(pools)."""
    cdef int32_t pool
    core.is_cold = True
    core.digest_value = mix(core.digest_value, 1)
    for pool in range(core.ledger.count):
        await_replays(core, pool)


cdef int32_t register_pool(Core core, bytes name, PoolFigures* f) except -1:
    """Register a pool, or give a known one new figures. O(1), O(leases of it) on a new epoch; under
    a new name O(principals * patterns + queues * log n).

    While a principal offers it, and for a lease's TTL and grace after its last stream has ended, no
    other one can change it: its shim may be reconnecting, and its leases run. While it is offered
    at the epoch that it has, this cannot go back. Else it may: an engine's wall clock may have been
    put back.
    """
    cdef int32_t pool
    cdef Pool* p
    cdef int voided
    cdef bint is_first
    check_pool(name, f)
    known = core.pool_names.get(name)
    if known is None:
        check_pool_share(core, f.principal)
        pool = new_pool(core, name, f.principal)
        p = &core.ledger.pools[pool]
    else:
        pool = known
        p = &core.ledger.pools[pool]
        if f.principal not in (NONE, p.principal) and is_owned(core, p):
            raise CallerError(CODE_FAILED_PRECONDITION, "pool", owner_text(core, name, p))
        if not is_owned(core, p):
            check_pool_share(core, f.principal)
        if (p.configured or core.ledger.is_claimed(pool)) and f.epoch < p.epoch:
            raise CallerError(
                CODE_FAILED_PRECONDITION, "epoch",
                f"the pool is already at the later epoch {p.epoch}",
            )
        if f.epoch != p.epoch:
            voided = void_leases(core, pool)
            if voided:
                note(
                    core, "leases_voided", name, voided,
                    f"the engine of epoch {p.epoch} was replaced by that of epoch {f.epoch}",
                )
            core.prefixes.index(pool).forget()
            forget_footprints(core, pool)
            p.engine_excess_tokens = p.owed_tokens = p.replay_debt = 0
            p.replayed_tokens = p.replayed_sequences = 0
            p.caps_replays = False
            p.telemetry_at_ns = NONE
        elif p.live and f.block_size != p.block_size:
            invalid("block_size_tokens", "cannot change without a new epoch while leases live")
    core.save_rest = True
    is_first = f.principal != NONE and p.principal == NONE
    if f.principal != NONE:
        if p.principal not in (NONE, f.principal):
            core.ledger.learn_anew(pool)  # from what the owner before has reported
            p.engine_running = p.engine_waiting = p.engine_used_tokens = p.engine_preemptions = 0
            p.telemetry_at_ns = NONE
        p.principal = f.principal
    if p.replays_until_ns == 0:
        p.replays_until_ns = core.now_ns + core.settings.lease_ttl_ns + core.settings.lease_grace_ns
    if is_first and (f.gates or core.is_cold) and not core.was_restored:
        await_replays(core, pool)
    if f.principal != NONE:
        p.gates = <int32_t>max(f.gates, <int64_t>core.is_cold)
        count_replayed(core, pool, 0)
    p.epoch = f.epoch
    core.ledger.size(pool, f.capacity_tokens, f.block_size, f.max_running, f.max_model_tokens)
    if name in core.saved_pools:
        resume_pool(core, name)
    return pool


cdef int check_pool_share(Core core, int32_t principal) except -1:
    # Looks at every pool: O(pools).
    cdef int32_t pool, count = 0
    cdef int64_t most
    cdef const Pool* p
    if not core.principals.is_limited(principal):
        return 0
    most = core.principals.places(principal, <int32_t>core.settings.pools_max)
    for pool in range(core.ledger.count):
        p = &core.ledger.pools[pool]
        count += p.principal == principal and is_owned(core, p)
    if count >= most:
        raise CallerError(
            CODE_RESOURCE_EXHAUSTED, "pool",
            f"this caller may have {most} pools; raise its share_of_places in auth.principals",
        )
    return 0


cdef bint may_report(Core core, int32_t pool, int32_t principal) except -1:
    """Return whether a principal may report how full an engine is: the one that offers the pool, or
    one that may offer it while it has no owner. O(patterns)."""
    cdef int32_t owner = core.ledger.pools[pool].principal
    if owner != NONE:
        return owner == principal
    return core.principals.may_offer(principal, core.pool_list[pool])


cdef int32_t configure_pool(Core core, bytes name, PoolFigures* f) except -1:
    """Register a pool that is attached without a stream."""
    cdef int32_t pool = register_pool(core, name, f)
    if not core.ledger.pools[pool].configured:
        core.ledger.pools[pool].configured = 1
        settle_pool(core, pool)
        core.ledger.pools[pool].attached += 1
        core.ledger.order.touch(pool)
    return pool


# Far beyond any engine, and sums of them with the books of a pool stay far below 2^63.
cdef int64_t TELEMETRY_MAX = <int64_t>1 << 50


cdef int take_telemetry(
    Core core, int32_t pool, int64_t epoch, int64_t running, int64_t waiting,
    int64_t used_tokens, int64_t preemptions,
) except -1:
    cdef Pool* p = &core.ledger.pools[pool]
    cdef int64_t elapsed_ns = 0, fresh = 0
    for field, value in (
        ("running", running), ("waiting", waiting), ("used_tokens", used_tokens),
        ("preemptions", preemptions),
    ):
        check_range(field, value, 0, TELEMETRY_MAX)
    if epoch != p.epoch:
        return 0
    if p.telemetry_at_ns >= 0:
        elapsed_ns = core.now_ns - p.telemetry_at_ns
        fresh = max(<int64_t>0, preemptions - p.engine_preemptions)
        if fresh:
            note_preemption(core, p)
    p.engine_running = running
    p.engine_waiting = waiting
    p.engine_used_tokens = used_tokens
    p.engine_preemptions = preemptions
    p.telemetry_at_ns = core.now_ns
    core.save_rest = True
    core.ledger.order.touch(pool)
    p.engine_excess_tokens = max(
        <int64_t>0, used_tokens - p.promised_blocks * p.block_size - p.loras.tokens
    )
    adapt_headroom(core, p, fresh, elapsed_ns)
    return 0
