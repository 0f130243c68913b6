# Fair queue: orders the queues of each target by the virtual token counters of their flows.

cdef int rank_queue(Flows flows, int32_t q) except -1:
    """Give the queue its place among the candidates of its target. O(log n)."""
    cdef Queue* queue = &flows.queues[q]
    cdef Line line = <Line>flows.candidates[queue.target]
    cdef int32_t cls = flows.items[queue.flow].cls
    cdef Request* head
    cdef bint waited
    if queue.chain.count:
        head = &flows.requests.items[queue.chain.head]
        if flows.requests.head_state_of(queue.chain.head).head_ns < 0:
            head.head_state.head_ns = flows.now_ns
    if queue.chain.count == 0 or not flows.is_billed(queue) or queue.throttled:
        line.remove(cls, q)
        if queue.target == 0 and not stands_in_one(flows):
            leave_anywhere(flows, q)
        if queue.chain.count:
            wait_outside(flows.requests, queue.chain.head, queue.throttled, flows.now_ns)
        if flows.items[queue.flow].quota != NONE:
            request_quota(flows, queue.flow)
        return 0
    if flows.items[queue.flow].quota != NONE:
        rejoin(flows, queue.flow)
    if head.head_state.lined_ns < 0:
        head.head_state.lined_ns = flows.now_ns
    wait_inside(flows.requests, queue.chain.head, flows.now_ns)
    if queue.target:
        flows.pool_order.touch(queue.target - 1)
    if not flows.local:
        return line.put(cls, q, flows.key_of(q), head.seq, flows.now_ns)
    waited = return_to_pools(flows, q)
    line.put(cls, q, flows.key_of(q), head.seq, flows.now_ns)
    if queue.target == 0 and not flows.one_line:
        stand_anywhere(flows, q)
    return bring_back(flows, queue.flow) if waited else 0


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
    flows.changed.mark(flow)
    f.vtc = min(max(<int64_t>0, f.vtc + weighted_micro), VTC_MAX)
    if f.vtc > VTC_REBASE and flows.active(flow).count:
        rebase(flows, f.cls)
    if flows.active(flow).has(flow):
        flows.active(flow).put(flow, f.vtc, flow)
    if f.waits_at != NONE or f.throttled:
        rekey_waiting(flows, flow)
    if flows.local:
        charge_positions(flows, flow, weighted_micro, pool)
    if flows.order != ORDER_COUNTER:
        return 0
    q = f.first_queue
    while q != NONE:
        if flows.queues[q].chain.count:
            rank_queue(flows, q)
        q = flows.queues[q].next_queue
    return bring_back(flows, flow) if flows.local else 0


cdef int rebase(Flows flows, int32_t cls) except -1:
    # Once in about 2^60 micro-tokens. Where one flow runs so far ahead that the others have not
    # come half as far, it is held at VTC_MAX instead, and still is the last. Idle flows further
    # below the least active one than the credit would be lifted on their return, so cutting them
    # at 0 changes no order.
    cdef Heap active = <Heap>flows.actives[cls]
    cdef int64_t base = active.nodes[0].key - flows.credit()
    cdef int32_t i
    if base < VTC_REBASE // 2:
        return 0
    flows.level[cls] = max(<int64_t>0, flows.level[cls] - base)
    for i in range(<int32_t>len(flows.anywhere) if flows.one_line else 0):
        flows.positions.shift(cls, i)[0] += base
    for i in range(flows.count):
        if flows.items[i].cls != cls:
            continue
        flows.items[i].vtc = max(<int64_t>0, flows.items[i].vtc - base)
        flows.changed.mark(i)
        if active.has(i):
            active.put(i, flows.items[i].vtc, i)
        rekey_waiting(flows, i)
    for i in range(flows.queue_count):
        if flows.queues[i].chain.count:
            rank_queue(flows, i)
    return 0
