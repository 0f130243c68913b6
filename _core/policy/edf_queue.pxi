

cdef inline int64_t deadline_of(const Request* r) noexcept nogil:
    return r.due_ns if r.has_deadline else NEVER


cdef inline int64_t order_key(Flows flows, const Queue* queue, const Request* r) noexcept:
    """Return the key that orders a queue; ties go by arrival."""
    if flows.place_from is not None:
        return flows.requests.rare_of(r).place
    return deadline_of(r) if queue.by_deadline else 0


cdef int insert_in_treap(Flows flows, Queue* queue, int32_t i) except -1:
    cdef const Request* r = &flows.requests.items[i]
    cdef int64_t key = order_key(flows, queue, r)
    queue.root = flows.treaps.insert(queue.root, i, key, r.seq, r.work, r.arrival_ns)
    return 0


cdef int insert_in_order(Flows flows, int32_t q, int32_t i) except -1:
    """Give request i its place in the chain of a queue. O(log n) expected."""
    cdef Queue* queue = &flows.queues[q]
    cdef Request* items = flows.requests.items
    insert_in_treap(flows, queue, i)
    chain_insert(&queue.chain, items, flows.treaps.before(i), i)
    return 0


cdef int displace(Flows flows, int32_t q, int32_t head) except -1:
    # Nothing was granted: if the new head needs no quota, the flow stays in the line.
    cdef Request* old = &flows.requests.items[head]
    unthrottle(flows, q)
    if flows.is_billed(&flows.queues[q]):
        flows.requests.head_state_of(flows.queues[q].head).lined_ns = old.head_state.lined_ns
    wait_for(flows.requests, head, WAITS_QUEUE, flows.now_ns)
    old.head_state.head_ns = old.head_state.lined_ns = NONE
    return 0


cdef inline bint takes_in_turn(Flows flows, int32_t flow) noexcept:
    """Return whether a flow's requests take their quotas as heads, not at their arrival."""
    return not flows.items[flow].refuses and not flows.items[flow].dry_runs


cdef int64_t ahead_of(Flows flows, int32_t i) except -1:
    """Return how many requests are before i in its queue; under `arrival`, those that were
    withdrawn since still count. O(targets), in a treap with O(log n) expected."""
    cdef Request* r = &flows.requests.items[i]
    cdef Queue* queue = &flows.queues[flows.queue_of(r.flow, r.target + 1)]
    if queue.in_tree:
        return flows.treaps.place(i)
    return max(0, r.ordinal - flows.requests.items[queue.chain.head].ordinal)


cdef int64_t work_in_queue(Flows flows, const Queue* queue, int64_t deadline_ns) noexcept:
    """Work in a queue that is served before one that comes now with a deadline, -1: with none;
    what will come with an earlier one is not foreseen. O(1), in a treap O(log n) expected."""
    if queue.chain.count == 0:
        return 0
    if not queue.in_tree:
        return queue.work_in - flows.requests.items[queue.chain.head].mark
    if deadline_ns == NONE or not queue.by_deadline:
        return flows.treaps.items[queue.root].work
    return flows.treaps.work_until(queue.root, deadline_ns)


cdef int64_t oldest_in(Flows flows, const Queue* queue) noexcept:
    """Return when the oldest request of a queue that is not empty arrived. O(1)."""
    if queue.in_tree:
        return flows.treaps.items[queue.root].oldest_ns
    return flows.requests.items[queue.chain.head].arrival_ns
