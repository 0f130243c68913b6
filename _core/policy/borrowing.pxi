# Lending: which flows are within their shares, which borrow, which are held; see guarantees.pxi.

cdef inline bint has_share(Core core, int32_t node) noexcept:
    return node < core.quotas.guarantees.count and core.quotas.guarantees.items[node].nominal > 0


cdef inline bint is_root_cohort(Core core, int32_t node) noexcept:
    return core.quotas.guarantees.count > 0 and node == core.quotas.guarantees.root


cdef int add_share(QuotaLimits* limits, int64_t share, int64_t lends, int64_t borrows) except -1:
    check_range("share", share, 0, QUOTA_LIMIT_MAX)
    check_range("lends", lends, NONE, share)
    check_range("borrows", borrows, NONE, QUOTA_LIMIT_MAX)
    limits.share, limits.borrows = share, borrows
    limits.lends = share if lends == NONE else lends
    return 0


cdef int give_share(Core core, int32_t node, const QuotaLimits* limits) except -1:
    """Let a node have a share, or none (0). O(1) amortised; the pools follow, see
    `settle_shares()`."""
    cdef Guarantees s = core.quotas.guarantees
    cdef Guarantee* n
    if not limits.share and not has_share(core, node):
        return 0
    if s.stale and s.stale_ns != core.now_ns:
        settle_shares(core)
    if s.root == NONE:
        s.root = core.quotas.add()
        core.quota_keys.append(QUOTA_ROW)
        core.quota_names[b""] = s.root  # which no group may have
    s.reach(core.quotas.count)
    n = &s.items[node]
    n.nominal, n.lends, n.borrows = limits.share, limits.lends, limits.borrows
    s.stale = True
    s.stale_ns = core.now_ns
    return 0


cdef int end_share(Core core, int32_t flow) except -1:
    """End the share of a tenant that is gone, so that none can borrow from it."""
    cdef QuotaLimits none
    if core.flows.items[flow].own_quota == NONE:
        return 0
    memset(&none, 0, sizeof(QuotaLimits))
    return give_share(core, core.flows.items[flow].own_quota, &none)


cdef inline int know_shares(Core core) except -1:
    if core.quotas.guarantees.stale:
        settle_shares(core)
    return 0


cdef int settle_shares(Core core) except -1:
    """Find the pools and the flows' shares after a change. O(nodes * levels + flows)."""
    cdef Guarantees s = core.quotas.guarantees
    cdef Guarantee* n
    cdef int32_t node, pool, flow
    cdef list rates = [0] * s.count
    s.stale = False
    for node in range(s.count):
        n = &s.items[node]
        n.lender = n.cohort = NONE
        rates[node] += n.nominal
        if n.nominal == 0:
            continue
        pool = core.quotas.nodes[node].parent
        while pool != NONE and not has_share(core, pool):
            pool = core.quotas.nodes[pool].parent
        n.cohort = s.root if pool == NONE else pool
        rates[n.cohort] += n.lends - (0 if n.cohort == s.root else n.nominal)
    for node in range(s.count):
        n = &s.items[node]
        bucket_limit(&n.unused, min(max(rates[node], 0), QUOTA_LIMIT_MAX), s.stale_ns)
        bucket_limit(&n.credit, max(n.borrows, <int64_t>0), s.stale_ns)
        if n.cohort != NONE:
            join_ring(s, node, n.cohort)
    core.quotas.mark_ready(s.root)
    for flow in range(core.flows.count):
        node = core.flows.items[flow].quota
        while node != NONE and not has_share(core, node):
            node = core.quotas.nodes[node].parent
        core.flows.items[flow].guarantee = node
    return 0


cdef void join_ring(Guarantees s, int32_t node, int32_t pool) noexcept:
    # Behind the one that joined last, who points to the first.
    cdef int32_t last = s.items[pool].lender
    if last == NONE:
        s.items[node].next_member = node
    else:
        s.items[node].next_member = s.items[last].next_member
        s.items[last].next_member = node
    s.items[pool].lender = node


# The source that pays for a flow's next request: 0: its own share, k: the k-th pool above;
# PAID_NOT: none. The first of the empty buckets up to there holds tokens again at `due_ns`.
ctypedef struct FundingSource:
    int source
    bint limited  # it may not borrow now, even if a pool holds tokens
    int64_t due_ns


cdef FundingSource funding_source_of(Core core, int32_t flow) noexcept:
    """Below its share a flow has its own; else it borrows from the nearest pool that holds
    something, while its limits, and those of the groups between, allow it. O(levels)."""
    cdef Guarantee* n
    cdef FundingSource funding
    funding.source = 0
    funding.limited = False
    funding.due_ns = NEVER
    if core.flows.items[flow].guarantee == NONE:  # since a reload: nothing binds it any more
        return funding
    n = &core.quotas.guarantees.items[core.flows.items[flow].guarantee]
    while not bucket_has(&n.unused, core.now_ns):
        if n.cohort == NONE:  # the root
            funding.source = PAID_NOT
            return funding
        funding.due_ns = min(funding.due_ns, bucket_due(&n.unused))
        if n.borrows != NONE and not bucket_has(&n.credit, core.now_ns):
            funding.due_ns = min(funding.due_ns, bucket_due(&n.credit))
            funding.limited = True
            funding.source = PAID_NOT
            return funding
        funding.source += 1
        n = &core.quotas.guarantees.items[n.cohort]
    return funding


cdef int book_share(Core core, int32_t i, int64_t tokens) except -1:
    """Set the tokens of a bill that its share pays. O(levels)."""
    cdef Bill* b = &core.quotas.bills[core.requests.items[i].bill]
    cdef int64_t more = tokens - b.share_tokens
    cdef int32_t node = b.share_node, left = b.share_source
    know_shares(core)
    if b.share_source == PAID_NOT or more == 0:
        return 0
    b.share_tokens = tokens
    while left != 0 and node != NONE and core.quotas.guarantees.items[node].cohort != NONE:
        core.quotas.guarantees.items[node].borrowed += more
        node = core.quotas.guarantees.items[node].cohort
        left -= 1
    if b.lender != NONE:
        core.quotas.guarantees.items[b.lender].lent += more
    if b.share_source != PAID_FREE:
        draw_share(core, b, more)
    return look_again(core, core.requests.items[i].flow) if more < 0 else 0


cdef int look_again(Core core, int32_t flow) except -1:
    """Note when a held flow has tokens of its own again, and whether it may borrow. Tokens that are
    given back to its group earlier count from that time on. O(levels + targets * log n)."""
    cdef Flow* f = &core.flows.items[flow]
    cdef Heap dues = core.quotas.guarantees.dues
    cdef int32_t q = f.first_queue
    cdef FundingSource funding
    if not f.throttled:
        return 0
    funding = funding_source_of(core, flow)
    if funding.source == 0:
        funding.due_ns = core.now_ns
    f.limited = funding.limited
    note_throttled(core.flows, flow)
    while q != NONE:
        if not core.flows.queues[q].throttled or funding.due_ns == NEVER:
            dues.remove(q)
        else:
            dues.put(
                q, funding.due_ns, core.requests.items[core.flows.queues[q].head].seq
            )
        q = core.flows.queues[q].next_queue
    return 0


cdef int draw_share(Core core, const Bill* b, int64_t tokens) except -1:
    """Take tokens from the source that pays a bill; negative: give back. O(levels)."""
    cdef int64_t micro = tokens * MICRO
    cdef int32_t node = b.share_node
    cdef int k
    cdef Guarantee* n
    for k in range(b.share_source):
        n = &core.quotas.guarantees.items[node]
        if n.cohort == NONE:  # there were more pools when it was granted
            break
        if n.borrows != NONE:
            bucket_take(&n.credit, micro, core.now_ns)
        node = n.cohort
    while node != NONE:
        n = &core.quotas.guarantees.items[node]
        bucket_take(&n.unused, micro, core.now_ns)
        if n.nominal == 0:
            break
        micro = <int64_t>(<wide>micro * n.lends // n.nominal)
        node = n.cohort
    return core.quotas.mark_ready(core.quotas.guarantees.root)


cdef int follow_bill(Core core, int32_t i) except -1:
    """Let the share pay for what the bill states now."""
    cdef Bill* b = &core.quotas.bills[core.requests.items[i].bill]
    return book_share(core, i, b.input_tokens + b.output_tokens)


cdef int pay_share(Core core, int32_t i) except -1:
    """Have the share of a request's flow pay for it, unless it has. O(levels)."""
    cdef Request* r = &core.requests.items[i]
    cdef Bill* b = &core.quotas.bills[r.bill]
    cdef int32_t node
    cdef int k
    know_shares(core)
    node = core.flows.items[r.flow].guarantee
    if r.bill == 0 or node == NONE or b.share_source != PAID_NOT:
        return 0
    b.share_node = node
    b.share_source = funding_source_of(core, r.flow).source
    if b.share_source == PAID_NOT:
        b.share_source = PAID_FREE
    b.lender = NONE
    if b.share_source > 0:
        for k in range(b.share_source):
            node = core.quotas.guarantees.items[node].cohort
        b.lender = next_lender(core, node, (b.input_tokens + b.output_tokens) * MICRO)
    return follow_bill(core, i)


cdef int32_t next_lender(Core core, int32_t pool, int64_t micro) noexcept:
    """Return the member whose unused share a loan is booked to: the next in turn that has `micro`
    of what it lends left; -1: none of LENDERS_SEEN. O(LENDERS_SEEN)."""
    cdef Guarantee* p = &core.quotas.guarantees.items[pool]
    cdef Guarantee* n
    cdef int k
    for k in range(LENDERS_SEEN):
        if p.lender == NONE:
            break
        p.lender = core.quotas.guarantees.items[p.lender].next_member
        n = &core.quotas.guarantees.items[p.lender]
        bucket_fill(&n.unused, core.now_ns)
        if n.unused.level > 0 and <wide>n.unused.level * n.lends // n.nominal >= micro:
            return p.lender
    return NONE


cdef bint is_saturated(Core core, int32_t target) noexcept:
    """Return whether shares bind for a target: in its pool, or in all where it may be any.
    O(pools)."""
    cdef int32_t p
    cdef bint some = False
    for p in range(core.ledger.count):
        if core.ledger.serves(p) and core.flows.may_take(p, target):
            some = True
            if not core.ledger.pools[p].saturated:
                return False
    return some


cdef void note_saturation(Core core) noexcept:
    """Note whether a pool is saturated: from `saturation_ppm` of its capacity on, until it is
    `saturation_band_ppm` below. O(pools)."""
    cdef Pool* p
    cdef int32_t i
    cdef wide load, size
    for i in range(core.ledger.count):
        p = &core.ledger.pools[i]
        load = <wide>core.ledger.load(i, NULL) * 1_000_000
        size = <wide>p.capacity_blocks * p.block_size
        if load >= size * core.settings.saturation_ppm:
            p.saturated = True
        elif load < size * (core.settings.saturation_ppm - core.settings.saturation_band_ppm):
            p.saturated = False


cdef inline bint is_contested(Flows flows, int32_t target, int32_t cls) noexcept:
    """Return whether several of a class are in the line of a target; for a set, in those of all its
    pools. A pool that has nothing else waiting lets a queue go, so no other one may hold it again.
    O(pools of the target)."""
    cdef int32_t k
    for k in range(flows.sets.line_count(target)):
        if (<Line>flows.candidates[flows.sets.line_at(target, k)]).heap(cls).count < 2:
            return False
    return True


cdef bint must_throttle(Core core, int32_t i) noexcept:
    """Return whether a head is beyond its flow's share while that binds: in saturation, or with
    others of its class in the same line. O(pools)."""
    cdef Request* r = &core.requests.items[i]
    cdef Flow* f = &core.flows.items[r.flow]
    if f.guarantee == NONE or r.bill == 0:
        return False
    if core.quotas.bills[r.bill].share_source != PAID_NOT:
        return False
    if not is_contested(core.flows, r.target + 1, f.cls):
        if not is_saturated(core, r.target):
            return False
    return not bucket_has(&core.quotas.guarantees.items[f.guarantee].unused, core.now_ns)


cdef int throttle(Core core, int32_t i) except -1:
    """Take the queue of a head out of the line; the head begins to wait for room when it is let go.
    O(targets * log n)."""
    cdef Request* r = &core.requests.items[i]
    cdef Flow* f = &core.flows.items[r.flow]
    cdef int32_t q = core.flows.find_queue(r.flow, r.target + 1), root = core.quotas.guarantees.root
    if not f.throttled:
        f.throttled_lift = core.quotas.nodes[root].lift[f.cls]
    core.flows.queues[q].throttled = True
    f.throttled += 1
    core.quotas.guarantees.throttled += 1
    wait_for(core.requests, i, WAITS_SHARE, core.now_ns)
    core.requests.head_state_of(i).lined_ns = NONE
    rank_queue(core.flows, q)
    look_again(core, r.flow)
    return core.quotas.mark_ready(root)


cdef int let_go(Core core, int32_t q) except -1:
    """Put a held queue back into the line. O(targets * log n)."""
    unthrottle(core.flows, q)
    rank_queue(core.flows, q)
    return note_out(core.flows, core.flows.queues[q].flow)


cdef int pay_and_let_go(Core core, int32_t q) except -1:
    let_go(core, q)
    return pay_share(core, core.flows.queues[q].head)


cdef int wake_root_cohort(Core core) except -1:
    """Note when the root's pool, if empty, will hold tokens that a held queue waits for."""
    cdef int32_t root = core.quotas.guarantees.root
    cdef Bucket* unused = &core.quotas.guarantees.items[root].unused
    cdef int64_t due_ns = NEVER
    know_shares(core)
    if core.quotas.guarantees.throttled and not bucket_has(unused, core.now_ns):
        due_ns = bucket_due(unused)
    if due_ns == NEVER:
        core.quotas.wakes.remove(root)
    else:
        core.quotas.wakes.put(root, due_ns, root)
    return 0


cdef int run_share_dues(Core core, int64_t work) except -1:
    """Look at held queues whose time has come, until `work_max`: the work done so far."""
    cdef Heap dues = core.quotas.guarantees.dues
    cdef int32_t q, flow
    know_shares(core)
    while dues.count and dues.nodes[0].key <= core.now_ns and work < core.settings.work_max:
        q = dues.nodes[0].id
        flow = core.flows.queues[q].flow
        if funding_source_of(core, flow).source == 0:
            pay_and_let_go(core, q)
        else:
            look_again(core, flow)
        work += 1
    return <int>work


cdef bint let_one_go(Core core, int32_t pool) except -1:
    """Put a held queue back into the empty line of a pool: the first of LOOKAHEAD that its share
    does not bind, or that can borrow; False: there is none. The best class is first.
    O(LOOKAHEAD * log n + classes)."""
    cdef int32_t found[LOOKAHEAD]
    cdef bint is_free[LOOKAHEAD]
    cdef Line own = <Line>core.quotas.guarantees.throttled_for[pool + 1]
    cdef Line free = core.flows.no_line
    cdef int32_t k, c, flow, count = 0
    if core.flows.may_take(pool, NONE):
        free = <Line>core.quotas.guarantees.throttled_for[0]
    for k in range(core.classes.count):
        c = core.classes.order[k]
        count = best_first(own.heap(c), free.heap(c), 0, found, is_free, count)
    for k in range(count):
        if not is_saturated(core, core.flows.queues[found[k]].target - 1):
            let_go(core, found[k])
            return True
        flow = core.flows.queues[found[k]].flow
        if funding_source_of(core, flow).source != PAID_NOT:
            pay_and_let_go(core, found[k])
            return True
        look_again(core, flow)
    return False


cdef dict share_row(Core core, int64_t now_ns, int32_t flow):
    """Return the state of a flow's share, or of its group's, for Stats."""
    cdef Flow* f
    cdef Guarantee n
    know_shares(core)
    f = &core.flows.items[flow]
    memset(&n, 0, sizeof(Guarantee))
    if f.guarantee != NONE:
        n = core.quotas.guarantees.items[f.guarantee]
        bucket_fill(&n.unused, max(now_ns, core.now_ns))
    return {
        "share_tokens_per_minute": n.nominal,
        "share_left_tokens": max(<int64_t>0, n.unused.level // MICRO),
        "borrowed_tokens": n.borrowed,
        "lent_tokens": n.lent,
        "held_to_share": bool(f.throttled),
    }


cdef int fill_quotas(Core core) except -1:
    """Reset all quotas and shares, less what open bills took. O(nodes + requests)."""
    cdef Guarantee* n
    cdef int32_t node, i
    cdef Bill* b
    core.quotas.fill_up()
    know_shares(core)
    for node in range(core.quotas.guarantees.count):
        n = &core.quotas.guarantees.items[node]
        n.unused.level = n.unused.rate * MICRO
        n.credit.level = n.credit.rate * MICRO
        n.unused.at_ns = n.credit.at_ns = core.now_ns
    for i in range(core.requests.used):
        if core.requests.items[i].state != FREE and core.requests.items[i].bill:
            b = &core.quotas.bills[core.requests.items[i].bill]
            if b.share_source >= 0:
                draw_share(core, b, b.share_tokens)
    return 0


cdef int check_shares(Core core) except -1:
    """Held queues, and that no bucket holds more than a minute's tokens."""
    cdef int32_t node, q, k, flow, held = 0, listed = 0, counted = 0
    cdef Guarantee* n
    cdef Line line
    know_shares(core)
    for node in range(core.quotas.guarantees.count):
        n = &core.quotas.guarantees.items[node]
        check_invariant(
            core,
            n.unused.level <= n.unused.rate * MICRO
            and n.credit.level <= n.credit.rate * MICRO,
            "a share holds at most a minute of it",
        )
    for line in core.quotas.guarantees.throttled_for:
        check_line(core, line)
        listed += line.count
    for flow in range(core.flows.count):
        counted += core.flows.items[flow].throttled
    for q in range(core.flows.queue_count):
        held += core.flows.queues[q].throttled
        for k in range(core.flows.sets.line_count(core.flows.queues[q].target)):
            line = core.quotas.guarantees.throttled_for[
                core.flows.sets.line_at(core.flows.queues[q].target, k)
            ]
            check_invariant(
                core,
                line.has(core.flows.items[core.flows.queues[q].flow].cls, q)
                == core.flows.queues[q].throttled,
                "every held queue is listed for its target",
            )
            listed -= k > 0 and core.flows.queues[q].throttled
        check_invariant(
            core, core.flows.queues[q].throttled or not core.quotas.guarantees.dues.has(q),
            "only held queues wait for their shares",
        )
    return check_invariant(
        core, held == listed and held == counted and held == core.quotas.guarantees.throttled,
        "held queues are counted",
    )
