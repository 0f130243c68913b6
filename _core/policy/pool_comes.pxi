# A new pool changes the lines: flows get their positions in it. With the second pool they begin to
# have any. With more than POOLS_ORDERED pools, requests for any pool leave the lines of the single
# pools, see local_position.pxi.

cdef void begin_shift(Flows flows, int32_t pool) noexcept:
    """Let the line for any pool stand in a pool at its level. O(classes)."""
    cdef int32_t cls
    for cls in range(CLASSES_MAX):
        flows.positions.shift(cls, pool)[0] = (
            flows.positions.level(cls, pool)[0] - flows.level[cls]
        )


cdef bint has_queue_in(Flows flows, int32_t flow, int32_t pool) noexcept:
    """Return whether a flow has a queue of requests that name a pool, alone or in a set.
    O(targets)."""
    cdef int32_t q = flows.items[flow].first_queue
    while q != NONE:
        if flows.queues[q].target and flows.may_take(pool, flows.queues[q].target - 1):
            return True
        q = flows.queues[q].next_queue
    return False


cdef int begin_one_line(Flows flows) except -1:
    """There are many pools now: what may run anywhere leaves the lines of each, and flows keep
    positions only in pools for which they had requests. O(flows + queues * pools * log n)."""
    cdef int32_t q, flow, n, last, pool
    flows.one_line = True
    for q in range(flows.queue_count):
        if flows.queues[q].target == 0:
            leave_anywhere(flows, q)
    for flow in range(flows.count):
        n = flows.items[flow].first_position
        flows.items[flow].first_position = NONE
        while n != NONE:
            last, n = n, flows.positions.items[n].next_position
            if has_queue_in(flows, flow, flows.positions.items[last].pool):
                flows.positions.items[last].next_position = flows.items[flow].first_position
                flows.items[flow].first_position = last
            else:
                flows.positions.items[last].next_position = NONE
                if is_node(flows, flow):
                    flows.family_of(flow).positions[flows.positions.items[last].pool] = NONE
                flows.positions.release(last)
                flows.changed.mark(flow)
    for pool in range(<int32_t>len(flows.anywhere)):
        begin_shift(flows, pool)
    return 0


cdef int begin_local(Flows flows, bint copies) except -1:
    """A second pool has come: flows stand in the first one as they do by their counters, unless
    another process has saved how they do. O(flows + queues * log n)."""
    cdef int32_t flow, cls
    cdef Flow* f
    cdef Position* p
    flows.local = True
    if not copies:
        return 0
    for cls in range(CLASSES_MAX):
        flows.positions.level(cls, 0)[0] = flows.level[cls]
    for flow in range(flows.count):
        f = &flows.items[flow]
        if f.vtc == 0 and f.queued == 0:
            continue
        p = &flows.positions.items[position_of(flows, flow, 0)]
        p.key = f.vtc
        wait_in_pools(flows, flow)
        if p.waits_at != NONE:
            p.wait_lift = f.throttled_lift if f.waits_at == NONE else f.wait_lift
            p.wait_lift -= flows.quotas.nodes[p.waits_at].lift[f.cls]
    for flow in range(<int32_t>len(flows.families)):
        (<Family>flows.families[flow]).levels[0] = (<Family>flows.families[flow]).level
    for flow in range(flows.count):
        if flows.items[flow].parent != NONE and not is_node(flows, flow):
            count_backlogged(flows, flow)
    return 0


cdef int count_backlogged(Flows flows, int32_t flow) except -1:
    """Count a flow below a node, which was not below one before, as backlogged in the pools in
    which it is; no node is lifted for that. O(pools * levels + targets)."""
    cdef IndexSet queued
    cdef IndexSet stands
    cdef int32_t n = flows.items[flow].first_position
    cdef Position* p
    find_lines(flows, flow, &queued, &stands)
    while n != NONE:
        p = &flows.positions.items[n]
        n = p.next_position
        p.backlogged = p.waits_at == NONE and is_for(flows, &queued, p.pool)
        if p.backlogged:
            join_nodes(flows, flow, p.pool, False, False)
    return 0


cdef int add_to_pool(Flows flows, int32_t pool, bint begins) except -1:
    """A pool has come: what may run there stands there. O(queues * log n)."""
    cdef int32_t q, flow
    for q in range(flows.queue_count):
        flow = flows.queues[q].flow
        if flows.queues[q].target == 0 and flows.one_line:
            continue
        if flows.may_take(pool, flows.queues[q].target - 1) and flows.queues[q].chain.count:
            if begins:
                begin_in_pool(flows, flow, pool)
            replace_in_line(flows, q)
            wait_in_pools(flows, flow)
    return place_all_nodes(flows)
