# Flows, keys and pools, as the configuration and the shims declare them.

cdef int enter(Scheduler core, int64_t now_ns) except -1:
    # Every event begins here.
    if core.fuse.what is not None:
        raise InvariantError(core.fuse.what)
    if now_ns < core.now_ns:
        invalid("now_ns", f"time went back by {core.now_ns - now_ns} ns")
    core.now_ns = now_ns
    return 0


cdef int known_pool(Scheduler core, int32_t pool) except -1:
    if not 0 <= pool < core.ledger.count:
        invalid("pool", f"no pool has the index {pool}")
    return 0


cdef int known_flow(Scheduler core, int32_t flow) except -1:
    if not 0 <= flow < core.flows.count:
        invalid("flow", f"no flow has the index {flow}")
    return 0


cdef int32_t register_pool(
    Scheduler core, bytes name, int64_t epoch, int64_t capacity_tokens, int64_t block_size,
    int64_t max_running, int64_t max_model_tokens,
) except -1:
    """Register a pool, or give a known one new figures. O(1), O(leases of it) on a new epoch."""
    cdef int32_t pool
    cdef Pool* p
    if not 0 < len(name) <= ID_BYTES_MAX:
        invalid("pool", f"a name has 1 to {ID_BYTES_MAX} bytes")
    if epoch < 0:
        invalid("epoch", "must not be negative")
    if not 1 <= block_size <= 65_536:
        invalid("block_size_tokens", f"must be from 1 to 65,536, not {block_size}")
    if not block_size <= capacity_tokens <= <int64_t>1 << 40:
        invalid(
            "capacity_tokens", f"must be from one block to 2^40, not {capacity_tokens}"
        )
    if not 0 <= max_running <= 1 << 24:
        invalid("max_running", f"must be from 0 to {1 << 24}, not {max_running}")
    if not 0 <= max_model_tokens <= TOKENS_MAX:
        invalid("max_model_tokens", f"must be from 0 to {TOKENS_MAX}, not {max_model_tokens}")
    known = core.pool_names.get(name)
    if known is None:
        if core.ledger.count == POOLS_MAX:
            raise CallerError(
                CODE_RESOURCE_EXHAUSTED, "pool", f"at most {POOLS_MAX} pools can be registered"
            )
        pool = core.ledger.add()
        core.pool_names[name] = pool
        core.pool_list.append(name)
        core.flows.candidates.append(Heap())
    else:
        pool = known
        p = &core.ledger.pools[pool]
        if epoch < p.epoch:
            raise CallerError(
                CODE_FAILED_PRECONDITION, "epoch",
                f"the pool is already at the later epoch {p.epoch}",
            )
        if epoch > p.epoch:
            void_leases(core, pool)
        elif p.live and block_size != p.block_size:
            invalid("block_size_tokens", "cannot change without a new epoch while leases live")
    core.ledger.pools[pool].epoch = epoch
    core.ledger.size(pool, capacity_tokens, block_size, max_running, max_model_tokens)
    return pool


cdef int take_telemetry(
    Scheduler core, int32_t pool, int64_t epoch, int64_t running, int64_t waiting,
    int64_t used_tokens, int64_t preemptions,
) except -1:
    cdef Pool* p = &core.ledger.pools[pool]
    for field, value in (
        ("running", running), ("waiting", waiting), ("used_tokens", used_tokens),
        ("preemptions", preemptions),
    ):
        if value < 0:
            invalid(field, f"must not be negative, not {value:,}")
    if epoch != p.epoch:
        return 0
    p.engine_running = running
    p.engine_waiting = waiting
    p.engine_used_tokens = used_tokens
    p.engine_preemptions = preemptions
    p.telemetry_at_ns = core.now_ns
    return 0
