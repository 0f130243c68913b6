# Where queues stand: at the root in the line of their target, else in that of their node.
#
# A node has a queue for each target of the flows below it: it holds no requests, and is in the line
# above while the node's own line has entries. Its key is the node's counter, its arrival that of
# the first head in its line. Under orders without counters no flow is below a node. With several
# pools a queue for any of them is also in the order of each pool, at every level.

cdef inline bint stands_in_one(Flows flows) noexcept:
    """Whether what may run anywhere stands in one line, and not in one of each pool."""
    return flows.one_line or not flows.local


cdef inline Line free_line(Flows flows, int32_t pool):
    """The line, in the order of a pool, of the queues whose requests may run in any pool."""
    return <Line>(flows.candidates[0] if stands_in_one(flows) else flows.anywhere[pool])


cdef inline Heap own_heap(Flows flows, int32_t node, int32_t cls, int32_t pool):
    """Of the children of a node, -1: of the root in a class, those with a head that must run in a
    pool. O(1)."""
    if node == NONE:
        return (<Line>flows.candidates[pool + 1]).heap(cls)
    return flows.family_of(node).line_of(pool + 1)


cdef inline Heap free_heap(Flows flows, int32_t node, int32_t cls, int32_t pool):
    """The same of those with a head that may run in any, in the order of a pool. O(1)."""
    if node == NONE:
        return free_line(flows, pool).heap(cls)
    if stands_in_one(flows):
        return flows.family_of(node).line_of(0)
    return flows.family_of(node).free_line_of(pool)


cdef inline bint is_node(Flows flows, int32_t flow) noexcept:
    return flows.items[flow].family != NONE


cdef inline bint has_place(Flows flows, int32_t q) noexcept:
    """Whether a queue stands in its line. O(1)."""
    cdef const Flow* f = &flows.items[flows.queues[q].flow]
    cdef int32_t target = flows.queues[q].target
    if f.parent == NONE:
        return (<Line>flows.candidates[target]).has(f.cls, q)
    return flows.family_of(f.parent).has(target, f.place)


cdef inline int put_in_line(Flows flows, int32_t q, int64_t key, int64_t arrival) except -1:
    cdef const Flow* f = &flows.items[flows.queues[q].flow]
    cdef int32_t target = flows.queues[q].target
    if f.parent == NONE:
        return (<Line>flows.candidates[target]).put(f.cls, q, key, arrival, flows.now_ns)
    return flows.family_of(f.parent).line(target).put(f.place, key, arrival)


cdef inline int stand_node(Flows flows, int32_t node, int32_t target) except -1:
    """Give a node its place for a target by its counter and its first head, or none.
    O(log n)."""
    cdef Heap line = flows.family_of(node).line(target)
    cdef int32_t q = flows.queue_of(node, target)
    if line.count == 0:
        return take_from_line(flows, q)
    return put_in_line(flows, q, flows.key_of(q), line.nodes[0].tie)


cdef inline int take_from_line(Flows flows, int32_t q) except -1:
    cdef const Flow* f = &flows.items[flows.queues[q].flow]
    cdef int32_t target = flows.queues[q].target
    if f.parent == NONE:
        (<Line>flows.candidates[target]).remove(f.cls, q)
    else:
        flows.family_of(f.parent).line(target).remove(f.place)
    return 0


cdef inline int stand_nodes(Flows flows, int32_t q) except -1:
    """The line of a queue's node has changed: give each node above its place.
    O(levels * log n)."""
    cdef int32_t node = flows.items[flows.queues[q].flow].parent
    while node != NONE:
        stand_node(flows, node, flows.queues[q].target)
        node = flows.items[node].parent
    return 0


cdef inline int stand(Flows flows, int32_t q) except -1:
    """Give the queue of a tenant's flow its place, which it may have already.
    O(levels * log n)."""
    put_in_line(
        flows, q, flows.key_of(q), flows.requests.items[flows.queues[q].chain.head].seq
    )
    return stand_nodes(flows, q)


cdef inline int leave_line(Flows flows, int32_t q) except -1:
    """Take the queue of a tenant's flow out of its line, if it stands there.
    O(levels * log n)."""
    take_from_line(flows, q)
    return stand_nodes(flows, q)


cdef inline int stand_by_counter(Flows flows, int32_t node) except -1:
    """Give a node its places by its counters of now, for all targets.
    O((targets + pools) * log n)."""
    cdef int32_t q = flows.items[node].first_queue
    while q != NONE:
        stand_node(flows, node, flows.queues[q].target)
        if flows.queues[q].target and flows.local:
            flows.pool_order.touch(flows.queues[q].target - 1)
        elif not stands_in_one(flows):
            stand_node_anywhere(flows, q)
        q = flows.queues[q].next_queue
    return 0


cdef inline int stand_node_anywhere(Flows flows, int32_t q) except -1:
    """Give a node's queue of what may run anywhere its place in each pool. O(pools * log n)."""
    cdef int32_t node = flows.queues[q].flow, n = flows.items[node].first_position
    while n != NONE:
        stand_node_in(flows, q, flows.positions.items[n].pool)
        n = flows.positions.items[n].next_position
    return 0


cdef inline int stand_node_in(Flows flows, int32_t q, int32_t pool) except -1:
    # The same in one pool. O(log n).
    cdef int32_t node = flows.queues[q].flow
    cdef Heap line = flows.family_of(node).free_line(pool)
    if line.count == 0:
        return take_from_anywhere(flows, q, pool)
    return put_anywhere(
        flows, q, pool, flows.counter_at(node, pool) // flows.grain, line.nodes[0].tie
    )


cdef inline int stand_nodes_in(Flows flows, int32_t q, int32_t pool) except -1:
    """The line for any pool of a queue's node has changed in the order of a pool: give each node
    above its place there. O(levels * log n)."""
    cdef int32_t node = flows.items[flows.queues[q].flow].parent
    while node != NONE:
        stand_node_in(flows, flows.queue_of(node, 0), pool)
        node = flows.items[node].parent
    return 0


cdef inline int put_anywhere(
    Flows flows, int32_t q, int32_t pool, int64_t key, int64_t arrival
) except -1:
    """Let a queue of what may run anywhere stand in the order of a pool. O(log n)."""
    cdef const Flow* f = &flows.items[flows.queues[q].flow]
    if f.parent == NONE:
        return (<Line>flows.anywhere[pool]).put(f.cls, q, key, arrival, flows.now_ns)
    return flows.family_of(f.parent).free_line(pool).put(f.place, key, arrival)


cdef inline int take_from_anywhere(Flows flows, int32_t q, int32_t pool) except -1:
    cdef const Flow* f = &flows.items[flows.queues[q].flow]
    if f.parent == NONE:
        (<Line>flows.anywhere[pool]).remove(f.cls, q)
    else:
        flows.family_of(f.parent).free_line(pool).remove(f.place)
    return 0


cdef inline int32_t child_at(Flows flows, int32_t node, int32_t id) noexcept:
    """The flow with a number in the lines of a node, -1: of the root. O(1)."""
    return flows.queues[id].flow if node == NONE else flows.family_of(node).members[id]


cdef inline int32_t queue_at(Flows flows, int32_t node, int32_t target, int32_t id) noexcept:
    """The queue with a number in the line of a node for a target, -1: of the root. O(targets)."""
    if node == NONE:
        return id
    return flows.find_queue(flows.family_of(node).members[id], target)


cdef int32_t first_head(Flows flows, Heap line, int32_t pool) noexcept:
    """The request that is first in a line of the root that is not empty, in the order of a pool.
    O(levels)."""
    cdef int32_t q = line.nodes[0].id, target = flows.queues[q].target, node, cls
    while is_node(flows, flows.queues[q].flow):
        node = flows.queues[q].flow
        cls = flows.items[node].cls
        line = own_heap(flows, node, cls, pool) if target else free_heap(flows, node, cls, pool)
        q = queue_at(flows, node, target, line.nodes[0].id)
    return flows.queues[q].chain.head


cdef int32_t first_of_two(
    Flows flows, int32_t cls, int32_t pool, int64_t shift
) noexcept:
    """The request of a class that is first in a pool, with a shift added to the keys of those that
    may run anywhere; -1: there is none. A node is compared with its siblings once, and its children
    in both lines with each other. O(levels)."""
    cdef Heap own = own_heap(flows, NONE, cls, pool), free = free_heap(flows, NONE, cls, pool)
    cdef int32_t node = NONE, q
    while own.count or free.count:
        if own.count == 0 or (free.count and less_by(&free.nodes[0], &own.nodes[0], shift)):
            q = queue_at(flows, node, 0, free.nodes[0].id)
        else:
            q = queue_at(flows, node, pool + 1, own.nodes[0].id)
        node = flows.queues[q].flow
        if not is_node(flows, node):
            return flows.queues[q].chain.head
        own, free = own_heap(flows, node, cls, pool), free_heap(flows, node, cls, pool)
    return NONE


cdef int32_t next_heads(
    Flows flows, int32_t node, int32_t cls, int32_t pool, int64_t shift, int32_t* found,
    int32_t taken,
) noexcept:
    """The first requests of a class in a pool below a node, -1: the root, behind those that were
    taken, LOOKAHEAD at most with them: those of the first child first.
    O(levels * LOOKAHEAD^2)."""
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
        if taken == LOOKAHEAD:
            return taken
        if not is_node(flows, child):
            found[taken] = flows.queues[q].chain.head
            taken += 1
            continue
        for m in range(k):
            if seen[m] == child:  # it stands in both lines
                break
        else:
            taken = next_heads(flows, child, cls, pool, shift, found, taken)
    return taken
