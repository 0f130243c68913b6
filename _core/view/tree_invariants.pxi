# Verifies the tree of shares: each family, and what nodes and the root count of it.

cdef int64_t arrival_of(Flows flows, int32_t q) except -1:
    """Return when the first head of a queue came; for a node, the first of its line."""
    cdef int32_t flow = flows.queues[q].flow
    if is_node(flows, flow):
        return flows.family_of(flow).line_of(flows.queues[q].target).nodes[0].tie
    return flows.requests.items[flows.queues[q].head].seq


cdef int64_t key_in(Flows flows, int32_t q, int32_t pool) except *:
    """Return the key of a queue in the line of a pool, its own or one of its set. O(pools)."""
    if flows.order == ORDER_COUNTER and flows.queues[q].target > POOLS_MAX:
        return flows.counter_at(flows.queues[q].flow, pool) // flows.grain
    return flows.key_of(q)


cdef bint stands_by(Flows flows, int32_t q, const Node* entry, int64_t key, int64_t tie) except *:
    """Return whether an entry of a queue is right; a node that waits to be placed has its earlier
    key."""
    cdef int32_t flow = flows.queues[q].flow
    if is_node(flows, flow) and flows.family_of(flow).is_noted:
        return entry.key <= key
    return entry.key == key and entry.tie == tie


cdef int check_node(Core core, int32_t node) except -1:
    """Check that a node stands, is active and counts as its children say. O(family * targets)."""
    cdef Flows flows = core.flows
    cdef const Flow* f = &flows.items[node]
    cdef Family family = flows.family_of(node)
    cdef Heap line
    cdef int32_t place, child, q, k, target, queued = 0
    cdef int64_t work = 0
    check_invariant(core, family.active.valid(), "heap order of a family")
    check_invariant(
        core, flows.is_active(node) == (family.active.count > 0),
        "a node is active while a child is",
    )
    for place in range(family.count):
        child = family.members[place]
        if child < 0:
            continue
        check_invariant(
            core, flows.items[child].parent == node and flows.items[child].place == place
            and flows.items[child].depth == f.depth + 1 and flows.items[child].cls == f.cls,
            "a child knows its place",
        )
        queued += flows.items[child].queued
        work += flows.items[child].queued_work
    check_invariant(
        core, queued == f.queued and work == f.queued_work, "queued of a node = sum of its children"
    )
    check_backlogged(core, node)
    for target in range(<int32_t>len(family.lines)):
        line = family.line_of(target)
        check_invariant(core, line.valid(), "heap order of a line of a family")
        q = flows.find_queue(node, target)
        check_invariant(
            core, (q != NONE and has_place(flows, q)) == (line.count > 0),
            "a node stands while a child does",
        )
        for k in range(line.count):
            q = queue_at(flows, node, target, line.nodes[k].id)
            check_invariant(
                core, stands_by(
                    flows, q, &line.nodes[k], key_in(flows, q, target - 1), arrival_of(flows, q)
                ),
                "a child stands at its counter and its head",
            )
    return 0


cdef int check_backlogged(Core core, int32_t node) except -1:
    """Check that a node counts in each pool the children that are backlogged there: tenants with
    something queued that does not wait for a quota. O(pools * (family + targets))."""
    cdef Flows flows = core.flows
    cdef Family family = flows.family_of(node)
    cdef IndexSet queued
    cdef IndexSet stands
    cdef int32_t place, child, n, pool
    cdef list counts = [0] * POOLS_ORDERED
    for place in range(family.count):
        child = family.members[place]
        n = NONE if child < 0 else flows.items[child].first_position
        while n != NONE:
            pool = flows.positions.items[n].pool
            counts[pool] += flows.positions.items[n].backlogged > 0
            if not is_node(flows, child):
                find_lines(flows, child, &queued, &stands)
                check_invariant(
                    core, flows.positions.items[n].backlogged == (
                        flows.positions.items[n].waits_at == NONE
                        and is_for(flows, &queued, pool)
                    ),
                    "a tenant's flow is backlogged in a pool while it has something queued there",
                )
            n = flows.positions.items[n].next_position
    for pool in range(POOLS_ORDERED):
        n = flows.find_position(node, pool)
        check_invariant(
            core, counts[pool] == (0 if n == NONE else flows.positions.items[n].backlogged),
            "a node counts its children that are backlogged in a pool",
        )
    return 0


cdef int check_weights(Core core) except -1:
    """Check the weights that are queued, and that share the pools. O(flows)."""
    cdef Flows flows = core.flows
    cdef const Flow* f
    cdef Family family
    cdef int32_t flow, cls, count = 0
    cdef int64_t recent = 0
    cdef list lines = [[0, 0] for _ in range(CLASSES_MAX)]
    cdef list families = [[0, 0, 0, 0] for _ in flows.families]
    for flow in range(flows.count):
        f = &flows.items[flow]
        sums = lines[f.cls] if f.parent == NONE else families[flows.items[f.parent].family]
        sums[0] += f.weight_milli if f.queued else 0
        sums[1] += f.weight_milli if f.queued > 1 else 0
        if not flows.is_recent(flow):
            continue
        count += not is_node(flows, flow)
        if f.parent == NONE:
            recent += f.weight_milli
        else:
            sums[2] += f.weight_milli
            sums[3] += 1
    for cls in range(CLASSES_MAX):
        check_invariant(
            core, lines[cls] == [flows.queued_weight[cls], flows.deep_weight[cls]],
            "weights of what is queued = sums of flows",
        )
    check_invariant(
        core, recent == flows.recent_weight and count == flows.recent_count,
        "weight of those that share the pools = sum of flows",
    )
    for flow in range(<int32_t>len(flows.families)):
        family = <Family>flows.families[flow]
        check_invariant(
            core, families[flow] == [
                family.queued_weight, family.deep_weight, family.recent_weight,
                family.recent_count,
            ],
            "weights of a family = sums of its children",
        )
    return 0
