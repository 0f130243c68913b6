# Where a request runs that may run in any pool, or in those of a set: where the least is promised,
# or in a fuller one in which its LoRA adapter is active already, if it can begin there at once.

cdef inline int64_t promised_ppm(Core core, int32_t pool) noexcept:
    return (
        core.ledger.pools[pool].promised_blocks * 1_000_000
        // core.ledger.pools[pool].capacity_blocks
    )


cdef inline bint has_choice(Core core) noexcept:
    """Return whether something waits that may run in several pools. O(1)."""
    return (<Line>core.flows.candidates[0]).count > 0 or core.flows.sets.used > 0


cdef int32_t nearest(Core core, int32_t pool) except -2:
    """Return the pool to serve before the emptiest, else that one: its next request may run
    anywhere, is next there too, and would begin there at once, where its adapter is active. At most
    so much fuller as `affinity_ppm` says; the emptiest of these. O(pools), in the peak form with
    their leases."""
    cdef bint aged
    cdef int32_t i = head_for(core, pool, &aged), q, best = NONE, adapter
    cdef int64_t most, share, least = 0
    cdef Request* r
    if i == NONE:
        return pool
    r = &core.requests.items[i]
    adapter = core.requests.rare_of(r).adapter
    if (
        is_one_pool(r.target) or adapter == NONE or is_full(core, r.flow)
        or lora_is_active(&core.ledger.pools[pool].loras, adapter)
    ):
        return pool
    most = promised_ppm(core, pool) + core.settings.adapter_affinity_ppm
    for q in range(core.ledger.count):
        if not core.ledger.order.is_open(q):
            continue
        if not lora_is_active(&core.ledger.pools[q].loras, adapter):
            continue
        share = promised_ppm(core, q)
        if share > most or (best != NONE and share >= least):
            continue
        if head_for(core, q, &aged) == i and begins_at_once(core, q, r):
            best, least = q, share
    return pool if best == NONE else best


cdef bint begins_at_once(Core core, int32_t pool, const Request* r) noexcept:
    forget_engine_excess(core, pool)
    core.ledger.expire_prefill_budget(pool, core.now_ns)
    return plan_for(core, pool, r).reason == WAIT_NONE


cdef int32_t placed(Core core, int32_t pool) except -2:
    """Return the pool to serve before the emptiest, else that one: for the adapter of its next
    request, and among those that serve this as well for its prefix. O(pools), with hashes O(pools
    log)."""
    cdef int32_t near = pool
    if not has_choice(core):
        return pool
    if core.settings.adapter_affinity_ppm and core.adapters.count:
        near = nearest(core, pool)
    if core.settings.prefix_affinity_ppm and core.prefixes.queued:
        return with_prefix(core, pool, near)
    return near


cdef int32_t with_prefix(Core core, int32_t first, int32_t pool) except -2:
    """Return the pool with the longest match for the next request of `pool`, if it is next there
    too and begins at once; the emptiest of these, else `pool`. `first` is the emptiest of all."""
    cdef bint aged, has_adapter
    cdef int32_t i = head_for(core, pool, &aged), q, best = NONE, adapter
    cdef int64_t most, share, least = 0, found, longest
    cdef Request* r
    if i == NONE or core.prefixes.of(i) == NULL:
        return pool
    r = &core.requests.items[i]
    if is_one_pool(r.target) or is_full(core, r.flow):
        return pool
    adapter = core.requests.rare_of(r).adapter
    has_adapter = adapter != NONE and lora_is_active(&core.ledger.pools[pool].loras, adapter)
    most = promised_ppm(core, first) + core.settings.prefix_affinity_ppm
    longest = matched_tokens(core, pool, i)
    for q in range(core.ledger.count):
        share = promised_ppm(core, q)
        if q == pool or not core.ledger.order.is_open(q) or share > most:
            continue
        if has_adapter and not lora_is_active(&core.ledger.pools[q].loras, adapter):
            continue
        found = matched_tokens(core, q, i)
        if found < longest or (found == longest and (best == NONE or share >= least)):
            continue
        if head_for(core, q, &aged) == i and begins_at_once(core, q, r):
            best, longest, least = q, found, share
    return pool if best == NONE else best
