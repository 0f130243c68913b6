# Order inside a flow: by arrival, or earliest deadline first.
#
# A queue is a chain in the order in which it is served. By deadline a treap over the same requests
# says where one goes, its place and the work before it. A deadline is the time until which a
# request says that it will wait; those that say none stand behind all that do, in the order of
# arrival. So they may starve, to their queue TTL, but for requests of their own tenant and class
# only: what a flow gets is decided by its counter, not by its deadlines.
#
# Whoever comes with an earlier deadline than the head takes its place, and asks the quotas for
# itself; the former head gives back what it took, and asks again when its turn comes. So behind the
# head nobody holds a quota, but where quotas are taken at the arrival (a flow that refuses, or that
# is audited).

cdef enum:
    BY_ARRIVAL = 0
    BY_DEADLINE = 1

FLOW_ORDERS = {"arrival": BY_ARRIVAL, "deadline": BY_DEADLINE}


cdef inline int64_t deadline_of(const Request* r) noexcept nogil:
    return r.due_ns if r.has_deadline else NEVER


cdef int32_t insert_by_deadline(Flows flows, int32_t q, int32_t i) except -2:
    """Give request i its place in a queue; returns the head that it displaces, -1: none.
    O(log n) expected."""
    cdef Queue* queue = &flows.queues[q]
    cdef Request* items = flows.requests.items
    cdef int32_t head = queue.chain.head
    queue.root = flows.treaps.insert(queue.root, i, deadline_of(&items[i]), &items[i])
    chain_insert(&queue.chain, items, flows.treaps.before(i), i)
    if queue.chain.head != i:
        return NONE
    if head != NONE:
        displace(flows, q, head)
    flows._rank(q)
    return head


cdef int displace(Flows flows, int32_t q, int32_t head) except -1:
    # Nothing was granted: where the new head needs no quota, the flow stands in the line as before.
    cdef Request* old = &flows.requests.items[head]
    unthrottle(flows, q)
    if flows.is_billed(&flows.queues[q]):
        flows.requests.head_state_of(flows.queues[q].chain.head).lined_ns = old.head_state.lined_ns
    wait_for(flows.requests, head, WAITS_QUEUE, flows.now_ns)
    old.head_state.head_ns = old.head_state.lined_ns = NONE
    return 0


cdef inline bint takes_in_turn(Flows flows, int32_t flow) noexcept:
    """Whether a flow's requests take their quotas as heads, not at their arrival."""
    return not flows.items[flow].refuses and not flows.items[flow].dry_runs


cdef int line_up(Scheduler core, int32_t i) except -1:
    """Queue a request that has come. O(levels + log n)."""
    cdef int32_t displaced = core.flows.enqueue(i)
    return 0 if displaced == NONE else step_back(core, displaced)


cdef int step_back(Scheduler core, int32_t i) except -1:
    """A head has been displaced: it gives back what it took of its quotas, and does not wait for
    more. O(levels + log n)."""
    cdef int32_t flow = core.requests.items[i].flow
    if takes_in_turn(core.flows, flow):
        close_bill(core, i, False)
    if core.flows.items[flow].wait_head == i:
        quota_lost_head(core.flows, flow, i)
    return note_out(core.flows, flow)


cdef int give_back(Scheduler core, int32_t q) except -1:
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


cdef int give_back_all(Scheduler core, int32_t flow) except -1:
    """The same for all queues of a flow, which may have ceased to take quotas at the arrival."""
    cdef int32_t q = core.flows.items[flow].first_queue
    while q != NONE:
        give_back(core, q)
        q = core.flows.queues[q].next_queue
    return 0


cdef int64_t ahead_of(Flows flows, int32_t i) except -1:
    """Requests before i in its queue; by arrival, those that were withdrawn since still count.
    O(targets), by deadline with O(log n) expected."""
    cdef Request* r = &flows.requests.items[i]
    cdef Queue* queue = &flows.queues[flows.queue_of(r.flow, r.target + 1)]
    if queue.by_deadline:
        return flows.treaps.place(i)
    return max(0, r.ordinal - flows.requests.items[queue.chain.head].ordinal)


cdef int64_t work_in_queue(Flows flows, const Queue* queue, int64_t deadline_ns) noexcept:
    """Work in a queue that is served before one that comes now with a deadline, -1: with none;
    what will come with an earlier one is not foreseen. O(1), by deadline O(log n) expected."""
    if queue.chain.count == 0:
        return 0
    if not queue.by_deadline:
        return queue.work_in - flows.requests.items[queue.chain.head].mark
    if deadline_ns == NONE:
        return flows.treaps.items[queue.root].work
    return flows.treaps.work_until(queue.root, deadline_ns)


cdef int64_t oldest_in(Flows flows, const Queue* queue) noexcept:
    """When the oldest request of a queue that is not empty arrived. O(1)."""
    if queue.by_deadline:
        return flows.treaps.items[queue.root].oldest_ns
    return flows.requests.items[queue.chain.head].arrival_ns


# Another order while requests wait.

cdef int change_order(Scheduler core, int order) except -1:
    """Have all queues sorted by the polls that follow. O(1)."""
    core.flows.by_deadline = order == BY_DEADLINE
    core.flows.unsorted = core.flows.queue_count
    core.has_more = True
    return 0


cdef int sort_queues(Scheduler core) except -1:
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


cdef int sort_queue(Scheduler core, int32_t q) except -1:
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
            queue.root = flows.treaps.insert(queue.root, i, key, &flows.requests.items[i])
    if queue.chain.head != head:
        displace(flows, q, head)
        flows._rank(q)
        step_back(core, head)
    return give_back(core, q)


cdef int check_order(Scheduler core, int32_t q) except -1:
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
