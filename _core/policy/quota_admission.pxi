# Flows and their quotas: a queue is in the line only while its head has a bill.
#
# A new head without a bill asks. If all nodes of its chain (tenant, groups) hold enough, it takes
# from each; else the whole flow waits for the first node that does not. While all its heads wait,
# or are held to its share (see borrowing.pxi), it is out: no part of the minimum, and lifted when
# it returns (section 4.1). A node serves its waiting flows by class, with ageing,
# and in the order of their counters. A lift is the node's, for a class: flows that waited together
# keep their distances, so a group's quota is shared by weight, however far the others have come
# meanwhile. Exempt flows have no quotas.

cdef Take take_for(Core core, int32_t i) noexcept:
    """Return the amounts that a request takes from its quotas: its prompts, and its outputs as
    predicted when it first asked."""
    cdef Request* r = &core.requests.items[i]
    cdef int64_t each
    cdef Asked asked
    cdef uint8_t evidence
    cdef Bill* b = &core.quotas.bills[r.bill]
    if r.bill:
        return take_of(b.input_tokens, b.output_tokens)
    if r.quota_output:
        return take_of(r.prompt_tokens, r.quota_output)
    asked_of(core, r, &asked)
    each = core.predictor.promise(&asked, &evidence)
    if each == NONE or each > r.output_max_tokens:
        each = r.output_max_tokens
    return take_of(r.prompt_tokens, each * r.sequences)


cdef int quota_refusal(Core core, int32_t i) except -1:
    """Return why the quotas of a request refuse it at its arrival; 0: they do not. O(levels)."""
    cdef Request* r = &core.requests.items[i]
    cdef Flow* f = &core.flows.items[r.flow]
    cdef Take t = take_for(core, i)
    cdef int32_t node = f.quota
    cdef int64_t due_ns, latest = core.now_ns
    cdef bint waits = False, asks = False
    cdef int outcome
    core.quotas.asks_store = False
    if f.exempt:
        return 0
    while node != NONE:
        if not core.quotas.can_hold(node, &t):
            return OUT_REJECTED_QUOTA_SIZE
        node = core.quotas.nodes[node].parent
    outcome = model_refusal(core, i, &t)
    if outcome or not f.refuses:
        return outcome
    node = f.quota
    while node != NONE:
        due_ns = core.quotas.due(node, &t)
        if due_ns == NONE:  # when one of its requests ends: about as often as one is granted
            latest = max(latest, core.now_ns + f.interval_ns)
        if core.quotas.may_get_chunk(node, &t):
            asks = True
        elif not 0 <= due_ns <= core.now_ns or core.quotas.is_awaited(node):
            waits = True
        latest = max(latest, due_ns)
        node = core.quotas.nodes[node].parent
    core.quotas.refused_until_ns = latest
    core.quotas.asks_store = asks and not waits
    return OUT_REJECTED_QUOTA if waits else 0


cdef int64_t quota_wait_ns(Core core, int32_t i) noexcept:
    """Return how long the quotas of a queued request make it wait at least, as far as is known."""
    cdef int32_t node = core.flows.items[core.requests.items[i].flow].quota
    cdef int64_t latest = core.now_ns
    cdef Take t
    if node == NONE or core.requests.items[i].bill:
        return 0
    t = take_for(core, i)
    while node != NONE:
        latest = max(latest, core.quotas.due(node, &t))
        node = core.quotas.nodes[node].parent
    return latest - core.now_ns


cdef int take_quota(Core core, int32_t i) except -1:
    """Take from all nodes of a request's chain, whether they hold enough or not. O(levels)."""
    cdef int32_t node = core.flows.items[core.requests.items[i].flow].quota
    cdef Take t
    if node == NONE:
        return 0
    t = take_for(core, i)
    while node != NONE:
        core.quotas.bill(i, &t, node)
        node = core.quotas.nodes[node].parent
    return 0


cdef int run_quotas(Core core) except -1:
    """Let those ask that have not, and serve the waiters of nodes that hold more. O(log n) each."""
    cdef Quotas q = core.quotas
    cdef int32_t first
    if q.is_new:
        q.is_new = False
        ask_all_anew(core)
    while True:
        if q.asking.count:
            first = q.asking.nodes[0].id
            q.asking.remove(first)
            ask_quota(core, first, NONE)
        elif q.ready.count:
            first = q.ready.nodes[0].id
            q.ready.remove(first)
            if is_root_cohort(core, first):
                wake_root_cohort(core)
            else:
                serve_waiters(core, first)
        else:
            q.has_work = False
            return 0


cdef int ask_quota(Core core, int32_t flow, int32_t served_by) except -1:
    """Take for every head of a flow, or let it wait. The node that serves it does not make it wait
    behind others. O(targets * (targets + log n))."""
    cdef Flow* f = &core.flows.items[flow]
    cdef int32_t i, node
    cdef Take t
    while f.waits_at == NONE:
        i = head_without_bill(core.flows, flow)
        if i == NONE:
            return 0
        t = take_for(core, i)
        core.requests.items[i].quota_output = <int32_t>t.output_tokens
        node = f.quota
        while node != NONE:
            if node != served_by and comes_behind(core, flow, i, node):
                break
            if not core.quotas.fits(node, &t):
                break
            node = core.quotas.nodes[node].parent
        if node != NONE:
            return park(core, flow, i, node)
        pass_waiters(core, flow, served_by)
        take_quota(core, i)
        rank_request(core.flows, i)
        served_by = NONE
    return 0


cdef int32_t head_without_bill(Flows flows, int32_t flow) noexcept:
    """Return the oldest head of a flow that has no bill; -1: none. O(targets)."""
    cdef int32_t q = flows.items[flow].first_queue, i, oldest = NONE
    while q != NONE:
        i = flows.queues[q].head
        if i != NONE and not flows.is_billed(&flows.queues[q]):
            if oldest == NONE or flows.requests.items[i].seq < flows.requests.items[oldest].seq:
                oldest = i
        q = flows.queues[q].next_queue
    return oldest


cdef bint comes_behind(Core core, int32_t flow, int32_t i, int32_t node):
    # Whether a flow that precedes this one waits at the node.
    cdef int32_t cls = core.flows.items[flow].cls
    cdef Line line
    cdef Node* first
    cdef int64_t key
    if not core.quotas.is_awaited(node):
        return False
    line = <Line>core.quotas.waiting[node]
    if line.heap(cls).count == 0:
        return line.holds_up(cls, core.now_ns)
    if line.first(core.now_ns) != cls:
        return True
    first = line.heap(cls).nodes
    key = waiting_key(core.flows, flow, i, core.quotas.nodes[node].lift[cls])
    return first.key < key or (first.key == key and first.tie < flow)


cdef int pass_waiters(Core core, int32_t flow, int32_t served_by) except -1:
    # A flow that overtakes the waiting ones of a node counts as served by it. Another class of them
    # may be the first now. O(levels * (classes + log n)).
    cdef int32_t node = core.flows.items[flow].quota
    while node != NONE:
        if node != served_by and core.quotas.is_awaited(node):
            (<Line>core.quotas.waiting[node]).served(core.flows.items[flow].cls, core.now_ns)
            core.quotas.mark_ready(node)
        node = core.quotas.nodes[node].parent
    return 0


cdef int park(Core core, int32_t flow, int32_t i, int32_t node) except -1:
    """Let a flow wait at a node until it holds enough for the head i. O(log n)."""
    cdef Flow* f = &core.flows.items[flow]
    cdef Line line = core.quotas.queue_at(node)
    cdef Heap heap = line.heap(f.cls)
    core.flows.changed.mark(flow)
    f.waits_at = node
    f.wait_head = i
    f.wait_lift = core.quotas.nodes[node].lift[f.cls]
    # Number the places in a node's heap from the start, so that it is no larger than needed.
    f.wait_slot = heap.count
    line.put(f.cls, f.wait_slot, waiting_key(core.flows, flow, i, f.wait_lift), flow, core.now_ns)
    note_out(core.flows, flow)
    if heap.count == 1 or heap.nodes[0].tie == flow:
        set_wake(core, node)
    return 0


cdef int set_wake(Core core, int32_t node) except -1:
    # When the first of the waiters will be served, if nothing else happens, or another class may
    # have become the first.
    cdef Line line = <Line>core.quotas.waiting[node]
    cdef int32_t cls = line.first(core.now_ns)
    cdef Take t
    cdef int64_t due_ns = NONE
    if cls != NONE:
        t = take_for(core, core.flows.items[<int32_t>line.heap(cls).nodes[0].tie].wait_head)
        due_ns = core.quotas.due(node, &t)
        due_ns = earlier(due_ns, line.next_due_ns(cls, core.now_ns))
        if is_held(core.quotas.nodes[node].escrow):
            core.quotas.wanting.mark(node)
            core.quotas.is_wanted = True
    if due_ns == NONE:
        core.quotas.wakes.remove(node)
    else:
        core.quotas.wakes.put(node, due_ns, node)
    return 0


cdef int serve_waiters(Core core, int32_t node) except -1:
    """Serve the flows that wait at a node while it holds enough for the first. O(log n) each."""
    cdef Line line = <Line>core.quotas.waiting[node]
    cdef int32_t flow, cls
    cdef Take t
    while line.count:
        cls = line.first(core.now_ns)
        flow = <int32_t>line.heap(cls).nodes[0].tie
        t = take_for(core, core.flows.items[flow].wait_head)
        if not core.quotas.fits(node, &t):
            break
        line.served(cls, core.now_ns)
        unpark(core.flows, flow)
        ask_quota(core, flow, node)
    return set_wake(core, node)


cdef int close_bill(Core core, int32_t i, bint has_run) except -1:
    if core.requests.items[i].bill and not has_run:
        book_share(core, i, 0)
    if core.requests.items[i].bill:
        core.quotas.settle(i, has_run)
    return 0


cdef int raise_bill(Core core, int32_t i) except -1:
    """Take usage that is reported beyond a bill at once. O(levels)."""
    cdef Request* r = &core.requests.items[i]
    cdef Bill* b = &core.quotas.bills[r.bill]
    core.quotas.correct(
        i, max(b.input_tokens, <int64_t>r.lease.input_tokens),
        max(b.output_tokens, <int64_t>r.lease.output_tokens),
    )
    return follow_bill(core, i)


cdef bint model_waits(Core core, int32_t i, int32_t pool) except -1:
    """Return whether the quota of a pool's model makes its next request, and so the pool, wait."""
    cdef Pool* p = &core.ledger.pools[pool]
    cdef Take t
    cdef int64_t due_ns
    if p.quota == NONE or core.flows.items[core.requests.items[i].flow].exempt:
        return False
    t = take_for(core, i)
    due_ns = core.quotas.due(p.quota, &t)
    if 0 <= due_ns <= core.now_ns:
        core.requests.items[i].quota_output = <int32_t>t.output_tokens
        return False
    p.reason = WAIT_QUOTA
    if due_ns != NONE:
        core.pool_wakes.put(pool, due_ns, pool)
    return True


cdef bint model_allows(Core core, int32_t i, int32_t pool) noexcept:
    """Return whether the quota of a pool's model holds enough for a request that may pass the
    next."""
    cdef int32_t node = core.ledger.pools[pool].quota
    cdef Take t
    if node == NONE or core.flows.items[core.requests.items[i].flow].exempt:
        return True
    t = take_for(core, i)
    core.requests.items[i].quota_output = <int32_t>t.output_tokens
    return core.quotas.fits(node, &t)


cdef int take_model_quota(Core core, int32_t i) except -1:
    cdef Take t = take_for(core, i)
    if core.flows.items[core.requests.items[i].flow].exempt:
        return 0
    return core.quotas.bill(i, &t, core.ledger.pools[core.requests.items[i].pool].quota)


cdef int model_refusal(Core core, int32_t i, const Take* t) except -1:
    """Return why the quotas of all models that a request may run on refuse it; 0: one does not.
    O(pools)."""
    cdef Request* r = &core.requests.items[i]
    cdef int32_t p, node
    cdef int64_t due_ns, soonest = NONE
    cdef bint fits = False
    for p in range(core.ledger.count):
        if not core.flows.may_take(p, r.target) or not core.ledger.serves(p):
            continue
        node = core.ledger.pools[p].quota
        if node == NONE:
            return 0
        if core.quotas.can_hold(node, t):
            fits = True
            due_ns = core.quotas.due(node, t)
            if 0 <= due_ns <= core.now_ns or not core.flows.items[r.flow].refuses:
                return 0
            soonest = due_ns if soonest == NONE else min(soonest, due_ns)
    core.quotas.refused_until_ns = max(core.now_ns, soonest)
    return OUT_REJECTED_QUOTA if fits else OUT_REJECTED_QUOTA_SIZE


cdef int unpark_whole(Flows flows, int32_t flow) except -1:
    # It waits for no quota any more, and none of its queues is held: they get their places next.
    cdef int32_t q = flows.items[flow].first_queue
    if flows.items[flow].waits_at != NONE:
        unpark(flows, flow)
    if flows.items[flow].throttled:
        rejoin(flows, flow)
    while q != NONE:
        unthrottle(flows, q)
        q = flows.queues[q].next_queue
    return 0


cdef int ask_all_anew(Core core) except -1:
    """Let each waiting flow ask again after a change of limits. O(flows * log n)."""
    cdef int32_t flow
    for flow in range(core.flows.count):
        unpark_whole(core.flows, flow)
        if core.flows.items[flow].queued:
            rank_flow(core.flows, flow)
            request_quota(core.flows, flow)
    return 0
