# Position local to a pool, while there are several: where each flow stands in each of them.
#
# Charge: service moves the flow's keys in all pools of the domain. Lift: a flow that gets something
# queued in a pool begins there at the pool's level less the credit; the level never falls, see
# flows. Lead: service elsewhere may bring a flow ahead of the others in a pool only up to their
# least key plus the lead. The rest is forgiven at once, or when the flow is next queued there. So
# with one pool nothing is ever forgiven, and what a flow does in one pool cannot starve it, or
# the others, in another one. The pool forgives nothing later: otherwise a flow could save up
# service elsewhere, and have its service in the pool itself forgiven. Requests for any pool are in
# the lines of all pools, and those for a set of pools in the lines of these.
#
# A position belongs to a flow and a pool. One for each line and pool would do only while each flow
# has one target. Otherwise, of two flows that ask for a pool, the one that was also served in a
# quick one would get nothing after the quick one has gone, until the other has caught up.
#
# In the tree of shares all of this holds among the children of each node. A node is backlogged in a
# pool while a child is; it is lifted when the first of them becomes so.


cdef inline int64_t lead_of(Flows flows, int32_t pool, const Flow* f) noexcept:
    """Return how far ahead of the others in a pool service elsewhere may keep a flow, or a node:
    beside the lead, as far as passing a head may bring it there (see backfill.pxi). Else a flow
    that passes in each of several pools would be forgiven in each what it led by.

    While large requests of another flow wait and run, this one is served elsewhere, and their flow
    catches up with that later. So an automatic lead goes by the largest charge: by the average one,
    a flow of small requests would be forgiven most of it. It goes by the flow's own weight: by
    others' weights, one of a small weight would let all fall far behind."""
    cdef int64_t lead = flows.positions.lead_max
    if lead == LEAD_AUTO:
        lead = LEAD_CHARGES * 1000 * min(flows.largest_charge, LEAD_MOST) // f.weight_milli
        lead = flows.positions.pace[pool] + min(lead, LEAD_MOST)
    return lead + flows.lead_given_max


cdef int32_t position_of(Flows flows, int32_t flow, int32_t pool) except -1:
    """Return the position of a flow in a pool; a new one is a newcomer's. O(positions of the
    flow)."""
    cdef int32_t n = flows.find_position(flow, pool)
    return new_position(flows, flow, pool) if n == NONE else n


cdef int32_t new_position(Flows flows, int32_t flow, int32_t pool) except -1:
    """Give a flow that has no position in a pool that of a newcomer. O(1)."""
    cdef Flow* f = &flows.items[flow]
    cdef int32_t n = flows.positions.add(flow, pool, flows.newcomer_at(flow, pool))
    flows.positions.items[n].next_position = f.first_position
    f.first_position = n
    if is_node(flows, flow) and pool < POOLS_ORDERED:
        flows.family_of(flow).positions[pool] = n
    return n


cdef bint first_of_pool(Flows flows, int32_t flow, int32_t pool, Node* first) noexcept:
    """Find the least (key, sequence number) of a flow and its siblings in a pool; return whether
    any stands there. O(1)."""
    cdef int32_t cls = flows.items[flow].cls, node = flows.items[flow].parent
    cdef Heap own = own_heap(flows, node, cls, pool), free = free_heap(flows, node, cls, pool)
    freshen(flows, own, node, pool, False)
    freshen(flows, free, node, pool, True)
    if own.count:
        first[0] = own.nodes[0]
    if free.count and (
        own.count == 0 or less_by(&free.nodes[0], &own.nodes[0], shift_of(flows, cls, pool))
    ):
        first[0] = free.nodes[0]
        first.key += shift_of(flows, cls, pool)
    return own.count > 0 or free.count > 0


cdef int64_t raise_level_in(Flows flows, int32_t flow, int32_t pool) noexcept:
    """Let the level of a flow and its siblings in a pool follow their least key, while the policy
    goes by the keys. It never falls. O(1)."""
    cdef Node first
    cdef int64_t* level = flows.level_in(flow, pool)
    if flows.order != ORDER_COUNTER or not flows.lifts:
        return level[0]
    if flows.one_line:
        keep_shift(flows, flows.items[flow].cls, pool)
    if first_of_pool(flows, flow, pool, &first):
        level[0] = max(level[0], first.key * flows.grain)
    return level[0]


cdef void raise_levels_in(Flows flows, int32_t flow, int32_t pool) noexcept:
    """Raise the levels of a flow and of the nodes above it. O(levels)."""
    while flow != NONE:
        raise_level_in(flows, flow, pool)
        flow = flows.items[flow].parent


cdef int join_pool(Flows flows, int32_t n, bint earns) except -1:
    """A flow has become backlogged in the pool of a position: count it below its node.
    O(levels)."""
    cdef int32_t flow = flows.positions.items[n].flow
    if flows.items[flow].parent == NONE or flows.positions.items[n].backlogged:
        return 0
    flows.positions.items[n].backlogged = 1
    return join_nodes(flows, flow, flows.positions.items[n].pool, True, earns)


cdef int join_nodes(
    Flows flows, int32_t flow, int32_t pool, bint lifts, bint earns
) except -1:
    """Count a flow at its node as backlogged in a pool, and so on up while a node was not. Each of
    these is lifted, with the credit if it earns it. O(levels)."""
    cdef int32_t node = flows.items[flow].parent, n
    cdef int64_t least
    while node != NONE:
        n = position_of(flows, node, pool)
        flows.positions.items[n].backlogged += 1
        if flows.positions.items[n].backlogged > 1:
            return 0
        if flows.lifts and lifts:
            least = raise_level_in(flows, node, pool)
            least -= flows.credit(flows.items[node].depth) if earns else 0
            flows.positions.items[n].key = max(flows.positions.items[n].key, least)
        flows.changed.mark(node)
        node = flows.items[node].parent
    return 0


cdef void part_pool(Flows flows, int32_t n) noexcept:
    """A flow is not backlogged any more in the pool of a position. O(levels)."""
    if flows.positions.items[n].backlogged:
        flows.positions.items[n].backlogged = 0
        part_nodes(flows, flows.positions.items[n].flow, flows.positions.items[n].pool)


cdef void part_nodes(Flows flows, int32_t flow, int32_t pool) noexcept:
    # Count a flow at its node no more, nor a node of which it was the last.
    cdef int32_t node = flows.items[flow].parent, n
    while node != NONE:
        n = flows.find_position(node, pool)
        flows.positions.items[n].backlogged -= 1
        if flows.positions.items[n].backlogged:
            return
        flows.changed.mark(node)
        node = flows.items[node].parent


cdef int part_emptied(Flows flows, int32_t flow) except -1:
    """A queue of a flow below a node is empty: in pools for which the flow has nothing queued it is
    not backlogged any more. O(targets + pools + levels)."""
    cdef IndexSet queued
    cdef IndexSet stands
    cdef int32_t n = flows.items[flow].first_position
    find_lines(flows, flow, &queued, &stands)
    while n != NONE:
        if not is_for(flows, &queued, flows.positions.items[n].pool):
            part_pool(flows, n)
        n = flows.positions.items[n].next_position
    return 0


# With more than POOLS_ORDERED pools, a place of each queue in a line of each pool would cost what
# all pools cost. Requests for any pool are then in one line, in the order of the flows' counters
# over all pools. A pool compares them with the requests that must run there by one difference for
# all of a class, the shift: a counter and the shift are a key in that pool. The shift keeps the
# head of the line within the same bounds as a flow: no further behind the pool's level than the
# credit, and no further ahead of the requests that must run there than the lead.

cdef int64_t shift_of(Flows flows, int32_t cls, int32_t pool) noexcept:
    """Return the shift of a pool for keys of the line for any pool, in their grain. O(1)."""
    cdef Heap own, free
    cdef int64_t key, here
    cdef const Flow* f
    if not flows.one_line or flows.order != ORDER_COUNTER or not flows.lifts:
        return 0
    own = (<Line>flows.candidates[pool + 1]).heap(cls)
    free = free_line(flows, pool).heap(cls)
    if free.count == 0:
        return flows.positions.shift(cls, pool)[0] // flows.grain
    key = free.nodes[0].key
    here = key + flows.positions.shift(cls, pool)[0] // flows.grain
    if own.count and flows.queues[own.nodes[0].id].flow != flows.queues[free.nodes[0].id].flow:
        f = &flows.items[flows.queues[free.nodes[0].id].flow]
        here = min(here, own.nodes[0].key + lead_of(flows, pool, f) // flows.grain)
    here = max(here, (flows.positions.level(cls, pool)[0] - flows.credit(0)) // flows.grain)
    return here - key


cdef inline void keep_shift(Flows flows, int32_t cls, int32_t pool) noexcept:
    flows.positions.shift(cls, pool)[0] = shift_of(flows, cls, pool) * flows.grain


cdef int begin_in_pools(Flows flows, int32_t flow, int32_t target) except -1:
    """The flow gets something queued for a target: lift it in each pool that this target means
    and in which it had nothing queued. O(pools), with one line O(targets of the flow)."""
    cdef IndexSet busy
    cdef int32_t q = flows.items[flow].first_queue, n, k, pool, pools
    if target == 0 and flows.one_line:
        return 0
    if target > POOLS_MAX:
        return begin_in_set(flows, flow, target)
    pools = <int32_t>len(flows.anywhere)
    busy = flows.named_only
    while q != NONE:
        if flows.queues[q].chain.count:
            if flows.queues[q].target == target:
                return 0  # it stands in these pools already
            if flows.queues[q].target > POOLS_MAX:
                if target and flows.may_take(target - 1, flows.queues[q].target - 1):
                    return 0
                for k in range(flows.sets.line_count(flows.queues[q].target)):
                    set_add(&busy, flows.sets.line_at(flows.queues[q].target, k) - 1)
            elif flows.queues[q].target:
                set_add(&busy, flows.queues[q].target - 1)
            elif not flows.one_line and flows.may_take(target - 1, NONE):
                return 0
        q = flows.queues[q].next_queue
    if target:
        return begin_in_pool(flows, flow, target - 1)
    n = flows.items[flow].first_position
    while n != NONE:  # those that it has are not looked for again
        pool = flows.positions.items[n].pool
        if not set_has(&busy, pool):
            set_add(&busy, pool)
            begin_at(flows, n)
        n = flows.positions.items[n].next_position
    for pool in range(pools):
        if not set_has(&busy, pool):
            begin_at(flows, new_position(flows, flow, pool))
    return 0


cdef int begin_in_set(Flows flows, int32_t flow, int32_t target) except -1:
    """The flow gets something queued for a set of pools. O(targets + pools of the set *
    positions)."""
    cdef IndexSet queued
    cdef IndexSet stands
    cdef int32_t k, pool
    find_lines(flows, flow, &queued, &stands)
    for k in range(flows.sets.line_count(target)):
        pool = flows.sets.line_at(target, k) - 1
        if set_has(&queued, pool + 1):
            continue
        if flows.one_line or not is_for(flows, &queued, pool):
            begin_in_pool(flows, flow, pool)
    return 0


cdef int begin_in_pool(Flows flows, int32_t flow, int32_t pool) except -1:
    return begin_at(flows, position_of(flows, flow, pool))


cdef int begin_at(Flows flows, int32_t n) except -1:
    """Lift a flow in the pool of a position. O(levels)."""
    cdef Position* p = &flows.positions.items[n]
    p.waits_at = NONE
    if flows.lifts:
        p.key = max(
            p.key,
            raise_level_in(flows, p.flow, p.pool) - flows.credit(flows.items[p.flow].depth),
        )
    flows.changed.mark(p.flow)
    return join_pool(flows, n, True)


cdef int rebase_pool(Flows flows, int32_t flow, int32_t pool) except -1:
    # As `rebase()` does for counters, once in about 2^60 micro-tokens. O(positions + queues).
    cdef Node first
    cdef int64_t base = 0
    cdef int64_t* level = flows.level_in(flow, pool)
    cdef int32_t n, q
    if first_of_pool(flows, flow, pool, &first):
        base = first.key * flows.grain - flows.credit(flows.items[flow].depth)
    if base < VTC_REBASE // 2 or flows.order != ORDER_COUNTER:
        return 0
    place_nodes(flows)
    flows.pool_order.stirred = True
    level[0] = max(<int64_t>0, level[0] - base)
    if flows.items[flow].parent == NONE:
        flows.positions.shift(flows.items[flow].cls, pool)[0] -= base
    for n in range(flows.positions.count):
        if flows.positions.items[n].pool == pool and flows.positions.items[n].flow != NONE:
            if are_siblings(flows, flows.positions.items[n].flow, flow):
                flows.positions.items[n].key = max(
                    <int64_t>0, flows.positions.items[n].key - base
                )
                flows.changed.mark(flows.positions.items[n].flow)
    for q in range(flows.queue_count):
        if are_siblings(flows, flows.queues[q].flow, flow):
            replace_in_line(flows, q)
    return 0


cdef inline bint are_siblings(Flows flows, int32_t a, int32_t b) noexcept:
    return (
        flows.items[a].parent == flows.items[b].parent and flows.items[a].cls == flows.items[b].cls
    )


cdef int replace_in_line(Flows flows, int32_t q) except -1:
    """Give a queue in the line, and the nodes above it, their places by the keys of now.
    O((levels + pools) * log n)."""
    if not has_place(flows, q):
        return 0
    if is_node(flows, flows.queues[q].flow):
        stand_by_counter(flows, flows.queues[q].flow)
        return stand_above(flows, q)
    stand(flows, q)
    return (
        stand_anywhere(flows, q) if flows.queues[q].target == 0 and not flows.one_line else 0
    )


cdef int stand_above(Flows flows, int32_t q) except -1:
    """The places of a node's queue have changed: give each node above its own.
    O(levels * pools * log n)."""
    cdef int32_t n = flows.items[flows.queues[q].flow].first_position
    stand_nodes(flows, q)
    while n != NONE and flows.queues[q].target == 0 and not stands_in_one(flows):
        stand_nodes_in(flows, q, flows.positions.items[n].pool)
        n = flows.positions.items[n].next_position
    return 0


cdef int stand_anywhere(Flows flows, int32_t q) except -1:
    """Give a queue whose requests may run anywhere its place in each pool, and the nodes above it.
    O(levels * pools * log n)."""
    cdef Queue* queue = &flows.queues[q]
    cdef int32_t n = flows.items[queue.flow].first_position
    cdef int64_t key = flows.key_of(q), seq = flows.requests.items[queue.head].seq
    cdef Position* p
    while n != NONE:
        p = &flows.positions.items[n]
        if flows.order == ORDER_COUNTER and flows.lifts:
            key = p.key // flows.grain
        n = p.next_position
        if not flows.may_take(p.pool, NONE):
            continue
        put_anywhere(flows, q, p.pool, key, seq)
        stand_nodes_in(flows, q, p.pool)
    return 0


cdef int leave_anywhere(Flows flows, int32_t q) except -1:
    cdef int32_t pool
    for pool in range(<int32_t>len(flows.anywhere)):
        take_from_anywhere(flows, q, pool)
        stand_nodes_in(flows, q, pool)
    return 0


cdef void find_lines(Flows flows, int32_t flow, IndexSet* queued, IndexSet* stands) noexcept:
    """Find the targets for which a flow has requests queued, and those for which it is in the line;
    for a set of pools, these pools. O(targets + pools of its sets)."""
    cdef int32_t q = flows.items[flow].first_queue, target, k
    set_clear(queued, <int32_t>len(flows.candidates))
    set_clear(stands, <int32_t>len(flows.candidates))
    while q != NONE:
        for k in range(flows.sets.line_count(flows.queues[q].target)):
            target = flows.sets.line_at(flows.queues[q].target, k)
            if flows.queues[q].chain.count:
                set_add(queued, target)
            if has_place(flows, q):
                set_add(stands, target)
        q = flows.queues[q].next_queue


cdef inline bint is_for(Flows flows, const IndexSet* targets, int32_t pool) noexcept:
    """Return whether one of some targets means a pool. O(1)."""
    return set_has(targets, pool + 1) or (set_has(targets, 0) and flows.may_take(pool, NONE))


cdef int wait_in_pools(Flows flows, int32_t flow) except -1:
    """Note in which pools all that a flow has queued waits for a quota, or for its share: there it
    is lifted with those that wait at the same node. O(targets)."""
    cdef Flow* f = &flows.items[flow]
    cdef IndexSet queued
    cdef IndexSet stands
    cdef int32_t n = f.first_position, node = f.waits_at, place
    cdef Position* p
    if node == NONE and f.throttled:
        node = flows.quotas.guarantees.root
    if node == NONE:
        return 0
    find_lines(flows, flow, &queued, &stands)
    while n != NONE:
        p = &flows.positions.items[n]
        place, n = n, p.next_position
        if is_for(flows, &stands, p.pool) or p.waits_at == node:
            continue
        if not is_for(flows, &queued, p.pool):
            continue
        if p.waits_at != NONE:
            keep_lift(flows, p)
        p.waits_at, p.wait_lift = node, flows.positions.lift_of(node, f.cls, p.pool)
        part_pool(flows, place)
    return 0


cdef void keep_lift(Flows flows, Position* p) noexcept:
    # Those that waited with it may have been lifted since.
    cdef int64_t lift = flows.positions.lift_of(p.waits_at, flows.items[p.flow].cls, p.pool)
    p.key = min(p.key + lift - p.wait_lift, VTC_MAX)
    p.waits_at = NONE


cdef bint return_to_pools(Flows flows, int32_t q) except -1:
    """Lift a flow in pools in which it waited, without credit, before a queue of it enters the
    line; return whether it waited in any. O(positions of the flow)."""
    cdef int32_t n = flows.items[flows.queues[q].flow].first_position
    cdef int32_t target = flows.queues[q].target, cls = flows.items[flows.queues[q].flow].cls
    cdef int32_t node, place
    cdef bint waited = False
    cdef int64_t least
    cdef Position* p
    while n != NONE:
        p = &flows.positions.items[n]
        place, n = n, p.next_position
        node = p.waits_at
        if node == NONE or not flows.may_take(p.pool, target - 1):
            continue
        keep_lift(flows, p)
        least = raise_level_in(flows, p.flow, p.pool)
        if flows.lifts and p.key < least:
            flows.positions.add_lift(node, cls, p.pool, least - p.key)
            p.key = least
        join_pool(flows, place, False)
        waited = True
    return waited
