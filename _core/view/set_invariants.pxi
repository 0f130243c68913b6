# Verifies the sets of pools that requests name, and where their queues stand.

cdef int check_sets(Core core) except -1:
    """Check the sets against the queued requests, and that a queue of a set has an entry in the
    line of each of its pools. O(requests + sets * pools + queues * pools)."""
    cdef PoolSets sets = core.flows.sets
    cdef list users = [0] * sets.count
    cdef list of_pool = [0] * POOLS_MAX
    cdef int32_t i, n, k, used = 0, unused = 0
    for i in range(core.requests.used):
        if core.requests.items[i].state == QUEUED and is_set(core.requests.items[i].target):
            users[core.requests.items[i].target - POOLS_MAX] += 1
    for n in range(sets.count):
        check_invariant(core, sets.items[n].users == users[n], "users of a set = queued requests")
        used += users[n] > 0
        for k in range(sets.items[n].count):
            of_pool[sets.items[n].pools[k]] += users[n] > 0
            check_invariant(
                core, set_has(&sets.items[n].members, sets.items[n].pools[k])
                and (k == 0 or sets.items[n].pools[k - 1] < sets.items[n].pools[k]),
                "a set knows its pools",
            )
        check_invariant(
            core, sets.items[n].count == 0
            or sets.numbers.get(sets.items[n].hi, sets.items[n].lo) == n, "a set is found",
        )
    n = sets.first_unused
    while n != NONE:
        unused += 1
        n = sets.items[n].next_unused
    check_invariant(
        core, used == sets.used and used + unused == sets.count, "a set is in use or not"
    )
    for k in range(POOLS_MAX):
        check_invariant(core, of_pool[k] == sets.of_pool[k], "a pool counts its sets in use")
    return check_set_queues(core.flows, core)


cdef int check_set_queues(Flows flows, Core core) except -1:
    cdef int32_t q, k, flow, target, node
    cdef Heap line
    cdef list in_sets = [0] * flows.count
    for q in range(flows.queue_count):
        flow = flows.queues[q].flow
        if flows.queues[q].target <= POOLS_MAX:
            continue
        in_sets[flow] += flows.queues[q].stands
        for k in range(flows.sets.line_count(flows.queues[q].target)):
            target = flows.sets.line_at(flows.queues[q].target, k)
            node = flows.items[flow].parent
            line = own_heap(flows, node, flows.items[flow].cls, target - 1)
            if node == NONE:
                check_invariant(
                    core, line.has(q) == flows.queues[q].stands,
                    "a queue of a set stands in the line of each of its pools",
                )
            else:
                check_invariant(
                    core, line.has(flows.items[flow].place) == (
                        first_standing(flows, flow, target) != NONE
                    ),
                    "a child stands in the line of a pool while a head of it does",
                )
    for flow in range(flows.count):
        check_invariant(
            core, in_sets[flow] == flows.items[flow].in_sets, "a flow counts its queues of sets"
        )
    return 0
