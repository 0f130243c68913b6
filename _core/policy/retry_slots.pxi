# Retry-After of a refused request, and the places that a queue keeps for retries.
#
# Each refusal gets a time of its own, later than that of the refusal before it. The forecast for a
# full queue is wrong if new requests arrive meanwhile. So a fifth of the queue's places is for
# retries that are due, and other requests find the queue full that much earlier. A retry does not
# say that it is one: while a retry is due, the next request that arrives counts as it. With these
# places, Retry-After is the forecast and a twelfth. A queue of less than five places, or one that
# is full by tokens, keeps no places; there it is the forecast and three eighths.

cdef enum:
    RETRY_SLOTS_PART = 5

# Clients may add up to a tenth of RETRY_MAX_NS to a Retry-After; the rest is for the way.
cdef int64_t RETRY_SLOT_LATE_NS = 16_000_000_000


cdef inline int64_t slots_kept(int64_t most) noexcept nogil:
    """Return the number of places that a queue keeps for retries."""
    return most // RETRY_SLOTS_PART


cdef void drop_late_slots(RetrySlots* r, int64_t now_ns) noexcept nogil:
    """Give up the retries that are too late. A flood that never retries would else leave its places
    to other requests for as long as further ones are refused. O(1)."""
    cdef int64_t late_ns = now_ns - RETRY_SLOT_LATE_NS - r.first_ns
    cdef int64_t span_ns = r.last_ns - r.first_ns
    cdef int64_t gone
    if r.count == 0 or late_ns <= 0:
        return
    if late_ns > span_ns:  # also if one alone is left
        r.count = 0
        return
    gone = <int64_t>(<wide>late_ns * (r.count - 1) // span_ns)
    r.first_ns += <int64_t>(<wide>span_ns * gone // (r.count - 1))
    r.count -= gone


cdef bint claims_retry_slot(RetrySlots* r, int64_t now_ns) noexcept nogil:
    """Return whether a request that arrives now counts as a retry that is due. Retries count as
    evenly spaced. O(1)."""
    drop_late_slots(r, now_ns)
    if r.count == 0 or now_ns < r.first_ns:
        return False
    r.count -= 1
    if r.count:
        r.first_ns += (r.last_ns - r.first_ns) // r.count
    return True


cdef inline int64_t slots_open_to(RetrySlots* r, int64_t most, int64_t now_ns) noexcept nogil:
    """Return how many requests a queue of `most` places may hold when it takes one more."""
    return most if claims_retry_slot(r, now_ns) else most - slots_kept(most)


cdef void reserve_retry_slot(RetrySlots* r, int64_t now_ns, int64_t due_ns) noexcept nogil:
    """Keep a place for a retry at `due_ns`. The places are evenly spaced, even if the times that
    the refusals named are not. O(1)."""
    drop_late_slots(r, now_ns)
    if r.count == 0:
        r.first_ns = due_ns
    r.last_ns = due_ns
    r.count += 1


cdef Refusals* refusals_of(Core core, int32_t flow) except NULL:
    """Return the writable record of a flow's refusals; most flows never need one. O(1)."""
    cdef Flow* f = &core.flows.items[flow]
    if f.refusals == &NO_REFUSALS:
        f.refusals = <Refusals*>core.flows.refusal_slab.alloc()
    return f.refusals


cdef int64_t turn_ns(Core core, int32_t flow, int32_t target, int64_t work) noexcept:
    """Return how long `work` of a flow takes at the flow's part of its pools. O(pools)."""
    cdef Flow* f = &core.flows.items[flow]
    cdef Pace pace = pace_of(core, target)
    if pace.whole == 0:
        return min(f.interval_ns if f.interval_ns else NS_PER_S, RETRY_MAX_NS)
    return time_for(work, own_pace(core, flow, &pace))


cdef int64_t next_turn_ns(
    Core core, int64_t* next_ns, int64_t wait_ns, int64_t step_ns, int64_t early_ns=0
) noexcept:
    # Each refusal gets a time of its own, later than that of the one before. Its client comes up to
    # `early_ns` earlier.
    cdef int64_t due_ns = max(core.now_ns + wait_ns, next_ns[0] + step_ns)
    next_ns[0] = min(due_ns, core.now_ns + RETRY_MAX_NS + early_ns)
    return next_ns[0] - core.now_ns


cdef int64_t before_turn_ns(
    Core core, int64_t* next_ns, int64_t wait_ns, int64_t step_ns, int64_t patience_ns
) noexcept:
    """Return when to come for a turn in `wait_ns` or later: half of the patience before it, or half
    of the time until it if that is less, so that not all come at once."""
    cdef int64_t turn_ns = next_turn_ns(core, next_ns, wait_ns, step_ns, patience_ns // 2)
    return max(turn_ns // 2, turn_ns - patience_ns // 2)


cdef int64_t forecast_in_turn(
    Core core, int64_t* next_ns, int64_t wait_ns, int64_t step_ns
) noexcept:
    # 3/8 above the forecast, and half a place: a retry that is too early is refused again.
    return next_turn_ns(core, next_ns, wait_ns * 11 // 8 + step_ns // 2, step_ns * 11 // 8)


cdef int64_t place_in_ns(Core core, const Request* r, int outcome) except -1:
    """Return when a request that a full queue refuses will find a place in it. O(pools)."""
    cdef Flow* f = &core.flows.items[r.flow]
    cdef bint own = outcome == OUT_REJECTED_FLOW_QUEUE_FULL
    cdef Pace pace = pace_of(core, r.target)
    cdef int64_t queued, backlog, tokens, over, each, step_ns, wait_ns
    cdef int64_t* next_ns = (
        &f.next_retry_at_ns if own or pace.whole == 0 else &core.flows.next_retry_at_ns
    )
    cdef RetrySlots* slots = &core.flows.retry_slots
    if own:
        slots = &refusals_of(core, r.flow).retry_slots
        queued, backlog, tokens = f.queued, f.queued_work, f.queued_tokens
        over = tokens + r.prompt_tokens - core.settings.flow_queue_tokens_max
        over = over if core.settings.flow_queue_tokens_max else 0
    else:
        queued, backlog = core.requests.states[QUEUED], core.flows.queued_work
        tokens = core.flows.queued_tokens
        over = tokens + r.prompt_tokens - core.settings.queue_tokens_max
        over = over if core.settings.queue_tokens_max else 0
    each = backlog // max(<int64_t>1, queued) + 1
    # The part of the work that has to be done until the tokens in excess are gone.
    over = <int64_t>(<wide>backlog * over // max(<int64_t>1, tokens)) if over > 0 else 0
    if own or pace.whole == 0:
        step_ns = turn_ns(core, r.flow, r.target, each)
        wait_ns = turn_ns(core, r.flow, r.target, max(each, over))
    else:
        step_ns, wait_ns = time_for(each, pace.whole), time_for(max(each, over), pace.whole)
    if over or slots_kept(core.settings.flow_queue_max if own else core.settings.queue_max) == 0:
        return forecast_in_turn(core, next_ns, wait_ns, step_ns)
    wait_ns = next_turn_ns(core, next_ns, wait_ns * 13 // 12, step_ns * 13 // 12)
    reserve_retry_slot(slots, core.now_ns, core.now_ns + wait_ns)
    return wait_ns


cdef int64_t refill_in_ns(Core core, int32_t i) noexcept:
    """Return when a request that its quotas refuse will find enough in them, after the retries of
    earlier refusals. O(levels)."""
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
    return next_turn_ns(
        core, &f.next_retry_at_ns, core.quotas.refused_until_ns - core.now_ns,
        step_ns * QUOTA_TICK_NS
    )
