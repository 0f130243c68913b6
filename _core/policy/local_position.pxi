# Position local to a pool, while there are several: where each flow stands in each of them.
#
# Charge: service moves the flow's keys in all pools of the domain. Lift: a flow that gets something
# queued in a pool begins there at the pool's level less the credit; the level never falls, see
# flows. Lead: service elsewhere may bring a flow no further ahead of the others in a pool than
# their least key and the lead; the rest is forgiven at once, or when the flow next stands in line
# there. So with one pool nothing is ever forgiven, and what a flow does in one pool cannot starve
# it, or the others, in another one. The pool forgives nothing later: otherwise a flow could save up
# service elsewhere, and have its service in the pool itself forgiven. Requests for any pool stand
# in a line of each pool.


cdef inline Line free_line(Flows flows, int32_t pool):
    """The line, in the order of a pool, of the queues whose requests may run in any pool."""
    return <Line>(flows.candidates[0] if stands_in_one(flows) else flows.anywhere[pool])


cdef inline bint stands_in_one(Flows flows) noexcept:
    """Whether what may run anywhere stands in one line, and not in one of each pool."""
    return flows.one_line or not flows.local


cdef inline int64_t lead_of(Flows flows, int32_t pool) noexcept:
    """How far ahead of the others in a pool service elsewhere may keep a flow."""
    if flows.positions.lead_max != LEAD_AUTO:
        return flows.positions.lead_max
    return 2 * flows.average_charge[0] + flows.positions.pace[pool]


cdef int32_t position_of(Flows flows, int32_t flow, int32_t pool) except -1:
    """The position of a flow in a pool; a new one is a newcomer's. O(positions of the flow)."""
    cdef int32_t n = flows.find_position(flow, pool)
    return new_position(flows, flow, pool) if n == NONE else n


cdef int32_t new_position(Flows flows, int32_t flow, int32_t pool) except -1:
    """A newcomer's position of a flow that has none in a pool. O(1)."""
    cdef Flow* f = &flows.items[flow]
    cdef int32_t n = flows.positions.add(flow, pool, flows.newcomer_at(f.cls, pool))
    flows.positions.items[n].next_position = f.first_position
    f.first_position = n
    return n


cdef bint first_of_pool(Flows flows, int32_t cls, int32_t pool, Node* first) noexcept:
    """The least (key, sequence number) of a class in a pool; whether any stands there. O(1)."""
    cdef Heap own = (<Line>flows.candidates[pool + 1]).heap(cls)
    cdef Heap free = free_line(flows, pool).heap(cls)
    if own.count:
        first[0] = own.nodes[0]
    if free.count and (
        own.count == 0 or less_by(&free.nodes[0], &own.nodes[0], shift_of(flows, cls, pool))
    ):
        first[0] = free.nodes[0]
        first.key += shift_of(flows, cls, pool)
    return own.count > 0 or free.count > 0


cdef int64_t raise_level_in(Flows flows, int32_t cls, int32_t pool) noexcept:
    """Let the level of a class in a pool follow its least key, while the policy goes by the keys.
    It never falls. O(1)."""
    cdef Node first
    cdef int64_t* level = flows.positions.level(cls, pool)
    if flows.order != ORDER_COUNTER or not flows.lifts:
        return level[0]
    if flows.one_line:
        keep_shift(flows, cls, pool)
    if first_of_pool(flows, cls, pool, &first):
        level[0] = max(level[0], first.key * flows.grain)
    return level[0]


# With more than POOLS_ORDERED pools, a place of each queue in a line of each pool would cost what
# all pools cost. What may run anywhere then stands in one line, in the order of the flows' counters
# over all pools. In a pool it stands beside what must run there with one difference for all of a
# class, the shift: a counter and the shift are a key in that pool. The shift keeps the head of the
# line within the same bounds as a flow: no further behind the pool's level than the credit, and no
# further ahead of those who must run there than the lead.

cdef int64_t shift_of(Flows flows, int32_t cls, int32_t pool) noexcept:
    """What a pool adds to keys of the line for any pool, in their grain. O(1)."""
    cdef Heap own, free
    cdef int64_t key, here
    if not flows.one_line or flows.order != ORDER_COUNTER or not flows.lifts:
        return 0
    own = (<Line>flows.candidates[pool + 1]).heap(cls)
    free = (<Line>flows.candidates[0]).heap(cls)
    if free.count == 0:
        return flows.positions.shift(cls, pool)[0] // flows.grain
    key = free.nodes[0].key
    here = key + flows.positions.shift(cls, pool)[0] // flows.grain
    if own.count and flows.queues[own.nodes[0].id].flow != flows.queues[free.nodes[0].id].flow:
        here = min(here, own.nodes[0].key + lead_of(flows, pool) // flows.grain)
    here = max(here, (flows.positions.level(cls, pool)[0] - flows.credit(0)) // flows.grain)
    return here - key


cdef inline void keep_shift(Flows flows, int32_t cls, int32_t pool) noexcept:
    flows.positions.shift(cls, pool)[0] = shift_of(flows, cls, pool) * flows.grain


cdef void begin_shift(Flows flows, int32_t pool) noexcept:
    """Let the line for any pool stand in a pool at its level. O(classes)."""
    cdef int32_t cls
    for cls in range(CLASSES_MAX):
        flows.positions.shift(cls, pool)[0] = (
            flows.positions.level(cls, pool)[0] - flows.level[cls]
        )


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
            if flows.find_queue(flow, flows.positions.items[last].pool + 1) != NONE:
                flows.positions.items[last].next_position = flows.items[flow].first_position
                flows.items[flow].first_position = last
            else:
                flows.positions.items[last].next_position = NONE
                flows.positions.release(last)
                flows.changed.mark(flow)
    for pool in range(<int32_t>len(flows.anywhere)):
        begin_shift(flows, pool)
    return 0


cdef int begin_in_pools(Flows flows, int32_t flow, int32_t target) except -1:
    """The flow gets something queued for a target: lift it in each pool that this target means
    and in which it had nothing queued. O(pools), with one line O(targets of the flow)."""
    cdef IndexSet busy
    cdef int32_t q = flows.items[flow].first_queue, n, pool, pools
    if target == 0 and flows.one_line:
        return 0
    pools = <int32_t>len(flows.anywhere)
    set_clear(&busy, pools)
    while q != NONE:
        if flows.queues[q].chain.count:
            if flows.queues[q].target == target:
                return 0  # it stands in these pools already
            if flows.queues[q].target:
                set_add(&busy, flows.queues[q].target - 1)
            elif not flows.one_line:
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


cdef int begin_in_pool(Flows flows, int32_t flow, int32_t pool) except -1:
    return begin_at(flows, position_of(flows, flow, pool))


cdef int begin_at(Flows flows, int32_t n) except -1:
    """Lift a flow in the pool of a position. O(1)."""
    cdef Position* p = &flows.positions.items[n]
    cdef int32_t cls = flows.items[p.flow].cls
    p.waits_at = NONE
    if flows.lifts:
        p.key = max(p.key, raise_level_in(flows, cls, p.pool) - flows.credit(0))
    flows.changed.mark(p.flow)
    return 0


cdef int charge_positions(
    Flows flows, int32_t flow, int64_t weighted_micro, int32_t served_in
) except -1:
    """Add service in a pool to the keys of a flow; negative: a refund. O(positions of the flow)."""
    cdef int32_t n = flows.items[flow].first_position
    cdef Position* p
    while n != NONE:
        p = &flows.positions.items[n]
        n = p.next_position
        if not flows.positions.counts(p.pool, served_in):
            continue
        if p.pool != served_in:
            p.foreign = min(max(<int64_t>0, p.foreign + weighted_micro), VTC_MAX)
        p.key = min(max(<int64_t>0, p.key + weighted_micro), VTC_MAX)
        if p.key > VTC_REBASE:
            rebase_pool(flows, flows.items[flow].cls, p.pool)
    return 0


cdef int rebase_pool(Flows flows, int32_t cls, int32_t pool) except -1:
    # As `rebase()` does for counters, once in about 2^60 micro-tokens. O(positions + queues).
    cdef Node first
    cdef int64_t base = 0
    cdef int64_t* level = flows.positions.level(cls, pool)
    cdef int32_t n, q
    if first_of_pool(flows, cls, pool, &first):
        base = first.key * flows.grain - flows.credit(0)
    if base < VTC_REBASE // 2 or flows.order != ORDER_COUNTER:
        return 0
    level[0] = max(<int64_t>0, level[0] - base)
    flows.positions.shift(cls, pool)[0] -= base
    for n in range(flows.positions.count):
        if flows.positions.items[n].pool == pool and flows.positions.items[n].flow != NONE:
            if flows.items[flows.positions.items[n].flow].cls == cls:
                flows.positions.items[n].key = max(
                    <int64_t>0, flows.positions.items[n].key - base
                )
                flows.changed.mark(flows.positions.items[n].flow)
    for q in range(flows.queue_count):
        if flows.items[flows.queues[q].flow].cls == cls:
            replace_in_line(flows, q)
    return 0


cdef int replace_in_line(Flows flows, int32_t q) except -1:
    """Give a queue that stands in line its places by the keys of now. O(pools * log n)."""
    if is_node(flows, flows.queues[q].flow) or not has_place(flows, q):
        return 0
    stand(flows, q)
    return (
        stand_anywhere(flows, q) if flows.queues[q].target == 0 and not flows.one_line else 0
    )


cdef int stand_anywhere(Flows flows, int32_t q) except -1:
    """Give a queue whose requests may run anywhere its place in each pool. O(pools * log n)."""
    cdef Queue* queue = &flows.queues[q]
    cdef int32_t n = flows.items[queue.flow].first_position
    cdef int64_t key = flows.key_of(q), seq = flows.requests.items[queue.chain.head].seq
    cdef Position* p
    while n != NONE:
        p = &flows.positions.items[n]
        if flows.order == ORDER_COUNTER and flows.lifts:
            key = p.key // flows.grain
        (<Line>flows.anywhere[p.pool]).put(
            flows.items[queue.flow].cls, q, key, seq, flows.now_ns
        )
        n = p.next_position
    return 0


cdef int leave_anywhere(Flows flows, int32_t q) except -1:
    cdef int32_t pool, cls = flows.items[flows.queues[q].flow].cls
    for pool in range(<int32_t>len(flows.anywhere)):
        (<Line>flows.anywhere[pool]).remove(cls, q)
    return 0


cdef int bring_back(Flows flows, int32_t flow) except -1:
    """Where a flow stands too far ahead because of service elsewhere, forgive it some of that.
    O(positions * log n)."""
    cdef int32_t n = flows.items[flow].first_position, cls = flows.items[flow].cls, q
    cdef IndexSet queued
    cdef IndexSet stands
    cdef bint lowered = False
    cdef Node first
    cdef Position* p
    cdef int64_t less_by
    if flows.order != ORDER_COUNTER or not flows.lifts:
        return 0
    while n != NONE and flows.positions.items[n].foreign == 0:
        n = flows.positions.items[n].next_position
    if n == NONE:
        return 0
    find_lines(flows, flow, &queued, &stands)
    while n != NONE:
        p = &flows.positions.items[n]
        n = p.next_position
        if p.foreign == 0 or not (set_has(&stands, 0) or set_has(&stands, p.pool + 1)):
            continue
        first_of_pool(flows, cls, p.pool, &first)
        if flows.queues[first.id].flow != flow:
            less_by = p.key - first.key * flows.grain - lead_of(flows, p.pool)
            less_by = min(less_by, p.foreign)
            if less_by > 0:
                p.key -= less_by
                flows.positions.forgiven = min(flows.positions.forgiven + less_by, VTC_MAX)
                lowered = True
        p.foreign = 0  # what is left of it stays
    if lowered:
        flows.changed.mark(flow)
        q = flows.items[flow].first_queue
        while q != NONE:
            replace_in_line(flows, q)
            q = flows.queues[q].next_queue
    return 0


cdef void find_lines(Flows flows, int32_t flow, IndexSet* queued, IndexSet* stands) noexcept:
    """For which targets a flow has something queued, and for which it stands in line.
    O(targets)."""
    cdef int32_t q = flows.items[flow].first_queue, target
    set_clear(queued, <int32_t>len(flows.candidates))
    set_clear(stands, <int32_t>len(flows.candidates))
    while q != NONE:
        target = flows.queues[q].target
        if flows.queues[q].chain.count:
            set_add(queued, target)
        if has_place(flows, q):
            set_add(stands, target)
        q = flows.queues[q].next_queue


cdef int wait_in_pools(Flows flows, int32_t flow) except -1:
    """Note in which pools all that a flow has queued waits for a quota, or for its share: there it
    is lifted with those that wait at the same node. O(targets)."""
    cdef Flow* f = &flows.items[flow]
    cdef IndexSet queued
    cdef IndexSet stands
    cdef int32_t n = f.first_position, node = f.waits_at, target
    cdef Position* p
    if node == NONE and f.throttled:
        node = flows.quotas.guarantees.root
    if node == NONE:
        return 0
    find_lines(flows, flow, &queued, &stands)
    while n != NONE:
        p = &flows.positions.items[n]
        n = p.next_position
        target = p.pool + 1
        if set_has(&stands, 0) or set_has(&stands, target) or p.waits_at == node:
            continue
        if not (set_has(&queued, 0) or set_has(&queued, target)):
            continue
        if p.waits_at != NONE:
            keep_lift(flows, p)
        p.waits_at, p.wait_lift = node, flows.positions.lift_of(node, f.cls, p.pool)
    return 0


cdef void keep_lift(Flows flows, Position* p) noexcept:
    # Those that waited with it may have been lifted since.
    cdef int64_t lift = flows.positions.lift_of(p.waits_at, flows.items[p.flow].cls, p.pool)
    p.key = min(p.key + lift - p.wait_lift, VTC_MAX)
    p.waits_at = NONE


cdef bint return_to_pools(Flows flows, int32_t q) except -1:
    """A queue is about to stand in line: lift its flow in pools in which it waited, without
    credit; whether it waited in any. O(positions of the flow)."""
    cdef int32_t n = flows.items[flows.queues[q].flow].first_position
    cdef int32_t target = flows.queues[q].target, cls = flows.items[flows.queues[q].flow].cls, node
    cdef bint waited = False
    cdef int64_t least
    cdef Position* p
    while n != NONE:
        p = &flows.positions.items[n]
        n = p.next_position
        node = p.waits_at
        if node == NONE or (target and target != p.pool + 1):
            continue
        keep_lift(flows, p)
        least = raise_level_in(flows, cls, p.pool)
        if flows.lifts and p.key < least:
            flows.positions.add_lift(node, cls, p.pool, least - p.key)
            p.key = least
        waited = True
    return waited


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
    return 0


cdef int add_to_pool(Flows flows, int32_t pool, bint begins) except -1:
    """A pool has come: what may run there stands there. O(queues * log n)."""
    cdef int32_t q, flow
    for q in range(flows.queue_count):
        flow = flows.queues[q].flow
        if flows.queues[q].target == 0 and flows.one_line:
            continue
        if flows.queues[q].target in (0, pool + 1) and flows.queues[q].chain.count:
            if begins:
                begin_in_pool(flows, flow, pool)
            replace_in_line(flows, q)
            wait_in_pools(flows, flow)
    return 0
