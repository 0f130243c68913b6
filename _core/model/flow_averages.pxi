# The averages that flows learn from their requests, and how they fade.

cdef enum:
    CHARGES_AVERAGED = 32  # the moving average of charges forgets at this pace
    LARGEST_FADES = 256  # the largest charge falls by this part of each smaller one


cdef void note_grant(Flows flows, int32_t flow, int64_t now_ns) noexcept:
    # Time between grants, moving average with alpha = 1/5; what Retry-After is made of.
    cdef Flow* f = &flows.items[flow]
    cdef int64_t gap
    flows.changed.mark(flow)
    if f.granted_at_ns >= 0:
        gap = now_ns - f.granted_at_ns
        f.interval_ns += (gap - f.interval_ns) // 5 if f.interval_ns else gap
    f.granted_at_ns = now_ns


cdef void note_output(Flows flows, int32_t flow, int64_t output_tokens) noexcept:
    """Learn an output, of each sequence: n = (4 n + output) / 5 (section 4.4 of the paper)."""
    cdef Flow* f = &flows.items[flow]
    flows.changed.mark(flow)
    if f.average_milli:
        f.average_milli = (4 * f.average_milli + output_tokens * 1000) // 5
    else:
        f.average_milli = output_tokens * 1000


cdef void note_charge(Flows flows, const Request* r, const Settings* s) noexcept:
    """Average what requests are charged in total, each at most what it asked for, and keep the
    largest. O(levels)."""
    cdef const Flow* f = &flows.items[r.flow]
    cdef int64_t most = price_of(
        s, r, r.prompt_tokens, 0, <int64_t>r.output_max_tokens * r.sequences
    )
    most = min(r.lease.charged, weighted_by(most, r.lease.weight_milli))
    note_largest(flows, most * r.lease.weight_milli // 1000)  # at most PRICED_MAX
    average_charge(flows, f.depth, most)
    while f.parent != NONE:
        f = &flows.items[f.parent]
        average_charge(flows, f.depth, reweighed(most, r.lease.weight_milli, f.weight_milli))


cdef inline void note_largest(Flows flows, int64_t charge) noexcept:
    # It fades by service, not by requests: between two requests of a large tenant, others may have
    # any number of small ones. It is gone when 256 times as much was charged.
    flows.largest_charge = max(charge, flows.largest_charge - charge // LARGEST_FADES)


cdef inline void average_charge(Flows flows, int32_t depth, int64_t charge) noexcept:
    cdef int64_t* average = &flows.average_charge[depth]
    if average[0]:
        average[0] += charge // CHARGES_AVERAGED - average[0] // CHARGES_AVERAGED
    else:
        average[0] = charge


cdef int forget_flows(Flows flows) except -1:
    """Reset counters and rates. Only while nothing is active does order stay the same."""
    cdef int32_t i, pools = <int32_t>len(flows.anywhere)
    flows.next_retry_at_ns, flows.retry_slots.count = LONG_AGO_NS, 0
    flows.changed.mark_all(flows.count)
    end_resumed(flows, flows.count)
    for i in range(flows.count):
        flows.items[i].interval_ns = 0
        flows.items[i].granted_at_ns = NONE
        flows.items[i].average_milli = 0
        forget_waits(&flows.items[i], flows.now_ns)
        if flows.items[i].queued == 0 and flows.items[i].live == 0:
            flows.items[i].vtc = 0
            if flows.is_active(i):
                flows.rekey_active(i)
            leave_pools(flows, i)
    for i in range(CLASSES_MAX):
        if (<Heap>flows.actives[i]).count == 0:
            flows.level[i] = 0
            flows.positions.forget(i, pools)
    memset(flows.positions.pace, 0, pools * sizeof(int64_t))
    memset(flows.average_charge, 0, sizeof(flows.average_charge))
    flows.largest_charge = 0
    for i in range(<int32_t>len(flows.families)):
        if (<Family>flows.families[i]).active.count == 0:
            (<Family>flows.families[i]).level = 0
            memset((<Family>flows.families[i]).levels, 0, POOLS_ORDERED * sizeof(int64_t))
    while flows.linger_first != NONE:
        flows._leave(flows.linger_first)
    return 0


cdef void leave_pools(Flows flows, int32_t flow) noexcept:
    """Let a flow that has nothing queued have no positions. O(pools)."""
    cdef int32_t q = flows.items[flow].first_queue
    flows.positions.release(flows.items[flow].first_position)
    flows.items[flow].first_position = NONE
    if flows.items[flow].family != NONE:
        flows.family_of(flow).forget_positions()
    while q != NONE:
        flows.queues[q].position = NONE
        q = flows.queues[q].next_queue


cdef void forget_waits(Flow* f, int64_t now_ns) noexcept:
    rate_forget(&f.served, now_ns)
    f.next_retry_at_ns = LONG_AGO_NS
    if f.refusals != &NO_REFUSALS:
        f.refusals.retry_slots.count = 0
    f.wait_error_ns = f.waits_judged = f.first_us = f.forecast_first_us = f.first_judged = 0
    f.too_long_ns = f.too_long_at_ns = 0
    f.gave_up_ns = NONE
    memset(&f.shed_accuracy, 0, sizeof(ShedAccuracy))
    f.input_before, f.cached_before = f.input_tokens, f.cached_tokens


cdef int show_times(Flows flows, int32_t flow, bint shown) except -1:
    """Count a tenant's times in histograms of its own, or in the shared ones. O(classes)."""
    while flow != NONE:
        flows.count_times(&flows.items[flow], shown)
        flow = flows.items[flow].sibling
    return 0


cdef void clear_times(Flows flows, int32_t cls) noexcept:
    """Begin the histograms of a class at 0: its place has gone to another one. O(flows)."""
    cdef int32_t flow
    memset(&flows.other_times[cls], 0, sizeof(FlowTimes))
    for flow in range(flows.count):
        if flows.items[flow].cls == cls and flows.items[flow].own_times != NULL:
            memset(flows.items[flow].own_times, 0, sizeof(FlowTimes))
