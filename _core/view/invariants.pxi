# The proof that the books balance: every invariant, verified from the records. O(n).

cdef int check_requests(Core core) except -1:
    cdef int32_t i
    cdef Request* r
    cdef int64_t kept = 0
    for i in range(core.requests.used):
        r = &core.requests.items[i]
        if r.state == FREE:
            continue
        kept += 1
        check_invariant(core, core.ids.get(r.key_hi, r.key_lo) == i, "request_id finds its request")
        if r.state == QUEUED:
            check_invariant(core, r.lease == &NO_LEASE, "queued holds no lease")
        else:
            check_invariant(
                core, core.leases.get(<uint64_t>r.lease.lease_id, 0) == i,
                "lease_id finds its lease",
            )
        if r.state != ENDED:
            at = core.deadlines.places[i] - 1 if core.deadlines.has(i) else -1
            check_invariant(
                core, at >= 0 and core.deadlines.nodes[<int32_t>at].key <= r.due_ns, "timed in time"
            )
            check_invariant(
                core, r.owner <= 0 or core.sessions[r.owner] is not None, "its session is open"
            )
        check_invariant(
            core, r.lease.posted_blocks <= r.lease.reserved_blocks, "posted <= reserved"
        )
        check_invariant(
            core,
            r.lease.reserved_blocks == 0
            or ((r.state == LIVE or r.state == SUSPECT) and not r.lease.is_void),
            "only a lease that is not void holds a reservation",
        )
    check_invariant(core, kept == <int64_t>core.ids.count, "no request_id without a request")
    check_invariant(
        core, NO_LEASE.lease_id == 0 and NO_LEASE.charged == 0 and NO_LEASE.output_tokens == 0
        and NO_LEASE.reserved_blocks == 0 and NO_LEASE.growing_at == NONE and not NO_LEASE.is_void
        and NO_HEAD_STATE.head_ns == NONE and NO_HEAD_STATE.wait_times == NULL
        and NO_HEAD_STATE.bypassed == 0 and NO_HEAD_STATE.waits_for == 0,
        "who has no lease, or was never the first, has nothing",
    )
    check_rare_fields(core)
    return check_adapters(core)


cdef list charges_of_leases(Core core):
    cdef int32_t i
    cdef list charged = [0] * core.flows.count
    for i in range(core.requests.used):
        if core.requests.items[i].state == LIVE or core.requests.items[i].state == SUSPECT:
            charged[core.requests.items[i].flow] += core.requests.items[i].lease.charged
    return charged


cdef int check_tenants(Core core) except -1:
    cdef int32_t i
    cdef int64_t born = 0
    cdef list answers = [0] * core.flows.count
    for i in range(core.requests.used):
        if core.requests.items[i].state == ENDED:
            answers[core.requests.items[i].flow] += 1
    for i in range(core.flows.count):
        check_invariant(
            core, answers[i] == core.flows.items[i].answers, "answers of a flow = those stored"
        )
        check_invariant(
            core, is_node(core.flows, i)
            or core.flow_names[core.flow_list[i]] == core.flows.items[i].base,
            "the name of a flow finds its tenant",
        )
        born += core.flows.items[i].born
    return check_invariant(core, born == core.born_count, "tenants at first sight = their flows")


cdef int check_flows(Core core) except -1:
    cdef int32_t f, q
    cdef int64_t queued, received = 0, everything = 0, exempt = 0, exempt_live = 0
    cdef list charged = charges_of_leases(core)
    for f in range(core.flows.count):
        if is_node(core.flows, f):
            check_node(core, f)
            continue
        queued = 0
        q = core.flows.items[f].first_queue
        while q != NONE:
            check_invariant(
                core,
                has_place(core.flows, q) == (
                    core.flows.queues[q].chain.count > 0
                    and core.flows.is_billed(&core.flows.queues[q])
                    and not core.flows.queues[q].throttled
                ),
                "a queue whose head has its quota is a candidate",
            )
            check_order(core, q)
            queued += core.flows.queues[q].chain.count
            q = core.flows.queues[q].next_queue
        check_invariant(core, queued == core.flows.items[f].queued, "queued = sum of queues")
        check_invariant(
            core, core.flows.is_active(f) == (
                (queued > 0 or core.flows.items[f].resumed != 0) and not is_out(core.flows, f)
            ),
            "active = queued or returning, and not blocked by its quota",
        )
        check_invariant(core, core.flows.items[f].vtc >= 0, "a counter is never negative")
        check_invariant(
            core, core.flows.items[f].open_charged == charged[f],
            "what a counter carries for leases = sum over them",
        )
        everything += queued
        if core.flows.items[f].exempt:
            exempt += queued
            exempt_live += core.flows.items[f].live
        received += core.flows.items[f].received
    everything += core.flows.agents.held
    check_invariant(core, everything == core.requests.states[QUEUED], "queued = sum of flows")
    check_invariant(core, received <= core.received, "received >= sum of flows")
    check_invariant(
        core, exempt == core.flows.exempt_queued and exempt_live == core.flows.exempt_live,
        "what is exempt = sum of exempt flows",
    )
    check_backlog(core)
    check_principals(core)
    check_vouchers(core)
    return check_candidates(core)


cdef int check_principals(Core core) except -1:
    """Check how many entries of the tables each known principal holds. O(requests + principals)."""
    cdef int32_t i, count = core.principals.count
    cdef const Principal* p
    cdef const Request* r
    cdef list held = [[0] * 9 for _ in range(count)]  # by state, then in the order of comparison
    for i in range(core.requests.used):
        r = &core.requests.items[i]
        if r.state != FREE and 0 <= r.principal < count:
            held[r.principal][r.state] += 1
            held[r.principal][5] += r.prompt_tokens if r.state == QUEUED else 0
    for session in core.sessions:
        if session is not None and 0 <= (<SessionState>session).principal < count:
            held[(<SessionState>session).principal][6] += 1
    for i in range(core.adapters.count):
        if core.adapters.items[i].users and 0 <= core.adapters.items[i].principal < count:
            held[core.adapters.items[i].principal][7] += 1
    for i in range(core.flows.count):
        if core.flows.items[i].born and 0 < core.flows.items[i].maker <= count:
            held[core.flows.items[i].maker - 1][8] += 1
    for i in range(count):
        p = &core.principals.items[i]
        check_invariant(
            core,
            held[i] == [
                0, p.requests[1], p.requests[2], p.requests[3], p.requests[4], p.queued_tokens,
                p.sessions, p.adapters, p.tenants,
            ],
            "what a principal holds = sum over it",
        )
    return 0


cdef int check_vouchers(Core core) except -1:
    """Check the queued requests of each flow, by principal. O(requests + flows)."""
    cdef int32_t i, f
    cdef const Request* r
    cdef const Flow* flow
    cdef Voucher own
    cdef dict held = {}
    cdef list sums = [[0, 0, 0] for _ in range(core.flows.count)]
    for i in range(core.requests.used):
        r = &core.requests.items[i]
        if r.state == QUEUED and r.principal != core.flows.items[r.flow].voucher:
            queued, tokens = held.get((r.flow, r.principal), (0, 0))
            held[r.flow, r.principal] = queued + 1, tokens + r.prompt_tokens
    for (f, principal), (queued, tokens) in held.items():
        own = core.flows.vouchers.of(f, principal)
        check_invariant(
            core, own.queued == queued and own.tokens == tokens,
            "what a principal has queued of a tenant = sum over it",
        )
        for i, more in enumerate((1, queued, tokens)):
            sums[f][i] += more
    for f in range(core.flows.count):
        flow = &core.flows.items[f]
        check_invariant(
            core, sums[f] == [flow.vouchers, flow.vouched, flow.vouched_tokens],
            "what principals have queued of a tenant = sum over them",
        )
    return check_invariant(
        core, len(held) == <int64_t>core.flows.vouchers.found.count, "no voucher without a request"
    )


cdef int check_backlog(Core core) except -1:
    """Check tokens and work in the queues: of flows, of classes, of all."""
    cdef Flows flows = core.flows
    cdef int64_t all_tokens = 0, exempt_tokens = 0, all_work = 0
    cdef int32_t f, i, cls
    cdef list tokens = [0] * flows.count, work = [0] * flows.count
    cdef list backlog = [0] * CLASSES_MAX
    for _, i in queued_requests(core):
        if core.requests.rare_of(&core.requests.items[i]).hold != NONE:
            continue
        tokens[core.requests.items[i].flow] += core.requests.items[i].prompt_tokens
        work[core.requests.items[i].flow] += core.requests.items[i].work
    check_weights(core)
    for f in range(flows.count):
        if is_node(flows, f):
            continue
        check_invariant(
            core, tokens[f] == flows.items[f].queued_tokens
            and work[f] == flows.items[f].queued_work, "queued tokens = sum of queues"
        )
        cls = flows.items[f].cls
        backlog[cls] += work[f]
        all_tokens += tokens[f]
        all_work += work[f]
        exempt_tokens += tokens[f] if flows.items[f].exempt else 0
    check_invariant(
        core, all_tokens == flows.queued_tokens and all_work == flows.queued_work
        and exempt_tokens == flows.exempt_tokens, "queued tokens = sum of flows"
    )
    for cls in range(CLASSES_MAX):
        check_invariant(
            core, backlog[cls] == flows.backlog[cls], "backlog of a class = sum of its flows"
        )
    return 0


cdef int check_candidates(Core core) except -1:
    cdef Line line
    cdef Heap heap
    cdef int32_t k, q, c, pool = NONE
    for c in range(CLASSES_MAX):
        check_invariant(core, (<Heap>core.flows.actives[c]).valid(), "heap order of active flows")
    check_positions(core)
    for line in core.flows.candidates:
        check_line(core, line)
        for c in range(CLASSES_MAX):
            heap = line.heap(c)
            for k in range(heap.count):
                q = heap.nodes[k].id
                check_invariant(
                    core,
                    stands_by(
                        core.flows, q, &heap.nodes[k], key_in(core.flows, q, pool),
                        arrival_of(core.flows, q),
                    )
                    and core.flows.items[core.flows.queues[q].flow].cls == c,
                    "a candidate stands at its counter and its head, in its class",
                )
        pool += 1
    return 0


cdef int check_positions(Core core) except -1:
    """Check that each flow stands where its positions say, in every pool. O(queues * pools)."""
    cdef Flows flows = core.flows
    cdef Position* p
    cdef Line line
    cdef Heap heap
    cdef int32_t n, q, pool, flow, cls, id
    cdef int64_t key, seq
    for n in range(flows.positions.count):
        p = &flows.positions.items[n]
        check_invariant(
            core, p.flow == NONE
            or (flows.find_position(p.flow, p.pool) == n and 0 <= p.foreign and 0 <= p.key),
            "a flow has one position in a pool",
        )
    for pool in range(core.ledger.count):
        check_invariant(
            core, is_named_only(core, pool) != flows.may_take(pool, NONE)
            and (flows.local or flows.may_take(pool, NONE)),
            "a pool takes requests that name none unless a stranger may ask",
        )
    if stands_in_one(flows):
        return 0
    for pool in range(core.ledger.count):
        line = <Line>flows.anywhere[pool]
        check_line(core, line)
        check_invariant(
            core, line.count == 0 or flows.may_take(pool, NONE),
            "nothing stands in a pool that takes only what names it",
        )
        for q in range(flows.queue_count):
            flow, cls = flows.queues[q].flow, flows.items[flows.queues[q].flow].cls
            if flows.queues[q].target != 0:
                continue
            heap, id = free_heap(flows, flows.items[flow].parent, cls, pool), q
            if flows.items[flow].parent != NONE:
                id = flows.items[flow].place
            check_invariant(
                core,
                heap.has(id) == (has_place(flows, q) and flows.may_take(pool, NONE)),
                "what may run anywhere stands in every pool that takes it",
            )
            if heap.has(id):
                key = flows.key_of(q)
                if flows.order == ORDER_COUNTER:
                    key = flows.counter_at(flow, pool) // flows.grain
                seq = arrival_of(flows, q)
                if is_node(flows, flow):
                    seq = free_heap(flows, flow, cls, pool).nodes[0].tie
                check_invariant(
                    core, stands_by(flows, q, heap.entry(id), key, seq),
                    "what may run anywhere stands by its position in each pool",
                )
    return 0


cdef int check_pools(Core core) except -1:
    cdef int32_t p, i, f
    cdef int64_t promised, posted, live, suspect, sequences, waiting, fresh
    cdef int64_t of_pools = 0, of_flows = 0
    for p in range(core.ledger.count):
        promised = posted = live = suspect = sequences = waiting = fresh = 0
        i = core.ledger.pools[p].first_lease
        while i != NONE:
            promised += core.requests.items[i].lease.reserved_blocks
            posted += core.requests.items[i].lease.posted_blocks
            live += 1
            fresh += core.requests.items[i].lease.fresh_tokens
            suspect += core.requests.items[i].state == SUSPECT
            sequences += core.requests.items[i].sequences
            if core.requests.items[i].lease.in_prefill_budget:
                waiting += core.requests.items[i].prompt_tokens
                check_invariant(
                    core, not is_computed(&core.requests.items[i]), "a round is not computed yet"
                )
            i = core.requests.items[i].lease.pool_next
        check_invariant(
            core, promised == core.ledger.pools[p].promised_blocks
            and posted == core.ledger.pools[p].posted_blocks
            and live == core.ledger.pools[p].live,
            "promised and posted = sums over live leases",
        )
        check_invariant(
            core,
            suspect == core.ledger.pools[p].suspect
            and sequences == core.ledger.pools[p].running_sequences
            and fresh == core.ledger.pools[p].prefilling,
            "suspect leases, running sequences and input to compute = sums over live leases",
        )
        check_invariant(
            core, waiting == core.ledger.pools[p].prefill_budget.tokens,
            "a prefill budget = its leases' input",
        )
        check_load(core, p)
        check_loras(core, p)
        of_pools += (promised + posted) * core.ledger.pools[p].block_size
    for f in range(core.flows.count):
        of_flows += core.flows.items[f].promised_tokens + core.flows.items[f].posted_tokens
    return check_invariant(core, of_pools == of_flows, "promised and posted = sums over flows")


cdef int check_load(Core core, int32_t pool) except -1:
    cdef GrowingLeases* runs = &core.ledger.pools[pool].growing
    cdef int32_t i = core.ledger.pools[pool].first_lease, growing = 0
    cdef int64_t held = 0, most = runs.peak_blocks
    cdef Request* r
    cdef GrowingLease run
    if most >= 0:
        runs.peak_blocks = -1
        growing_peak(runs, core.requests, NULL, core.ledger.pools[pool].block_size)
        check_invariant(core, runs.peak_blocks == most, "the peak that is kept is the peak")
    while i != NONE:
        r = &core.requests.items[i]
        run = core.ledger.figures(pool, r, r.lease.reserved_blocks, r.lease.predicted_output)
        growing += r.lease.growing_at != NONE
        held += r.lease.fixed_tokens
        if r.lease.growing_at != NONE:
            check_invariant(
                core,
                runs.items[r.lease.growing_at].id == i
                and runs.items[r.lease.growing_at].tokens_left == run.tokens_left
                and runs.items[r.lease.growing_at].blocks == run.blocks
                and runs.items[r.lease.growing_at].part == run.part
                and runs.items[r.lease.growing_at].width == run.width,
                "a lease that grows counts as it was last reported",
            )
        else:
            check_invariant(
                core, r.lease.fixed_tokens == run.whole and run.width == 0, "a lease counts in full"
            )
        i = r.lease.pool_next
    return check_invariant(
        core, growing == runs.count and held == runs.fixed_tokens, "the load counts every lease"
    )


cdef int check_waiters(Core core, int32_t node, Heap heap) except -1:
    cdef int32_t k, f
    for k in range(heap.count):
        f = <int32_t>heap.nodes[k].tie
        check_invariant(
            core,
            core.flows.items[f].waits_at == node
            and core.flows.items[f].wait_slot == heap.nodes[k].id
            and core.requests.items[core.flows.items[f].wait_head].state == QUEUED
            and core.requests.items[core.flows.items[f].wait_head].bill == 0,
            "a flow waits where it says, with a head that has no bill",
        )
    return 0


cdef int check_quotas(Core core) except -1:
    """Check concurrency and waiters, and that nothing is owed to a bucket beyond what it holds."""
    cdef int32_t i, n, f, c, waiting = 0
    cdef int k
    cdef Bill* b
    cdef Line line
    cdef list live = [0] * core.quotas.count, tokens = [0] * core.quotas.count
    for i in range(core.requests.used):
        if core.requests.items[i].state != FREE and core.requests.items[i].bill:
            check_invariant(
                core, core.requests.items[i].state != ENDED, "who has ended has no bill"
            )
            b = &core.quotas.bills[core.requests.items[i].bill]
            for k in range(b.count):
                live[b.nodes[k]] += 1
                tokens[b.nodes[k]] += b.input_tokens + b.output_tokens
    for n in range(core.quotas.count):
        check_invariant(
            core, core.quotas.nodes[n].live == live[n], "concurrency = bills of the node"
        )
        check_invariant(
            core, core.quotas.nodes[n].open_input + core.quotas.nodes[n].open_output == tokens[n],
            "open tokens of a quota = sums over its bills",
        )
        for k in range(BUDGETS):
            check_invariant(
                core, core.quotas.nodes[n].budgets[k].spent >= tokens[n],
                "a budget has spent what stands on its open bills",
            )
        for k in range(RATES):
            check_invariant(
                core, core.quotas.nodes[n].level[k] <= core.quotas.nodes[n].rate[k] * MICRO,
                "a bucket holds at most a minute's limit",
            )
        line = core.quotas.waiting[n]
        if line is None:
            continue
        check_line(core, line)
        for c in range(CLASSES_MAX):
            check_waiters(core, n, line.heap(c))
        waiting += line.count
    check_shares(core)
    for f in range(core.flows.count):
        waiting -= core.flows.items[f].waits_at != NONE
    return check_invariant(
        core, waiting == 0, "every flow that waits for a quota is among its waiters"
    )


cdef int check_all(Core core) except -1:
    cdef int64_t live = core.requests.states[LIVE] + core.requests.states[SUSPECT]
    check_requests(core)
    check_flows(core)
    check_tenants(core)
    check_sets(core)
    check_pools(core)
    check_pool_order(core)
    check_quotas(core)
    check_prefixes(core)
    check_sessions(core)
    check_invariant(
        core, core.received == core.granted + core.requests.states[QUEUED] + core.rejected
        + core.evicted,
        "received = granted + queued + rejected + evicted",
    )
    check_invariant(
        core, core.granted == live + core.completed + core.cancelled + core.expired,
        "granted = live + completed + cancelled + expired",
    )
    check_invariant(
        core, <int64_t>core.deadlines.count == core.requests.states[QUEUED] + live,
        "every queued request and every lease is timed",
    )
    check_invariant(core, core.deadlines.valid() and core.quotas.wakes.valid(), "heap order")
    return check_invariant(
        core, core.answers.count == core.requests.states[ENDED], "stored answers"
    )
