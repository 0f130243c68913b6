# Stats: rows of counters and levels.

cdef service_of(Core core, int32_t flow):
    cdef Flow* f = &core.flows.items[flow]
    # As Python numbers: over years the product outgrows 64 bits.
    return (
        <object>f.input_tokens * core.settings.input_price_micro
        + <object>f.output_tokens * core.settings.output_price_micro
        + <object>f.kv_steps * core.settings.kv_price_micro
    )


cdef bint sees_tenant(Core core, int32_t principal, bytes name) except -1:
    """Return whether a principal may see a tenant: one that it may vouch for. O(patterns)."""
    return not core.principals.is_limited(principal) or fits_any(
        core.principals.tenants[principal], <const uint8_t*>PyBytes_AS_STRING(name), len(name)
    )


cdef pool_stats(Core core, int64_t now_ns, int32_t pool):
    cdef Pool* p = &core.ledger.pools[pool]
    return {
        "name": core.pool_list[pool].decode(),
        "epoch": p.epoch,
        "capacity_tokens": p.capacity_blocks * p.block_size,
        "block_size_tokens": p.block_size,
        "promised_tokens": p.promised_blocks * p.block_size,
        "posted_tokens": p.posted_blocks * p.block_size,
        "live_leases": p.live,
        "running_sequences": p.running_sequences,
        "suspect_leases": p.suspect,
        "queued": core.flows.queued_for[pool + 1],
        "overdrawn": core.ledger.load(pool, NULL) > core.ledger.allowance(pool),
        "attached": p.attached > 0,
        "detached_ms": (
            (now_ns - p.detached_at_ns) // NS_PER_MS if p.detached_at_ns and not p.attached else 0
        ),
        "owned_ms": (
            0 if p.attached else max(<int64_t>0, p.owned_until_ns - now_ns) // NS_PER_MS
        ),
        "said_goodbye": not p.attached and bool(p.said_goodbye),
        "draining": bool(p.draining or core.ledger.closed),
        "named_only": not core.flows.may_take(pool, NONE),
        "wait_reason": WAIT_REASONS[p.reason] if core.requests.states[QUEUED] else "NONE",
        "max_running": p.max_running,
        "saturated": bool(p.saturated),
        "headroom_tokens": p.headroom_blocks * p.block_size,
        "kept_tokens": kept_tokens(p, now_ns),
        "overload_state": overload_now(core, pool, now_ns),
        "fill_ppm": fill_ppm(p),
        "drain_tokens_per_minute": pace_milli(&p.drain, p.drain.work) * 60 // 1000,
        "prefill_tokens_per_s": (
            p.prefill_tokens * NS_PER_S // p.prefill_ns if p.prefill_ns else 0
        ),
        "prefill_error_ms": p.prefill_error_ns // NS_PER_MS,
        "prefills_judged": p.prefills_judged,
        "output_above_limit_tokens": p.output_above_limit,
        "load_tokens": core.ledger.load(pool, NULL),
        "engine_capacity_tokens": p.engine_tokens,
        "round_tokens": core.ledger.round_tokens(pool, now_ns),
        "round_max_tokens": p.prefill_budget.max_tokens,
        "last_prefill_us": p.last_prefill_ns // 1000,
        "active_adapters": p.loras.active,
        "max_loras": p.limits.max_loras,
        "adapter_tokens": p.loras.tokens,
        **prefix_row(core, pool),
        "sessions_active": p.sessions_active,
        "sessions_tokens": p.sessions_tokens,
        "sessions_max_tokens": p.limits.sessions_max_tokens,
        "sessions_waiting": sessions_waiting(core, pool),
        "engine_running": p.engine_running,
        "engine_waiting": p.engine_waiting,
        "engine_used_tokens": p.engine_used_tokens,
        "engine_preemptions": p.engine_preemptions,
        "telemetry_age_ms": (
            NONE if p.telemetry_at_ns < 0 else (now_ns - p.telemetry_at_ns) // NS_PER_MS
        ),
    }


cdef dict price_row(Core core):
    cdef Settings* s = &core.settings
    return {
        "input_micro": s.input_price_micro,
        "cached_micro": s.input_price_micro * s.cached_price_ppm // 1_000_000,
        "output_micro": s.output_price_micro,
        "kv_micro": s.kv_price_micro,
    }


cdef dict prefix_row(Core core, int32_t pool):
    cdef PrefixIndex index = core.prefixes.index(pool)
    return {
        "prefix_blocks": index.places.count,
        "prefix_tokens": index.tokens,
        "prefix_asked_tokens": index.asked_tokens,
        "prefix_matched_tokens": index.matched_tokens,
    }


cdef int64_t entitled_ppm(Flows flows, int32_t flow) noexcept:
    """Return the part of all service that a flow or a node is due: at each level by the weights of
    those that are active or were lately; 0 if it is not among them. O(levels)."""
    cdef wide part = <wide>1_000_000 * PART_UNITS
    if not flows.is_recent(flow):
        return 0
    while flow != NONE:
        part = part * flows.items[flow].weight_milli // flows.recent_weight_of(flow)[0]
        flow = flows.items[flow].parent
    return <int64_t>(part // PART_UNITS)


cdef dict flow_row(Core core, int64_t now_ns, int32_t flow):
    cdef Flow* f
    cdef int32_t q
    cdef int64_t oldest = now_ns
    cdef Asked asked
    f = &core.flows.items[flow]
    asked.flow, asked.adapter, asked.live = flow, 0, f.live
    asked.live_of_all = core.requests.states[LIVE] + core.requests.states[SUSPECT]
    q = f.first_queue
    while q != NONE:
        if core.flows.queues[q].chain.count:
            oldest = min(oldest, oldest_in(core.flows, &core.flows.queues[q]))
        q = core.flows.queues[q].next_queue
    return {
        "tenant": core.flow_list[flow].decode(),
        "request_class": core.classes.names[f.cls].decode(),
        "weight_milli": f.weight_milli,
        "entitled_ppm": entitled_ppm(core.flows, flow),
        "vtc_micro": f.vtc,
        "queued": f.queued + f.held,
        "queued_input_tokens": f.queued_tokens + f.held_tokens,
        "wait_expected_ms": wait_now_ms(core, flow),
        "wait_error_ms": f.wait_error_ns // NS_PER_MS,
        "waits_judged": f.waits_judged,
        "ttft_expected_ms": f.forecast_first_us // 1000,
        "ttft_ms": f.first_us // 1000,
        "ttft_judged": f.first_judged,
        "deadline_probes_judged": f.shed_accuracy.judged,
        "deadline_probes_missed": f.shed_accuracy.missed,
        "live_leases": f.live,
        "promised_tokens": f.promised_tokens,
        "posted_tokens": f.posted_tokens,
        "input_tokens": f.input_tokens,
        "cached_input_tokens": f.cached_tokens,
        "output_tokens": f.output_tokens,
        "kv_token_steps": f.kv_steps,
        "received": f.received,
        "granted": f.granted,
        "completed": f.completed,
        "cancelled": f.cancelled,
        "expired": f.expired,
        "oldest_queued_ms": (now_ns - min(oldest, oldest_held(core, flow))) // NS_PER_MS,
        "longest_wait_ms": queue_ttl_of(core, flow) // NS_PER_MS,
        **session_row(core, flow),
        "refusals": refusal_counts(f.refusals.counts),
        "quotas": quota_rows(core, now_ns, f.quota, NONE),
        "waits_for_quota": f.waits_at != NONE,
        **share_row(core, now_ns, flow),
        "audit": bool(f.dry_runs),
        **dry_run_rows(core, flow),
        "predicted_p50_tokens": max(0, core.predictor.quantile(&asked, MEDIAN)),
        "predicted_quantile_tokens": max(0, core.predictor.quantile(&asked, LEDGER)),
        **predictor_figures(core, flow),
    }


cdef int64_t wait_now_ms(Core core, int32_t flow) except -2:
    """Return the wait of one more request of a flow, as large as those queued; -1: unknown."""
    cdef Flow* f = &core.flows.items[flow]
    cdef int64_t wait_ns, size = core.flows.queued_work // max(1, core.requests.states[QUEUED])
    if f.queued:
        size = f.queued_work // f.queued
    wait_ns = wait_of_next(core, flow, size)
    return NONE if wait_ns < 0 else wait_ns // NS_PER_MS


cdef dict predictor_figures(Core core, int32_t flow):
    """Return how many promises held, of a flow or (-1) of all."""
    cdef FlowLengths sums
    cdef const Lengths* e = &core.predictor.overall
    memset(&sums, 0, sizeof(FlowLengths))
    sums.judged, sums.covered = core.predictor.judged, core.predictor.covered
    sums.reserved_tokens = core.predictor.reserved_tokens
    sums.used_tokens = core.predictor.used_tokens
    if flow != NONE:
        e = NULL
        memset(&sums, 0, sizeof(FlowLengths))
        if flow < core.predictor.flows_max:
            sums = core.predictor.lengths_of[flow]
            e = &sums.own
    reserved, used = sums.reserved_tokens, sums.used_tokens
    return {
        "predictor_judged": sums.judged,
        "predictor_coverage_ppm": (
            sums.covered * 1_000_000 // sums.judged if sums.judged else 0
        ),
        "predictor_level_ppm": (
            e.sketch.level_ppm[LEDGER] if e != NULL and e.sketch != NULL else 0
        ),
        "reserved_to_used_ppm": reserved * 1_000_000 // used if used else 0,
    }


cdef list quota_rows(Core core, int64_t now_ns, int32_t node, int32_t end):
    """Return the tightest limit of each kind along a chain of quotas up to `end`, and what it has
    left."""
    cdef Told told[LIMITS_TOLD]
    cdef int k
    core.quotas.tightest_limits(node, end, now_ns, told)
    return [
        {
            "kind": LIMIT_KINDS[k], "limit": told[k].limit, "remaining": told[k].left,
            "reset_ms": told[k].reset_ms,
        }
        for k in range(LIMITS_TOLD)
        if told[k].limit
    ]


cdef list quota_stats(Core core, int64_t now_ns):
    """Return groups, models and the pool of all shares: what each has left itself, and who waits
    for it. O(quotas + flows * levels + pools)."""
    cdef int32_t flow, pool, node
    cdef Flow* f
    cdef Pool* p
    cdef list waiting = [0] * core.quotas.count, held = [0] * core.quotas.count, rows = []
    know_shares(core)
    for flow in range(core.flows.count):
        f = &core.flows.items[flow]
        if f.waits_at != NONE:
            waiting[f.waits_at] += 1
        node = f.guarantee if f.throttled else NONE
        while node != NONE:
            held[node] += 1
            node = core.quotas.guarantees.items[node].cohort
    for pool in range(core.ledger.count):
        p = &core.ledger.pools[pool]
        if p.quota != NONE and p.reason == WAIT_QUOTA and core.requests.states[QUEUED]:
            waiting[p.quota] += 1
    for name, known in core.quota_names.items():
        node = known
        row = {
            "name": name.decode(),
            "parent": quota_name_of(core, core.quotas.nodes[node].parent),
            "limits": quota_rows(core, now_ns, node, core.quotas.nodes[node].parent),
            "open_requests": core.quotas.nodes[node].live,
            "waiting": waiting[node],
            **group_share(core, now_ns, node),
            "held_flows": held[node],
        }
        if row["limits"] or row["share_tokens_per_minute"] or shares_bind(core, node):
            rows.append(row)
    return rows


cdef bint shares_bind(Core core, int32_t node) noexcept:
    # The root's pool, while any tenant has a share.
    return is_root_cohort(core, node) and core.quotas.guarantees.items[node].unused.rate > 0


cdef dict group_share(Core core, int64_t now_ns, int32_t node):
    """Return the state of a node's share, and what is left in the pool of its members. O(1)."""
    cdef Guarantee n
    memset(&n, 0, sizeof(Guarantee))
    if has_share(core, node) or is_root_cohort(core, node):
        n = core.quotas.guarantees.items[node]
        bucket_fill(&n.unused, max(now_ns, core.now_ns))
    return {
        "share_tokens_per_minute": n.nominal,
        "share_left_tokens": max(<int64_t>0, n.unused.level // MICRO),
        "borrowed_tokens": n.borrowed,
        "lent_tokens": n.lent,
    }


cdef dict tenants_row(Core core):
    return {
        "first_sight": core.born_count,
        "flows_max": core.settings.flows_max,
        "shared_requests": core.shared_requests,
        "forgotten": core.forgotten,
    }


cdef list class_rows(Core core):
    """Return the classes, best first. O(flows + classes)."""
    cdef int64_t queued[CLASSES_MAX]
    cdef int64_t live[CLASSES_MAX]
    cdef int64_t granted[CLASSES_MAX]
    cdef int32_t c, i
    cdef list rows = []
    memset(queued, 0, sizeof(queued))
    memset(live, 0, sizeof(live))
    memset(granted, 0, sizeof(granted))
    for i in range(core.flows.count):
        if is_node(core.flows, i):
            continue
        c = core.flows.items[i].cls
        queued[c] += core.flows.items[i].queued
        live[c] += core.flows.items[i].live
        granted[c] += core.flows.items[i].granted
    for i in range(core.classes.count):
        c = core.classes.order[i]
        granted[c] += core.granted_apart[c]
        if core.classes.items[c].gone and not queued[c] and not live[c]:
            continue
        rows.append({
            "name": core.classes.names[c].decode(),
            "rank": core.classes.items[c].rank,
            "ageing_ms": core.classes.items[c].ageing_ns // NS_PER_MS,
            "exempt": bool(core.classes.items[c].exempt),
            "queued": queued[c],
            "live_leases": live[c],
            "granted": granted[c],
            "brought_forward": core.classes.items[c].aged,
        })
    return rows


cdef struct Span:
    int64_t low, high


cdef int64_t fairness_gap(Flows flows) except -1:
    """Return the largest difference of counters between siblings of a class that are backlogged
    in a pool, and not because of their own quotas. O(queues * pools + (classes + families) *
    pools)."""
    cdef int64_t widest = 0
    cdef int32_t q, k, n, flow, target, pool, count
    cdef int32_t pools = <int32_t>len(flows.anywhere) if flows.local else 1
    cdef Span* spans
    if pools == 0:
        return 0
    count = (CLASSES_MAX + <int32_t>len(flows.families)) * (pools + 1)
    # One more for what stands in one line for all pools.
    spans = <Span*>extend(NULL, count, sizeof(Span))
    for k in range(count):
        spans[k].low, spans[k].high = VTC_MAX, -1
    for q in range(flows.queue_count):
        flow, target = flows.queues[q].flow, flows.queues[q].target
        k = flows.items[flow].cls * (pools + 1)
        if not has_place(flows, q):
            continue
        if flows.items[flow].parent != NONE:
            k = (CLASSES_MAX + flows.items[flows.items[flow].parent].family) * (pools + 1)
        if not flows.local:
            widen(&spans[k], flows.items[flow].vtc)
        elif target == 0 and flows.one_line:
            widen(&spans[k + pools], flows.items[flow].vtc)
        elif target:
            for n in range(flows.sets.line_count(target)):
                pool = flows.sets.line_at(target, n) - 1
                widen(&spans[k + pool], flows.counter_at(flow, pool))
        else:
            n = flows.items[flow].first_position
            while n != NONE:
                if flows.may_take(flows.positions.items[n].pool, NONE):
                    widen(
                        &spans[k + flows.positions.items[n].pool],
                        flows.positions.items[n].key if flows.lifts else flows.items[flow].vtc,
                    )
                n = flows.positions.items[n].next_position
    for k in range(count):
        widest = max(widest, spans[k].high - spans[k].low)
    free(spans)
    return widest


cdef inline void widen(Span* s, int64_t counter) noexcept:
    s.low, s.high = min(s.low, counter), max(s.high, counter)


cdef totals_of(Core core):
    cdef int32_t i
    cdef int64_t promised = 0, weight = WEIGHT_MILLI_MAX, credit = 0
    capacity = 0
    for i in range(core.ledger.count):
        promised += core.ledger.pools[i].promised_blocks * core.ledger.pools[i].block_size
        capacity += core.ledger.pools[i].capacity_blocks * core.ledger.pools[i].block_size
    for i in range(core.flows.count):
        weight = min(weight, core.flows.items[i].weight_milli)
    for i in range(TREE_LEVELS):
        credit = max(credit, core.flows.credit(i))
    # Theorem 4.4 of the paper, divided by the least weight; M is what all pools hold. The
    # running requests hold at most M in each of at most `output_seen_max` steps.
    # Under DLPM a flow may be a quantum ahead, at either end of a time. A flow may begin below the
    # others by the credit. A flow that passed a head was ahead of it by its charge at most.
    bound = 2 * max(
        core.prompt_seen_max * core.settings.input_price_micro,
        capacity * (
            core.settings.output_price_micro
            + core.output_seen_max * core.settings.kv_price_micro
        ),
    ) * 1000 // weight + (2 * core.flows.grain if core.by_prefix else 0) + credit
    bound += core.flows.lead_given_max
    if core.flows.order != ORDER_COUNTER or not core.flows.lifts:
        bound = 0  # the policy promises none
    return {
        "received": core.received,
        "granted": core.granted,
        "queued": core.requests.states[QUEUED],
        "queued_input_tokens": core.flows.queued_tokens,
        "live_leases": core.requests.states[LIVE] + core.requests.states[SUSPECT],
        "completed": core.completed,
        "cancelled": core.cancelled,
        "expired": core.expired,
        "rejected": core.rejected,
        "evicted": core.evicted,
        "replays_refused": core.replays_refused,
        "reports_limited": core.reports_limited,
        "promised_tokens": promised,
        "fairness_gap_micro": fairness_gap(core.flows),
        "fairness_bound_micro": bound,
        "predictor_samples": core.predictor.samples,
        **predictor_figures(core, NONE),
        "refusals": refusal_counts(core.refusals),
        "flows": core.flows.count - len(core.flows.families),
        "open_sessions": sum(s is not None for s in core.sessions),
        "stored_answers": core.answers.count,
        "overload_state": overload_of_all(core),
    }


cdef str state_text(Core core, int64_t now_ns):
    """Return the state as text. O(flows + queued)."""
    stats = core.stats(now_ns, 50)
    lines = [
        f"schedsvc core: policy {stats['policy']}, {stats['totals']['queued']} queued,"
        f" {stats['totals']['live_leases']} leases, digest {stats['digest']:016x}"
        + (f", HALTED: {core.fuse.what}" if core.fuse.what is not None else "")
    ]
    for p in stats["pools"]:
        lines.append(
            f"pool {p['name']} epoch {p['epoch']}: {p['promised_tokens']} promised and"
            f" {p['posted_tokens']} posted of {p['capacity_tokens']} tokens,"
            f" {p['live_leases']} leases ({p['suspect_leases']} suspect), {p['queued']} queued,"
            f" waits for {p['wait_reason']}"
        )
    for f in stats["flows"]:
        lines.append(
            f"flow {f['tenant']}, class {f['request_class']}, weight {f['weight_milli']}:"
            f" vtc {f['vtc_micro']},"
            f" {f['queued']} queued, {f['live_leases']} leases,"
            f" {f['promised_tokens']} tokens promised"
        )
    return "\n".join(lines)


cdef dict refusal_counts(int64_t* counts):
    return {
        outcome: counts[refusal_place(outcome)]
        for outcome in REFUSALS
        if counts[refusal_place(outcome)]
    }


cdef list queued_requests(Core core):
    """Return (seq, record) of each queued request. O(queues + queued)."""
    cdef int32_t q, i
    cdef list found = []
    for q in range(core.flows.queue_count):
        i = core.flows.queues[q].chain.head
        while i != NONE:
            found.append((core.requests.items[i].seq, i))
            i = core.requests.items[i].next
    for q in range(core.flows.agents.hold_used if core.flows.agents.held else 0):
        i = core.flows.agents.holds[q].requests.head
        while i != NONE:
            found.append((core.requests.items[i].seq, i))
            i = core.requests.items[i].next
    return found


cdef str quota_name_of(Core core, int32_t node):
    """Return the name of the group or model that a limit belongs to; empty: the limits are the
    tenant's own."""
    cdef bytes key = b"" if node == NONE else core.quota_keys[node]
    return key[1:].decode() if key[:1] == QUOTA_ROW else ""
