# The requests that are first in the lines of a pool, see tree_lines.pxi for who stands there.

cdef int32_t first_head(Flows flows, Heap line, int32_t pool) noexcept:
    """Return the request that is first in a line of the root that is not empty, in the order of a
    pool. O(levels)."""
    cdef int32_t q = line.nodes[0].id, target = flows.queues[q].target, node, cls
    while is_node(flows, flows.queues[q].flow):
        node = flows.queues[q].flow
        cls = flows.items[node].cls
        line = own_heap(flows, node, cls, pool) if target else free_heap(flows, node, cls, pool)
        q = queue_at(flows, node, target, line.nodes[0].id)
    return flows.queues[q].head


cdef int32_t least_served(Flows flows, int32_t i, int32_t pool) noexcept:
    """Return the head whose session was served least, ties by arrival: `i`, which is the first of
    its flow in a pool, or another head of the flow there. O(targets)."""
    cdef const Request* r = &flows.requests.items[i]
    cdef const Request* other
    cdef int32_t q = flows.items[r.flow].first_queue
    cdef int64_t less_by
    if not has_one_order(flows, r.flow):
        return i
    while q != NONE:
        if flows.queues[q].stands and flows.may_take(pool, flows.queues[q].target - 1):
            other = &flows.requests.items[flows.queues[q].head]
            less_by = session_key(flows, counted_session(flows, r))
            less_by -= session_key(flows, counted_session(flows, other))
            if less_by > 0 or (less_by == 0 and other.seq < r.seq):
                i, r = flows.queues[q].head, other
        q = flows.queues[q].next_queue
    return i


cdef int32_t first_of_two(
    Flows flows, int32_t node, int32_t cls, int32_t pool, int64_t shift
) noexcept:
    """Return the request of a class that is first in a pool below a node, -1: the root, with a
    shift added to the keys of those that may run anywhere; -1: there is none. A node is compared
    with its siblings once, and its children in both lines with each other. O(levels)."""
    cdef Heap own = own_heap(flows, node, cls, pool), free = free_heap(flows, node, cls, pool)
    cdef int32_t q
    while own.count or free.count:
        if own.count == 0 or (free.count and less_by(&free.nodes[0], &own.nodes[0], shift)):
            q = queue_at(flows, node, 0, free.nodes[0].id)
        else:
            q = queue_at(flows, node, pool + 1, own.nodes[0].id)
        node = flows.queues[q].flow
        if not is_node(flows, node):
            return least_served(flows, flows.queues[q].head, pool)
        own, free = own_heap(flows, node, cls, pool), free_heap(flows, node, cls, pool)
    return NONE


cdef int32_t next_heads(
    Flows flows, int32_t node, int32_t cls, int32_t pool, int64_t shift, int32_t* found,
    int32_t taken,
) noexcept:
    """Return the first requests of a class in a pool below a node, -1: the root, behind those that
    were taken, LOOKAHEAD at most with them: those of the first child first. O(levels *
    LOOKAHEAD^2)."""
    cdef int32_t next_ids[LOOKAHEAD]
    cdef bint is_free[LOOKAHEAD]
    cdef int32_t seen[LOOKAHEAD]
    cdef int32_t k, m, q, child, count = best_first(
        own_heap(flows, node, cls, pool), free_heap(flows, node, cls, pool), shift, next_ids,
        is_free, 0,
    )
    for k in range(count):
        q = queue_at(flows, node, 0 if is_free[k] else pool + 1, next_ids[k])
        child = seen[k] = flows.queues[q].flow
        if count == LOOKAHEAD:
            watch(flows, child)  # behind it another may come into sight
        if taken == LOOKAHEAD:
            return taken
        for m in range(k):
            if seen[m] == child:  # it stands in both lines
                break
        else:
            m = k
        if is_node(flows, child):
            if m == k:
                taken = next_heads(flows, child, cls, pool, shift, found, taken)
        elif m == k or not has_one_order(flows, child):
            found[taken] = least_served(flows, flows.queues[q].head, pool)
            taken += 1
    return taken
