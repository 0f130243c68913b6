# Saved rows, read back into a scheduler that has seen no request yet. They come from a disk, so
# nothing in them is believed: all are read and checked before the first one counts.
#
# Leases are not saved: their holders replay them. For the lifetime of a lease without renewal, the
# core holds what they took: blocks of their pool, tokens of quotas, and the charges in counters. A
# replay takes its part over, so that nothing is taken twice. The rest is then treated like the
# charges of expired leases. A flow that was active stays active for a lease's TTL, even without
# requests. So it keeps its distance to the others if its requests arrive a moment later, and a
# newcomer is lifted to the level of all flows that were active.


cdef int restore_rows(Core core, list rows) except -1:
    """Take over all rows or none; how many found their place. O(rows * log n)."""
    cdef list stood = []
    cdef int found = 0
    cdef bint applies
    if core.received or core.requests.used or core.resume_until_ns:
        raise CallerError(
            CODE_FAILED_PRECONDITION, "rows", "only a scheduler that saw no request is restored"
        )
    seen = set()
    for row in rows:
        if not (
            isinstance(row, (list, tuple)) and len(row) == 3
            and isinstance(row[0], bytes) and isinstance(row[1], bytes)
            and isinstance(row[2], int) and 0 <= row[2] <= AGE_MAX_NS
        ):
            invalid("rows", "a row is (key, value, age in ns)")
        if row[0] in seen:
            invalid("rows", f"the key {row[0]!r} occurs twice")
        seen.add(row[0])
    if not rows:
        return 0
    if core.tree_is_stale:
        settle_tree(core)
    for applies in (False, True):
        if applies:
            restore_born(core, rows)
        for key, value, age_ns in rows:
            try:
                found += restore_row(core, key, value, age_ns, applies, stood)
            except CallerError as e:
                raise CallerError(e.code, "rows", f"{key!r}: {e.field}: {e.description}") from None
    drop_rests(core)
    core.was_restored = True
    core.flows.resuming_until_ns = core.now_ns + core.settings.lease_ttl_ns
    core.resume_until_ns = core.now_ns + core.settings.lease_ttl_ns + core.settings.lease_grace_ns
    take_places(core, stood)
    for pool in range(core.ledger.count):
        if core.flows.local:
            take_positions(core, pool)
    core.predictor.samples = max(core.predictor.samples, latest_sample(core))
    return found


cdef int restore_born(Core core, list rows) except -1:
    """Make the flows of tenants at first sight, before a row of theirs counts. O(rows * rules)."""
    cdef int64_t v[9]
    cdef Cursor c
    cdef Slice name
    for key, value, _ in rows:
        if not core.unknown_own or len(core.flow_names) >= core.settings.flows_max:
            break
        if key[:3] == FLOW_ROW + b"\0\0":
            c = data_cursor(value)
            read_numbers(&c, v, 9)
            text = key[3:]
            name.at, name.size = <const uint8_t*><const char*>text, len(text)
            if not 0 < name.size <= NAME_BYTES_MAX or not is_utf8(&name) or has_control(&name):
                continue
            if v[8] and text not in core.flow_names:
                flow_at_sight(core, &name, NONE)
    return 0


cdef int restore_row(
    Core core, bytes key, bytes value, int64_t age_ns, bint applies, list stood
) except -1:
    # Checks one, or takes it over: 1 where there is a place for it.
    cdef Cursor c = data_cursor(value)
    cdef bytes kind = key[:1], name = key[1:]
    if kind == FLOW_ROW:
        return restore_flow(core, name, &c, age_ns, applies, stood)
    if kind == NODE_ROW:
        return restore_node(core, name, &c, applies)
    if kind == SESSION_ROW:
        return restore_session(core, name, &c, applies)
    if kind == LENGTHS_ROW:
        return restore_lengths(core, name, &c, applies)
    if kind == QUOTA_ROW or kind == TENANT_QUOTA_ROW:
        return restore_quota(core, kind, name, &c, age_ns, applies)
    if kind == POOL_ROW:
        return restore_pool(core, name, &c, applies)
    if key == OVERALL_ROW:
        return restore_overall(core, &c, applies)
    invalid("key", "of an unknown kind")


cdef int restore_flow(
    Core core, bytes name, Cursor* c, int64_t age_ns, bint applies, list stood
) except -1:
    cdef int64_t v[11]
    cdef int64_t key
    cdef int32_t flow = flow_of_row(core, name, applies)
    cdef Flow* f
    cdef Cursor again = c[0]
    read_numbers(c, v, 11)
    read_positions(core, flow, &again, applies)
    key = unzigzag(<uint64_t>v[1])
    check_range("counter", v[0], 0, VTC_MAX)
    check_range("key", key, -VTC_MAX, v[0])
    check_range("stands", v[2], STANDS_IDLE, STANDS_WAITING + QUOTA_LEVELS_MAX)
    check_range("open_charged", v[3], 0, VTC_MAX)
    check_range("average_milli", v[4], 0, <int64_t>TOKENS_MAX * 1000)
    check_range("interval_ns", v[5], 0, AGE_MAX_NS)
    check_range("granted_age_ns", v[6], 0, AGE_MAX_NS)
    check_range("born", v[8], 0, 1)
    check_range("sessions_level", v[9], 0, VTC_MAX)
    check_range("sessions_rest", v[10], 0, VTC_MAX)
    if flow == NONE:
        return 0
    f = &core.flows.items[flow]
    restore_rest(core, flow, v[9], v[10])
    f.vtc, f.owed, f.average_milli, f.interval_ns = v[0], v[3], v[4], v[5]
    if v[6]:
        f.granted_at_ns = max(<int64_t>0, core.now_ns - (v[6] - 1) - age_ns)
    if v[2] != STANDS_IDLE:
        stood.append((flow, v[2] - STANDS_WAITING, v[0], key))
    return 1


cdef int put_back(Flows flows, int32_t flow) except -1:
    """Let a flow be active that was it before the restart, until its time is over. O(log n)."""
    flows.items[flow].resumed = True
    flows.resuming += 1
    flows.count_recent(flow, 1)
    flows.linger(flow)
    return flows.join(flow, True)


cdef int take_places(Core core, list stood) except -1:
    """Let flows that were active be it; those that waited for a quota are lifted to them, and keep
    their distances where they waited together, as if all were served now. O(flows * log n)."""
    cdef Flows flows = core.flows
    cdef int32_t flow, node, cls
    waited = {}  # (node, class): what waited there
    for flow, level, vtc, key in sorted(stood):
        node = flows.items[flow].quota
        if level < 0:
            put_back(flows, flow)
        elif node == NONE:
            waited.setdefault((NONE, flow), []).append((flow, vtc, key))
        else:
            while level and core.quotas.nodes[node].parent != NONE:
                node = core.quotas.nodes[node].parent
                level -= 1
            cls = flows.items[flow].cls
            waited.setdefault((node, cls), []).append((flow, vtc, key))
    for node, waiters in [(k[0], waited[k]) for k in sorted(waited)]:
        cls = flows.items[<int32_t>waiters[0][0]].cls
        lift = max([vtc - key for _, vtc, key in waiters])
        if node != NONE:
            lift = core.quotas.nodes[node].lift[cls]
        if flows.lifts:
            least = min([key for _, _, key in waiters])
            lift = max(lift, flows.raise_level(waiters[0][0]) - least)
        if node != NONE:
            core.quotas.nodes[node].lift[cls] = min(lift, VTC_MAX)
        for flow, _, key in waiters:
            flows.items[flow].vtc = max(0, min(key + lift, VTC_MAX))
            put_back(flows, flow)
    return 0


cdef int restore_overall(Core core, Cursor* c, bint applies) except -1:
    cdef int64_t v[17]  # fields 2 to 18
    cdef int64_t levels[CLASSES_MAX]
    cdef int64_t tag, level = 0
    cdef SavedLengths lengths
    cdef int32_t cls
    cdef Predictor p = core.predictor
    memset(v, 0, sizeof(v))
    memset(levels, 0, sizeof(levels))
    memset(&lengths, 0, sizeof(SavedLengths))
    while True:
        tag = read_tag(c)
        if tag == 0:
            break
        if tag == 1 << 3 | LENGTH:
            read_lengths(read_message(c), &lengths)
        elif tag == 11 << 3 | LENGTH:
            cls = read_of_class(core, read_message(c), "level", &level)
            if cls != NONE:
                levels[cls] = level
        elif tag & 7 == VARINT and 2 <= tag >> 3 <= 18:
            v[(tag >> 3) - 2] = <int64_t>read_varint(c)
        else:
            skip(c, tag)
    check_whole(c, "it")
    check_range("samples", v[0], 0, SUM_MAX)
    check_sums(&v[1])
    check_range("prompt_seen_max", v[5], 0, TOKENS_MAX)
    check_range("output_seen_max", v[6], 0, TOKENS_MAX)
    check_range("draining", v[7], 0, 1)
    check_range("average_charge", v[8], 0, VTC_MAX)
    for cls in range(1, TREE_LEVELS):
        check_range("average_charge", v[9 + cls], 0, VTC_MAX)
    check_range("lead_given_max", v[15], 0, VTC_MAX)
    check_range("largest_charge", v[16], 0, VTC_MAX)
    if not applies:
        return 0
    core.flows.average_charge[0] = v[8]
    for cls in range(1, TREE_LEVELS):
        core.flows.average_charge[cls] = v[9 + cls]
    core.flows.largest_charge = v[16]
    for cls in range(CLASSES_MAX):
        core.flows.level[cls] = levels[cls]
    place_lengths(p, &p.overall, &lengths)
    p.samples, p.judged, p.covered, p.reserved_tokens, p.used_tokens = v[0], v[1], v[2], v[3], v[4]
    core.prompt_seen_max, core.output_seen_max, core.flows.lead_given_max = v[5], v[6], v[15]
    core.draining = core.ledger.closed = v[7] != 0
    core.ledger.touch_all()
    return 1


cdef int restore_quota(
    Core core, bytes kind, bytes name, Cursor* c, int64_t age_ns, bint applies
) except -1:
    cdef int64_t v[4]
    cdef int64_t bucket[4]  # which, limit, level, age
    cdef int64_t tag, lift = 0
    cdef int32_t cls
    cdef int windows[RATES]  # parts of its limit that a bucket may owe
    cdef Cursor inner
    cdef Quota* n = NULL
    cdef int32_t node = node_of(core, kind, name) if applies else NONE
    if node != NONE:
        n = &core.quotas.nodes[node]
    memset(v, 0, sizeof(v))
    memset(windows, 0, sizeof(windows))
    while True:
        tag = read_tag(c)
        if tag == 0:
            break
        if tag == 1 << 3 | LENGTH:
            inner = read_message(c)
            read_numbers(&inner, bucket, 4)
            bucket[2] = unzigzag(<uint64_t>bucket[2])
            check_range("bucket", bucket[0], 0, RATES - 1)
            check_range("limit", bucket[1], 1, QUOTA_LIMIT_MAX)
            check_range("level", bucket[2], LEVEL_MIN, bucket[1] * MICRO)
            check_range("age_ns", bucket[3], 0, AGE_MAX_NS)
            if n != NULL and n.rate[bucket[0]]:
                # The last request may have been as large as the limit.
                windows[bucket[0]] = 2 if n.rate[bucket[0]] == bucket[1] else 1
                restore_bucket(n, <int>bucket[0], bucket, core.now_ns - bucket[3] - age_ns)
        elif tag == 5 << 3 | LENGTH:
            cls = read_of_class(core, read_message(c), "lift", &lift)
            if n != NULL and cls != NONE:
                n.lift[cls] = lift
        elif tag & 7 == VARINT and 2 <= tag >> 3 <= 4:
            v[(tag >> 3) - 1] = <int64_t>read_varint(c)
        else:
            skip(c, tag)
    check_whole(c, "it")
    for tag in range(1, 4):
        check_range("open", v[tag], 0, SUM_MAX)
    if n == NULL:
        return 0
    n.owed_requests, n.owed_input, n.owed_output = v[1], v[2], v[3]
    for tag in range(RATES):
        if windows[tag]:
            core.quotas.cap_debt(node, <int>tag, windows[tag], 0)
    return 1


cdef void restore_bucket(Quota* n, int which, const int64_t* bucket, int64_t at_ns) noexcept:
    # Amounts taken stay taken, even under another limit; refill() credits the time away.
    cdef int64_t rate = n.rate[which]
    cdef wide level = <wide>bucket[2] + <wide>(rate - bucket[1]) * MICRO
    n.level[which] = <int64_t>min(max(level, <wide>LEVEL_MIN), <wide>rate * MICRO)
    n.at_ns[which] = at_ns




cdef int restore_pool(Core core, bytes name, Cursor* c, bint applies) except -1:
    cdef int64_t v[5]
    cdef Slice pool
    cdef Cursor again = c[0], levels
    read_numbers(c, v, 5)
    check_range("epoch", v[0], 0, <int64_t>1 << 62)
    check_range("promised_tokens", v[1], 0, <int64_t>1 << 50)
    check_range("headroom_ppm", unzigzag(<uint64_t>v[2]), -WHOLE_PPM, WHOLE_PPM)
    check_range("probes", v[3], 0, 1)
    check_range("draining", v[4], 0, 1)
    pool.at, pool.size = <const uint8_t*><const char*>name, len(name)
    check_pool_name(&pool)
    levels = again
    applies = applies and len(core.saved_pools) < core.settings.pools_max
    read_levels(core, name, &levels, applies)
    read_passes(core, name, &again, applies)
    if not applies:
        return 0
    core.saved_pools[name] = (v[0], v[1], unzigzag(<uint64_t>v[2]), v[3], v[4], core.now_ns)
    if name in core.pool_names:
        resume_pool(core, name)
    elif v[4] and core.ledger.count < pools_allowed(core):
        absent_pool(core, name)
    return 1


cdef int read_passes(Core core, bytes pool, Cursor* c, bint applies) except -1:
    """Keep which leases of a pool passed a head, until they are replayed. O(bytes)."""
    cdef int64_t v[2]
    cdef int64_t tag
    cdef Cursor inner
    while True:
        tag = read_tag(c)
        if tag == 0:
            return 0
        if tag != 7 << 3 | LENGTH:
            skip(c, tag)
            continue
        inner = read_message(c)
        read_numbers(&inner, v, 2)
        check_range("lease_id", v[0], 1, LEASE_ID_MAX)
        check_range("discount_ppm", v[1], 1, WHOLE_PPM)
        if applies:
            core.saved_passes.setdefault(pool, {})[v[0]] = v[1]


cdef int32_t absent_pool(Core core, bytes name) except -1:
    """Give a pool of before the restart that drains, and that no stream offers yet, a place, so
    that Stats shows it. O(pools)."""
    cdef int32_t pool = new_pool(core, name, NONE)
    core.ledger.size(pool, 1, 1, 0, 0)
    settle_pool(core, pool)
    core.ledger.pools[pool].draining = True
    return pool


cdef int resume_pool(Core core, bytes name) except -1:
    """Register a pool of before the restart: restore its averages, and hold the blocks of its
    leases until they are replayed, or until the engine has restarted too."""
    cdef int32_t pool = core.pool_names[name]
    cdef Pool* p = &core.ledger.pools[pool]
    cdef int64_t v[6]
    v[0], v[1], v[2], v[3], v[4], v[5] = core.saved_pools.pop(name)
    set_headroom(p, min(max(v[2], core.settings.headroom_min_ppm), core.settings.headroom_max_ppm))
    p.probes = v[3] != 0
    p.draining = v[4] != 0
    core.ledger.order.touch(pool)
    if v[0] == p.epoch and core.now_ns < (
        v[5] + core.settings.lease_ttl_ns + core.settings.lease_grace_ns
    ):
        p.owed_tokens = p.replay_debt = v[1]
    else:
        core.saved_passes.pop(name, None)
    return 0


cdef int end_resume(Core core) except -1:
    """End the wait for leases of before the restart: the saved rows hold nothing for them any more,
    and of flows that did not return sessions are forgotten. O(flows + quotas + sessions)."""
    cdef int32_t pool, node
    cdef Quota* n
    if core.resume_until_ns == 0:
        return 0
    core.resume_until_ns = 0
    forget_absent_sessions(core)
    core.saved_passes.clear()
    core.flows.changed.mark_all(core.flows.count)
    core.quotas.changed.mark_all(core.quotas.count)
    core.save_rest = True
    for pool in range(core.ledger.count):
        core.ledger.pools[pool].owed_tokens = 0
        core.ledger.order.touch(pool)
    for node in range(core.quotas.count):
        n = &core.quotas.nodes[node]
        n.owed_requests = n.owed_input = n.owed_output = 0
    return 0
