# How long a request will wait.
#
# The wait is work ahead, in the order in which it will be served, over the pace at which it drains.
# Ahead of a request are all that wait in better classes; of its own class, what flows with smaller
# counters may take until they reach its own; and its own flow's queue, which drains at the flow's
# own pace: its part by weight of what the pools grant to flows that go on waiting, so that whoever
# comes later and goes first is counted, or as measured since it is backlogged where that is less.
# Under policies without counters it is whatever waits. After the grant: what is computed before it
# and its own input, cached part left out, at the pace of the prefills. Both keep a moving average
# of their absolute error.

cdef inline uint64_t adapter_of(Core core, const Request* r) noexcept:
    return core.adapters.items[r.adapter].lo if r.adapter != NONE else 0


cdef inline void asked_of(Core core, const Request* r, Asked* asked) noexcept:
    """Whose output the predictor is asked for, and how many leases run. O(1)."""
    asked.flow = r.flow
    asked.adapter = adapter_of(core, r)
    asked.live = core.flows.items[r.flow].live
    asked.live_of_all = core.requests.states[LIVE] + core.requests.states[SUSPECT]


cdef enum:
    SCAN_MAX = 32  # flows that are looked at; further ones are taken to be like these
    SAMPLED = 128  # beyond so many flows, of so many requests one is foretold

cdef int64_t FORETOLD_MAX_US = (<int64_t>1 << 31) - 1


cdef int32_t work_of(Core core, const Request* r) noexcept:
    """What a request will be charged, in tokens, at least 1. O(1)."""
    cdef int64_t each = core.flows.items[r.flow].average_milli // 1000
    if each == 0 or each > r.output_max_tokens:
        each = r.output_max_tokens
    each = r.prompt_tokens * core.input_price + each * r.sequences * core.output_price
    return <int32_t>min(max(<int64_t>1, each // 1_000_000), <int64_t>WORK_MAX)


# At which the pools drain that a request may go to, in thousandths of tokens a second.
ctypedef struct Pace:
    int64_t whole  # 0: unknown
    int64_t deep  # for flows that go on waiting: less by what light flows take, which go first


cdef Pace pace_of(Core core, int32_t target) noexcept:
    """O(pools)."""
    cdef Pace pace
    cdef const Rate* drain
    cdef int32_t p
    pace.whole = pace.deep = 0
    for p in range(core.ledger.count):
        if core.ledger.serves(p) and (target == NONE or target == p):
            drain = &core.ledger.pools[p].drain
            pace.whole += pace_milli(drain, drain.work)
            pace.deep += pace_milli(drain, drain.deep_work)
    return pace


cdef bint has_to_wait(Core core, int32_t target) noexcept:
    """Whether somebody waits at every pool that a request may go to. O(pools)."""
    cdef bint waits = False
    cdef int32_t p
    for p in range(core.ledger.count):
        if core.ledger.serves(p) and (target == NONE or target == p):
            if core.ledger.pools[p].reason == WAIT_NONE:
                return False
            waits = True
    return waits


cdef inline int64_t part_of_line(Flows flows, int32_t node, int64_t whole) noexcept:
    """What a node gets of a pace, beside its siblings that have something queued."""
    cdef const Flow* f = &flows.items[node]
    cdef int64_t weight = flows.queued_weight_of(node)[0] + (0 if f.queued else f.weight_milli)
    return <int64_t>(<wide>whole * f.weight_milli // weight)


cdef int64_t own_pace(Core core, int32_t flow, const Pace* pace) noexcept:
    """At which the queue of a flow drains, where its pools drain at `pace`. What flows get that do
    not go on waiting is no part of `pace.deep`, so they do not share in it either; where none goes
    on waiting, all that wait share the whole. O(levels)."""
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
    """Work of other flows that goes before the next of this one. O(SCAN_MAX + classes)."""
    cdef Flow* f = &core.flows.items[flow]
    cdef int64_t before = 0
    cdef int32_t c
    for c in range(core.classes.count):
        if core.classes.goes_before(c, f.cls):
            before += core.flows.backlog[c]
    if core.flows.order != ORDER_COUNTER:
        return before
    return before + siblings_before(core, flow, target)


cdef int64_t siblings_before(Core core, int32_t flow, int32_t target) noexcept:
    """Work of its class that goes before the next of a flow: what its siblings take until their
    counters reach its own, and while they do, what the siblings of its node get beside them, and so
    on up. O(levels * SCAN_MAX)."""
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
    """What flows of a node's line, -1: of the root's, take until their counters reach this one,
    best first down the heap."""
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
                before += min(their, core.flows.items[queue.flow].queued_work)
            else:
                before += min(their, work_in_queue(core.flows, queue, NONE))
        for child in range(4 * at + 1, min(4 * at + 5, heap.count)):
            open[count] = child
            count += 1
    if count and seen == SCAN_MAX:  # more of them
        before = before // SCAN_MAX * heap.count
    return before


cdef int64_t wait_from(
    Core core, int32_t flow, int32_t target, int64_t own_ahead, int64_t work
) except -2:
    """How long whoever has so much of its own queue before it will wait; -1: unknown. Where
    order is not by counters, everything in its class or a better one goes before.
    O(SCAN_MAX + pools + classes)."""
    cdef Pace pace = pace_of(core, target)
    cdef Flow* f = &core.flows.items[flow]
    if pace.whole == 0:
        return NONE
    work += work_before(core, flow, target)
    if core.flows.order != ORDER_COUNTER:
        return time_for(max(own_ahead, core.flows.backlog[f.cls]) + work, pace.whole)
    return min(
        WAIT_MAX_NS,
        time_for(own_ahead, own_pace(core, flow, &pace)) + time_for(work, pace.whole),
    )


cdef int64_t wait_of_new(
    Core core, int32_t flow, int32_t target, int64_t work, int64_t deadline_ns
) except -2:
    """The same for one that comes now with a deadline, -1: with none."""
    cdef int32_t q = core.flows.find_queue(flow, target + 1)
    cdef int64_t ahead = 0
    if q != NONE:
        ahead = work_in_queue(core.flows, &core.flows.queues[q], deadline_ns)
    return wait_from(core, flow, target, ahead, work)


cdef int forecast(Core core, int32_t i) except -1:
    """Note of a request that is about to be queued when it is expected to be granted, and when to
    have its first token. O(SCAN_MAX), of few where there are many flows."""
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
    """Learn from a request that leaves its queue how wrong it was foretold. One whose turn has not
    come says so only where it should have by then."""
    cdef Flow* f = &core.flows.items[r.flow]
    cdef int64_t error_ns = core.now_ns - r.arrival_ns - <int64_t>r.forecast_wait_us * 1000
    if r.forecast_wait_us < 0 or (not in_turn and error_ns < 0):
        return 0
    error_ns = max(error_ns, -error_ns)
    f.wait_error_ns = averaged(f.wait_error_ns, error_ns) if f.waits_judged else error_ns
    f.waits_judged += 1
    return 0


# From the grant to the first token.

cdef int32_t fresh_of(Core core, const Request* r) noexcept:
    """Input that has to be computed: less by what of the flow's input was cached so far."""
    cdef Flow* f = &core.flows.items[r.flow]
    cdef int64_t known = f.input_tokens - f.input_before, cached = f.cached_tokens - f.cached_before
    cached = max(<int64_t>0, min(cached, known))
    if cached > 0:
        cached = <int64_t>(<wide>r.prompt_tokens * cached // known)
    return <int32_t>max(<int64_t>1, r.prompt_tokens - cached)


cdef inline int64_t prefill_ns(const Pool* p, int64_t tokens) noexcept:
    """How long so much input takes, with all that is before it."""
    if p.prefill_tokens == 0:
        return 0
    return <int64_t>(<wide>(p.prefilling + tokens) * p.prefill_ns // p.prefill_tokens)


cdef int64_t prefill_of(Core core, const Request* r) noexcept:
    """The same for a request in the best pool that it may go to; 0: unknown. O(pools)."""
    cdef int64_t least = NONE, each
    cdef int32_t p, fresh = fresh_of(core, r)
    for p in range(core.ledger.count):
        if core.ledger.serves(p) and (r.target == NONE or r.target == p):
            each = prefill_ns(&core.ledger.pools[p], fresh)
            least = each if least < 0 else min(least, each)
    return max(<int64_t>0, least)


cdef int enter_prefill(Core core, Request* r) noexcept:
    """A granted request's input is on its way. O(1)."""
    cdef Pool* p = &core.ledger.pools[r.pool]
    r.lease.fresh_tokens = fresh_of(core, r)
    r.lease.prefill_us = <int32_t>min(prefill_ns(p, r.lease.fresh_tokens) // 1000, FORETOLD_MAX_US)
    p.prefilling += r.lease.fresh_tokens
    r.lease.prefill_line = <int32_t>min(p.prefilling, <int64_t>WORK_MAX)
    return 0


cdef int leave_prefill(Core core, Request* r) noexcept:
    """It is done, or ends without. O(1)."""
    core.ledger.pools[r.pool].prefilling -= r.lease.fresh_tokens
    r.lease.fresh_tokens = 0
    return 0
