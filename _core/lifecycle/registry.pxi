# Registry: gives names, flows of classes, and pools their numbers.

cdef void set_born(Core core, int32_t flow, bint born) noexcept:
    """Note whether a tenant is known at first sight, not by the configuration. O(classes)."""
    cdef int32_t sibling = flow
    while core.flows.items[flow].born and not born and sibling != NONE:
        add_counters(&core.carried, &core.flows.items[sibling])
        sibling = core.flows.items[sibling].sibling
    if core.flows.items[flow].born and not born:
        core.principals.count_tenant(core.flows.items[flow].maker - 1, -1)
        core.flows.items[flow].maker = 0
    core.born_count += <int>born - core.flows.items[flow].born
    core.flows.items[flow].born = born
    core.flows.changed.mark(flow)


cdef int put_name(Core core, bytes name, int32_t flow) except -1:
    """Let a name stand for a flow, or for none where it is gone."""
    cdef Hash128 h = sip128(
        core.k0, core.k1 ^ NAME_SALT, <const uint8_t*><const char*>name, len(name)
    )
    if flow == NONE:
        core.names.remove(h.hi, h.lo)
        known = core.flow_names.get(name)
        if known is not None:
            set_born(core, known, False)
            end_share(core, known)
    else:
        core.names.put(h.hi, h.lo, flow)
    return 0


cdef int known_class(Core core, int32_t c) except -1:
    if not 0 <= c < core.classes.count or core.classes.items[c].gone:
        invalid("request_class", f"no class has the index {c}")
    return 0


cdef int set_classes_of(Core core, int32_t flow, int32_t default_class, tuple named) except -1:
    """Set which class a tenant's requests are of, and which they may name. O(named)."""
    cdef uint32_t bits = 0
    cdef int32_t c
    known_class(core, default_class)
    for c in named:
        known_class(core, c)
        bits |= <uint32_t>1 << c
    core.flows.items[flow].default_class = default_class
    core.flows.items[flow].named_classes = bits
    return 0


cdef int enter_class(Core core, Ask* ask) except -1:
    """Let what is asked be of the tenant's flow in its class, made at its first request.
    O(classes)."""
    cdef int32_t base = ask.flow
    while ask.flow != NONE:
        if core.flows.items[ask.flow].cls == ask.cls:
            return 0
        ask.flow = core.flows.items[ask.flow].sibling
    ask.flow = core.flows.add_sibling(base, ask.cls)
    core.flow_list.append(core.flow_list[base])
    place_flow(core, ask.flow)
    if core.flows.items[base].dry_runs:
        core.dry_run_counts[ask.flow] = [0] * (REFUSAL_KINDS + 1)
    return 0


cdef list flows_of(Core core, bytes name):
    cdef int32_t flow = core.flow_names.get(name, NONE)
    cdef list found = []
    while flow != NONE:
        found.append(flow)
        flow = core.flows.items[flow].sibling
    return sorted(found)


cdef inline bint is_owned(Core core, const Pool* p) noexcept:
    return p.attached > p.configured or core.now_ns < p.owned_until_ns


cdef int32_t free_place(Core core, int32_t principal) noexcept:
    """Return the place of a pool without engine, leases or requests, which no other principal owns;
    -1: none. O(pools)."""
    cdef int32_t pool
    cdef const Pool* p
    for pool in range(core.ledger.count):
        p = &core.ledger.pools[pool]
        if (
            p.attached == 0
            and (p.principal == principal or not is_owned(core, p))
            and not p.draining
            and p.live == 0
            and core.flows.queued_for[pool + 1] == 0
            and core.flows.sets.of_pool[pool] == 0
            and not waits_for_cap(core, pool)
        ):
            return pool
    return NONE


cdef int32_t new_pool(Core core, bytes name, int32_t principal) except -1:
    # Takes a new place. From POOLS_REUSED on it rather takes one that is free again: a process that
    # sees many names of pools come and go does not look at all of them for ever.
    cdef int32_t pool = NONE
    cdef int64_t allowed = pools_allowed(core)
    if core.ledger.count >= min(allowed, <int64_t>POOLS_REUSED):
        pool = free_place(core, principal)
    if pool != NONE:
        del core.pool_names[core.pool_list[pool]]
        core.pool_list[pool] = name
        core.flows.sets.forget(pool)
        forget_footprints(core, pool)
        core.ledger.clear(pool)
        core.prefixes.pools[pool] = PrefixIndex()
        settle_pool(core, pool)
    elif core.ledger.count >= allowed and allowed < core.settings.pools_max:
        raise CallerError(
            CODE_FAILED_PRECONDITION, "pool",
            f"groups with a weight share at most {POOLS_ORDERED} pools, and that many are"
            " registered; remove `weight` from all groups, or run a second scheduler",
        )
    elif core.ledger.count >= core.settings.pools_max:
        raise CallerError(
            CODE_RESOURCE_EXHAUSTED, "pool",
            f"at most {core.settings.pools_max} pools can be in use",
        )
    else:
        pool = core.ledger.add()
        core.pool_list.append(name)
        core.prefixes.pools.append(PrefixIndex())
        core.flows.candidates.append(Line(core.classes))
        core.flows.anywhere.append(Line(core.classes))
        core.quotas.guarantees.throttled_for.append(Line(core.classes))
        if principal != NONE and is_named_only(core, pool):
            set_add(&core.flows.named_only, pool)
        stand_in_pool(core, pool)
    core.pool_names[name] = pool
    core.ledger.pools[pool].quota = core.pool_models.get(name, NONE)
    core.flows.positions.model[pool] = core.ledger.pools[pool].quota
    limit_pool(core, pool)
    return pool
