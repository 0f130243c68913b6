# How long a request will wait, and when one that is refused may come back.
#
# The wait is work ahead, in the order in which it will be served, over the pace at which it drains.
# Ahead of a request are all that wait in better classes; of its own class, what flows with smaller
# counters may take until they reach its own; and its own flow's queue, which drains at the flow's
# own pace: its part by weight of what the pools grant to flows that go on waiting, so that whoever
# comes later and goes first is counted, or as measured since it is backlogged where that is less.
# Under policies without counters it is whatever waits. After the grant: what is computed before it
# and its own input, cached part left out, at the pace of the prefills. Both keep a moving average
# of their absolute error.

cdef enum:
    SCAN_MAX = 32  # flows that are looked at; further ones are taken to be like these
    SAMPLED = 128  # beyond so many flows, of so many requests one is foretold

cdef int64_t FORETOLD_MAX_US = (<int64_t>1 << 31) - 1


cdef void count_queued(Flows flows, const Request* r, int32_t more) noexcept:
    """One more or one less is queued. A flow is backlogged from the second on until its queue is
    empty. O(1)."""
    cdef Flow* f = &flows.items[r.flow]
    f.queued += more
    f.queued_tokens += more * r.prompt_tokens
    flows.queued_tokens += more * r.prompt_tokens
    flows.queued_for[r.target + 1] += more
    if f.exempt:
        flows.exempt_queued += more
        flows.exempt_tokens += more * r.prompt_tokens
    f.queued_work += more * r.work
    flows.queued_work += more * r.work
    flows.backlog[f.cls] += more * r.work
    if f.queued == 0 or (f.queued == 1 and more > 0):
        flows.backlogged += more
        flows.backlogged_weight[f.cls] += more * f.weight_milli
        memset(&f.served, 0, sizeof(Rate))
    elif f.queued == 2:
        rate_run(&f.served, flows.now_ns, True)


cdef void forget_waits(Flow* f, int64_t now_ns) noexcept:
    rate_forget(&f.served, now_ns)
    f.told_ns = LONG_AGO_NS
    f.wait_error_ns = f.waits_judged = f.first_us = f.foretold_first_us = f.first_judged = 0
    memset(&f.doubts, 0, sizeof(Doubts))
    f.input_before, f.cached_before = f.input_tokens, f.cached_tokens


cdef int32_t work_of(Scheduler core, const Request* r) noexcept:
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


cdef Pace pace_of(Scheduler core, int32_t target) noexcept:
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


cdef bint has_to_wait(Scheduler core, int32_t target) noexcept:
    """Whether somebody waits at every pool that a request may go to. O(pools)."""
    cdef bint waits = False
    cdef int32_t p
    for p in range(core.ledger.count):
        if core.ledger.serves(p) and (target == NONE or target == p):
            if core.ledger.pools[p].reason == WAIT_NONE:
                return False
            waits = True
    return waits


cdef int64_t own_pace(Scheduler core, const Flow* f, const Pace* pace) noexcept:
    """At which the queue of a flow drains, where its pools drain at `pace`. O(1)."""
    cdef int64_t measured = pace_milli(&f.served, f.served.work)
    cdef int64_t weight = core.flows.backlogged_weight[f.cls]
    cdef int64_t part = pace.deep if pace.deep else pace.whole
    if f.queued == 0:
        weight += f.weight_milli
    part = max(<int64_t>1, <int64_t>(<wide>part * f.weight_milli // weight))
    return min(measured, part) if measured else part


cdef int64_t work_before(Scheduler core, int32_t flow, int32_t target) except -1:
    """Work of other flows that goes before the next of this one. O(SCAN_MAX + classes)."""
    cdef Flow* f = &core.flows.items[flow]
    cdef int64_t before = 0
    cdef int32_t c
    for c in range(core.classes.count):
        if core.classes.goes_before(c, f.cls):
            before += core.flows.backlog[c]
    if core.flows.order != ORDER_COUNTER:
        return before
    before += smaller_before(core, core.flows.candidates[0], flow)
    if target != NONE:
        before += smaller_before(core, core.flows.candidates[target + 1], flow)
    return before


cdef int64_t smaller_before(Scheduler core, Line line, int32_t flow) noexcept:
    """What flows of a line take until their counters reach this one's, best first down the heap."""
    cdef Flow* f = &core.flows.items[flow]
    cdef Heap heap = line.heap(f.cls)
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
        if least >= f.vtc:
            continue
        seen += 1
        queue = &core.flows.queues[heap.nodes[at].id]
        if queue.flow != flow:
            their = <int64_t>(
                <wide>(f.vtc - least) * core.flows.items[queue.flow].weight_milli
                // 1_000_000_000
            )
            before += min(their, work_in_queue(core.flows, queue, NONE))
        for child in range(4 * at + 1, min(4 * at + 5, heap.count)):
            open[count] = child
            count += 1
    if count and seen == SCAN_MAX:  # more of them
        before = before // SCAN_MAX * heap.count
    return before


cdef int64_t wait_from(
    Scheduler core, int32_t flow, int32_t target, int64_t own_ahead, int64_t work
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
        time_for(own_ahead, own_pace(core, f, &pace)) + time_for(work, pace.whole),
    )


cdef int64_t wait_of_new(
    Scheduler core, int32_t flow, int32_t target, int64_t work, int64_t deadline_ns
) except -2:
    """The same for one that comes now with a deadline, -1: with none."""
    cdef int32_t q = core.flows.find_queue(flow, target + 1)
    cdef int64_t ahead = 0
    if q != NONE:
        ahead = work_in_queue(core.flows, &core.flows.queues[q], deadline_ns)
    return wait_from(core, flow, target, ahead, work)


cdef int foretell(Scheduler core, int32_t i) except -1:
    """Note of a request that is about to be queued when it is expected to be granted, and when to
    have its first token. O(SCAN_MAX), of few where there are many flows."""
    cdef Request* r = &core.requests.items[i]
    cdef int64_t wait_ns
    r.foretold_wait_us = NONE
    if not has_to_wait(core, r.target):
        return 0
    if core.flows.backlogged > SCAN_MAX and core.seq % SAMPLED:
        return 0
    wait_ns = wait_of_new(core, r.flow, r.target, r.work, r.due_ns if r.has_deadline else NONE)
    if wait_ns >= 0:
        r.foretold_wait_us = <int32_t>min(wait_ns // 1000, FORETOLD_MAX_US)
        wait_ns += prefill_of(core, r)
        r.foretold_first_us = <int32_t>min(wait_ns // 1000, FORETOLD_MAX_US)
    return 0


cdef int note_waited(Scheduler core, const Request* r, bint in_turn) noexcept:
    """Learn from a request that leaves its queue how wrong it was foretold. One whose turn has not
    come says so only where it should have by then."""
    cdef Flow* f = &core.flows.items[r.flow]
    cdef int64_t error_ns = core.now_ns - r.arrival_ns - <int64_t>r.foretold_wait_us * 1000
    if r.foretold_wait_us < 0 or (not in_turn and error_ns < 0):
        return 0
    error_ns = max(error_ns, -error_ns)
    f.wait_error_ns = averaged(f.wait_error_ns, error_ns) if f.waits_judged else error_ns
    f.waits_judged += 1
    return 0


# From the grant to the first token.

cdef int32_t fresh_of(Scheduler core, const Request* r) noexcept:
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


cdef int64_t prefill_of(Scheduler core, const Request* r) noexcept:
    """The same for a request in the best pool that it may go to; 0: unknown. O(pools)."""
    cdef int64_t least = NONE, each
    cdef int32_t p, fresh = fresh_of(core, r)
    for p in range(core.ledger.count):
        if core.ledger.serves(p) and (r.target == NONE or r.target == p):
            each = prefill_ns(&core.ledger.pools[p], fresh)
            least = each if least < 0 else min(least, each)
    return max(<int64_t>0, least)


cdef int enter_prefill(Scheduler core, Request* r) noexcept:
    """A granted request's input is on its way. O(1)."""
    cdef Pool* p = &core.ledger.pools[r.pool]
    r.lease.fresh_tokens = fresh_of(core, r)
    r.lease.prefill_us = <int32_t>min(prefill_ns(p, r.lease.fresh_tokens) // 1000, FORETOLD_MAX_US)
    p.prefilling += r.lease.fresh_tokens
    r.lease.prefill_line = <int32_t>min(p.prefilling, <int64_t>WORK_MAX)
    return 0


cdef int leave_prefill(Scheduler core, Request* r) noexcept:
    """It is done, or ends without. O(1)."""
    core.ledger.pools[r.pool].prefilling -= r.lease.fresh_tokens
    r.lease.fresh_tokens = 0
    return 0


cdef int note_first(Scheduler core, Request* r) noexcept:
    """A report tells of a request's first output. O(1)."""
    cdef Pool* p = &core.ledger.pools[r.pool]
    cdef Flow* f = &core.flows.items[r.flow]
    cdef int64_t took_ns = core.now_ns - r.arrival_ns - r.lease.waited_ns, error_ns
    r.lease.first_us = <int32_t>min((core.now_ns - r.arrival_ns) // 1000 + 1, FORETOLD_MAX_US)
    if r.lease.fresh_tokens:
        leave_prefill(core, r)
        error_ns = took_ns - <int64_t>r.lease.prefill_us * 1000
        error_ns = max(error_ns, -error_ns)
        if p.prefill_tokens == 0:
            p.prefill_ns, p.prefill_tokens = took_ns, r.lease.prefill_line
            p.prefill_error_ns = error_ns
        else:
            p.prefill_ns = averaged(p.prefill_ns, took_ns)
            p.prefill_tokens = max(<int64_t>1, averaged(p.prefill_tokens, r.lease.prefill_line))
            p.prefill_error_ns = averaged(p.prefill_error_ns, error_ns)
        p.prefills_judged += 1
    if r.foretold_wait_us >= 0:
        if f.first_judged == 0:
            f.first_us, f.foretold_first_us = r.lease.first_us, r.foretold_first_us
        else:
            f.first_us = averaged(f.first_us, r.lease.first_us)
            f.foretold_first_us = averaged(f.foretold_first_us, r.foretold_first_us)
        f.first_judged += 1
    if r.doubt:
        settle_first(core, r)
    return 0


# When to come back.

cdef int64_t turn_ns(Scheduler core, int32_t flow, int32_t target, int64_t work) noexcept:
    """How long so much work of a flow takes, the flow's part of the pools counted. O(pools)."""
    cdef Flow* f = &core.flows.items[flow]
    cdef Pace pace = pace_of(core, target)
    if pace.whole == 0:
        return min(f.interval_ns if f.interval_ns else NS_PER_S, RETRY_MAX_NS)
    return time_for(work, own_pace(core, f, &pace))


cdef int64_t told_in_turn(
    Scheduler core, int64_t* told_ns, int64_t wait_ns, int64_t step_ns
) noexcept:
    # Those who were told before come back before: each is told a time of its own.
    cdef int64_t due_ns = max(core.now_ns + wait_ns, told_ns[0] + step_ns)
    told_ns[0] = min(due_ns, core.now_ns + RETRY_MAX_NS)
    return told_ns[0] - core.now_ns


cdef int64_t foretold_in_turn(
    Scheduler core, int64_t* told_ns, int64_t wait_ns, int64_t step_ns
) noexcept:
    # 3/8 more than is foretold, and half a place: who comes too early is refused again.
    return told_in_turn(core, told_ns, wait_ns * 11 // 8 + step_ns // 2, step_ns * 11 // 8)


cdef int64_t place_in_ns(Scheduler core, const Request* r, int outcome) noexcept:
    """When a request that a full queue refuses will find a place in it. O(pools)."""
    cdef Flow* f = &core.flows.items[r.flow]
    cdef bint own = outcome == OUT_REJECTED_FLOW_QUEUE_FULL
    cdef Pace pace = pace_of(core, r.target)
    cdef int64_t queued, backlog, tokens, over, each, step_ns
    if own:
        queued, backlog, tokens = f.queued, f.queued_work, f.queued_tokens
        over = tokens + r.prompt_tokens - core.flow_queue_tokens_max
        over = over if core.flow_queue_tokens_max else 0
    else:
        queued, backlog = core.requests.states[QUEUED], core.flows.queued_work
        tokens = core.flows.queued_tokens
        over = tokens + r.prompt_tokens - core.queue_tokens_max
        over = over if core.queue_tokens_max else 0
    each = backlog // max(<int64_t>1, queued) + 1
    # The part of the work that has to be gone before so many tokens are.
    over = <int64_t>(<wide>backlog * over // max(<int64_t>1, tokens)) if over > 0 else 0
    if own or pace.whole == 0:
        step_ns = turn_ns(core, r.flow, r.target, each)
        return foretold_in_turn(
            core, &f.told_ns, turn_ns(core, r.flow, r.target, max(each, over)), step_ns
        )
    return foretold_in_turn(
        core, &core.flows.told_ns, time_for(max(each, over), pace.whole), time_for(each, pace.whole)
    )


cdef int64_t refill_in_ns(Scheduler core, int32_t i) noexcept:
    """When a request that its quotas refuse will find enough in them, after those that were told
    before. O(levels)."""
    cdef Flow* f = &core.flows.items[core.requests.items[i].flow]
    cdef int32_t node = f.quota
    cdef int64_t step_ns = 0
    cdef Take t = take_for(core, i)
    cdef int k
    while node != NONE:
        for k in range(RATES):
            if core.quotas.nodes[node].rate[k]:
                step_ns = max(step_ns, t.micro[k] // core.quotas.nodes[node].rate[k])
        node = core.quotas.nodes[node].parent
    return told_in_turn(
        core, &f.told_ns, core.quotas.refused_until_ns - core.now_ns, step_ns * QUOTA_TICK_NS
    )


cdef int note_refused(Scheduler core, int32_t i, int outcome) except -1:
    """Find when a request that is refused may come back."""
    if outcome == OUT_REJECTED_FLOW_QUEUE_FULL or outcome == OUT_REJECTED_QUEUE_FULL:
        core.refused_wait_ns = place_in_ns(core, &core.requests.items[i], outcome)
    elif outcome == OUT_REJECTED_QUOTA:
        core.refused_wait_ns = refill_in_ns(core, i)
    elif outcome == OUT_REJECTED_DEADLINE:
        core.refused_wait_ns = in_time_in_ns(core, &core.requests.items[i])
    return 0


cdef int64_t turn_again_ns(Scheduler core, const Request* r) except -1:
    """When one that was evicted after its whole wait would come to its turn in time. O(SCAN_MAX +
    pools)."""
    cdef int64_t patience_ns = r.due_ns - r.arrival_ns
    cdef int64_t wait_ns = wait_of_new(
        core, r.flow, r.target, r.work, core.now_ns + patience_ns if r.has_deadline else NONE
    )
    cdef int64_t step_ns = turn_ns(core, r.flow, r.target, r.work)
    wait_ns = step_ns if wait_ns < 0 else wait_ns - patience_ns
    return foretold_in_turn(
        core, &core.flows.items[r.flow].told_ns, max(<int64_t>0, wait_ns), step_ns
    )
