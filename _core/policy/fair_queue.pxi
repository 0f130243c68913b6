# Fair queue: orders the queues of each target by the virtual token counters of their flows.

cdef int rank_queue(Flows flows, int32_t q) except -1:
    """Give the queue its place among the candidates of its target. O(log n)."""
    # Read first: a node above may get a queue on the way, and then all queues may move.
    cdef Queue* queue = &flows.queues[q]
    cdef int32_t flow = queue.flow, target = queue.target, head = NONE
    cdef bint throttled = queue.throttled, waited
    cdef HeadState* state = NULL
    if queue.chain.count:
        head = queue.head
        state = flows.requests.head_state_of(head)
        if state.head_ns < 0:
            state.head_ns = flows.now_ns
    if is_node(flows, flow):
        return 0  # it stands by its line
    if head != NONE and flows.order == ORDER_EXTERNAL:
        ask_key(flows, q)
    if head == NONE or not flows.is_billed(queue) or throttled:
        leave_line(flows, q)
        if target == 0 and not stands_in_one(flows):
            leave_anywhere(flows, q)
        if head != NONE:
            wait_outside(flows.requests, head, throttled, flows.now_ns)
        if flows.items[flow].quota != NONE:
            request_quota(flows, flow)
        return 0
    if flows.items[flow].quota != NONE and not flows.is_active(flow):
        rejoin(flows, flow)
    if state.lined_ns < 0:
        state.lined_ns = flows.now_ns
    wait_inside(flows.requests, head, flows.now_ns)
    if 0 < target <= POOLS_MAX:
        flows.pool_order.touch(target - 1)
    if not flows.local:
        return stand(flows, q)
    waited = return_to_pools(flows, q)
    stand(flows, q)
    if target == 0 and not flows.one_line:
        stand_anywhere(flows, q)
    if waited:
        bring_back(flows, flow, 0)
        bring_nodes_back(flows, flow)
    return 0


cdef int rank_request(Flows flows, int32_t i) except -1:
    """Give the queue of request i its place."""
    cdef Request* r = &flows.requests.items[i]
    return rank_queue(flows, flows.queue_of(r.flow, r.target + 1))


cdef int rank_flow(Flows flows, int32_t flow) except -1:
    """Give all queues of a flow their places. O(targets * log n)."""
    cdef int32_t q = flows.items[flow].first_queue
    while q != NONE:
        rank_queue(flows, q)
        q = flows.queues[q].next_queue
    return 0


cdef int charge_flow(
    Flows flows, int32_t flow, int64_t weighted_micro, int32_t pool
) except -1:
    """Add weighted service in a pool to the counter; negative: a refund. O(targets * log n)."""
    cdef Flow* f = &flows.items[flow]
    cdef int32_t q
    if weighted_micro == 0:
        return 0
    add_service(flows, flow, weighted_micro)
    if f.waits_at != NONE or f.throttled:
        rekey_waiting(flows, flow)
    if flows.local:
        charge_positions(flows, flow, weighted_micro, pool)
    if flows.order == ORDER_EXTERNAL:
        return rank_anew(flows, flow)
    if flows.order != ORDER_COUNTER:
        return 0
    q = f.first_queue
    while q != NONE:
        if flows.queues[q].chain.count:
            rank_queue(flows, q)
            note_charged(flows, flow, weighted_micro)
        q = flows.queues[q].next_queue
    return bring_back(flows, flow, weighted_micro) if flows.local else 0


cdef int rank_anew(Flows flows, int32_t flow) except -1:
    """Ask for the keys of the heads of a flow that was charged, and give its queues their places;
    pools that rest hear of it. O(targets * log n), and what the function takes."""
    cdef int32_t q = flows.items[flow].first_queue
    while q != NONE:
        if flows.queues[q].chain.count:
            rank_queue(flows, q)
            flows.pool_order.stirred = True
        q = flows.queues[q].next_queue
    if flows.items[flow].waits_at != NONE or flows.items[flow].throttled:
        rekey_waiting(flows, flow)
    return 0


cdef inline void note_charged(Flows flows, int32_t flow, int64_t weighted_micro) noexcept:
    """A flow with something queued, or a node, was charged: have pools looked at for which that may
    bring another request forward. O(1)."""
    # With a larger grain a charge may change who takes part, and move nothing in the line.
    if (
        weighted_micro < 0 or flows.grain > 1
        or flows.items[flow].watched == flows.pool_order.watch
    ):
        flows.pool_order.stirred = True


cdef inline int add_service(Flows flows, int32_t flow, int64_t weighted_micro) except -1:
    cdef Flow* f = &flows.items[flow]
    flows.changed.mark(flow)
    f.vtc = min(max(<int64_t>0, f.vtc + weighted_micro), VTC_MAX)
    if f.vtc > VTC_REBASE and flows.active(flow).count:
        rebase(flows, flow)
    return flows.rekey_active(flow) if weighted_micro < 0 and flows.is_active(flow) else 0


cdef int charge_nodes(
    Flows flows, int32_t flow, int32_t weight_milli, int64_t before, int64_t after, int32_t pool
) except -1:
    """Charge the nodes above a flow for a lease in a pool for which the flow was charged `before`,
    and now `after`, with a weight. The charge is of totals, so that rounding does not add up. Their
    places follow before the next pick. O(levels * pools) while none comes too far ahead of its
    siblings, else O(levels * pools * log n)."""
    cdef int32_t node = flows.items[flow].parent, parent
    cdef void* family
    cdef void* above
    cdef int64_t more
    cdef bint falls = after < before, looks = False
    if node == NONE:
        return 0
    above = family_at(flows, node)
    while node != NONE:
        family, parent = above, flows.items[node].parent
        above = NULL if parent == NONE else family_at(flows, parent)
        more = reweighed(after, weight_milli, flows.items[node].weight_milli)
        more -= reweighed(before, weight_milli, flows.items[node].weight_milli)
        add_service(flows, node, more)
        if more:
            note_charged(flows, node, more)
        if flows.local and charge_node(flows, node, family, above, more, pool):
            looks = True
        note_stale(flows, node, family)
        node = parent
    if falls:
        place_nodes(flows)
    return bring_nodes_back(flows, flow) if looks else 0


cdef int rebase(Flows flows, int32_t flow) except -1:
    # Once in about 2^60 micro-tokens. Where one flow runs so far ahead that the others have not
    # come half as far, it is held at VTC_MAX instead, and still is the last. Idle flows further
    # below the least active one than the credit would be lifted on their return, so cutting them
    # at 0 changes no order.
    cdef Heap active = flows.active(flow)
    cdef int64_t* level = flows.level_of(flow)
    cdef int64_t base = flows.least_active(flow) - flows.credit(flows.items[flow].depth)
    cdef int32_t i, parent = flows.items[flow].parent, cls = flows.items[flow].cls
    if base < VTC_REBASE // 2:
        return 0
    place_nodes(flows)
    flows.pool_order.stirred = True
    level[0] = max(<int64_t>0, level[0] - base)
    for i in range(<int32_t>len(flows.anywhere) if flows.one_line else 0):
        flows.positions.shift(cls, i)[0] += base
    for i in range(flows.count):
        if flows.items[i].cls != cls or flows.items[i].parent != parent:
            continue
        flows.items[i].vtc = max(<int64_t>0, flows.items[i].vtc - base)
        flows.changed.mark(i)
        if flows.is_active(i):
            flows.rekey_active(i)
        rekey_waiting(flows, i)
    for i in range(flows.queue_count):
        if is_node(flows, flows.queues[i].flow):
            stand_by_counter(flows, flows.queues[i].flow)
        elif flows.queues[i].chain.count:
            rank_queue(flows, i)
    return 0
