# Changes of the order inside a flow; heads that lose their place give their quotas back.

cdef int put_in_queue(Core core, int32_t i) except -1:
    """Queue a request. O(levels + log n), with sessions for each target of its own."""
    cdef Flows flows = core.flows
    cdef const Request* r = &core.requests.items[i]
    cdef int32_t displaced = enqueue(flows, i), s
    if displaced != NONE:
        step_back(core, displaced)
    s = counted_session(flows, r)
    if s == NONE:
        return 0
    settle_strands(core, s)
    return settle_strands(core, flows.agents.of_flows[flows.items[r.flow].agents].rest)


cdef int take_from_queue(Core core, int32_t i) except -1:
    """Take a queued request out. If the order is by deadline, the next request of its session may
    have arrived before it, and so before the head. O(levels + log n)."""
    cdef Flows flows = core.flows
    cdef const Request* r = &core.requests.items[i]
    cdef int32_t q = NONE, displaced
    if flows.items[r.flow].agents:
        q = flows.find_queue(r.flow, r.target + 1)
    dequeue(flows, i)
    if q == NONE or flows.queues[q].line == 0:
        return 0
    displaced = choose_head(flows, q)
    return 0 if displaced == NONE else step_back(core, displaced)


cdef int settle_strands(Core core, int32_t s) except -1:
    """The counter of a session has changed, by service or by a lift at one target: give its strands
    at all targets their places. O(targets * levels * log n)."""
    cdef Flows flows = core.flows
    cdef int32_t t = flows.agents.items[s].first_strand, displaced
    cdef const Strand* strand
    while t != NONE and flows.order == ORDER_COUNTER:
        strand = &flows.agents.strands[t]
        if (
            flows.agents.line(flows.queues[strand.queue].line).heap.entry(strand.place).key
            != session_key(flows, s)
        ):
            displaced = rekey_session(flows, s, t)
            if displaced != NONE:
                step_back(core, displaced)
        t = flows.agents.strands[t].next_strand
    return 0


cdef int charge_session(Core core, int32_t i, int64_t weighted_micro) except -1:
    """Add service of a lease to the counter of its session; negative: a refund.
    O(targets * levels * log n)."""
    cdef Flows flows = core.flows
    cdef int32_t s = counted_session(flows, &core.requests.items[i])
    cdef AgentSession* a
    if s == NONE or weighted_micro == 0:
        return 0
    a = &flows.agents.items[s]
    a.vtc = min(max(<int64_t>0, a.vtc + weighted_micro), VTC_MAX)
    note_counter(flows, s)
    if a.vtc > VTC_REBASE:
        rebase_sessions(core, a.flow)
    return settle_strands(core, s)


cdef int rebase_sessions(Core core, int32_t flow) except -1:
    # Once in about 2^60 micro-tokens. O(sessions * log n).
    cdef AgentSessions agents = core.flows.agents
    cdef FlowSessions* of = &agents.of_flows[core.flows.items[flow].agents]
    cdef int64_t base = VTC_REBASE // 2
    cdef int32_t s, q = core.flows.items[flow].first_queue
    cdef SessionLine line
    of.highest = max(<int64_t>0, of.highest - base)
    of.level = max(<int64_t>0, of.level - base)
    for s in range(agents.used):
        if agents.items[s].flow == flow:
            agents.items[s].vtc = max(<int64_t>0, agents.items[s].vtc - base)
            note_counter(core.flows, s)
    while q != NONE:
        if core.flows.queues[q].line:
            line = agents.line(core.flows.queues[q].line)
            line.level = max(<int64_t>0, line.level - base)
        q = core.flows.queues[q].next_queue
    return rekey_sessions(core, flow)


cdef int rekey_sessions(Core core, int32_t flow) except -1:
    """Give all strands, of a flow or (-1) of all, their places by the keys of now.
    O(queues + strands * log n)."""
    cdef AgentSessions agents = core.flows.agents
    cdef int32_t t, q, displaced
    if agents.count == 0:
        return 0
    for t in range(agents.strand_used):
        if agents.strands[t].session != NONE:
            if flow == NONE or agents.items[agents.strands[t].session].flow == flow:
                stand_strand(core.flows, t)
    for q in range(core.flows.queue_count):
        if core.flows.queues[q].line and (flow == NONE or core.flows.queues[q].flow == flow):
            displaced = choose_head(core.flows, q)
            if displaced != NONE:
                step_back(core, displaced)
    return 0


cdef int step_back(Core core, int32_t i) except -1:
    """Give back what a displaced head took of its quotas, and end its wait for them.
    O(levels + log n)."""
    cdef int32_t flow = core.requests.items[i].flow
    if takes_in_turn(core.flows, flow):
        close_bill(core, i, False)
    if core.flows.items[flow].wait_head == i:
        quota_lost_head(core.flows, flow, i)
    return note_out(core.flows, flow)


cdef int give_back(Core core, int32_t q) except -1:
    """Give back what requests behind the head took at their arrival: they could keep the head
    from its own. O(n), at a reload."""
    cdef Queue* queue = &core.flows.queues[q]
    cdef int32_t i = queue.chain.head
    if not (queue.in_tree or queue.line) or not takes_in_turn(core.flows, queue.flow):
        return 0
    while i != NONE:
        if i != queue.head:
            close_bill(core, i, False)
        i = core.requests.items[i].next
    return 0


cdef int give_back_all(Core core, int32_t flow) except -1:
    """The same for all queues of a flow, which may have ceased to take quotas at the arrival."""
    cdef int32_t q = core.flows.items[flow].first_queue
    while q != NONE:
        give_back(core, q)
        q = core.flows.queues[q].next_queue
    return 0


# Another order while requests wait.

cdef int change_order(Core core, int order) except -1:
    """Have all queues sorted by the polls that follow. O(1)."""
    core.flows.by_deadline = order == BY_DEADLINE
    core.flows.unsorted = core.flows.queue_count
    core.has_more = True
    return 0


cdef int sort_queues(Core core) except -1:
    """Sort the queues that are left, one after the other, until `work_max` requests were in them.
    O((work_max + longest queue) * log n)."""
    cdef int64_t work = 0
    while core.flows.unsorted:
        if work >= core.settings.work_max:
            core.has_more = True
            return 0
        core.flows.unsorted -= 1
        work += 1 + core.flows.queues[core.flows.unsorted].chain.count
        sort_queue(core, core.flows.unsorted)
    return 0


cdef int sort_queue(Core core, int32_t q) except -1:
    cdef Flows flows = core.flows
    cdef Queue* queue = &flows.queues[q]
    cdef int32_t i = queue.chain.head, displaced
    cdef list found = []
    if queue.by_deadline == flows.by_deadline:
        return 0
    queue.by_deadline = flows.by_deadline
    queue.in_tree = flows.needs_tree(queue)
    while i != NONE:
        found.append((
            order_key(flows, queue, &flows.requests.items[i]), flows.requests.items[i].seq, i,
        ))
        i = flows.requests.items[i].next
    found.sort()
    queue.chain.head = queue.chain.tail = queue.root = NONE
    queue.chain.count = 0
    for _, _, i in found:
        chain_push(&queue.chain, flows.requests.items, i)
        if queue.in_tree:
            insert_in_treap(flows, queue, i)
    if queue.line:
        sort_strands(flows, q)
    displaced = choose_head(flows, q)
    if displaced != NONE:
        step_back(core, displaced)
    return give_back(core, q)


cdef int sort_strands(Flows flows, int32_t q) except -1:
    """Sort the strands of a queue after a change of its order. O(queued * log n)."""
    cdef AgentSessions agents = flows.agents
    cdef int32_t i = flows.queues[q].chain.head, t
    cdef const Request* r
    cdef list found = []
    while i != NONE:
        t = agents.find_strand(counted_session(flows, &flows.requests.items[i]), q)
        agents.strands[t].root = NONE
        found.append((i, t))
        i = flows.requests.items[i].next
    for i, t in found:
        r = &flows.requests.items[i]
        agents.strands[t].root = agents.treaps.insert(
            agents.strands[t].root, i, order_key(flows, &flows.queues[q], r), r.seq, r.work,
            r.arrival_ns,
        )
    for _, t in found:
        stand_strand(flows, t)
    return 0


cdef int check_order(Core core, int32_t q) except -1:
    """Verify the chain of a queue, and its treap. O(n)."""
    cdef Queue* queue = &core.flows.queues[q]
    cdef Request* r
    cdef int32_t i = queue.chain.head, count = 0
    cdef int64_t key, before_key = -NEVER, before_seq = -NEVER
    while i != NONE:
        r = &core.requests.items[i]
        key = order_key(core.flows, queue, r)
        check_invariant(
            core,
            (
                key > before_key or (key == before_key and r.seq > before_seq)
                or (queue.line and not queue.in_tree)  # what waited for a cap comes late
            )
            and r.state == QUEUED,
            "a queue is served by arrival, by deadline or by place",
        )
        if queue.in_tree:
            check_invariant(core, core.flows.treaps.place(i) == count, "the treap knows its place")
            check_invariant(
                core, i == queue.head or r.bill == 0
                or not takes_in_turn(core.flows, queue.flow),
                "in a treap no request behind the head holds a quota",
            )
        before_key, before_seq = key, r.seq
        count += 1
        i = r.next
    check_invariant(core, count == queue.chain.count, "a queue is as long as it says")
    if queue.in_tree:
        check_invariant(
            core,
            core.flows.treaps.valid(queue.root)
            and (queue.root == NONE if count == 0
                 else core.flows.treaps.items[queue.root].count == count),
            "the treap of a queue",
        )
    return 0
