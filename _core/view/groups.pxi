# The tree of shares for people: a row for each group with a weight, and the level at which one
# request precedes another.

ctypedef struct GroupSums:
    int64_t live, granted, input_tokens, cached_tokens, output_tokens


cdef list group_rows(Core core):
    """Return the groups with a weight, as configured, in each class that has come below them.
    O(flows + groups * (levels + classes))."""
    cdef Flows flows = core.flows
    cdef int32_t flow, node
    cdef list rows = []
    cdef GroupSums* sums
    if not has_weights(core):
        return rows
    sums = <GroupSums*>extend(NULL, len(flows.families) + 1, sizeof(GroupSums))
    try:
        sum_below(flows, sums)
        for node in core.quota_names.values():
            if core.quotas.nodes[node].weight_milli == 0:
                continue
            flow = core.quotas.nodes[node].node
            if flow == NONE:  # no tenant is below it yet
                rows.append(idle_group(core, node))
            while flow != NONE:
                rows.append(group_row(core, node, flow, &sums[flows.items[flow].family]))
                flow = flows.items[flow].sibling
    finally:
        free(sums)
    return rows


cdef int sum_below(Flows flows, GroupSums* sums) except -1:
    """Sum up what all below each node were served while they were below it; by number of its
    family. O(flows)."""
    cdef int32_t flow, depth
    cdef const Flow* f
    cdef list nodes = []
    memset(sums, 0, len(flows.families) * sizeof(GroupSums))
    for flow in range(flows.count):
        f = &flows.items[flow]
        if is_node(flows, flow):
            nodes.append(flow)
            add_served(&sums[f.family], f)
        elif f.parent != NONE:
            add_served(&sums[flows.items[f.parent].family], f)
            sums[flows.items[f.parent].family].live += f.live
    for depth in range(TREE_LEVELS - 1, 0, -1):
        for flow in nodes:
            f = &flows.items[flow]
            if f.depth == depth and f.parent != NONE:
                add_sums(&sums[flows.items[f.parent].family], &sums[f.family])
    return 0


cdef inline void add_served(GroupSums* to, const Flow* f) noexcept:
    to.granted += f.granted
    to.input_tokens += f.input_tokens
    to.cached_tokens += f.cached_tokens
    to.output_tokens += f.output_tokens


cdef inline void add_sums(GroupSums* to, const GroupSums* more) noexcept:
    to.live += more.live
    to.granted += more.granted
    to.input_tokens += more.input_tokens
    to.cached_tokens += more.cached_tokens
    to.output_tokens += more.output_tokens


cdef dict group_row(Core core, int32_t node, int32_t flow, const GroupSums* sums):
    """Return the row of a group in one class. O(levels)."""
    cdef const Flow* f = &core.flows.items[flow]
    return {
        "name": quota_name_of(core, node),
        "parent": "" if f.parent == NONE else core.flow_list[f.parent].decode(),
        "request_class": core.classes.names[f.cls].decode(),
        "level": f.depth + 1,
        "weight_milli": f.weight_milli,
        "entitled_ppm": entitled_ppm(core.flows, flow),
        "vtc_micro": f.vtc,
        "queued": f.queued,
        "live_leases": sums.live,
        "input_tokens": sums.input_tokens,
        "cached_input_tokens": sums.cached_tokens,
        "output_tokens": sums.output_tokens,
        "granted": sums.granted,
    }


cdef dict idle_group(Core core, int32_t node):
    """Return the row of a group that no flow is below. O(levels)."""
    cdef GroupSums none
    cdef int32_t above = core.quotas.nodes[node].parent, level = 1, n
    memset(&none, 0, sizeof(GroupSums))
    while above != NONE and core.quotas.nodes[above].weight_milli == 0:
        above = core.quotas.nodes[above].parent
    n = above
    while n != NONE:
        level += core.quotas.nodes[n].weight_milli > 0
        n = core.quotas.nodes[n].parent
    return {
        "name": quota_name_of(core, node),
        "parent": quota_name_of(core, above),
        "request_class": core.classes.names[0].decode(),
        "level": level,
        "weight_milli": core.quotas.nodes[node].weight_milli,
        "entitled_ppm": 0, "vtc_micro": 0, "queued": 0, "live_leases": 0, "input_tokens": 0,
        "cached_input_tokens": 0, "output_tokens": 0, "granted": 0,
    }


cdef dict group_ahead(Core core, int32_t i, int32_t head, int32_t pool):
    """Find where the paths of a request and of one that precedes it in a pool part: the level, 1 at
    the root, the two groups (empty: a tenant), and by how much service; {}: no group is above
    either. O(levels * pools)."""
    cdef Flows flows = core.flows
    cdef int32_t mine = core.requests.items[i].flow, its = core.requests.items[head].flow
    if mine == its or flows.items[mine].parent == flows.items[its].parent == NONE:
        return {}
    while flows.items[mine].depth > flows.items[its].depth:
        mine = flows.items[mine].parent
    while flows.items[its].depth > flows.items[mine].depth:
        its = flows.items[its].parent
    while flows.items[mine].parent != flows.items[its].parent:
        mine, its = flows.items[mine].parent, flows.items[its].parent
    return {
        "level": flows.items[mine].depth + 1,
        "own_group": core.flow_list[mine].decode() if is_node(flows, mine) else "",
        "next_group": core.flow_list[its].decode() if is_node(flows, its) else "",
        "next_lead_tokens": (flows.counter_at(mine, pool) - flows.counter_at(its, pool)) // MICRO,
    }
