# The state that outlives the process, as rows of a key and a value. A call returns only rows that
# have changed since the last one, and a bounded number, so that saving never delays decisions.
#
# A key is a letter and a name. A value is a protocol buffer, in fields of numbers; a signed number
# is written in zigzag. The rows on disk are:
#
#   f flow     1 counter, 2 the same without the lift of the quota it waits for (signed), 3 how it
#              stands (0 idle, 1 active, from 2 on it waits at that level of its quotas), 4 charged
#              for open leases, 5 average output, 6 between grants, 7 since the last grant, plus 1,
#              8 where it stands in pools (repeated: 1 key, 2 service elsewhere, 3 pool), 9 its
#              tenant is known at first sight, not configured
#              10 level of its sessions, 11 counter of its requests without one
#   n node     1 counter, 2 level of its children; its name is a class and a group, as a flow's is
#   s session  1 counter; its name is 16 bytes of the hash of its own, and the flow's
#   l flow     1 its lengths, 2 lengths with an adapter (repeated), 3 to 6 judged, covered, reserved
#              and used
#   t tenant, q name: a tenant's own quota, one of a group or a model
#              1 a bucket (repeated: 1 which, 2 limit, 3 level (signed), 4 since its tick began),
#              2 requests, 3 input and 4 output tokens on open bills, 5 lifts of
#              those that waited (repeated: 1 by how much, 2 class)
#   p pool     1 epoch, 2 promised tokens, 3 headroom (signed), 4 no preemption was seen yet, 5 an
#              operator drains it, 6 levels (repeated: 1 level, 2 class), 7 leases that passed a
#              head (repeated: 1 lease id, 2 parts per million of their work that are not charged)
#   o          1 lengths of all flows, 2 to 6 samples, judged, covered, reserved and used, 7 longest
#              prompt, 9 an operator drains everything, 10 average charge, 11 levels (repeated:
#              1 level, 2 class), 12 to 16 average charges below one node, two and so on, 17 the
#              lead that passes were given, 18 the largest charge of late
#
# A flow is named by the length of its class's name in two bytes (0: the default), that, and tenant.
# Lengths are 1 count, 2 level, 3 when they were learned, 4 those that wait for a sketch (packed),
# 5 the sketch as pairs of steps between buckets and counts (packed), 6 the adapter's hash.

cdef list changed_rows(Core core, int64_t now_ns, int64_t rows_max):
    """Return at most `count` rows, and behind the last change those of all flows and of pools. A
    row without a value is to be deleted. The first call gives all rows. O(rows)."""
    cdef list rows = []
    cdef int32_t n
    check_range("rows_max", rows_max, 1, 1 << 20)
    if not core.flows.changed.on:
        core.flows.agents.changed.on = True
        core.flows.agents.changed.mark_all(core.flows.agents.used)
        core.flows.changed.on = core.predictor.changed.on = core.quotas.changed.on = True
        core.flows.changed.mark_all(core.flows.count)
        core.predictor.changed.mark_all(min(core.flows.count, core.predictor.flows_max))
        core.quotas.changed.mark_all(core.quotas.count)
        core.save_rest = True
    while core.gone_rows and len(rows) < rows_max:  # before new rows of a tenant that returned
        rows.append((core.gone_rows.pop(), None))
    while len(rows) < rows_max:
        n = core.flows.changed.take()
        if n != NONE:
            if is_node(core.flows, n):
                rows.append((NODE_ROW + flow_name(core, n), node_value(core, n)))
            else:
                rows.append((FLOW_ROW + flow_name(core, n), flow_value(core, n, now_ns)))
            continue
        n = core.flows.agents.changed.take()
        if n != NONE:
            if has_row(core.flows.agents, n):
                rows.append((session_key_of(core, n), session_value(core, n)))
            continue
        n = core.predictor.changed.take()
        if n != NONE:
            if n < core.flows.count and not is_node(core.flows, n):
                rows.append((LENGTHS_ROW + flow_name(core, n), lengths_value(core, n)))
            continue
        n = core.quotas.changed.take()
        if n == NONE:
            break
        rows.append((core.quota_keys[n], quota_value(core, n, now_ns)))
    core.save_rest = core.save_rest or len(rows) > 0
    if len(rows) < rows_max and core.save_rest:
        core.save_rest = False
        rows.append((OVERALL_ROW, overall_value(core)))
        for n in range(core.ledger.count):
            if core.pool_list[n] not in core.saved_pools:
                rows.append((POOL_ROW + <bytes>core.pool_list[n], pool_value(core, n)))
        for name, told in core.saved_pools.items():  # not offered since the restart
            epoch, promised, headroom, probes, draining, _ = told
            levels, passes = levels_in(core, name), core.saved_passes.get(name, {})
            value = pool_row(core, epoch, promised, headroom, probes, draining, levels, passes)
            rows.append((POOL_ROW + <bytes>name, value))
    return rows


cdef bytes flow_value(Core core, int32_t flow, int64_t now_ns):
    cdef Writer w = core.writer
    cdef Flow* f = &core.flows.items[flow]
    cdef AgentSessions agents = core.flows.agents
    cdef int64_t vtc = f.vtc, key = f.vtc, stands = STANDS_IDLE
    cdef int32_t node = f.quota
    if core.flows.is_active(flow):
        stands = STANDS_ACTIVE
    elif f.throttled and f.waits_at == NONE:  # it is restored as if it had been idle
        key += core.quotas.nodes[core.quotas.guarantees.root].lift[f.cls] - f.throttled_lift
        vtc = key
    elif f.waits_at != NONE:
        key -= f.wait_lift
        vtc = key + core.quotas.nodes[f.waits_at].lift[f.cls]
        stands = STANDS_WAITING
        while node != f.waits_at and node != NONE:
            stands += 1
            node = core.quotas.nodes[node].parent
    if f.agents:
        w.varint(11, agents.items[agents.of_flows[f.agents].rest].vtc)
        w.varint(10, level_to_save(core.flows, flow))
    w.varint(9, f.born)
    write_positions(core, w, flow)
    if f.granted_at_ns >= 0:
        w.varint(7, now_ns - f.granted_at_ns + 1)
    w.varint(6, f.interval_ns)
    w.varint(5, f.average_milli)
    w.varint(4, f.open_charged + (f.owed if core.resume_until_ns else 0))
    w.varint(3, stands)
    w.varint(2, zigzag(key))
    w.varint(1, vtc)
    return w.take()


cdef inline bint has_row(AgentSessions agents, int32_t s) noexcept:
    return agents.items[s].flow != NONE and agents.items[s].has_node


cdef bytes session_value(Core core, int32_t s):
    core.flows.agents.items[s].is_saved = True
    core.writer.varint(1, core.flows.agents.items[s].vtc)
    return core.writer.take()


cdef bytes lengths_value(Core core, int32_t flow):
    cdef Writer w = core.writer
    cdef FlowLengths* f = &core.predictor.lengths_of[flow]
    cdef int k
    w.varint(6, f.used_tokens)
    w.varint(5, f.reserved_tokens)
    w.varint(4, f.covered)
    w.varint(3, f.judged)
    if f.pairs != NULL:
        for k in range(PAIRS_MAX):
            if f.pairs[k].adapter:
                write_lengths(w, 2, &f.pairs[k].lengths, f.pairs[k].adapter, f.pairs[k].learned_at)
    write_lengths(w, 1, &f.own, 0, 0)
    return w.take()


cdef int write_lengths(
    Writer w, int field, const Lengths* e, uint64_t adapter, int64_t learned_at
) except -1:
    cdef size_t before = w.length(), packed
    cdef int32_t k, above = NONE
    if adapter:
        w.fixed64(6, adapter)
    packed = w.length()
    if e.sketch != NULL:
        for k in range(BUCKETS - 1, -1, -1):
            if e.sketch.counts[k]:
                if above != NONE:
                    w.number(above - k)
                w.number(e.sketch.counts[k])
                above = k
        w.number(above + 1)
        w.close(5, packed)
    elif e.count:
        for k in range(e.count - 1, -1, -1):
            w.number(e.first[k])
        w.close(4, packed)
    w.varint(3, learned_at)
    w.varint(2, e.sketch.level_ppm[LEDGER] if e.sketch != NULL else 0)
    w.varint(1, e.count)
    return w.close(field, before)


cdef int write_of_class(Core core, Writer w, int field, int cls, int64_t value) except -1:
    """Write a number and the name of the class that it belongs to."""
    cdef size_t before = w.length()
    w.text(2, <bytes>core.classes.names[cls])
    w.varint(1, value)
    return w.close(field, before)


cdef bytes quota_value(Core core, int32_t node, int64_t now_ns):
    cdef Writer w = core.writer
    cdef Quota* n = &core.quotas.nodes[node]
    cdef bint owed = core.resume_until_ns != 0
    cdef size_t before
    cdef int k
    for k in range(CLASSES_MAX - 1, -1, -1):
        if n.lift[k]:
            write_of_class(core, w, 5, k, n.lift[k])
    w.varint(4, n.open_output + (n.owed_output if owed else 0))
    w.varint(3, n.open_input + (n.owed_input if owed else 0))
    w.varint(2, n.live + (n.owed_requests if owed else 0))
    for k in range(RATES - 1, -1, -1):
        if n.rate[k]:
            before = w.length()
            w.varint(4, min(now_ns - n.at_ns[k], AGE_MAX_NS))
            w.varint(3, zigzag(max(n.level[k], LEVEL_MIN)))
            w.varint(2, n.rate[k])
            w.varint(1, k)
            w.close(1, before)
    return w.take()


cdef bytes pool_value(Core core, int32_t pool):
    cdef Pool* p = &core.ledger.pools[pool]
    return pool_row(
        core, p.epoch, p.promised_blocks * p.block_size + p.owed_tokens, p.headroom_ppm, p.probes,
        p.draining, levels_in(core, <bytes>core.pool_list[pool]), passes_in(core, pool),
    )


cdef dict passes_in(Core core, int32_t pool):
    """Return the leases of a pool that passed a head, and their discounts, with void ones and those
    of before a restart that were not replayed yet. O(leases of the pool) if any lease has a
    discount, else O(1)."""
    cdef bytes name = core.pool_list[pool]
    cdef dict found = {**core.saved_passes.get(name, {}), **core.void_passes.get(name, {})}
    cdef int32_t i = core.ledger.pools[pool].first_lease
    cdef const Lease* lease
    if core.passes == 0:
        return found
    while i != NONE:
        lease = core.requests.items[i].lease
        if lease.discount_ppm:
            found[lease.lease_id] = lease.discount_ppm
        i = lease.pool_next
    return found


cdef bytes pool_row(
    Core core, int64_t epoch, int64_t promised_tokens, int64_t headroom_ppm, bint probes,
    bint draining, list levels, dict passes,
):
    cdef Writer w = core.writer
    cdef size_t before
    for lease_id, discount_ppm in passes.items():
        before = w.length()
        w.varint(2, discount_ppm)
        w.varint(1, lease_id)
        w.close(7, before)
    for cls, level in levels:
        write_of_class(core, w, 6, cls, level)
    w.varint(5, draining)
    w.varint(4, probes)
    w.varint(3, zigzag(headroom_ppm))
    w.varint(2, promised_tokens)
    w.varint(1, epoch)
    return w.take()


cdef bytes overall_value(Core core):
    cdef Writer w = core.writer
    cdef Predictor p = core.predictor
    cdef int32_t c
    w.varint(18, core.flows.largest_charge)
    w.varint(17, core.flows.lead_given_max)
    for c in range(TREE_LEVELS - 1, 0, -1):
        w.varint(11 + c, core.flows.average_charge[c])
    for c in range(CLASSES_MAX - 1, -1, -1):
        if core.flows.level[c]:
            write_of_class(core, w, 11, c, core.flows.level[c])
    w.varint(10, core.flows.average_charge[0])
    w.varint(9, core.ledger.closed)
    w.varint(8, core.output_seen_max)
    w.varint(7, core.prompt_seen_max)
    w.varint(6, p.used_tokens)
    w.varint(5, p.reserved_tokens)
    w.varint(4, p.covered)
    w.varint(3, p.judged)
    w.varint(2, p.samples)
    write_lengths(w, 1, &p.overall, 0, 0)
    return w.take()
