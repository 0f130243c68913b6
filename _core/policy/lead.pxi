# Charges service in all pools, and holds the lead: how far service elsewhere may bring a flow, or a
# node, ahead of its siblings in a pool.
#
# A report charges each node above its flow, and rarely brings one too far ahead. So the node's keys
# are compared with those that stand in the lines first. Only where it may be too far ahead by these
# are the lines made fresh: that cost more than all the rest of a report.


cdef inline int charge_position(
    Flows flows, Position* p, int64_t weighted_micro, int32_t served_in
) except -1:
    """Add service in a pool to one of the keys, if it counts there. O(1)."""
    if not flows.positions.counts(p.pool, served_in):
        return 0
    if p.pool != served_in:
        p.foreign = min(max(<int64_t>0, p.foreign + weighted_micro), VTC_MAX)
    p.key = min(max(<int64_t>0, p.key + weighted_micro), VTC_MAX)
    return rebase_pool(flows, p.flow, p.pool) if p.key > VTC_REBASE else 0


cdef int charge_positions(
    Flows flows, int32_t flow, int64_t weighted_micro, int32_t served_in
) except -1:
    """Add service in a pool to the keys of a flow; negative: a refund. O(positions of the flow)."""
    cdef int32_t n = flows.items[flow].first_position
    cdef Position* p
    while n != NONE:
        p = &flows.positions.items[n]
        n = p.next_position
        charge_position(flows, p, weighted_micro, served_in)
    return 0


cdef inline int64_t least_beside(Flows flows, const Flow* f, void* above, int32_t pool) noexcept:
    """Return the least key in the lines of a pool in which a flow stands; `above`: its node's
    family, NULL at the root."""
    cdef void* own
    cdef void* free
    if above != NULL:
        return (<Family>above).least_key(pool)
    own = (<Line>flows.candidates[pool + 1]).heap_at[f.cls]
    free = (<Line>flows.anywhere[pool]).heap_at[f.cls]
    return first_key(free, first_key(own, NONE))


cdef inline bint may_be_ahead(
    Flows flows, const Position* p, const Flow* f, void* above
) noexcept:
    """Return whether a flow that stands in a pool may be further ahead than the lead lets it. It is
    not if it is not by the keys in the lines: those of stale nodes are of before, and no greater
    than those of now. So most reports need not freshen the lines. O(1)."""
    if flows.one_line:
        return True  # the shift is part of the keys
    return p.key - least_beside(flows, f, above, p.pool) * flows.grain > (
        lead_of(flows, p.pool, f)
    )


cdef bint charge_node(
    Flows flows, int32_t node, void* family, void* above, int64_t weighted_micro,
    int32_t served_in,
) except -1:
    """Add service in a pool to the keys of a node; whether it may be too far ahead in one, so that
    `bring_back()` has to look at it. `above`: the family of the node above it, NULL at the root.
    O(positions of the node)."""
    cdef const Flow* f = &flows.items[node]
    cdef int32_t n = f.first_position
    cdef bint looks = False, compares = flows.order == ORDER_COUNTER and flows.lifts
    cdef Position* p
    while n != NONE:
        p = &flows.positions.items[n]
        n = p.next_position
        charge_position(flows, p, weighted_micro, served_in)
        if p.foreign and compares and (<Family>family).stands_in(p.pool):
            if may_be_ahead(flows, p, f, above):
                looks = True
            else:
                p.foreign = 0  # what is left of it stays
    return looks


cdef int64_t too_far_ahead(Flows flows, const Position* p) noexcept:
    """Return how much further ahead of the others service elsewhere keeps a flow that stands in a
    pool than the lead allows; none if not above 0. O(log n) amortised."""
    cdef const Flow* f = &flows.items[p.flow]
    cdef Node first
    first_of_pool(flows, p.flow, p.pool, &first)
    if child_at(flows, f.parent, first.id) == p.flow:
        return 0
    return min(
        p.key - first.key * flows.grain - lead_of(flows, p.pool, f), p.foreign
    )


cdef int bring_back(Flows flows, int32_t flow, int64_t charged) except -1:
    """Where a flow stands too far ahead because of service elsewhere, forgive it some of that.
    Pools that rest hear of it if it is more than what was just charged. O(positions * log n)."""
    cdef int32_t n = flows.items[flow].first_position, q
    cdef IndexSet queued
    cdef IndexSet stands
    cdef bint lowered = False
    cdef const Flow* f = &flows.items[flow]
    cdef void* above = NULL
    cdef Position* p
    cdef int64_t less_by
    if flows.order != ORDER_COUNTER or not flows.lifts:
        return 0
    while n != NONE and flows.positions.items[n].foreign == 0:
        n = flows.positions.items[n].next_position
    if n == NONE:
        return 0
    if f.parent != NONE:
        above = family_at(flows, f.parent)
    if not is_node(flows, flow):
        find_lines(flows, flow, &queued, &stands)
    while n != NONE:
        p = &flows.positions.items[n]
        n = p.next_position
        if p.foreign == 0:
            continue
        if is_node(flows, flow):
            if not flows.family_of(flow).stands_in(p.pool):
                continue
        elif not is_for(flows, &stands, p.pool):
            continue
        less_by = too_far_ahead(flows, p) if may_be_ahead(flows, p, f, above) else 0
        if less_by > 0:
            p.key -= less_by
            flows.pool_order.stirred = flows.pool_order.stirred or less_by > charged
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


cdef int bring_nodes_back(Flows flows, int32_t flow) except -1:
    """Apply the lead to the nodes above a flow, too. O(levels * positions * log n)."""
    flow = flows.items[flow].parent
    while flow != NONE:
        bring_back(flows, flow, 0)
        flow = flows.items[flow].parent
    return 0
