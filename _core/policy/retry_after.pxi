# Retry-After: estimates when a refused or evicted request may be retried.

cdef int note_refused(Core core, int32_t i, int outcome) except -1:
    """Estimate when a refused request may be retried."""
    if outcome == OUT_REJECTED_FLOW_QUEUE_FULL or outcome == OUT_REJECTED_QUEUE_FULL:
        core.refused_wait_ns = place_in_ns(core, &core.requests.items[i], outcome)
    elif outcome == OUT_REJECTED_QUOTA:
        core.refused_wait_ns = refill_in_ns(core, i)
    elif outcome == OUT_REJECTED_DEADLINE:
        core.refused_wait_ns = feasible_in_ns(core, &core.requests.items[i])
    return 0


cdef int64_t turn_again_ns(Core core, const Request* r) except -1:
    """Return after how long a request that was evicted at the end of its wait should be sent again.

    With a deadline: after what waits now, at most the queue's TTL, since what waits leaves by then.
    Without one it may wait as long again, and all that is ahead of it now will have left by then.
    So it has a turn only among evicted requests. It comes half its patience before that turn, or
    half of the time until it if that is less, so that they do not all come at once.
    O(SCAN_MAX + classes + pools)."""
    cdef int64_t* next_ns = &core.flows.items[r.flow].next_retry_at_ns
    cdef int64_t patience_ns = r.due_ns - r.arrival_ns, wait_ns
    cdef int64_t step_ns = turn_ns(core, r.flow, r.target, r.work)
    if not r.has_deadline:
        return before_turn_ns(core, next_ns, step_ns, step_ns, patience_ns)
    wait_ns = wait_of_new(core, r.flow, r.target, r.work, core.now_ns + patience_ns)
    wait_ns = step_ns if wait_ns < 0 else min(wait_ns - patience_ns, core.settings.queue_ttl_ns)
    return forecast_in_turn(core, next_ns, max(<int64_t>0, wait_ns), step_ns)


cdef inline int64_t spread(uint64_t key, int64_t value) noexcept nogil:
    # Deterministic jitter of +-10 %, so that those refused together do not return together.
    return value * (900 + <int64_t>(key % 201)) // 1000


cdef inline int64_t later(uint64_t key, int64_t wait_ns) noexcept nogil:
    # At least a second, never before the time that is known, up to 10 % after it.
    wait_ns = min(max(wait_ns, NS_PER_S), RETRY_MAX_NS)
    return (wait_ns + NS_PER_MS - 1) // NS_PER_MS * (1000 + <int64_t>(key % 101)) // 1000


cdef int64_t retry_after_ms(Core core, int32_t flow, int outcome, uint64_t key) noexcept:
    """Return the time to the retry; 0: a retry is of no use. O(1)."""
    if outcome in (
        OUT_REJECTED_TOO_LARGE, OUT_REJECTED_UNKNOWN_TENANT, OUT_EVICTED_TOO_LARGE,
        OUT_EVICTED_CANCELLED, OUT_REJECTED_QUOTA_SIZE,
    ):
        return 0
    if outcome in (OUT_REJECTED_NO_POOL, OUT_REJECTED_DRAINING, OUT_EVICTED_DRAINING):
        return spread(key, 5_000)
    if outcome in (
        OUT_REJECTED_FLOW_QUEUE_FULL, OUT_REJECTED_QUEUE_FULL, OUT_REJECTED_QUOTA,
        OUT_REJECTED_DEADLINE, OUT_EVICTED_TTL, OUT_EVICTED_DEADLINE,
    ):
        return later(key, core.refused_wait_ns)
    return later(key, core.flows.items[flow].interval_ns)
