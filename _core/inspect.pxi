# What it shows, and the proof that its books balance.

cdef bytes encode_verdict(Scheduler core, Verdict* v):
    cdef bytes name = core.pool_list[v.pool] if v.pool >= 0 and v.outcome == OUT_GRANTED else b""
    write_admit_response(core.writer, v, name, core.lease_ttl_ns // NS_PER_MS)
    return core.writer.take()


cdef service_of(Scheduler core, int32_t flow):
    cdef Flow* f = &core.flows.items[flow]
    # As Python numbers: over years the product outgrows 64 bits.
    return (
        <object>f.input_tokens * core.input_price + <object>f.output_tokens * core.output_price
    )


cdef pool_stats(Scheduler core, int64_t now_ns, int32_t pool):
    cdef Pool* p = &core.ledger.pools[pool]
    cdef Heap heap = <Heap>core.flows.candidates[pool + 1]
    cdef int32_t i
    cdef int64_t queued = 0
    for i in range(heap.count):
        queued += core.flows.queues[heap.nodes[i].id].chain.count
    return {
        "name": core.pool_list[pool].decode(),
        "epoch": p.epoch,
        "capacity_tokens": p.capacity_blocks * p.block_size,
        "block_size_tokens": p.block_size,
        "promised_tokens": p.promised_blocks * p.block_size,
        "posted_tokens": p.posted_blocks * p.block_size,
        "live_leases": p.live,
        "suspect_leases": p.suspect,
        "queued": queued,
        "overdrawn": p.promised_blocks > p.capacity_blocks,
        "attached": p.attached > 0,
        "wait_reason": WAIT_REASONS[p.reason] if core.requests.states[QUEUED] else "NONE",
        "max_running": p.max_running,
        "headroom_tokens": p.headroom_blocks * p.block_size,
        "engine_running": p.engine_running,
        "engine_waiting": p.engine_waiting,
        "engine_used_tokens": p.engine_used_tokens,
        "engine_preemptions": p.engine_preemptions,
        "telemetry_age_ms": (
            NONE if p.telemetry_at_ns < 0 else (now_ns - p.telemetry_at_ns) // NS_PER_MS
        ),
    }


cdef totals_of(Scheduler core):
    cdef int32_t i
    cdef int64_t promised = 0, weight = WEIGHT_MILLI_MAX
    capacity = 0
    for i in range(core.ledger.count):
        promised += core.ledger.pools[i].promised_blocks * core.ledger.pools[i].block_size
        capacity += core.ledger.pools[i].capacity_blocks * core.ledger.pools[i].block_size
    for i in range(core.flows.count):
        weight = min(weight, core.flows.items[i].weight_milli)
    # Theorem 4.4 of the paper, divided by the least weight; M is what all pools hold.
    bound = 2 * max(
        core.prompt_seen_max * core.input_price, capacity * core.output_price
    ) * 1000 // weight
    judged, used = core.predictor.judged, core.predictor.used_tokens
    return {
        "received": core.received,
        "granted": core.granted,
        "queued": core.requests.states[QUEUED],
        "live_leases": core.requests.states[LIVE] + core.requests.states[SUSPECT],
        "completed": core.completed,
        "cancelled": core.cancelled,
        "expired": core.expired,
        "rejected": core.rejected,
        "evicted": core.evicted,
        "promised_tokens": promised,
        "fairness_gap_micro": core.flows.fairness_gap(),
        "fairness_bound_micro": bound,
        "predictor_coverage_ppm": core.predictor.covered * 1_000_000 // judged if judged else 0,
        "predictor_samples": core.predictor.samples,
        "reserved_to_used_ppm": (
            core.predictor.reserved_tokens * 1_000_000 // used if used else 0
        ),
        "refusals": refusal_counts(core.refusals),
        "open_sessions": sum(s is not None for s in core.sessions),
        "stored_answers": core.answers.count,
    }


cdef int require(Scheduler core, bint holds, str what) except -1:
    if not holds:
        raise core.fuse.blow(what)
    return 0


cdef dict refusal_counts(int64_t* counts):
    return {
        outcome: counts[refusal_place(outcome)]
        for outcome in REFUSALS
        if counts[refusal_place(outcome)]
    }


cdef list queued_requests(Scheduler core):
    """(seq, record) of all that is queued. O(queues + queued)."""
    cdef int32_t q, i
    cdef list found = []
    for q in range(core.flows.queue_count):
        i = core.flows.queues[q].chain.head
        while i != NONE:
            found.append((core.requests.items[i].seq, i))
            i = core.requests.items[i].next
    return found


cdef int check_requests(Scheduler core) except -1:
    cdef int32_t i
    cdef Request* r
    cdef int64_t kept = 0
    for i in range(core.requests.used):
        r = &core.requests.items[i]
        if r.state == FREE:
            continue
        kept += 1
        require(core, core.ids.get(r.key_hi, r.key_lo) == i, "request_id finds its request")
        if r.state == QUEUED:
            require(core, r.lease_id == 0 and r.charged == 0, "queued holds no lease")
        else:
            require(
                core, core.leases.get(<uint64_t>r.lease_id, 0) == i, "lease_id finds its lease"
            )
        if r.state != ENDED:
            at = core.deadlines.places[i] - 1 if core.deadlines.has(i) else -1
            require(
                core, at >= 0 and core.deadlines.nodes[<int32_t>at].key <= r.due_ns, "timed in time"
            )
            require(
                core, r.owner <= 0 or core.sessions[r.owner] is not None, "its session is open"
            )
        require(core, r.posted_blocks <= r.reserved_blocks, "posted <= reserved")
        require(
            core,
            r.reserved_blocks == 0
            or ((r.state == LIVE or r.state == SUSPECT) and not r.is_void),
            "only a lease that is not void holds a reservation",
        )
    return require(core, kept == <int64_t>core.ids.count, "no request_id without a request")


cdef int check_flows(Scheduler core) except -1:
    cdef int32_t f, q, i
    cdef int64_t queued, seq, received = 0, everything = 0
    cdef Heap heap
    for f in range(core.flows.count):
        queued = 0
        q = core.flows.items[f].first_queue
        while q != NONE:
            heap = <Heap>core.flows.candidates[core.flows.queues[q].target]
            require(
                core,
                heap.has(q) == (core.flows.queues[q].chain.count > 0),
                "a queue is a candidate",
            )
            seq = -1
            i = core.flows.queues[q].chain.head
            while i != NONE:
                require(
                    core,
                    core.requests.items[i].seq > seq
                    and core.requests.items[i].state == QUEUED,
                    "FIFO inside the flow",
                )
                seq = core.requests.items[i].seq
                queued += 1
                i = core.requests.items[i].next
            q = core.flows.queues[q].next_queue
        require(core, queued == core.flows.items[f].queued, "queued = sum of queues")
        require(
            core, core.flows.active.has(f) == (queued + core.flows.items[f].live > 0),
            "active = queued or in flight",
        )
        require(core, core.flows.items[f].vtc >= 0, "a counter is never negative")
        everything += queued
        received += core.flows.items[f].received
    require(core, everything == core.requests.states[QUEUED], "queued = sum of flows")
    require(core, received <= core.received, "received >= sum of flows")
    return check_candidates(core)


cdef int check_candidates(Scheduler core) except -1:
    cdef Heap heap
    cdef int32_t k, q
    for heap in core.flows.candidates:
        require(core, heap.valid(), "candidate heap order")
        for k in range(heap.count):
            q = heap.nodes[k].id
            require(
                core, heap.nodes[k].tie == core.requests.items[core.flows.queues[q].chain.head].seq
                and (
                    core.flows.fcfs
                    or heap.nodes[k].key == core.flows.items[core.flows.queues[q].flow].vtc
                ),
                "a candidate stands at its counter and its head",
            )
    return 0


cdef int check_pools(Scheduler core) except -1:
    cdef int32_t p, i, f
    cdef int64_t promised, posted, live, suspect, sequences, of_pools = 0, of_flows = 0
    for p in range(core.ledger.count):
        promised = posted = live = suspect = sequences = 0
        i = core.ledger.pools[p].first_lease
        while i != NONE:
            promised += core.requests.items[i].reserved_blocks
            posted += core.requests.items[i].posted_blocks
            live += 1
            suspect += core.requests.items[i].state == SUSPECT
            sequences += core.requests.items[i].sequences
            i = core.requests.items[i].pool_next
        require(
            core, promised == core.ledger.pools[p].promised_blocks
            and posted == core.ledger.pools[p].posted_blocks
            and live == core.ledger.pools[p].live,
            "promised and posted = sums over live leases",
        )
        require(
            core,
            suspect == core.ledger.pools[p].suspect
            and sequences == core.ledger.pools[p].running_sequences,
            "suspect leases and running sequences = sums over live leases",
        )
        of_pools += (promised + posted) * core.ledger.pools[p].block_size
    for f in range(core.flows.count):
        of_flows += core.flows.items[f].promised_tokens + core.flows.items[f].posted_tokens
    return require(core, of_pools == of_flows, "promised and posted = sums over flows")
