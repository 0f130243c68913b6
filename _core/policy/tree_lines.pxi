# Where queues stand: at the root in the line of their target, else in that of their node.
#
# A node has a queue for each target of the flows below it: it holds no requests, and is in the line
# above while the node's own line has entries. Its key is the node's counter, its arrival that of
# the first head in its line. Under orders without counters no flow is below a node. With several
# pools a queue for any of them is also in the order of each pool, at every level.
#
# A queue of a set of pools stands in the lines of these pools, among those that must run there. At
# the root it has an entry of its own in each. In a family a child has one entry in a line: the
# oldest of its heads that stand there gives that its arrival. So nodes have no queues of sets.
#
# Reports charge nodes many times between two picks, so a node that is charged is only noted as
# stale. Until `place_nodes()` its entries have the keys of before, which are no greater than those
# of now; a refund places a node at once. Every event that reads lines places the stale nodes first,
# but for the least of a pool, see `freshen()`. A node above a stale one is stale, too.

cdef inline bint stands_in_one(Flows flows) noexcept:
    """Return whether a request that may run anywhere is in one line, and not in one of each
    pool."""
    return flows.one_line or not flows.local


cdef inline Line free_line(Flows flows, int32_t pool):
    """Return the line, in the order of a pool, of the queues whose requests may run in any pool."""
    if not flows.may_take(pool, NONE):
        return flows.no_line
    return <Line>(flows.candidates[0] if stands_in_one(flows) else flows.anywhere[pool])


cdef inline Heap own_heap(Flows flows, int32_t node, int32_t cls, int32_t pool):
    """Return the heap of the children of a node, -1: of the root in a class, with a head that must
    run in a pool. O(1)."""
    if node == NONE:
        return (<Line>flows.candidates[pool + 1]).heap(cls)
    return flows.family_of(node).line_of(pool + 1)


cdef inline Heap free_heap(Flows flows, int32_t node, int32_t cls, int32_t pool):
    """Return the heap of the children with a head that may run in any pool, in the order of a pool.
    O(1)."""
    if node == NONE:
        return free_line(flows, pool).heap(cls)
    if stands_in_one(flows):  # then no pool takes only what names it
        return flows.family_of(node).line_of(0)
    return flows.family_of(node).free_line_of(pool)


cdef inline void* family_at(Flows flows, int32_t node) noexcept:
    """Return the family of a node, borrowed: a report looks at several, and to count references to
    them would cost as much as to charge them. To be cast to Family where it is used. O(1)."""
    return <void*>flows.families[flows.items[node].family]


cdef inline bint is_node(Flows flows, int32_t flow) noexcept:
    return flows.items[flow].family != NONE


cdef inline bint has_place(Flows flows, int32_t q) noexcept:
    """Return whether a queue stands in its line. O(1)."""
    return flows.queues[q].stands


cdef inline void note_place(
    Flows flows, int32_t target, Heap line, int32_t id, int64_t tie
) noexcept:
    """Have the pools looked at that another head concerns, before an entry gets a place in the line
    of a target. A change of its key alone is noted where it happens, see note_charged(). O(1)."""
    if not line.has(id) or line.entry(id).tie != tie:
        note_line(flows, target)


cdef inline void note_line(Flows flows, int32_t target) noexcept:
    if target:
        flows.pool_order.touch(target - 1)
    else:
        flows.pool_order.stirred = True


cdef inline void watch(Flows flows, int32_t flow) noexcept:
    """Have charges of a flow, and of the nodes above it, stir the pools that rest. O(levels)."""
    while flow != NONE:
        flows.items[flow].watched = flows.pool_order.watch
        flow = flows.items[flow].parent


cdef inline int put_in_line(Flows flows, int32_t q, int64_t key, int64_t arrival) except -1:
    cdef const Flow* f = &flows.items[flows.queues[q].flow]
    cdef int32_t target = flows.queues[q].target
    flows.queues[q].stands = True
    if f.parent == NONE:
        note_place(flows, target, (<Line>flows.candidates[target]).heap(f.cls), q, arrival)
        return (<Line>flows.candidates[target]).put(f.cls, q, key, arrival, flows.now_ns)
    note_place(flows, target, flows.family_of(f.parent).line(target), f.place, arrival)
    return flows.family_of(f.parent).line(target).put(f.place, key, arrival)


cdef inline bint stands_so(
    Heap line, int32_t id, int64_t tie, bint is_stale, int64_t key
) noexcept:
    """Return whether an id is in a line with this tie, and with this key or a stale one. O(1)."""
    cdef const Node* entry
    if not line.has(id):
        return False
    entry = line.entry(id)
    return entry.tie == tie and (is_stale or entry.key == key)


cdef inline bint stand_node(Flows flows, int32_t q) except -1:
    """Give a node's queue its place by the node's counter and its first head, or none; whether its
    place has changed, which a stale node's does not while it has that head. O(log n)."""
    cdef const Flow* f = &flows.items[flows.queues[q].flow]
    cdef int32_t target = flows.queues[q].target
    cdef Family family = flows.family_of(flows.queues[q].flow)
    cdef Heap line = family.line_of(target)
    cdef int64_t key, tie
    if line.count == 0:
        if not has_place(flows, q):
            return False
        take_from_line(flows, q)
        return True
    key, tie = flows.key_of(q), line.nodes[0].tie
    if f.parent == NONE:
        if stands_so(
            (<Line>flows.candidates[target]).heap(f.cls), q, tie, family.is_stale, key
        ):
            return False
    elif stands_so(
        flows.family_of(f.parent).line_of(target), f.place, tie, family.is_stale, key
    ):
        return False
    put_in_line(flows, q, key, tie)
    return True


cdef inline int take_from_line(Flows flows, int32_t q) except -1:
    cdef const Flow* f = &flows.items[flows.queues[q].flow]
    cdef int32_t target = flows.queues[q].target
    note_line(flows, target)
    flows.queues[q].stands = False
    if f.parent == NONE:
        (<Line>flows.candidates[target]).remove(f.cls, q)
    else:
        flows.family_of(f.parent).line(target).remove(f.place)
    return 0


cdef inline int stand_nodes(Flows flows, int32_t q) except -1:
    """The line of a queue's node has changed: give each node above its place, as far up as one
    changes. O(levels * log n)."""
    return stand_nodes_above(flows, flows.queues[q].flow, flows.queues[q].target)


cdef inline int stand_nodes_above(Flows flows, int32_t flow, int32_t target) except -1:
    cdef int32_t node = flows.items[flow].parent
    while node != NONE:
        if not stand_node(flows, flows.queue_of(node, target)):
            return 0
        node = flows.items[node].parent
    return 0


cdef int32_t first_standing(Flows flows, int32_t flow, int32_t target) noexcept:
    """Return the queue of a tenant's flow with the oldest head of those in the line of a pool,
    whose target that is; -1: none is there. O(targets)."""
    cdef int32_t q = flows.items[flow].first_queue, first = NONE
    cdef int64_t seq, least = 0
    while q != NONE:
        if flows.queues[q].stands and flows.queues[q].target and (
            flows.may_take(target - 1, flows.queues[q].target - 1)
        ):
            seq = flows.requests.items[flows.queues[q].head].seq
            if first == NONE or seq < least:
                first, least = q, seq
        q = flows.queues[q].next_queue
    return first


cdef int place_child(Flows flows, int32_t flow, int32_t target, int32_t pool_position) except -1:
    """Give a tenant's flow below a node its entry in the line of a pool, with the oldest of its
    heads that stand there, or none. `pool_position`: its position there, if any head does.
    O(targets + levels * log n)."""
    cdef const Flow* f = &flows.items[flow]
    cdef int32_t q = first_standing(flows, flow, target)
    cdef Heap line = flows.family_of(f.parent).line(target)
    cdef int64_t first = line.nodes[0].tie if line.count else NONE, seq
    if q == NONE:
        note_line(flows, target)
        line.remove(f.place)
    else:
        seq = flows.requests.items[flows.queues[q].head].seq
        note_place(flows, target, line, f.place, seq)
        line.put(f.place, position_key(flows, flow, pool_position), seq)
    if line.count and line.nodes[0].tie == first:
        return 0
    return stand_nodes_above(flows, flow, target)


cdef inline int64_t position_key(Flows flows, int32_t flow, int32_t position) noexcept:
    """Return the key of a flow in the order by counters, by its position in a pool. O(1)."""
    if not flows.lifts:
        return flows.items[flow].vtc // flows.grain
    return flows.positions.items[position].key // flows.grain


cdef int stand_in_set(Flows flows, int32_t q) except -1:
    """Give a queue of a set of pools its place in the line of each.
    O(positions + pools of the set * (targets + levels * log n))."""
    cdef Queue* queue = &flows.queues[q]
    cdef Flow* f = &flows.items[queue.flow]
    cdef int32_t n = f.first_position, target = queue.target, flow = queue.flow, pool
    cdef int64_t key = 0, seq = flows.requests.items[queue.head].seq
    cdef Heap heap
    f.in_sets += not queue.stands
    queue.stands = True
    if flows.order != ORDER_COUNTER:
        key = flows.key_of(q)
    while n != NONE:
        pool = flows.positions.items[n].pool
        if flows.may_take(pool, target - 1):
            if f.parent != NONE:
                place_child(flows, flow, pool + 1, n)
            else:
                if flows.order == ORDER_COUNTER:
                    key = position_key(flows, flow, n)
                heap = (<Line>flows.candidates[pool + 1]).heap(f.cls)
                note_place(flows, pool + 1, heap, q, seq)
                (<Line>flows.candidates[pool + 1]).put(f.cls, q, key, seq, flows.now_ns)
        n = flows.positions.items[n].next_position
    return 0


cdef int leave_set(Flows flows, int32_t q) except -1:
    """Take a queue of a set out of the lines of its pools.
    O(positions + pools of the set * (targets + levels * log n))."""
    cdef int32_t flow = flows.queues[q].flow, target = flows.queues[q].target
    cdef int32_t n = flows.items[flow].first_position, pool
    flows.items[flow].in_sets -= 1
    flows.queues[q].stands = False
    while n != NONE:
        pool = flows.positions.items[n].pool
        if flows.may_take(pool, target - 1):
            if flows.items[flow].parent != NONE:
                place_child(flows, flow, pool + 1, n)
            else:
                note_line(flows, pool + 1)
                (<Line>flows.candidates[pool + 1]).remove(flows.items[flow].cls, q)
        n = flows.positions.items[n].next_position
    return 0


cdef inline int stand(Flows flows, int32_t q) except -1:
    """Give the queue of a tenant's flow its place, which it may have already; the nodes above it
    follow if another head is first in its line. O(levels * log n)."""
    cdef const Flow* f = &flows.items[flows.queues[q].flow]
    cdef int64_t seq = flows.requests.items[flows.queues[q].head].seq, first = NONE
    cdef void* line
    if flows.queues[q].target > POOLS_MAX:
        return stand_in_set(flows, q)
    if f.parent == NONE:
        return put_in_line(flows, q, flows.key_of(q), seq)
    flows.queues[q].stands = True
    if f.in_sets and flows.queues[q].target:
        return place_child(
            flows, flows.queues[q].flow, flows.queues[q].target,
            flows.find_position(flows.queues[q].flow, flows.queues[q].target - 1),
        )
    line = (<Family>flows.families[flows.items[f.parent].family]).line_at(flows.queues[q].target)
    if (<Heap>line).count:
        first = (<Heap>line).nodes[0].tie
    note_place(flows, flows.queues[q].target, <Heap>line, f.place, seq)
    (<Heap>line).put(f.place, flows.key_of(q), seq)
    return 0 if (<Heap>line).nodes[0].tie == first else stand_nodes(flows, q)


cdef inline int leave_line(Flows flows, int32_t q) except -1:
    """Take the queue of a tenant's flow out of its line, if it stands there.
    O(levels * log n)."""
    if not has_place(flows, q):
        return 0
    if flows.queues[q].target > POOLS_MAX:
        return leave_set(flows, q)
    if flows.items[flows.queues[q].flow].in_sets and flows.queues[q].target and (
        flows.items[flows.queues[q].flow].parent != NONE
    ):
        flows.queues[q].stands = False
        return place_child(
            flows, flows.queues[q].flow, flows.queues[q].target,
            flows.find_position(flows.queues[q].flow, flows.queues[q].target - 1),
        )
    take_from_line(flows, q)
    return stand_nodes(flows, q)


cdef inline int stand_by_counter(Flows flows, int32_t node) except -1:
    """Give a node its places by its counters of now, for all targets.
    O((targets + pools) * log n)."""
    cdef int32_t q = flows.items[node].first_queue
    flows.family_of(node).is_stale = False
    while q != NONE:
        stand_node(flows, q)
        if flows.queues[q].target and flows.local:
            flows.pool_order.touch(flows.queues[q].target - 1)
        elif not stands_in_one(flows):
            stand_node_anywhere(flows, q)
        q = flows.queues[q].next_queue
    return 0


cdef inline void note_stale(Flows flows, int32_t node, void* family) noexcept:
    """A node has been charged: have it placed before lines are read. O(1)."""
    cdef int32_t depth
    (<Family>family).is_stale = True
    if not (<Family>family).is_noted:
        depth = flows.items[node].depth
        (<Family>family).is_noted = True
        (<Family>family).next_stale = flows.first_stale[depth]
        flows.first_stale[depth] = node
        flows.stale_count += 1


cdef int place_nodes(Flows flows) except -1:
    """Give all stale nodes their places, the lowest first, so that those above find their heads.
    O(1) if there are none, else O((targets + pools) * log n) for each."""
    cdef int32_t depth = TREE_LEVELS, node
    cdef Family family
    while flows.stale_count:
        depth -= 1
        while flows.first_stale[depth] != NONE:
            node = flows.first_stale[depth]
            family = flows.family_of(node)
            flows.first_stale[depth] = family.next_stale
            flows.stale_count -= 1
            family.is_noted = False
            stand_by_counter(flows, node)
    return 0


cdef int place_all_nodes(Flows flows) except -1:
    """Give all nodes their places, after a change of all keys. O(flows)."""
    cdef int32_t flow
    for flow in range(flows.count):
        if is_node(flows, flow):
            note_stale(flows, flow, family_at(flows, flow))
    return place_nodes(flows)


cdef inline void freshen(
    Flows flows, Heap line, int32_t node, int32_t pool, bint is_free
) noexcept:
    """Have the first entry be the least by the keys of now, in one of the two lines that a pool has
    of the children of a node, -1: of the root. The keys of stale ones only grow. O(log n)
    amortised."""
    cdef int32_t q
    cdef int64_t key
    while flows.stale_count and line.count:
        q = queue_at(flows, node, 0 if is_free else pool + 1, line.nodes[0].id)
        if not is_node(flows, flows.queues[q].flow):
            return
        if not flows.family_of(flows.queues[q].flow).is_stale:
            return
        if is_free:
            key = flows.counter_at(flows.queues[q].flow, pool) // flows.grain
        else:
            key = flows.key_of(q)
        if key == line.nodes[0].key:
            return
        line.rekey_first(key)


cdef inline int stand_node_anywhere(Flows flows, int32_t q) except -1:
    """Give a node's queue of what may run anywhere its place in each pool. O(pools * log n)."""
    cdef int32_t node = flows.queues[q].flow, n = flows.items[node].first_position
    while n != NONE:
        stand_node_in(flows, q, flows.positions.items[n].pool)
        n = flows.positions.items[n].next_position
    return 0


cdef inline bint stand_node_in(Flows flows, int32_t q, int32_t pool) except -1:
    """Place a node in one pool; return whether its place there has changed. O(log n)."""
    cdef int32_t node = flows.queues[q].flow
    cdef const Flow* f = &flows.items[node]
    cdef Family family = flows.family_of(node)
    cdef Heap line = family.free_line_of(pool), siblings
    cdef int64_t key, tie
    if f.parent == NONE:
        siblings = (<Line>flows.anywhere[pool]).heap(f.cls)
    else:
        siblings = flows.family_of(f.parent).free_line_of(pool)
    if line.count == 0:
        if not siblings.has(q if f.parent == NONE else f.place):
            return False
        take_from_anywhere(flows, q, pool)
        return True
    key, tie = flows.counter_at(node, pool) // flows.grain, line.nodes[0].tie
    if stands_so(siblings, q if f.parent == NONE else f.place, tie, family.is_stale, key):
        return False
    # A tenant's own queue is in the line of all pools too, and that line reports its move.
    note_place(flows, 0, siblings, q if f.parent == NONE else f.place, tie)
    put_anywhere(flows, q, pool, key, tie)
    return True


cdef inline int stand_nodes_in(Flows flows, int32_t q, int32_t pool) except -1:
    """The line for any pool of a queue's node has changed in the order of a pool: give each node
    above its place there. O(levels * log n)."""
    cdef int32_t node = flows.items[flows.queues[q].flow].parent
    while node != NONE:
        if not stand_node_in(flows, flows.queue_of(node, 0), pool):
            return 0
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
    """Return the flow with a number in the lines of a node, -1: of the root. O(1)."""
    return flows.queues[id].flow if node == NONE else flows.family_of(node).members[id]


cdef inline int32_t queue_at(Flows flows, int32_t node, int32_t target, int32_t id) noexcept:
    """Return the queue with a number in the line of a node for a target, -1: of the root.
    O(targets)."""
    cdef int32_t child
    if node == NONE:
        return id
    child = flows.family_of(node).members[id]
    if target and flows.items[child].in_sets:
        return first_standing(flows, child, target)
    return flows.find_queue(child, target)
