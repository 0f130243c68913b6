# Where queues stand: at the root in the line of their target, else in that of their node.
#
# A node has a queue for each target for which something of it stands: it is empty, and stands in
# the line above while the node's own line is not. Its key is the node's counter, its arrival that
# of the first head in its line. Under orders without counters nothing stands below a node.

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
    return put_in_line(flows, q, flows.items[node].vtc // flows.grain, line.nodes[0].tie)


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


cdef inline int stand_by_counters(Flows flows, int32_t node) except -1:
    """Give a node, and those above it, their places by the counters of now, for all targets.
    O(levels * targets * log n)."""
    cdef int32_t q
    while node != NONE:
        q = flows.items[node].first_queue
        while q != NONE:
            stand_node(flows, node, flows.queues[q].target)
            q = flows.queues[q].next_queue
        node = flows.items[node].parent
    return 0


cdef inline int32_t queue_at(Flows flows, int32_t node, int32_t target, int32_t id) noexcept:
    """The queue with a number in the line of a node for a target, -1: of the root. O(targets)."""
    if node == NONE:
        return id
    return flows.find_queue(flows.family_of(node).members[id], target)


cdef int32_t first_head(Flows flows, Heap line) noexcept:
    """The request that is first in a line of the root that is not empty. O(levels)."""
    cdef int32_t q = line.nodes[0].id, target = flows.queues[q].target, node
    while is_node(flows, flows.queues[q].flow):
        node = flows.queues[q].flow
        line = flows.family_of(node).line_of(target)
        q = queue_at(flows, node, target, line.nodes[0].id)
    return flows.queues[q].chain.head


cdef int32_t first_of_two(Flows flows, Heap own, Heap free, int64_t shift) noexcept:
    """The request that is first in two lines of the root together, with a shift added to the keys
    of the second; -1: both are empty. A node is compared with its siblings once, and its children
    in both lines with each other. O(levels)."""
    cdef int32_t own_target = NONE, free_target = NONE, node = NONE, q
    if own.count:
        own_target = flows.queues[own.nodes[0].id].target
    if free.count:
        free_target = flows.queues[free.nodes[0].id].target
    while own.count or free.count:
        if own.count == 0 or (free.count and less_by(&free.nodes[0], &own.nodes[0], shift)):
            q = queue_at(flows, node, free_target, free.nodes[0].id)
        else:
            q = queue_at(flows, node, own_target, own.nodes[0].id)
        node = flows.queues[q].flow
        if not is_node(flows, node):
            return flows.queues[q].chain.head
        own = flows.family_of(node).line_of(own_target)
        free = flows.family_of(node).line_of(free_target)
    return NONE


cdef int32_t next_heads(
    Flows flows, Heap own, Heap free, int64_t shift, int32_t* found, int32_t taken
) noexcept:
    """The first requests of two lines of the root together, behind those that were taken, LOOKAHEAD
    at most with them: those of the first node first. O(levels * LOOKAHEAD^2)."""
    cdef int32_t own_target = NONE, free_target = NONE
    if own.count:
        own_target = flows.queues[own.nodes[0].id].target
    if free.count:
        free_target = flows.queues[free.nodes[0].id].target
    return heads_below(flows, NONE, own, free, own_target, free_target, shift, found, taken)


cdef int32_t heads_below(
    Flows flows, int32_t node, Heap own, Heap free, int32_t own_target, int32_t free_target,
    int64_t shift, int32_t* found, int32_t taken,
) noexcept:
    cdef int32_t next_ids[LOOKAHEAD]
    cdef bint is_free[LOOKAHEAD]
    cdef int32_t seen[LOOKAHEAD]
    cdef int32_t k, m, q, child, count = best_first(own, free, shift, next_ids, is_free, 0)
    for k in range(count):
        q = queue_at(flows, node, free_target if is_free[k] else own_target, next_ids[k])
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
            taken = heads_below(
                flows, child, flows.family_of(child).line_of(own_target),
                flows.family_of(child).line_of(free_target), own_target, free_target, shift, found,
                taken,
            )
    return taken
