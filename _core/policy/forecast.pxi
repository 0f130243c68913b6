# How long a request will wait.
#
# The wait is the work ahead, in the order in which it will be served, over the pace at which it
# drains. Three kinds of work are ahead of a request:
# - all that waits in better classes;
# - in its own class, the work that flows with smaller counters may take until they reach its own;
# - its own flow's queue, which drains at the flow's own pace. That is its part by weight of what
#   the pools grant to flows that go on waiting, so it counts requests that arrive later and are
#   granted first. If the pace measured since the flow is backlogged is less, that one counts.
# Under policies without counters, all that waits in its class is ahead.
# From the grant to the first token: the input that is computed before it, and its own without the
# cached part, at the pace of the prefills. Both keep a moving average of their absolute error.

cdef inline uint64_t adapter_of(Core core, const Request* r) noexcept:
    cdef int32_t adapter = core.requests.rare_of(r).adapter
    return core.adapters.items[adapter].lo if adapter != NONE else 0


cdef inline void asked_of(Core core, const Request* r, Asked* asked) noexcept:
    """Find whose output the predictor is asked for, and how many leases run. O(1)."""
    asked.flow = r.flow
    asked.adapter = adapter_of(core, r)
    asked.live = core.flows.items[r.flow].live
    asked.live_of_all = core.requests.states[LIVE] + core.requests.states[SUSPECT]


cdef enum:
    SCAN_MAX = 32  # flows that are read; further ones count as their average
    ERROR_FADES = 8
    WAITS_AVERAGED = 8
    SAMPLED = 128  # with more than SCAN_MAX flows queued, one in this many requests has one

cdef int64_t FORETOLD_MAX_US = (<int64_t>1 << 31) - 1


cdef int32_t work_of(Core core, const Request* r) noexcept:
    """Return the charge of a request, in tokens, at least 1. O(1)."""
    cdef int64_t each = core.flows.items[r.flow].average_milli // 1000
    if each == 0 or each > r.output_max_tokens:
        each = r.output_max_tokens
    each = price_of(&core.settings, r, r.prompt_tokens, 0, each * r.sequences)
    return <int32_t>min(max(<int64_t>1, each // 1_000_000), <int64_t>WORK_MAX)


# The pace at which the pools of a request drain, in thousandths of tokens a second.
ctypedef struct Pace:
    int64_t whole  # 0: unknown
    int64_t deep  # for flows that go on waiting: less the part of light flows


cdef Pace pace_of(Core core, int32_t target) noexcept:
    """Return the pace of the pools that a request may go to. O(pools)."""
    cdef Pace pace
    cdef const Rate* drain
    cdef int32_t p
    pace.whole = pace.deep = 0
    for p in range(core.ledger.count):
        if core.ledger.serves(p) and core.flows.may_take(p, target):
            drain = &core.ledger.pools[p].drain
            pace.whole += pace_milli(drain, drain.work)
            pace.deep += pace_milli(drain, drain.deep_work)
    return pace


cdef bint has_to_wait(Core core, int32_t target) noexcept:
    """Return whether requests wait at every pool that a request may go to. O(pools)."""
    cdef bint waits = False
    cdef int32_t p
    for p in range(core.ledger.count):
        if core.ledger.serves(p) and core.flows.may_take(p, target):
            if core.ledger.pools[p].reason in (WAIT_NONE, WAIT_SESSION_CAP):
                return False
            waits = True
    return waits


cdef inline int64_t part_of_line(Flows flows, int32_t node, int64_t whole) noexcept:
    """Return a node's part of a pace, beside its siblings that have requests queued."""
    cdef const Flow* f = &flows.items[node]
    cdef int64_t weight = flows.queued_weight_of(node)[0] + (0 if f.queued else f.weight_milli)
    return <int64_t>(<wide>whole * f.weight_milli // weight)


cdef int64_t own_pace(Core core, int32_t flow, const Pace* pace) noexcept:
    """Return the pace at which the queue of a flow drains, if its pools drain at `pace`. Flows that
    go on waiting share `pace.deep`, which has no part of the others; if none goes on waiting, all
    that wait share the whole. O(levels)."""
    cdef const Flow* f = &core.flows.items[flow]
    cdef int64_t measured = pace_milli(&f.served, f.served.work)
    cdef int64_t weight = core.flows.deep_weight_of(flow)[0]
    cdef int64_t part
    cdef int32_t node = f.parent
    if weight and pace.deep:
        part = pace.deep
        weight += 0 if f.queued > 1 else f.weight_milli
    else:
        part = pace.whole
        weight = core.flows.queued_weight_of(flow)[0] + (0 if f.queued else f.weight_milli)
    part = max(<int64_t>1, <int64_t>(<wide>part * f.weight_milli // weight))
    while node != NONE:
        part = max(<int64_t>1, part_of_line(core.flows, node, part))
        node = core.flows.items[node].parent
    return min(measured, part) if measured else part


cdef int64_t work_before(Core core, int32_t flow, int32_t target) except -1:
    """Return the work of other flows that precedes the next request of this one. O(SCAN_MAX +
    classes), for a set of pools O(pools of the set * SCAN_MAX)."""
    cdef int64_t before = classes_before(core, core.flows.items[flow].cls), of_class
    if core.flows.order != ORDER_COUNTER:
        return before
    if is_set(target):
        best_of_set(core, flow, target, &of_class)
        return before + of_class
    return before + siblings_before(core, flow, target)


cdef inline int64_t classes_before(Core core, int32_t cls) noexcept:
    """Return what is queued in better classes. O(classes)."""
    cdef int64_t before = 0
    cdef int32_t c
    for c in range(core.classes.count):
        if core.classes.goes_before(c, cls):
            before += core.flows.backlog[c]
    return before


cdef int64_t best_of_set(
    Core core, int32_t flow, int32_t target, int64_t* before
) noexcept:
    """Return how long the work of its class keeps the next request of a flow from the best pool of
    a set, and that work. O(pools of the set * levels * SCAN_MAX)."""
    cdef const PoolSet* s = core.flows.sets.of(target)
    cdef int64_t best = NONE, each, ahead, pace
    cdef int32_t k, p
    before[0] = 0
    for k in range(s.count):
        p = s.pools[k]
        pace = pace_milli(&core.ledger.pools[p].drain, core.ledger.pools[p].drain.work)
        if pace == 0 or not core.ledger.serves(p):
            continue
        ahead = siblings_before(core, flow, p)
        each = time_for(ahead, pace)
        if best < 0 or each < best:
            best, before[0] = each, ahead
    return max(<int64_t>0, best)


cdef int64_t part_in_pool(Core core, int32_t target, int32_t pool, int64_t work) noexcept:
    """Return how much of the work of a set a pool will take, by its part of their paces.
    O(pools)."""
    cdef Pace pace = pace_of(core, target)
    cdef const Rate* drain = &core.ledger.pools[pool].drain
    if pace.whole == 0:
        return work // core.flows.sets.of(target).count
    return <int64_t>(<wide>work * pace_milli(drain, drain.work) // pace.whole)


cdef int64_t siblings_before(Core core, int32_t flow, int32_t target) noexcept:
    """Return the work of its class that precedes the next request of a flow. Its siblings take work
    until their counters reach its own. Meanwhile the siblings of its node get theirs, and so on up.
    O(levels * SCAN_MAX)."""
    cdef Flow* f = &core.flows.items[flow]
    cdef int64_t before = 0, weight, counter
    cdef Heap free
    while f.parent != NONE:
        counter, free = f.vtc, core.flows.family_of(f.parent).line_of(0)
        if target != NONE:
            counter = core.flows.counter_at(flow, target)
            free = free_heap(core.flows, f.parent, f.cls, target)
            before += smaller_before(
                core, own_heap(core.flows, f.parent, f.cls, target), f.parent, flow, target + 1,
                counter,
            )
        before += smaller_before(core, free, f.parent, flow, 0, counter)
        flow = f.parent
        f = &core.flows.items[flow]
        weight = core.flows.queued_weight_of(flow)[0] + (0 if f.queued else f.weight_milli)
        before = <int64_t>min(<wide>before * weight // f.weight_milli, <wide>VTC_MAX)
    return before + root_before(core, flow, target)


cdef int64_t root_before(Core core, int32_t flow, int32_t target) noexcept:
    cdef Flow* f = &core.flows.items[flow]
    cdef int64_t before, counter
    if target == NONE:
        return smaller_before(
            core, (<Line>core.flows.candidates[0]).heap(f.cls), NONE, flow, 0, f.vtc
        )
    counter = core.flows.counter_at(flow, target)
    before = smaller_before(
        core, free_line(core.flows, target).heap(f.cls), NONE, flow, 0,
        counter - shift_of(core.flows, f.cls, target) * core.flows.grain,
    )
    return before + smaller_before(
        core, (<Line>core.flows.candidates[target + 1]).heap(f.cls), NONE, flow, target + 1,
        counter,
    )


cdef int64_t smaller_before(
    Core core, Heap heap, int32_t node, int32_t flow, int32_t target, int64_t counter
) noexcept:
    """Return the work that the flows of a node's line (-1: of the root's) take until their counters
    reach this one; of a set of pools, the part of this pool. Reads the heap from the best one down.
    O(SCAN_MAX), for each queue of a set O(pools) more."""
    cdef int32_t open[4 * SCAN_MAX + 4]
    cdef int32_t count = 0, seen = 0, at, child
    cdef int64_t before = 0, their, least
    cdef Queue* queue
    if heap.count:
        open[0] = 0
        count = 1
    while count and seen < SCAN_MAX:
        count -= 1
        at = open[count]
        least = heap.nodes[at].key * core.flows.grain
        if least >= counter:
            continue
        seen += 1
        queue = &core.flows.queues[queue_at(core.flows, node, target, heap.nodes[at].id)]
        if queue.flow != flow:
            their = <int64_t>(
                <wide>(counter - least) * core.flows.items[queue.flow].weight_milli
                // 1_000_000_000
            )
            if is_node(core.flows, queue.flow):
                their = min(their, core.flows.items[queue.flow].queued_work)
            else:
                their = min(their, work_in_queue(core.flows, queue, NONE))
            if queue.target > POOLS_MAX:
                their = part_in_pool(core, queue.target - 1, target - 1, their)
            before += their
        for child in range(4 * at + 1, min(4 * at + 5, heap.count)):
            open[count] = child
            count += 1
    if count and seen == SCAN_MAX:  # more of them
        before = before // SCAN_MAX * heap.count
    return before


cdef int64_t named_before_ns(Core core, int32_t flow, int64_t free_before) except -1:
    """Return how much longer than the work that may go anywhere, `free_before`, what names a pool
    keeps a request that names none from the best of its pools. O(1) if a pool has no such work,
    else O(pools * SCAN_MAX)."""
    cdef int64_t least = NONE, named, pace
    cdef int32_t p
    for p in range(core.ledger.count):
        if not (core.ledger.serves(p) and core.flows.may_take(p, NONE)):
            continue
        if (<Line>core.flows.candidates[p + 1]).count == 0:
            return 0
        pace = pace_milli(&core.ledger.pools[p].drain, core.ledger.pools[p].drain.work)
        if pace:
            named = time_for(max(<int64_t>0, work_before(core, flow, p) - free_before), pace)
            least = named if least < 0 else min(least, named)
    return max(<int64_t>0, least)


cdef int64_t wait_from(
    Core core, int32_t flow, int32_t target, int64_t own_ahead, int64_t work
) except -2:
    """Return the wait of a request with `own_ahead` of its own queue ahead of it; -1: unknown. If
    the order is not by counters, everything in its class or a better one is ahead. O(SCAN_MAX +
    pools + classes), for a set of pools O(pools of the set * SCAN_MAX) more."""
    cdef Pace pace = pace_of(core, target)
    cdef Flow* f = &core.flows.items[flow]
    cdef int64_t before, wait_ns
    if pace.whole == 0:
        return NONE
    if is_set(target) and core.flows.order == ORDER_COUNTER:
        wait_ns = time_for(own_ahead, own_pace(core, flow, &pace))
        wait_ns += time_for(work + classes_before(core, f.cls), pace.whole)
        return min(WAIT_MAX_NS, wait_ns + best_of_set(core, flow, target, &before))
    before = work_before(core, flow, target)
    if core.flows.order != ORDER_COUNTER:
        work += max(own_ahead, core.flows.backlog[f.cls])
        return time_for(work + before, pace.whole)
    wait_ns = time_for(own_ahead, own_pace(core, flow, &pace))
    wait_ns += time_for(work + before, pace.whole)
    if target == NONE:
        wait_ns += named_before_ns(core, flow, before)
    return min(WAIT_MAX_NS, wait_ns)


cdef int64_t wait_of_new(
    Core core, int32_t flow, int32_t target, int64_t work, int64_t deadline_ns
) except -2:
    """Return the same for a request that arrives now with a deadline, -1: with none."""
    cdef int32_t q = core.flows.find_queue(flow, target + 1)
    cdef int64_t ahead = 0
    place_nodes(core.flows)
    if q != NONE:
        ahead = work_in_queue(core.flows, &core.flows.queues[q], deadline_ns)
    return wait_from(core, flow, target, ahead, work)


cdef int64_t wait_of_next(Core core, int32_t flow, int64_t work) except -2:
    """Return the wait of one more request of a flow for the target that its queued requests name.
    If these name several, or it has none queued: for the best of those. -1: unknown.
    O((pools + its sets) * (SCAN_MAX + pools + classes))."""
    cdef int64_t best = NONE, each
    cdef bint queued = core.flows.items[flow].queued > 0
    cdef int32_t target, q = core.flows.items[flow].first_queue
    while q != NONE:
        target = core.flows.queues[q].target - 1
        if is_set(target) and core.flows.queues[q].chain.count:
            each = wait_of_new(core, flow, target, work, NONE) if has_to_wait(core, target) else 0
            if each >= 0:
                best = each if best < 0 else min(best, each)
        q = core.flows.queues[q].next_queue
    for target in range(NONE, core.ledger.count):
        if target != NONE and not core.ledger.serves(target):
            continue
        q = core.flows.find_queue(flow, target + 1)
        if queued and (q == NONE or core.flows.queues[q].chain.count == 0):
            continue
        if target == NONE and not queued:
            continue  # a pool that it may go to is no worse
        each = 0
        if has_to_wait(core, target):
            each = wait_of_new(core, flow, target, work, NONE)
        if each >= 0:
            best = each if best < 0 else min(best, each)
    return best


cdef int forecast(Core core, int32_t i) except -1:
    """Note the forecast of a request's grant and first token before it is queued. With many flows
    only a sample of the requests gets one. O(SCAN_MAX)."""
    cdef Request* r = &core.requests.items[i]
    cdef int64_t wait_ns
    r.forecast_wait_us = NONE
    if not has_to_wait(core, r.target):
        return 0
    if core.flows.backlogged > SCAN_MAX and core.seq % SAMPLED:
        return 0
    wait_ns = wait_of_new(core, r.flow, r.target, r.work, r.due_ns if r.has_deadline else NONE)
    if wait_ns >= 0:
        r.forecast_wait_us = <int32_t>min(wait_ns // 1000, FORETOLD_MAX_US)
        wait_ns += prefill_of(core, r)
        r.forecast_first_us = <int32_t>min(wait_ns // 1000, FORETOLD_MAX_US)
    return 0


cdef int note_waited(Core core, const Request* r, bint in_turn) noexcept:
    """Learn the error of the forecast from a request that leaves its queue. One that leaves before
    its turn counts only if its turn should have come by then. If its turn was not expected by then,
    the forecast was right, and the error that let it in was too large."""
    cdef Flow* f = &core.flows.items[r.flow]
    cdef int64_t error_ns = core.now_ns - r.arrival_ns - <int64_t>r.forecast_wait_us * 1000
    cdef bint in_time = <int64_t>r.forecast_wait_us * 1000 <= r.due_ns - r.arrival_ns
    if r.forecast_wait_us < 0:
        return 0
    note_too_long(f, r, 0 if error_ns < 0 and not in_turn else -error_ns, core.now_ns)
    if not in_time:
        if not in_turn:
            f.wait_error_ns -= f.wait_error_ns // ERROR_FADES
            f.waits_judged += 1
        return 0
    if not in_turn and error_ns < 0:
        return 0
    error_ns = max(error_ns, -error_ns)
    f.wait_error_ns = averaged(f.wait_error_ns, error_ns) if f.waits_judged else error_ns
    f.waits_judged += 1
    return 0


cdef inline void note_too_long(
    Flow* f, const Request* r, int64_t too_long_ns, int64_t now_ns
) noexcept nogil:
    """Learn by how much a forecast exceeded the wait. Requests that leave within one wait met the
    same queue, so each counts by the time since the one before it, over WAITS_AVERAGED waits.
    O(1)."""
    cdef int64_t span_ns = max(<int64_t>r.forecast_wait_us * 1000, NS_PER_S) * WAITS_AVERAGED
    cdef int64_t since_ns = min(now_ns - f.too_long_at_ns, span_ns // 5)
    f.too_long_ns += <int64_t>(<wide>(too_long_ns - f.too_long_ns) * since_ns // span_ns)
    f.too_long_at_ns = now_ns


# From the grant to the first token.

cdef int32_t fresh_of(Core core, const Request* r) noexcept:
    """Return the input that has to be computed, without the part of the flow's input that was
    cached."""
    cdef Flow* f = &core.flows.items[r.flow]
    cdef int64_t known = f.input_tokens - f.input_before, cached = f.cached_tokens - f.cached_before
    cached = max(<int64_t>0, min(cached, known))
    if cached > 0:
        cached = <int64_t>(<wide>r.prompt_tokens * cached // known)
    return <int32_t>max(<int64_t>1, r.prompt_tokens - cached)


cdef inline int64_t prefill_ns(const Pool* p, int64_t tokens) noexcept:
    """Return how long `tokens` of input take, with all that is ahead of them."""
    if p.prefill_tokens == 0:
        return 0
    return <int64_t>(<wide>(p.prefilling + tokens) * p.prefill_ns // p.prefill_tokens)


cdef int64_t prefill_of(Core core, const Request* r) noexcept:
    """Return the same for a request in the best pool that it may go to; 0: unknown. O(pools)."""
    cdef int64_t least = NONE, each
    cdef int32_t p, fresh = fresh_of(core, r)
    for p in range(core.ledger.count):
        if core.ledger.serves(p) and core.flows.may_take(p, r.target):
            each = prefill_ns(&core.ledger.pools[p], fresh)
            least = each if least < 0 else min(least, each)
    return max(<int64_t>0, least)


cdef inline void note_prefill_rate(Pool* p, const Request* r, int64_t took_ns) noexcept:
    """Keep how fast the input of a request was computed, without what the engine says it had. O(1).
    """
    cdef int64_t k = p.prefills_judged % RATES_KEPT
    p.prefill_sizes[k] = max(1, r.prompt_tokens - r.lease.cached_tokens)
    p.prefill_rates[k] = <int64_t>min(
        <wide>1 << 60, <wide>p.prefill_sizes[k] * MILLI_NS_PER_S // max(<int64_t>1, took_ns) + 1
    )


cdef inline int64_t first_after_ns(const Request* r) noexcept nogil:
    """Return the time from the grant of a lease to its first token: as reported, else as forecast
    at the grant."""
    if r.lease.first_us:
        return max(<int64_t>0, <int64_t>r.lease.first_us * 1000 - r.lease.waited_ns)
    return <int64_t>r.lease.prefill_us * 1000


cdef void note_decode(Pool* p, const Request* r, int64_t output_tokens, int64_t now_ns) noexcept:
    """Learn how long one sequence takes for a token after the first, from a lease that has ended
    after so much output of each. O(1)."""
    cdef int64_t ran_ns = min(now_ns - granted_at_ns(r), WAIT_MAX_NS)
    cdef int64_t decode_ns = max(<int64_t>1, ran_ns - first_after_ns(r))
    cdef int64_t milli = (output_tokens - 1) * 1000
    if not r.reports_progress or milli <= 0:
        return
    p.decode_ns = averaged(p.decode_ns, decode_ns) if p.decode_milli else decode_ns
    p.decode_milli = averaged(p.decode_milli, milli) if p.decode_milli else milli


cdef int enter_prefill(Core core, Request* r) noexcept:
    """Count a granted request's input as being computed. O(1)."""
    cdef Pool* p = &core.ledger.pools[r.pool]
    r.lease.fresh_tokens = fresh_of(core, r)
    r.lease.prefill_us = <int32_t>min(prefill_ns(p, r.lease.fresh_tokens) // 1000, FORETOLD_MAX_US)
    p.prefilling += r.lease.fresh_tokens
    r.lease.prefill_line = <int32_t>min(p.prefilling, <int64_t>WORK_MAX)
    return 0


cdef int leave_prefill(Core core, Request* r) noexcept:
    """Count it no longer: it is computed, or the request has ended. O(1)."""
    core.ledger.pools[r.pool].prefilling -= r.lease.fresh_tokens
    r.lease.fresh_tokens = 0
    return 0
