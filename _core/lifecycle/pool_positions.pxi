# Where flows stand in a pool: one that comes, and one that begins or ceases to take requests that
# name no pool.
#
# A pool takes only requests that name it while it registered itself and the configuration does not
# list it, if some principal that may ask may not offer it. Otherwise a request without a pool could
# run on the engine of a stranger. No such request enters the lines of that pool, or counts it among
# the pools that may take it. So with one pool that does, flows get positions as with several.

cdef int take_positions(Core core, int32_t pool) except -1:
    """Restore the positions of flows in a pool of before the restart that is registered again.
    O(flows * log n)."""
    cdef Flows flows = core.flows
    cdef int32_t q
    cdef int64_t* at
    cdef Position* p
    cdef Family family
    name = core.pool_list[pool]
    for cls, level in core.saved_levels.pop(name, ()):
        at = flows.positions.level(cls, pool)
        at[0] = max(<int64_t>level, at[0])
    for flow, (key, foreign, level) in core.saved_positions.pop(name, {}).items():
        p = &flows.positions.items[position_of(flows, flow, pool)]
        p.key, p.foreign = key, foreign
        if is_node(flows, flow):
            family = flows.family_of(flow)
            family.levels[pool] = max(<int64_t>level, family.levels[pool])
        flows.changed.mark(flow)
        q = flows.items[<int32_t>flow].first_queue
        while q != NONE:
            replace_in_line(flows, q)
            q = flows.queues[q].next_queue
    return 0


cdef int begin_positions(Core core) except -1:
    """Let flows stand in the first pool by a position there. O(flows + queues * log n)."""
    cdef bint copies = not core.saved_positions
    begin_local(core.flows, copies)
    take_positions(core, 0)
    return add_to_pool(core.flows, 0, not copies)


cdef int stand_in_pool(Core core, int32_t pool) except -1:
    """Give flows their positions in a pool that has come. O(flows + queues * log n)."""
    if core.ledger.count == 1 and not core.served_rows.on and core.flows.may_take(pool, NONE):
        return 0
    if not core.flows.local:
        begin_positions(core)
        if pool == 0:
            return 0
    take_positions(core, pool)
    if core.ledger.count > POOLS_ORDERED:
        if core.tree_is_stale:
            settle_tree(core)  # with more pools no flow is below a node
        if not core.flows.one_line:
            begin_one_line(core.flows)
        begin_shift(core.flows, pool)
    return add_to_pool(core.flows, pool, True)


cdef bint is_named_only(Core core, int32_t pool) except -1:
    """Return whether a pool has to take only requests that name it. O(principals * patterns)."""
    name = core.pool_list[pool]
    if core.ledger.pools[pool].configured or name in core.listed_pools:
        return False
    return core.principals.some_bar(name)


cdef int settle_pool(Core core, int32_t pool) except -1:
    """Let a pool take requests that name none, or take none of them any more, as is due.
    O(principals * patterns), O(queues * levels * log n + active sessions) if that changes."""
    cdef bint due = is_named_only(core, pool)
    if due == set_has(&core.flows.named_only, pool):
        return 0
    if core.tree_is_stale:
        settle_tree(core)
    place_nodes(core.flows)
    core.ledger.order.touch(pool)
    core.ledger.order.stirred = core.has_more = True
    if due:
        close_to_unnamed(core, pool)
    else:
        open_to_unnamed(core.flows, pool)
        note_opened(core, pool)
    return place_all_nodes(core.flows)


cdef int let_unnamed_out(Core core, int32_t pool) except -1:
    """Let requests that do not name a pool wait for its cap no more: it takes only those that name
    it from now on. O(sessions + those * log n)."""
    cdef AgentSessions agents = core.flows.agents
    cdef int32_t n, i
    cdef list waited = []
    for n in range(agents.hold_used):
        if agents.holds[n].requests.count and agents.shares[agents.holds[n].share].pool == pool:
            leave_hold(core, n, True, NONE, waited)
    for i in waited:
        line_up(core, i)
    return 0


cdef int note_opened(Core core, int32_t pool) except -1:
    """Let requests of active sessions wait for no cap in a pool that takes requests that name none.
    O(active sessions of the pool)."""
    cdef int32_t s = core.ledger.pools[pool].oldest_session
    while s != NONE:
        note_begun(core, s)
        s = core.flows.agents.items[s].next
    return 0


cdef int close_to_unnamed(Core core, int32_t pool) except -1:
    """Let requests that name no pool leave the lines of a pool, and wait for others. They are
    evicted if all of these drain. O(queues * levels * log n + sessions that wait for its cap)."""
    cdef Flows flows = core.flows
    cdef int32_t q
    if not flows.local:
        begin_positions(core)
    set_add(&flows.named_only, pool)
    for q in range(flows.queue_count if not flows.one_line else 0):
        if flows.queues[q].target == 0 and not is_node(flows, flows.queues[q].flow):
            take_from_anywhere(flows, q, pool)
            stand_nodes_in(flows, q, pool)
            part_emptied(flows, flows.queues[q].flow)
    let_unnamed_out(core, pool)
    if core.ledger.pools[pool].block_size:  # else it is new, and nothing has waited for it
        core.sweep_next = core.sweep_hold = 0
    return 0


cdef int open_to_unnamed(Flows flows, int32_t pool) except -1:
    """Let requests that name no pool stand in a pool, as if it had come. O(queues * levels *
    log n)."""
    cdef int32_t q, flow, own
    set_remove(&flows.named_only, pool)
    if flows.one_line:
        begin_shift(flows, pool)
        return 0
    for q in range(flows.queue_count):
        flow = flows.queues[q].flow
        if flows.queues[q].target or flows.queues[q].chain.count == 0:
            continue
        own = flows.find_queue(flow, pool + 1)
        if own == NONE or flows.queues[own].chain.count == 0:
            begin_in_pool(flows, flow, pool)
        replace_in_line(flows, q)
        wait_in_pools(flows, flow)
    return 0


cdef int settle_grants(Core core, int32_t number) except -1:
    """A principal may offer other pools than before, or ask where it could not: settle all pools.
    O(pools * patterns), and for each that this may open O(principals * patterns); queues move as
    settle_pool() says."""
    cdef int32_t pool
    for pool in range(core.ledger.count):
        if set_has(&core.flows.named_only, pool) != core.principals.bars(
            number, core.pool_list[pool]
        ):
            settle_pool(core, pool)
    return 0


cdef int list_pools(Core core, tuple names) except -1:
    """Let the configuration list these pools and no others. O(pools * principals * patterns)."""
    cdef int32_t pool
    core.listed_pools = frozenset(names)
    for pool in range(core.ledger.count):
        settle_pool(core, pool)
    return 0
