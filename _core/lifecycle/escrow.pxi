# Chunks of quotas' buckets that the store of a cluster keeps: granted, returned, and asked for.
#
# A grant is an event, so it is recorded, replayed, and part of the digest. The member's task reads
# what is wanted and what was drawn. It states both to the store, and its answer becomes the next
# event. Nothing here waits for it: without a chunk a flow waits for its quota, as before.
#
# Slots of concurrency go the same way, but a member states how many it keeps: those of its running
# requests, and those that it was granted and may fill.
#
# Quotas of models stay each member's own, because its pools are.

cdef bytes MODEL_QUOTA = QUOTA_ROW + b"model:"


cdef int32_t node_of(Core core, bytes kind, bytes name) except? -2:
    if kind == QUOTA_ROW:
        return core.quota_names.get(name, NONE)
    flow = core.flow_names.get(name)
    return NONE if flow is None else core.flows.items[<int32_t>flow].own_quota


cdef int hold_escrow(Core core, int32_t node) except -1:
    """Let the chunks of the store fill a node's buckets from now on, or a part of its limits. Debts
    stay, in whole units. O(1)."""
    cdef Quota* n = &core.quotas.nodes[node]
    cdef bytes key = <bytes>core.quota_keys[node]
    cdef int k
    if key == QUOTA_ROW or key.startswith(MODEL_QUOTA):
        return 0
    for k in range(RATES):
        core.quotas.refill(n, k)
    if n.escrow == NULL:
        n.escrow = <Escrow*>grow(NULL, 0, 1, sizeof(Escrow))
    n.escrow.share = core.quotas.escrow_share
    n.escrow.told_ns = core.now_ns
    n.escrow.slots = n.escrow.slots_end_ns = n.escrow.slots_left = 0
    n.escrow.slots_told_ns = core.now_ns - ESCROW_ASK_NS
    for k in range(RATES):
        n.at_ns[k] = core.now_ns
        n.escrow.due_ns[k] = 0
        # The store has not said anything yet, and it keeps what members left.
        n.escrow.left[k] = max(<int64_t>0, n.level[k] // MICRO)
        if n.escrow.share == 0:
            n.level[k] = -((max(<int64_t>0, -n.level[k]) + MICRO - 1) // MICRO * MICRO)
    core.quotas.changed.mark(node)
    core.quotas.drawn.mark(node)
    return core.quotas.mark_ready(node)


cdef int put_escrow(Core core, int64_t share) except -1:
    """Share the buckets of tenants and groups with the members of a cluster. O(quotas)."""
    cdef int32_t node
    check_range("share", share, 0, 1 << 20)
    core.quotas.in_escrow = core.quotas.drawn.on = core.quotas.wanting.on = True
    core.quotas.escrow_share = share
    for node in range(core.quotas.count):
        hold_escrow(core, node)
    core.has_more = True
    core.digest_value = mix(core.digest_value, <uint64_t>share)
    return 0


cdef int32_t escrow_node(Core core, bytes key) except? -2:
    """Return the node of a key of `escrow_wants()` that only chunks fill; -1: there is none."""
    cdef int32_t node = node_of(core, key[:1], key[1:])
    return node if node != NONE and is_held(core.quotas.nodes[node].escrow) else NONE


cdef int check_grants(list rows) except -1:
    """Refuse a row that no store answers, before anything is granted. O(rows)."""
    for key, amounts, dues_ns, left, ends_ns in rows:
        if not isinstance(key, bytes):
            invalid("rows", "keys must be bytes")
        if not len(amounts) == len(dues_ns) == len(left) == RATES:
            invalid("rows", f"each has {RATES} amounts, times and levels")
        for name, values, low, high in (
            ("amount", amounts, -QUOTA_LIMIT_MAX, 4 * QUOTA_LIMIT_MAX),
            ("due_ns", dues_ns, 0, NEVER), ("left", left, 0, QUOTA_LIMIT_MAX),
            ("ends_ns", (ends_ns,), 0, NEVER),
        ):
            for value in values:
                check_range(name, value, low, high)
    return 0


cdef tuple grant_chunk(Core core, bytes key, amounts, dues_ns, left, int64_t ends_ns):
    """Add amounts to what a node holds, or take them back, as far as it has them; which it were.
    O(1)."""
    cdef int32_t node = escrow_node(core, key)
    cdef Quota* n
    cdef int64_t units
    cdef int k
    if node == NONE:
        return (0,) * RATES
    n = &core.quotas.nodes[node]
    applied = []
    for k in range(RATES):
        core.quotas.refill(n, k)
        units = amounts[k]
        if n.rate[k] == 0:
            units = 0
        elif units < 0:
            units = -min(-units, max(<int64_t>0, n.level[k] // MICRO))
        n.level[k] = min(n.level[k] + units * MICRO, n.rate[k] * MICRO)
        n.escrow.due_ns[k], n.escrow.left[k] = dues_ns[k], left[k]
        core.digest_value = mix(core.digest_value, <uint64_t>units)
        applied.append(units)
    n.escrow.told_ns = core.now_ns
    if ends_ns:
        n.escrow.ends_ns = ends_ns
    core.quotas.changed.mark(node)
    core.quotas.mark_ready(node)
    return tuple(applied)


cdef tuple units_held(const Quota* n):
    """Return the units of each limit that a node holds; below 0: it owes."""
    return tuple([n.level[k] // MICRO if n.rate[k] else 0 for k in range(RATES)])


cdef list escrow_wants(Core core):
    """Return a row for each node in escrow that flows wait for, with the buckets that the first one
    needs: the node's key, and for each bucket of its path its key, what it lacks, and what the
    flow's queue can use. O(waiting nodes * levels)."""
    cdef DirtyQueue wanting = core.quotas.wanting
    cdef int32_t left = wanting.count - wanting.taken, node, cls
    cdef Line line
    found = []
    core.quotas.is_wanted = False
    while left > 0:
        left -= 1
        node = wanting.take()
        if not core.quotas.is_awaited(node) or not is_held(core.quotas.nodes[node].escrow):
            continue
        wanting.mark(node)
        line = <Line>core.quotas.waiting[node]
        cls = line.first(core.now_ns)
        path = wanted_path(core, <int32_t>line.heap(cls).nodes[0].tie)
        if path:
            found.append((core.quota_keys[node], path))
    return found


cdef list wanted_path(Core core, int32_t flow):
    """Return the buckets of a flow's path that lack something for its head, and those above and
    below. Empty: none lacks anything. O(levels)."""
    cdef Flow* f = &core.flows.items[flow]
    cdef Take t = take_for(core, f.wait_head)
    cdef int64_t each, need, behind = max(0, f.queued - 1)
    cdef int32_t node = f.quota
    cdef Quota* n
    cdef int k
    cdef bint is_short = False
    path = []
    while node != NONE:
        n = &core.quotas.nodes[node]
        if is_held(n.escrow):
            least, most = [], []
            for k in range(RATES):
                core.quotas.refill(n, k)
                each = min(t.micro[k] // MICRO, n.rate[k])
                need = max(<int64_t>0, each - max(<int64_t>0, n.level[k] // MICRO))
                is_short = is_short or need > 0
                least.append(need)
                most.append(min(n.rate[k], need + each * min(behind, <int64_t>1 << 20)))
            path.append((core.quota_keys[node], tuple(least), tuple(most)))
        node = n.parent
    return path if is_short else []


cdef list escrow_drawn(Core core, int64_t rows_max):
    """Return the keys of nodes that were drawn from since the last call, at most `rows_max`.
    O(rows)."""
    cdef int32_t node
    found = []
    while len(found) < rows_max:
        node = core.quotas.drawn.take()
        if node == NONE:
            break
        if is_held(core.quotas.nodes[node].escrow):
            found.append(core.quota_keys[node])
    return found


cdef list escrow_levels(Core core, list keys):
    """Return the limits of each key, and what is held of each; None: it is not in escrow.
    O(keys)."""
    cdef int32_t node
    cdef Quota* n
    cdef int k
    found = []
    for key in keys:
        node = escrow_node(core, key)
        if node == NONE:
            found.append(None)
            continue
        n = &core.quotas.nodes[node]
        for k in range(RATES):
            core.quotas.refill(n, k)
        limits = tuple([n.rate[k] for k in range(RATES)])
        found.append((limits, units_held(n)))
    return found


cdef int check_slots(list rows) except -1:
    """Refuse a row that no store answers, before anything is set. O(rows)."""
    for key, slots, left, ends_ns in rows:
        if not isinstance(key, bytes):
            invalid("rows", "keys must be bytes")
        check_range("slots", slots, 0, QUOTA_LIMIT_MAX)
        check_range("left", left, 0, QUOTA_LIMIT_MAX)
        check_range("ends_ns", ends_ns, 0, NEVER)
    return 0


cdef int put_slots(Core core, bytes key, int64_t slots, int64_t left, int64_t ends_ns) except -1:
    """Let a number of a node's requests run here; those that run beyond it go on. O(1)."""
    cdef int32_t node = escrow_node(core, key)
    cdef Escrow* e
    if node == NONE:
        return 0
    e = core.quotas.nodes[node].escrow
    e.slots, e.slots_left, e.slots_end_ns = slots, left, ends_ns
    e.slots_told_ns = core.now_ns
    core.digest_value = mix(core.digest_value, <uint64_t>slots)
    core.has_more = True
    return core.quotas.mark_ready(node)


cdef list slot_wants(Core core):
    """Return the keys of nodes in escrow that lack a slot for the first flow that waits at one of
    their paths' nodes, and how many requests could use one. O(waiting nodes * levels)."""
    cdef DirtyQueue wanting = core.quotas.wanting
    cdef int32_t k, node, waits_at
    cdef int64_t waiting
    cdef Quota* n
    cdef Line line
    found = {}
    for k in range(wanting.taken, wanting.count):
        waits_at = wanting.line[k]
        if not core.quotas.is_awaited(waits_at):
            continue
        line = <Line>core.quotas.waiting[waits_at]
        node = <int32_t>line.heap(line.first(core.now_ns)).nodes[0].tie
        waiting = line.count + core.flows.items[node].queued - 1
        node = core.flows.items[node].quota
        while node != NONE:
            n = &core.quotas.nodes[node]
            if is_held(n.escrow) and core.quotas.lacks_slot(n) and n.live < n.concurrency:
                found[core.quota_keys[node]] = min(waiting, n.concurrency - n.live)
            node = n.parent
    return list(found.items())


cdef list slot_rows(Core core, list keys):
    """Return the cap of each key, what runs, and how many may run; None: it has no cap in escrow.
    O(keys)."""
    cdef int32_t node
    cdef Quota* n
    found = []
    for key in keys:
        node = escrow_node(core, key)
        n = &core.quotas.nodes[node] if node != NONE else NULL
        if n == NULL or n.concurrency == 0:
            found.append(None)
            continue
        found.append((n.concurrency, n.live, slots_of(n.escrow, n.concurrency, core.now_ns)))
    return found
