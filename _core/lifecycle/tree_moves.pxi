# Which flows stand below which: a group of the configuration with a weight is a node of the tree.
#
# A group without a weight changes nothing: its members stand below the nearest group above it that
# has one. A flow that moves keeps its distance to the level of its siblings, so that a reload
# neither forgives what it was served nor gives it any credit.

cdef bint has_weights(Core core) noexcept:
    """Return whether a group has a weight. O(quotas)."""
    cdef int32_t node
    for node in range(core.quotas.count):
        if core.quotas.nodes[node].weight_milli:
            return True
    return False


cdef int64_t pools_allowed(Core core) noexcept:
    """Return how many pools there may be at once. O(quotas)."""
    cdef int64_t most = core.settings.pools_max
    return min(most, <int64_t>POOLS_ORDERED) if has_weights(core) else most


cdef int32_t new_node(Core core, int32_t group) except -1:
    """Return the flow of a group in the default class. O(1) amortised."""
    cdef int32_t node = core.flows.add(core.quotas.nodes[group].weight_milli)
    core.flow_list.append((<bytes>core.quota_keys[group])[1:])
    core.flows.items[node].group = group
    add_family(core.flows, node)
    core.quotas.nodes[group].node = node
    return node


cdef int add_family(Flows flows, int32_t node) except -1:
    flows.families.append(Family())
    flows.items[node].family = <int32_t>len(flows.families) - 1
    return 0


cdef int32_t node_in_class(Core core, int32_t group, int32_t cls) except -2:
    """Return the node of the nearest group with a weight, from this one up, in a class; make it
    when it is first needed; -1: none has a weight. O(levels + classes)."""
    cdef int32_t node, base
    while group != NONE and core.quotas.nodes[group].weight_milli == 0:
        group = core.quotas.nodes[group].parent
    if group == NONE:
        return NONE
    node = base = core.quotas.nodes[group].node
    if node == NONE:
        node = base = new_node(core, group)
    while node != NONE and core.flows.items[node].cls != cls:
        node = core.flows.items[node].sibling
    if node == NONE:
        node = core.flows.add_sibling(base, cls)
        core.flow_list.append(core.flow_list[base])
        add_family(core.flows, node)
    return node


cdef int32_t wanted_parent(Core core, int32_t flow) except -2:
    """Return the node below which the configuration wants a flow; -1: it is at the root, as all are
    under orders without counters."""
    cdef int32_t group = core.flows.items[flow].group
    if core.flows.order != ORDER_COUNTER:
        return NONE
    if is_node(core.flows, flow):
        group = core.quotas.nodes[group].parent
    return node_in_class(core, group, core.flows.items[flow].cls)


# The state of a flow at its former place.
ctypedef struct Stood:
    bint active, recent
    int64_t ahead  # lead over its siblings' level; -VTC_MAX: it is where a newcomer begins


cdef int carry_served(Flows flows, int32_t flow, int sign) except -1:
    """Keep (1) in the node above a flow what this flow and all below it were served there, or leave
    out (-1) what they were served before they came. So a node counts what was served below it, and
    never falls. O(flows below)."""
    if flows.items[flow].parent != NONE:
        add_carried(flows, &flows.items[flows.items[flow].parent], flow, sign)
    return 0


cdef int add_carried(Flows flows, Flow* to, int32_t flow, int sign) except -1:
    cdef const Flow* f = &flows.items[flow]
    cdef Family family
    cdef int32_t place
    to.granted += sign * f.granted
    to.input_tokens += sign * f.input_tokens
    to.cached_tokens += sign * f.cached_tokens
    to.output_tokens += sign * f.output_tokens
    if is_node(flows, flow):
        family = flows.family_of(flow)
        for place in range(family.count):
            if family.members[place] >= 0:
                add_carried(flows, to, family.members[place], sign)
    return 0


cdef Stood detach(Flows flows, int32_t flow) except *:
    """Take a flow out of all that its parent counts. O(levels * targets * log n)."""
    cdef Flow* f = &flows.items[flow]
    cdef Stood stood
    cdef int32_t q = f.first_queue
    cdef int64_t level = flows.level_of(flow)[0]
    place_nodes(flows)
    stood.active, stood.recent = flows.is_active(flow), flows.is_recent(flow)
    stood.ahead = f.vtc - level
    if not stood.active and f.vtc <= max(<int64_t>0, level - flows.credit(f.depth)):
        stood.ahead = -VTC_MAX
    while q != NONE:
        leave_line(flows, q)
        if flows.queues[q].target == 0 and not stands_in_one(flows):
            leave_anywhere(flows, q)
        q = flows.queues[q].next_queue
    detach_positions(flows, flow)
    if stood.active:
        flows.part(flow)
    if stood.recent:
        flows.count_recent(flow, -1)
    move_queued(flows, flow, -f.queued, -f.queued_work)
    if f.parent != NONE:
        carry_served(flows, flow, 1)
        flows.family_of(f.parent).leave(f.place)
    f.parent, f.depth = NONE, 0
    return stood


cdef void detach_positions(Flows flows, int32_t flow) noexcept:
    """Leave in each position how far it is ahead of its siblings' level, until `attach()`;
    -VTC_MAX: it is at a newcomer's place. O(pools * levels)."""
    cdef int32_t n = flows.items[flow].first_position
    cdef bint is_newcomer
    cdef Position* p
    while n != NONE:
        p = &flows.positions.items[n]
        n = p.next_position
        if p.backlogged:
            part_nodes(flows, flow, p.pool)
        is_newcomer = p.key <= flows.newcomer_at(flow, p.pool)
        p.key -= flows.level_in(flow, p.pool)[0]
        if is_newcomer and flows.items[flow].queued == 0:
            p.key = -VTC_MAX


cdef int attach_positions(Flows flows, int32_t flow) except -1:
    """Let a flow stand in each pool as far ahead of its new siblings' level. O(pools * levels)."""
    cdef int32_t n = flows.items[flow].first_position
    cdef Position* p
    while n != NONE:
        p = &flows.positions.items[n]
        n = p.next_position
        p.key = min(max(<int64_t>0, flows.level_in(flow, p.pool)[0] + p.key), VTC_MAX)
        if flows.items[flow].parent != NONE and p.backlogged and is_node(flows, flow):
            join_nodes(flows, flow, p.pool, True, False)
        elif not is_node(flows, flow):
            p.backlogged = 0
    if flows.items[flow].parent != NONE and not is_node(flows, flow):
        count_backlogged(flows, flow)
    return 0


cdef int attach(Flows flows, int32_t flow, int32_t parent, const Stood* stood) except -1:
    """Let a detached flow stand below a node, -1: at the root. Its queues are ranked by the caller.
    O(levels * targets * log n)."""
    cdef Flow* f = &flows.items[flow]
    if parent != NONE:
        f.parent, f.place = parent, flows.family_of(parent).add(flow)
        carry_served(flows, flow, -1)
    settle_depth(flows, flow)
    f.vtc = min(max(<int64_t>0, flows.level_of(flow)[0] + stood.ahead), VTC_MAX)
    flows.changed.mark(flow)
    attach_positions(flows, flow)
    move_queued(flows, flow, f.queued, f.queued_work)
    if stood.recent:
        flows.count_recent(flow, 1)
    if stood.active:
        flows.join(flow, False)
    return 0


cdef int settle_depth(Flows flows, int32_t flow) except -1:
    # Set the depth of a flow and of all below it.
    cdef Flow* f = &flows.items[flow]
    cdef Family family
    cdef int32_t place
    f.depth = 0 if f.parent == NONE else flows.items[f.parent].depth + 1
    if is_node(flows, flow):
        family = flows.family_of(flow)
        for place in range(family.count):
            if family.members[place] >= 0:
                settle_depth(flows, family.members[place])
    return 0


cdef int move_queued(Flows flows, int32_t flow, int32_t count, int64_t work) except -1:
    """Count what a flow has queued at its parent and all above, and among its siblings: more than
    before, or less. O(levels)."""
    cdef Flow* f = &flows.items[flow]
    cdef int32_t more = (count > 0) - (count < 0)
    if count:
        flows.queued_weight_of(flow)[0] += more * f.weight_milli
    if count > 1 or count < -1:
        flows.deep_weight_of(flow)[0] += more * f.weight_milli
    add_to_nodes(flows, flow, count, work)
    return 0


cdef int place_flow(Core core, int32_t flow) except -1:
    """Let a flow stand where the configuration wants it, with all that it has queued.
    O(levels * targets * log n)."""
    cdef int32_t parent
    cdef Stood stood
    if core.tree_is_stale:
        return 0  # the next poll places all
    parent = placed_parent(core, flow)
    if core.flows.items[flow].parent == parent:
        return 0
    stood = detach(core.flows, flow)
    attach(core.flows, flow, parent, &stood)
    return rank_moved(core.flows, flow)


cdef int32_t placed_parent(Core core, int32_t flow) except -2:
    # A node that was just made stands at the root until it is placed itself.
    cdef int32_t parent = wanted_parent(core, flow)
    if parent != NONE:
        place_flow(core, parent)
    return parent


cdef int rank_moved(Flows flows, int32_t flow) except -1:
    cdef int32_t q = flows.items[flow].first_queue
    if not is_node(flows, flow):
        rank_flow(flows, flow)
        return rekey_waiting(flows, flow)
    stand_by_counter(flows, flow)
    while q != NONE:
        stand_above(flows, q)
        q = flows.queues[q].next_queue
    return 0


cdef int settle_tree(Core core) except -1:
    """Let all flows stand where the configuration wants them, after a change of groups. First all
    that move leave, the lowest first, so that no two of them are ever above each other.
    O(flows * levels * targets * log n)."""
    cdef Flows flows = core.flows
    cdef int32_t flow, node
    cdef list moved = []
    cdef dict found = {}
    cdef Stood stood
    core.tree_is_stale = False
    for node in range(core.quotas.count):
        flow = core.quotas.nodes[node].node
        while flow != NONE and core.quotas.nodes[node].weight_milli:
            flows.reweigh(flow, core.quotas.nodes[node].weight_milli)
            flow = flows.items[flow].sibling
    flow = 0
    while flow < flows.count:  # nodes that are made on the way are looked at, too
        if wanted_parent(core, flow) != flows.items[flow].parent:
            moved.append((-flows.items[flow].depth, flow))
        flow += 1
    for _, flow in sorted(moved):
        stood = detach(flows, flow)
        found[flow] = (stood.active, stood.recent, stood.ahead)
    for flow in sorted(found):
        attach_in_order(core, flow, found)
    return 0


cdef int attach_in_order(Core core, int32_t flow, dict found) except -1:
    # The nodes above it first.
    cdef int32_t parent = wanted_parent(core, flow)
    cdef Stood stood
    if parent != NONE:
        attach_in_order(core, parent, found)
    if flow not in found:
        return 0
    stood.active, stood.recent, stood.ahead = found.pop(flow)
    attach(core.flows, flow, parent, &stood)
    return rank_moved(core.flows, flow)
