# Verifies what few requests have: their rare fields, and the LoRA adapters that they name.

cdef int check_rare_fields(Core core) except -1:
    """Check that only requests that are queued or run have rare fields, each its own, and that the
    others have none. O(requests)."""
    cdef const RareFields* none = &core.requests.rare[0]
    cdef const Request* r
    cdef int32_t i
    cdef set found = set()
    for i in range(core.requests.used):
        r = &core.requests.items[i]
        if r.state != FREE and r.rare:
            check_invariant(
                core, r.state != ENDED and r.rare not in found and r.rare < core.requests.rare_used,
                "rare fields are of one request that is queued or runs",
            )
            found.add(r.rare)
    check_invariant(
        core, <int32_t>len(found) == core.requests.rare_open, "no rare fields without a request"
    )
    return check_invariant(
        core, none.deadline_ns == 0 and none.adapter == NONE and none.session == NONE
        and none.told_output == 0 and none.place == 0 and none.hold == NONE
        and none.shed_watch == 0,
        "what most requests have of the rare fields is nothing",
    )


cdef int check_adapters(Core core) except -1:
    cdef Adapters adapters = core.adapters
    cdef int32_t i, adapter
    cdef int64_t idle = 0
    users = [0] * adapters.count
    for i in range(core.requests.used):
        adapter = core.requests.rare_of(&core.requests.items[i]).adapter
        if core.requests.items[i].state != FREE and adapter != NONE:
            users[adapter] += 1
    for i in range(adapters.count):
        check_invariant(
            core, users[i] == adapters.items[i].users,
            "users of an adapter = requests that are queued or run with it",
        )
        check_invariant(
            core, adapters.index.get(adapters.items[i].hi, adapters.items[i].lo) == i,
            "a name finds its adapter",
        )
        idle += users[i] == 0
    i = adapters.idle_head
    while i != NONE:
        check_invariant(core, adapters.items[i].users == 0, "an idle adapter has no users")
        idle -= 1
        i = adapters.items[i].next
    check_invariant(core, idle == 0, "every idle adapter is in the chain")
    return check_invariant(
        core, <int32_t>adapters.index.count == adapters.count, "no name without an adapter"
    )


cdef int check_loras(Core core, int32_t pool) except -1:
    cdef Pool* p = &core.ledger.pools[pool]
    cdef int32_t i = p.first_lease, adapter, flow
    cdef dict leases = {}, held = {}
    while i != NONE:
        flow = core.requests.items[i].flow
        held[flow] = held.get(flow, 0) + core.requests.items[i].lease.reserved_blocks
        adapter = core.requests.rare_of(&core.requests.items[i]).adapter
        if adapter != NONE:
            leases[adapter] = leases.get(adapter, 0) + 1
        i = core.requests.items[i].lease.pool_next
    for flow in range(p.held_count):
        check_invariant(
            core, p.held[flow] == held.get(flow, 0), "held by a flow = sum over its leases"
        )
    for adapter in range(p.loras.size):
        check_invariant(
            core, p.loras.leases[adapter] == leases.get(adapter, 0),
            "leases of an adapter = those that run with it",
        )
    tokens = sum(lora_tokens(core.adapters, adapter, p.limits.adapter_tokens) for adapter in leases)
    return check_invariant(
        core, p.loras.active == len(leases) and p.loras.tokens == tokens,
        "active adapters = those of the leases, with what they take",
    )
