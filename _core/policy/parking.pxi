# Parking: flows that wait outside the order, for a quota or until their share is free.

cdef bint unthrottle(Flows flows, int32_t q) except -1:
    """Hold a queue no more, and return whether it was held; the caller gives it its place. O(log
    n)."""
    cdef Queue* queue = &flows.queues[q]
    cdef Guarantees s = flows.quotas.guarantees
    cdef int32_t k
    if not queue.throttled:
        return False
    queue.throttled = False
    flows.items[queue.flow].throttled -= 1
    s.throttled -= 1
    for k in range(flows.sets.line_count(queue.target)):
        (<Line>s.throttled_for[flows.sets.line_at(queue.target, k)]).remove(
            flows.items[queue.flow].cls, q
        )
    s.dues.remove(q)
    if s.throttled == 0:
        flows.quotas.wakes.remove(s.root)
    return True


cdef int note_throttled(Flows flows, int32_t flow) except -1:
    """Give the held queues of a flow their places among those of their targets; of a set, in each
    of its pools. O((targets + pools of its sets) * log n)."""
    cdef Flow* f = &flows.items[flow]
    cdef int32_t q = f.first_queue, k, target
    cdef const Request* head
    cdef int64_t key
    while q != NONE:
        if flows.queues[q].throttled:
            head = &flows.requests.items[flows.queues[q].head]
            key = head.seq
            if flows.order == ORDER_COUNTER:
                key = f.vtc - f.throttled_lift
            elif flows.order == ORDER_INPUT:
                key = head.prompt_tokens
            elif flows.order == ORDER_EXTERNAL:
                key = flows.queues[q].key
            if f.limited:  # behind all that may
                key += VTC_REBASE
            for k in range(flows.sets.line_count(flows.queues[q].target)):
                target = flows.sets.line_at(flows.queues[q].target, k)
                (<Line>flows.quotas.guarantees.throttled_for[target]).put(
                    f.cls, q, key, head.seq, flows.now_ns
                )
        q = flows.queues[q].next_queue
    return 0


cdef bint has_throttled(Flows flows, int32_t pool) noexcept:
    cdef list throttled_for = flows.quotas.guarantees.throttled_for
    if (<Line>throttled_for[0]).count and flows.may_take(pool, NONE):
        return True
    return (<Line>throttled_for[pool + 1]).count > 0


cdef bint is_out(Flows flows, int32_t flow) noexcept:
    """Return whether a flow that waits for a quota, or is held, has no queue that is in the line or
    asks. O(targets)."""
    cdef Flow* f = &flows.items[flow]
    cdef int32_t q = f.first_queue
    if f.waits_at == NONE and not f.throttled:
        return False
    while q != NONE:
        if flows.queues[q].chain.count and not flows.queues[q].throttled:
            if f.waits_at == NONE or flows.is_billed(&flows.queues[q]):
                return False
        q = flows.queues[q].next_queue
    return True


cdef int note_out(Flows flows, int32_t flow) except -1:
    """Take a flow that is out from the minimum, and let one that is in rejoin it. O(targets + log
    n)."""
    if flows.local:
        wait_in_pools(flows, flow)
    if not is_out(flows, flow):
        return rejoin(flows, flow)
    if not flows.is_active(flow):
        return 0
    flows.part(flow)
    return note_lifts(flows, flow)


cdef int rejoin(Flows flows, int32_t flow) except -1:
    """Make a flow that was out active again, with the lift of the node that it waits at, else of
    the root; it earns no credit. O(targets * log n)."""
    cdef Flow* f = &flows.items[flow]
    cdef int32_t node = flows.quotas.guarantees.root if f.waits_at == NONE else f.waits_at
    cdef int64_t least, before = f.throttled_lift if f.waits_at == NONE else f.wait_lift
    cdef Quota* n
    if flows.is_active(flow):
        return 0
    if node == NONE:
        raise flows.quotas.fuse.blow("fairness: a flow was out that waited for nothing")
    n = &flows.quotas.nodes[node]
    least = flows.raise_level(flow)
    f.vtc += n.lift[f.cls] - before
    if flows.lifts and f.vtc < least:
        n.lift[f.cls] += least - f.vtc
        f.vtc = least
        flows.quotas.changed.mark(node)
    flows.join(flow, False)
    return note_lifts(flows, flow)


cdef int note_lifts(Flows flows, int32_t flow) except -1:
    # From now on it keeps its distance to those that wait with it.
    cdef Flow* f = &flows.items[flow]
    flows.changed.mark(flow)
    if f.waits_at != NONE:
        f.wait_lift = flows.quotas.nodes[f.waits_at].lift[f.cls]
    if f.throttled:
        f.throttled_lift = flows.quotas.nodes[flows.quotas.guarantees.root].lift[f.cls]
    return rekey_waiting(flows, flow)


cdef int64_t waiting_key(Flows flows, int32_t flow, int32_t i, int64_t lift) noexcept:
    """Return the key of a flow among those that wait for a quota with it, by its head i.
    O(targets)."""
    cdef const Request* r = &flows.requests.items[i]
    if flows.order == ORDER_COUNTER:
        return flows.items[flow].vtc - lift
    if flows.order == ORDER_INPUT:
        return r.prompt_tokens
    if flows.order == ORDER_EXTERNAL:
        return flows.queues[flows.find_queue(flow, r.target + 1)].key
    return r.seq


cdef int rekey_waiting(Flows flows, int32_t flow) except -1:
    # Its counter, or its key from outside, has changed while it may wait.
    cdef Flow* f = &flows.items[flow]
    if flows.order != ORDER_COUNTER and flows.order != ORDER_EXTERNAL:
        return 0
    if f.waits_at != NONE:
        (<Line>flows.quotas.waiting[f.waits_at]).put(
            f.cls, f.wait_slot, waiting_key(flows, flow, f.wait_head, f.wait_lift), flow,
            flows.now_ns,
        )
        flows.quotas.mark_ready(f.waits_at)
    return note_throttled(flows, flow) if f.throttled else 0


cdef int unpark(Flows flows, int32_t flow) except -1:
    """Take a flow out of a node's waiters, and lift it to the others. O(log n)."""
    cdef Flow* f = &flows.items[flow]
    cdef int32_t node = f.waits_at, last
    cdef Line line = <Line>flows.quotas.waiting[node]
    cdef Heap heap = line.heap(f.cls)
    cdef Node moved
    rejoin(flows, flow)
    line.remove(f.cls, f.wait_slot)
    if line.count == 0:
        flows.quotas.wakes.remove(node)
    if f.wait_slot != heap.count:  # the last slot moves into the gap
        last = heap.count
        moved = heap.nodes[heap.places[last] - 1]
        heap.remove(last)
        heap.put(f.wait_slot, moved.key, moved.tie)
        flows.items[<int32_t>moved.tie].wait_slot = f.wait_slot
    f.waits_at = NONE
    f.wait_head = NONE
    return 0


cdef int quota_lost_head(Flows flows, int32_t flow, int32_t i) except -1:
    """Let the next head of a flow ask: the head for which the flow waits has gone. O(log n)."""
    cdef int32_t node = flows.items[flow].waits_at
    unpark(flows, flow)
    flows.quotas.mark_ready(node)
    return request_quota(flows, flow)


cdef int request_quota(Flows flows, int32_t flow) except -1:
    """Note that a flow has a head without a bill, unless it waits already; and that it may
    be out now, or not any more. O(targets + log n)."""
    cdef Flow* f = &flows.items[flow]
    if f.waits_at != NONE or f.throttled:
        note_out(flows, flow)
    if f.waits_at != NONE:
        return 0
    flows.quotas.has_work = True
    return flows.quotas.asking.put(flow, flow, 0)
