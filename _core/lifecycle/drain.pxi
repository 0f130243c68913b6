# An operator's handles: pools that are drained, leases that are listed and revoked.
#
# A pool that is drained grants nothing any more; what runs goes on. New requests that only drained
# pools could take are refused (REJECTED_DRAINING). Queued requests that can go nowhere else are
# evicted by a sweep, a bounded part of it in each poll. It looks first at sessions whose requests
# wait for a cap, and so are in no queue, then at all queues, into which these may have come.
# A drain is saved, and goes on after a restart.

cdef enum:
    QUEUES_A_TURN = 64  # queues, or sessions, that are looked at for each eviction of a poll


cdef int drain_some(Core core, bytes name, bint draining) except -1:
    """Drain a pool, or (b"") all of them and the scheduler with them, or let it serve again. O(1),
    O(pools) for one that was not offered since the restart; evictions come with `poll()`."""
    cdef int32_t pool
    if name:
        known, told = core.pool_names.get(name), core.saved_pools.get(name)
        if known is None and told is None:
            raise CallerError(CODE_NOT_FOUND, "pool", "no pool of that name")
        if known is None and draining:
            known = absent_pool(core, name)
        if told is not None:
            core.saved_pools[name] = (*told[:4], draining, told[5])
        if known is not None:
            pool = known
            core.ledger.pools[pool].draining = draining
            core.ledger.order.touch(pool)
    else:
        core.draining = core.ledger.closed = draining
        core.ledger.touch_all()
    if draining:
        core.sweep_next = core.sweep_hold = 0
    core.has_more = core.save_rest = True
    return 0


cdef int forgive_tenant(Core core, bytes name) except -1:
    """Let a tenant's own quota owe nothing, and return how many of its buckets owed something.
    O(1)."""
    cdef int32_t flow, node
    cdef Quota* n
    cdef int k, found = 0
    known = core.flow_names.get(name)
    if known is None:
        raise CallerError(CODE_NOT_FOUND, "tenant", "no tenant of that name")
    flow = known
    node = core.flows.items[flow].own_quota
    if node == NONE:
        return 0
    n = &core.quotas.nodes[node]
    for k in range(RATES):
        core.quotas.refill(n, k)
        if n.rate[k] and n.level[k] < 0:
            n.level[k] = 0
            found += 1
    core.quotas.changed.mark(node)
    core.quotas.mark_ready(node)
    core.has_more = True
    return found


cdef int release_pool(Core core, bytes name) except -1:
    """Let any caller that may offer a pool take it over, because its owner is gone. O(1)."""
    cdef int32_t pool
    cdef Pool* p
    known = core.pool_names.get(name)
    if known is None:
        raise CallerError(CODE_NOT_FOUND, "pool", "no pool of that name")
    pool = known
    p = &core.ledger.pools[pool]
    if p.attached > p.configured:
        raise CallerError(
            CODE_FAILED_PRECONDITION, "pool", "is offered on a stream now; stop its gate first"
        )
    p.owned_until_ns = core.now_ns
    return 0


cdef int run_sweep(Core core) except -1:
    """Evict what can go nowhere any more, at most `work_max` requests. O(work_max * log n + the
    longest queue); those that stay are seen again where the sweep goes on in their queue."""
    cdef int64_t work = 0, looks = 0
    cdef Queue* queue
    while core.sweep_hold < core.flows.agents.hold_used:
        looks += 1
        if looks > QUEUES_A_TURN * core.settings.work_max or not sweep_chain(
            core, core.flows.agents.holds[core.sweep_hold].requests.head, &work
        ):
            core.has_more = True
            return 0
        core.sweep_hold += 1
    while core.sweep_next < core.flows.queue_count:
        looks += 1
        queue = &core.flows.queues[core.sweep_next]
        if looks > QUEUES_A_TURN * core.settings.work_max or (
            may_be_stranded(core, queue.target - 1)
            and not sweep_chain(core, queue.chain.head, &work)
        ):
            core.has_more = True
            return 0
        core.sweep_next += 1
    core.sweep_next = NONE
    return 0


cdef bint sweep_chain(Core core, int32_t i, int64_t* work) except -1:
    """Evict what is stranded of a chain that begins with a request; False: `work_max` is reached.
    O(chain + evictions * log n)."""
    cdef int32_t after
    while i != NONE:
        after = core.requests.items[i].next
        if may_be_stranded(core, core.requests.items[i].target) and is_stranded(
            core, &core.requests.items[i]
        ):
            if work[0] >= core.settings.work_max:
                return False
            work[0] += 1
            evict(core, i, OUT_EVICTED_DRAINING)
        i = after
    return True


cdef bint may_be_stranded(Core core, int32_t target) noexcept:
    return not is_one_pool(target) or core.ledger.closed or core.ledger.pools[target].draining


cdef bint is_stranded(Core core, const Request* r) noexcept:
    """Return whether every pool that can hold a queued request is drained. O(pools)."""
    cdef int32_t p
    cdef bint some = False
    if core.ledger.closed or is_one_pool(r.target):
        return True
    for p in range(core.ledger.count):
        if core.flows.may_take(p, r.target) and core.ledger.can_hold(p, r):
            if not core.ledger.pools[p].draining:
                return False
            some = True
    return some


cdef int revoke_lease(Core core, int64_t lease_id) except -1:
    """Void a lease of any holder; return its state before: LIVE means revoked now. O(1)."""
    cdef int32_t i = core.leases.get(<uint64_t>lease_id, 0)
    if i == NONE:
        return LS_UNKNOWN
    if core.requests.items[i].state == ENDED:
        return LS_ENDED
    if core.requests.items[i].lease.is_void:
        return LS_VOID
    void_lease(core, i)
    core.save_rest = True  # the debt of its pool, which no other row holds
    return LS_LIVE


# Which leases are listed.
ctypedef struct LeaseFilter:
    int32_t base  # the tenant's flow in the default class; -1: any
    int32_t pool  # -1: any
    int64_t epoch  # 0: any
    int64_t granted_until_ns
    int32_t principal  # -1: any


cdef LeaseFilter lease_filter(
    Core core, bytes tenant, bytes pool, int64_t epoch, int64_t granted_until_ns, int32_t principal
) except *:
    cdef LeaseFilter f
    f.base = f.pool = NONE
    if tenant:
        f.base = core.flow_names.get(tenant, NONE)
        if f.base == NONE:
            raise CallerError(CODE_NOT_FOUND, "tenant", "no tenant of that name")
    if pool:
        f.pool = core.pool_names.get(pool, NONE)
        if f.pool == NONE:
            raise CallerError(CODE_NOT_FOUND, "pool", "no pool of that name")
    f.epoch, f.granted_until_ns, f.principal = epoch, granted_until_ns, principal
    return f


cdef tuple lease_page(
    Core core, int64_t now_ns, int32_t start, int32_t scan_max, int32_t rows_max,
    const LeaseFilter* f, bytes client_id,
):
    """Return the rows of leases from a place in the slab on, and the next place (0: that was all).
    A lease keeps its place while it lives. O(scan_max)."""
    cdef int32_t i = start, last
    cdef list rows = []
    check_range("start", start, 0, (<int64_t>1 << 31) - 1)
    check_range("scan_max", scan_max, 1, 1 << 24)
    last = <int32_t>min(<int64_t>core.requests.used, <int64_t>start + scan_max)
    if client_id and not any(
        s is not None and (<SessionState>s).client_id == client_id for s in core.sessions
    ):
        raise CallerError(CODE_NOT_FOUND, "client_id", "no open Session of that name")
    while i < last and len(rows) < rows_max:
        if is_meant(core, &core.requests.items[i], f):
            if not client_id or client_of(core, &core.requests.items[i]) == client_id:
                rows.append(lease_row(core, now_ns, &core.requests.items[i]))
        i += 1
    return 0 if i >= core.requests.used else i, rows


cdef bint is_meant(Core core, const Request* r, const LeaseFilter* f) noexcept:
    return (
        (r.state == LIVE or r.state == SUSPECT)
        and (f.base == NONE or core.flows.items[r.flow].base == f.base)
        and (f.pool == NONE or r.pool == f.pool)
        and (f.epoch == 0 or r.lease.epoch == f.epoch)
        and (f.principal == NONE or r.principal == f.principal)
        and granted_at_ns(r) <= f.granted_until_ns
    )


cdef bytes client_of(Core core, const Request* r):
    """Return the name of the shim on whose stream a lease is; b"": on none."""
    cdef SessionState session
    if r.owner <= 0:
        return b""
    session = core.sessions[r.owner]
    return session.client_id if session.client_id is not None else b""


cdef dict lease_row(Core core, int64_t now_ns, const Request* r):
    cdef int64_t block = core.ledger.pools[r.pool].block_size
    cdef bytes adapter = b""
    cdef int32_t a = core.requests.rare_of(r).adapter
    if a != NONE:
        adapter = core.adapters.names[a]
    return {
        "lease_id": r.lease.lease_id,
        "tenant": core.flow_list[r.flow].decode(),
        "request_class": core.classes.names[core.flows.items[r.flow].cls].decode(),
        "pool": core.pool_list[r.pool].decode(),
        "pool_epoch": r.lease.epoch,
        "state": LS_VOID if r.lease.is_void else LS_LIVE,
        "suspect": r.state == SUSPECT,
        "age_ms": (now_ns - granted_at_ns(r)) // NS_PER_MS,
        "queued_ms": r.lease.waited_ns // NS_PER_MS,
        "due_ms": max(<int64_t>0, r.due_ns - now_ns) // NS_PER_MS,
        "reserved_tokens": r.lease.reserved_blocks * block,
        "posted_tokens": r.lease.posted_blocks * block,
        "prompt_tokens": r.prompt_tokens,
        "output_tokens": r.lease.output_tokens,
        "max_output_tokens": r.output_max_tokens,
        "sequences": r.sequences,
        "adapter": adapter.decode(),
        "client_id": client_of(core, r).decode(),
        "principal": r.principal,
        "replayed": was_restored(r),
    }
