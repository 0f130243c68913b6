# Queueing: puts a request into its queue, and takes it out.

cdef void count_queued(Flows flows, const Request* r, int32_t more) noexcept:
    """One more or one less is queued. A flow is backlogged from the second on until its queue is
    empty. O(levels)."""
    cdef Flow* f = &flows.items[r.flow]
    f.queued += more
    f.queued_tokens += more * r.prompt_tokens
    flows.queued_tokens += more * r.prompt_tokens
    if is_set(r.target):
        count_in_set(flows, r.target, more)
    else:
        flows.queued_for[r.target + 1] += more
    if f.exempt:
        flows.exempt_queued += more
        flows.exempt_tokens += more * r.prompt_tokens
    f.queued_work += more * r.work
    flows.queued_work += more * r.work
    flows.backlog[f.cls] += more * r.work
    if f.queued == 0 or (f.queued == 1 and more > 0):
        flows.backlogged += more
        memset(&f.served, 0, sizeof(Rate))
    elif f.queued == 2:
        rate_run(&f.served, flows.now_ns, True)
    count_weight(flows, r.flow, more)
    if f.parent != NONE:
        add_to_nodes(flows, r.flow, more, more * r.work)


cdef void count_in_set(Flows flows, int32_t target, int32_t more) noexcept:
    cdef const PoolSet* s = flows.sets.of(target)
    cdef int32_t k
    for k in range(s.count):
        flows.queued_for[s.pools[k] + 1] += more


cdef inline void count_weight(Flows flows, int32_t flow, int32_t more) noexcept:
    # Its number of queued requests has changed.
    cdef const Flow* f = &flows.items[flow]
    cdef int32_t before = f.queued - more
    flows.queued_weight_of(flow)[0] += ((f.queued > 0) - (before > 0)) * f.weight_milli
    flows.deep_weight_of(flow)[0] += ((f.queued > 1) - (before > 1)) * f.weight_milli


cdef void add_to_nodes(Flows flows, int32_t flow, int32_t count, int64_t work) noexcept:
    """Count what is queued below the nodes above a flow. O(levels)."""
    cdef int32_t node = flows.items[flow].parent
    while node != NONE:
        flows.items[node].queued += count
        flows.items[node].queued_work += work
        count_weight(flows, node, count)
        node = flows.items[node].parent


cdef int vouch(Flows flows, const Request* r, int32_t more) except -1:
    """Count one request more or less for the principal that vouches for its tenant, before it is
    counted as queued or held. O(1)."""
    cdef Flow* f = &flows.items[r.flow]
    cdef int64_t tokens = <int64_t>more * r.prompt_tokens
    if more > 0 and f.queued + f.held == 0:
        f.voucher = r.principal
    if r.principal == f.voucher:
        return 0
    f.vouchers += flows.vouchers.count(r.flow, r.principal, more, tokens)
    f.vouched += more
    f.vouched_tokens += tokens
    return 0


cdef Voucher first_voucher(const Flow* f) noexcept:
    """Return the record of the principal without one: the rest of the queued requests. O(1)."""
    cdef Voucher first
    first.queued = f.queued + f.held - f.vouched
    first.tokens = f.queued_tokens + f.held_tokens - f.vouched_tokens
    return first


cdef int32_t enqueue(Flows flows, int32_t i) except -2:
    """Queue request i, by arrival mostly at the end; returns the head that it displaces. O(log n),
    with several pools O(pools * log n)."""
    cdef Request* r = &flows.requests.items[i]
    cdef int32_t q = flows.queue_of(r.flow, r.target + 1), displaced
    flows.activate(r.flow)
    if flows.local:
        begin_in_pools(flows, r.flow, r.target + 1)
    vouch(flows, r, 1)
    count_queued(flows, r, 1)
    r.ordinal = flows.queues[q].ordinal
    flows.queues[q].ordinal += 1
    r.mark = flows.queues[q].work_in
    flows.queues[q].work_in += r.work
    if flows.queues[q].in_tree:
        insert_in_order(flows, q, i)
    else:
        chain_push(&flows.queues[q].chain, flows.requests.items, i)
    if flows.items[r.flow].agents:
        enter_line(flows, q, i)
    displaced = choose_head(flows, q)
    if flows.local:
        bring_back(flows, r.flow, 0)
        bring_nodes_back(flows, r.flow)
    return displaced


cdef int dequeue(Flows flows, int32_t i) except -1:
    """Take request i out of its queue, wherever it stands. The flow stays active until
    `settle()`. O(log n)."""
    cdef Request* r = &flows.requests.items[i]
    cdef int32_t q = flows.queue_of(r.flow, r.target + 1)
    cdef bint was_head = flows.queues[q].head == i, was_throttled = False
    flows.pool_order.stirred = True
    chain_remove(&flows.queues[q].chain, flows.requests.items, i)
    if flows.queues[q].in_tree:
        flows.queues[q].root = flows.treaps.remove(flows.queues[q].root, i)
        if flows.queues[q].chain.count == 0:
            flows.queues[q].in_tree = flows.needs_tree(&flows.queues[q])
    if flows.queues[q].line:
        leave_strand(flows, q, i)
        if is_set(r.target) and flows.queues[q].chain.count == 0:
            end_line(flows, q)
    vouch(flows, r, -1)
    count_queued(flows, r, -1)
    if was_head:
        was_throttled = unthrottle(flows, q)
        flows.queues[q].head = next_head(flows, q)
        rank_queue(flows, q)
    if flows.items[r.flow].wait_head == i:
        quota_lost_head(flows, r.flow, i)
    if flows.local and flows.items[r.flow].parent != NONE and flows.queues[q].chain.count == 0:
        part_emptied(flows, r.flow)
    return note_out(flows, r.flow) if was_throttled else 0
