# Why a request waits: its place, its estimate, and for what it has waited so far.
#
# Everything here only reads, as of the last event; nothing is decided by it.

cdef enum:
    NAMESAKES_MAX = 16  # requests of one client's id that are shown, the latest

UNTOLD = ("wait_told_ms", "ttft_told_ms", "wait_left_ms", "ttft_expected_ms")
cdef list STATES = ["", "QUEUED", "LIVE", "SUSPECT", "ENDED", "REFUSED"]


cdef list explain_id(
    Core core, int64_t now_ns, bytes request_id, bytes tenant, int32_t principal
):
    """Return the stories of the requests with an id: of one tenant, O(1) to find; else of all
    configured tenants, O(flows). Then those of the last requests that clients know by it,
    O(CLIENT_IDS_MAX)."""
    cdef list found = []
    cdef int32_t flow, of = NONE
    cdef uint64_t salt
    cdef Slice name, key
    check_id(request_id)
    memset(&key, 0, sizeof(Slice))
    now_ns = max(now_ns, core.now_ns)
    if tenant:
        name.at, name.size = <const uint8_t*><const char*>tenant, len(tenant)
        flow = flow_of(core, &name, &key)
        if flow == NONE:
            return found
        salt = tenant_salt(core, flow, &name, &key)
        add_story(core, now_ns, flow, request_id, salt, principal, found)
        of = flow
    else:
        for flow in range(core.flows.count):
            if core.flows.items[flow].base == flow:
                add_story(core, now_ns, flow, request_id, 0, principal, found)
    add_namesakes(core, now_ns, of, request_id, principal, found)
    return found


cdef int add_namesakes(
    Core core, int64_t now_ns, int32_t flow, bytes client_id, int32_t principal, list found
) except -1:
    """Add the stories of the last requests that clients know by an id, the latest first.

    `flow`: of this tenant, or of those that share its flow; -1: of all. O(CLIENT_IDS_MAX)."""
    cdef Hash128 key = client_key(
        core, <const uint8_t*><const char*>client_id, <size_t>len(client_id)
    )
    cdef const ClientId* item = core.client_ids.last(&key)
    cdef const Refusal* refusal
    cdef int64_t since_ns = now_ns - core.settings.answer_ttl_ns
    cdef int32_t i, whose, count = 0
    cdef set seen = set()
    while item != NULL and count < NAMESAKES_MAX:
        i, refusal = core.ids.get(item.key.hi, item.key.lo), NULL
        whose = NONE
        if i != NONE and core.requests.items[i].principal == item.principal:
            whose = core.requests.items[i].flow
        elif i == NONE:
            refusal = core.rejection_log.find(item.key.hi, item.key.lo, since_ns)
            if refusal != NULL and refusal.principal == item.principal:
                whose = refusal.flow
        if (
            whose != NONE
            and principal in (NONE, item.principal)
            and flow in (NONE, core.flows.items[whose].base)
            and (item.key.hi, item.key.lo) not in seen  # a lease that was replayed
        ):
            seen.add((item.key.hi, item.key.lo))
            count += 1
            if refusal == NULL:
                found.append(story_of(core, now_ns, i))
            else:
                found.append(story_of_refused(core, now_ns, refusal))
        item = core.client_ids.before(item)
    return 0


cdef int add_story(
    Core core, int64_t now_ns, int32_t flow, bytes request_id, uint64_t tenant,
    int32_t principal, list found,
) except -1:
    """Add the story of the request that has the id now, else of the last that was refused under it.
    `principal` -1: of all. O(1) to find; O(principals) for all, while several use an id of the same
    tenant."""
    cdef Hash128 keys[2]
    cdef const Refusal* refusal
    cdef const Refusal* last = NULL
    cdef int32_t i, p
    cdef int k
    keys[1] = tenant_key(
        core, flow, tenant, <const uint8_t*><const char*>request_id, len(request_id)
    )
    keys[0] = own_key(core, &keys[1], principal) if principal != NONE else keys[1]
    if principal == NONE and core.own_ids:
        for p in range(core.principals.count):
            keys[0] = own_key(core, &keys[1], p)
            i = core.ids.get(keys[0].hi, keys[0].lo)
            if i != NONE:
                found.append(story_of(core, now_ns, i))
        keys[0] = keys[1]
    for k in range(2):
        i = core.ids.get(keys[k].hi, keys[k].lo)
        if i != NONE and principal in (NONE, core.requests.items[i].principal):
            found.append(story_of(core, now_ns, i))
            return 0
    for k in range(2):
        refusal = core.rejection_log.find(
            keys[k].hi, keys[k].lo, now_ns - core.settings.answer_ttl_ns
        )
        if refusal != NULL and principal in (NONE, refusal.principal):
            if last == NULL or refusal.number > last.number:
                last = refusal
    if last != NULL:
        found.append(story_of_refused(core, now_ns, last))
    return 0


cdef dict story_of_refused(Core core, int64_t now_ns, const Refusal* refusal):
    """Return the story of a request that was not served. O(kinds of waits)."""
    cdef int k
    return {
        "tenant": core.flow_list[refusal.flow].decode(),
        "request_class": core.classes.names[core.flows.items[refusal.flow].cls].decode(),
        "state": STATES[5],
        "outcome": refusal.outcome,
        "pool": pool_name_of(core, refusal.target),
        "state_ms": (now_ns - refusal.at_ns) // NS_PER_MS,
        "age_ms": (now_ns - refusal.at_ns + refusal.waited_ns) // NS_PER_MS,
        "prompt_tokens": refusal.prompt_tokens,
        "max_output_tokens": refusal.output_max_tokens,
        "sequences": refusal.sequences,
        "queue_duration_us": refusal.waited_ns // 1000,
        "waited": [
            {"reason": k, "time_us": refusal.spent_us[k]}
            for k in range(WAITS_KINDS) if refusal.spent_us[k]
        ],
        **{name: NONE for name in UNTOLD},
    }


cdef dict story_of(Core core, int64_t now_ns, int32_t i):
    """Return all that is known of one request. O(SCAN_MAX + PLACE_MAX + pools), in the peak form
    times the leases of a pool."""
    cdef Request* r = &core.requests.items[i]
    cdef int64_t granted_ns = granted_at_ns(r), until_ns = granted_ns, since_ns = granted_ns
    cdef int64_t spent_ns[WAITS_KINDS]
    cdef bint queued = r.state == QUEUED
    cdef int k, kind
    if queued:
        until_ns, since_ns = now_ns, r.arrival_ns
    elif r.state == ENDED:
        since_ns = r.lease.ended_ns
    wait_times_until(core.requests, i, until_ns, spent_ns)
    story = {
        "tenant": core.flow_list[r.flow].decode(),
        "request_class": core.classes.names[core.flows.items[r.flow].cls].decode(),
        "state": STATES[r.state],
        "is_void": bool(r.lease.is_void),
        "outcome": r.lease.outcome if r.state == ENDED else 0 if queued else OUT_GRANTED,
        "pool": pool_name_of(core, r.target if queued else r.pool),
        "state_ms": (now_ns - since_ns) // NS_PER_MS,
        "age_ms": (now_ns - r.arrival_ns) // NS_PER_MS,
        "prompt_tokens": r.prompt_tokens,
        "max_output_tokens": r.output_max_tokens,
        "sequences": r.sequences,
        "queue_duration_us": (until_ns - r.arrival_ns) // 1000,
        "waited": [
            {"reason": k, "time_us": spent_ns[k] // 1000}
            for k in range(WAITS_KINDS) if spent_ns[k] > 0
        ],
        "session": session_story(core, now_ns, i),
        **estimate_row(core, now_ns, i),
    }
    if queued:
        kind = waits_now(core.requests, i, &since_ns)
        story["place"] = {
            "reason": kind,
            "reason_ms": (now_ns - since_ns) // NS_PER_MS,
            "queue_ahead": requests_before(core, i),
            "flows_ahead": flows_before(core, i),
            "work_ahead_tokens": work_ahead(core, i),
            "evicted_in_ms": max(<int64_t>0, r.due_ns - now_ns) // NS_PER_MS,
        }
        story["pools"] = pool_waits(core, i)
        story["limit"] = limit_row(core, now_ns, i, kind)
    return story


cdef Node rank_of(Core core, int32_t i, int32_t target) noexcept:
    """Return where a request would stand in its line, or in that of a pool of its set, if it were
    the head of its queue."""
    cdef Request* r = &core.requests.items[i]
    cdef Node mine
    mine.key, mine.tie, mine.id = 0, r.seq, NONE
    if core.flows.order == ORDER_COUNTER:
        mine.key = core.flows.counter_at(r.flow, target) // core.flows.grain
    elif core.flows.order == ORDER_INPUT:
        mine.key = r.prompt_tokens
    return mine


cdef int32_t flows_before(Core core, int32_t i) except -1:
    """Return how many flows of its class are ahead of it in the line, a node as one; more than
    SCAN_MAX are not counted. In a set of pools, the one counts in which they are the fewest.
    O(levels * SCAN_MAX * pools of the set)."""
    cdef int32_t target = core.requests.items[i].target, k, least = NONE, count
    for k in range(core.flows.sets.line_count(target + 1)):
        count = flows_before_in(core, i, core.flows.sets.line_at(target + 1, k) - 1)
        least = count if least == NONE else min(least, count)
    return least


cdef int32_t flows_before_in(Core core, int32_t i, int32_t pool) except -1:
    cdef Request* r = &core.requests.items[i]
    cdef Node mine = rank_of(core, i, pool)
    cdef Line free
    cdef Heap line
    cdef Family family
    cdef int32_t node
    cdef int32_t flow = r.flow, cls = core.flows.items[flow].cls, count = 0, target = pool + 1
    cdef int64_t shift
    while core.flows.items[flow].parent != NONE:
        node = core.flows.items[flow].parent
        family = core.flows.family_of(node)
        if target:
            count = nodes_before(core, family.line_of(target), family, &mine, flow, count)
            line = free_heap(core.flows, node, cls, pool)
        else:
            line = family.line_of(0)
        count = nodes_before(core, line, family, &mine, flow, count)
        flow = node
        if core.flows.order == ORDER_COUNTER:
            mine.key = core.flows.counter_at(flow, pool) // core.flows.grain
    if pool == NONE:
        free = <Line>core.flows.candidates[0]
    else:
        free = free_line(core.flows, pool)
    shift = shift_of(core.flows, cls, pool) if pool != NONE else 0
    mine.key -= shift
    count = nodes_before(core, free.heap(cls), None, &mine, flow, count)
    mine.key += shift
    if target:
        count = nodes_before(
            core, (<Line>core.flows.candidates[target]).heap(cls), None, &mine, flow, count
        )
    return count


cdef int32_t nodes_before(
    Core core, Heap heap, Family family, Node* mine, int32_t flow, int32_t count
) noexcept:
    # Down the heap from its head: below an entry that is not ahead, none is.
    cdef int32_t open[4 * SCAN_MAX + 8]
    cdef int32_t left = 0, at, child
    if heap.count:
        open[0] = 0
        left = 1
    while left and count <= SCAN_MAX:
        left -= 1
        at = open[left]
        if not less(&heap.nodes[at], mine):
            continue
        if family is None:
            count += core.flows.queues[heap.nodes[at].id].flow != flow
        else:
            count += family.members[heap.nodes[at].id] != flow
        for child in range(4 * at + 1, min(4 * at + 5, heap.count)):
            open[left] = child
            left += 1
    return count


cdef int64_t own_work_before(Core core, int32_t i) noexcept:
    """Return the work of its own queue that precedes it; in the order of arrival, withdrawn work
    still counts. O(targets), by deadline with O(log n) expected."""
    cdef Request* r = &core.requests.items[i]
    cdef Queue* queue
    if core.requests.rare_of(r).hold != NONE:  # it is in no queue
        return 0
    queue = &core.flows.queues[core.flows.find_queue(r.flow, r.target + 1)]
    if queue.in_tree:
        return core.flows.treaps.work_before(i)
    return max(<int64_t>0, r.mark - core.requests.items[queue.chain.head].mark)


cdef int64_t work_ahead(Core core, int32_t i) except -1:
    """Return the tokens that are expected to be charged to others before it is served, as its
    estimate counts them. O(SCAN_MAX + classes)."""
    cdef Request* r = &core.requests.items[i]
    return own_work_before(core, i) + work_before(core, r.flow, r.target)


cdef int64_t wait_left_ns(Core core, int32_t i) except -2:
    """Return how much longer a queued request is expected to wait; -1: unknown. O(SCAN_MAX +
    pools)."""
    cdef Request* r = &core.requests.items[i]
    cdef int64_t left_ns = 0
    if core.requests.rare_of(r).hold != NONE:  # until active sessions pause
        return NONE
    if has_to_wait(core, r.target):
        left_ns = wait_from(core, r.flow, r.target, own_work_before(core, i), r.work)
    return NONE if left_ns < 0 else max(left_ns, quota_wait_ns(core, i))


cdef dict estimate_row(Core core, int64_t now_ns, int32_t i):
    """Return its forecast, the expectation now, and the average errors of such figures."""
    cdef Request* r = &core.requests.items[i]
    cdef Flow* f = &core.flows.items[r.flow]
    cdef int64_t left_ns = NONE, first_ns = NONE, error_ns = 0
    cdef int32_t p
    if r.state == QUEUED:
        left_ns = wait_left_ns(core, i)
        if left_ns >= 0:
            first_ns = core.now_ns - r.arrival_ns + left_ns + prefill_of(core, r)
            left_ns = max(<int64_t>0, left_ns - (now_ns - core.now_ns))
    elif r.lease.first_us == 0 and r.state != ENDED:
        first_ns = r.lease.waited_ns + <int64_t>r.lease.prefill_us * 1000
    for p in range(core.ledger.count):
        if core.flows.may_take(p, r.target) and core.ledger.pools[p].attached:
            error_ns = max(error_ns, core.ledger.pools[p].prefill_error_ns)
    return {
        "wait_told_ms": r.forecast_wait_us // 1000 if r.forecast_wait_us >= 0 else NONE,
        "ttft_told_ms": r.forecast_first_us // 1000 if r.forecast_wait_us >= 0 else NONE,
        "wait_left_ms": left_ns // NS_PER_MS if left_ns >= 0 else NONE,
        "wait_error_ms": f.wait_error_ns // NS_PER_MS,
        "ttft_expected_ms": first_ns // NS_PER_MS if first_ns >= 0 else NONE,
        "ttft_error_ms": (f.wait_error_ns + error_ns) // NS_PER_MS,
        "ttft_ms": r.lease.first_us // 1000,
    }


cdef list pool_waits(Core core, int32_t i):
    """Return why each pool that it may go to waits, and which request is next there. O(pools *
    classes), in the peak form with their leases."""
    cdef Request* r = &core.requests.items[i]
    cdef int32_t p
    return [
        pool_wait(core, i, p)
        for p in range(core.ledger.count)
        if core.flows.may_take(p, r.target) and core.ledger.pools[p].block_size
    ]


cdef dict pool_wait(Core core, int32_t i, int32_t pool):
    cdef Request* r = &core.requests.items[i]
    cdef Pool* p = &core.ledger.pools[pool]
    cdef bint aged
    cdef int32_t head = head_for(core, pool, &aged)
    cdef Plan plan = plan_for(core, pool, r)
    cdef GrowingLease run = core.ledger.figures(pool, r, plan.blocks, plan.output_tokens)
    cdef int64_t limit = (p.capacity_blocks - p.headroom_blocks) * p.block_size
    cdef Flow* f
    row = {
        "pool": core.pool_list[pool].decode(),
        "attached": p.attached > 0,
        "reason": waits_of_pool(p.reason),
        "is_next": head == i,
        "can_hold": bool(core.ledger.can_hold(pool, r)),
        "need_tokens": plan.tokens,
        "load_tokens": core.ledger.load(pool, &run) + core.ledger.lora_more(pool, r, False),
        "load_max_tokens": limit - (kept_tokens(p, core.now_ns) if plan.above else 0),
    }
    if head != NONE and head != i:
        f = &core.flows.items[core.requests.items[head].flow]
        row["next_tenant"] = core.flow_list[core.requests.items[head].flow].decode()
        row["next_class"] = core.classes.names[f.cls].decode()
        if f.cls == core.flows.items[r.flow].cls and core.flows.order == ORDER_COUNTER:
            row["next_lead_tokens"] = (
                counter_of_head(core, i, pool) - counter_of_head(core, head, pool)
            ) // MICRO
            row |= group_ahead(core, i, head, pool)
    return row


cdef dict limit_row(Core core, int64_t now_ns, int32_t i, int kind):
    """Return the limit or share that it waits for, and until when; None: it waits for neither."""
    cdef Request* r = &core.requests.items[i]
    cdef int32_t node = core.flows.items[r.flow].waits_at
    cdef Take t
    if kind == WAITS_SHARE and core.flows.items[r.flow].guarantee != NONE:
        return held_row(core, now_ns, core.flows.find_queue(r.flow, r.target + 1))
    if kind == WAITS_POOL + WAIT_QUOTA:
        node = core.ledger.pools[core.requests.items[i].head_state.wait_times.pool].quota
    elif kind != WAITS_QUOTA:
        return None
    t = take_for(core, i)
    if node == NONE:  # it has not asked yet
        node = core.flows.items[r.flow].quota
        while node != NONE and core.quotas.fits(node, &t):
            node = core.quotas.nodes[node].parent
    return None if node == NONE else quota_row(core, now_ns, node, &t)


cdef dict quota_row(Core core, int64_t now_ns, int32_t node, const Take* t):
    """Return the limit of a node that holds enough last. O(1)."""
    cdef Quota n = core.quotas.nodes[node]
    cdef int64_t missing, due_ns, latest_ns = now_ns
    cdef int k, last = NONE
    for k in range(RATES):
        if n.rate[k]:
            refill(&n, k, now_ns)
            missing = min(t.micro[k], most_of(n.escrow, n.rate[k])) - n.level[k]
            due_ns = filled_ns(&n, k, missing, now_ns) if missing > 0 else 0
            if missing > 0 and due_ns > latest_ns:
                latest_ns, last = due_ns, k
    row = {"quota": quota_name_of(core, node), "behind_others": last == NONE}
    for k in range(BUDGETS):
        due_ns = budget_due_ns(&n.budgets[k], t.input_tokens + t.output_tokens, now_ns)
        if due_ns > latest_ns:
            return row | {
                "kind": LIMIT_KINDS[RATES + 1 + k],
                "limit": n.budgets[k].limit,
                "remaining": budget_left(&n.budgets[k]),
                "needs": t.input_tokens + t.output_tokens,
                "due_ms": (due_ns - now_ns + NS_PER_MS - 1) // NS_PER_MS,
                "behind_others": False,
            }
    if core.quotas.lacks_slot(&n):
        row |= {"kind": LIMIT_KINDS[RATES], "limit": n.concurrency, "needs": 1, "due_ms": NONE}
        row["behind_others"] = False
    elif last != NONE:
        row |= {
            "kind": LIMIT_KINDS[last],
            "limit": n.rate[last],
            "remaining": max(<int64_t>0, n.level[last] // MICRO),
            "needs": t.micro[last] // MICRO,
            "due_ms": (latest_ns - now_ns + NS_PER_MS - 1) // NS_PER_MS,
        }
    return row


cdef dict held_row(Core core, int64_t now_ns, int32_t q):
    cdef int32_t share = core.flows.items[core.flows.queues[q].flow].guarantee
    cdef Guarantee n = core.quotas.guarantees.items[share]
    cdef Heap dues = core.quotas.guarantees.dues
    cdef int64_t due_ms = NONE
    bucket_fill(&n.unused, now_ns)
    if dues.has(q):
        due_ms = max(<int64_t>0, dues.nodes[dues.places[q] - 1].key - now_ns) // NS_PER_MS
    return {
        "quota": quota_name_of(core, share),
        "limit": n.nominal,
        "remaining": max(<int64_t>0, n.unused.level // MICRO),
        "due_ms": due_ms,
    }
