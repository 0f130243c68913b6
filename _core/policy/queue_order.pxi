# Changes of the order inside a flow; heads that lose their place give their quotas back.

cdef int line_up(Core core, int32_t i) except -1:
    """Queue a request that has come. O(levels + log n)."""
    cdef int32_t displaced = enqueue(core.flows, i)
    return 0 if displaced == NONE else step_back(core, displaced)


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
    if queue.chain.count == 0 or not queue.by_deadline or not takes_in_turn(core.flows, queue.flow):
        return 0
    while core.requests.items[i].next != NONE:
        i = core.requests.items[i].next
        close_bill(core, i, False)
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
        if work >= core.work_max:
            core.has_more = True
            return 0
        core.flows.unsorted -= 1
        work += 1 + core.flows.queues[core.flows.unsorted].chain.count
        sort_queue(core, core.flows.unsorted)
    return 0


cdef int sort_queue(Core core, int32_t q) except -1:
    cdef Flows flows = core.flows
    cdef Queue* queue = &flows.queues[q]
    cdef int32_t i = queue.chain.head, head = queue.chain.head
    cdef list found = []
    if queue.by_deadline == flows.by_deadline:
        return 0
    queue.by_deadline = flows.by_deadline
    while i != NONE:
        found.append((
            deadline_of(&flows.requests.items[i]) if queue.by_deadline else 0,
            flows.requests.items[i].seq, i,
        ))
        i = flows.requests.items[i].next
    found.sort()
    queue.chain.head = queue.chain.tail = queue.root = NONE
    queue.chain.count = 0
    for key, _, i in found:
        chain_push(&queue.chain, flows.requests.items, i)
        if queue.by_deadline:
            insert_in_treap(flows, queue, i, key)
    if queue.chain.head != head:
        displace(flows, q, head)
        rank_queue(flows, q)
        step_back(core, head)
    return give_back(core, q)


cdef int check_order(Core core, int32_t q) except -1:
    """Verify the chain of a queue, and its treap. O(n)."""
    cdef Queue* queue = &core.flows.queues[q]
    cdef Request* r
    cdef int32_t i = queue.chain.head, count = 0
    cdef int64_t key, before_key = 0, before_seq = NONE
    while i != NONE:
        r = &core.requests.items[i]
        key = deadline_of(r) if queue.by_deadline else 0
        check_invariant(
            core,
            (key > before_key or (key == before_key and r.seq > before_seq))
            and r.state == QUEUED,
            "a queue is served by arrival, or by deadline",
        )
        if queue.by_deadline:
            check_invariant(core, core.flows.treaps.place(i) == count, "the treap knows its place")
            check_invariant(
                core, count == 0 or r.bill == 0 or not takes_in_turn(core.flows, queue.flow),
                "by deadline nobody holds a quota behind the head",
            )
        before_key, before_seq = key, r.seq
        count += 1
        i = r.next
    check_invariant(core, count == queue.chain.count, "a queue is as long as it says")
    if queue.by_deadline:
        check_invariant(
            core,
            core.flows.treaps.valid(queue.root)
            and (queue.root == NONE if count == 0
                 else core.flows.treaps.items[queue.root].count == count),
            "the treap of a queue",
        )
    return 0
