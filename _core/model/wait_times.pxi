# Each thing that a queued request waits for, and for how long.
#
# Two times of every request show most of it. A request waits behind others until it is the
# first of its own queue (head_ns), then for its quotas until it is in the line (lined_ns), then for
# its turn. A record begins with the first reason that these do not cover: its pool wants to serve
# it and has no room, or its flow is held. So a request that is granted at once needs no record.
# Each reason has one time that grows, so a record has one size however long the wait is.

cdef WaitTimes* wait_times_of(Requests requests, int32_t i) except NULL:
    """Return the record of a request that is, or was, the first of its queue. O(1)."""
    cdef Request* r = &requests.items[i]
    cdef WaitTimes* w = r.head_state.wait_times
    if w == NULL:
        w = requests.head_state_of(i).wait_times = <WaitTimes*>requests.wait_times_slab.alloc()
        w.pool = NONE
        w.since_ns, r.head_state.waits_for = r.arrival_ns, WAITS_QUEUE
        wait_for(requests, i, WAITS_QUOTA, r.head_state.head_ns)
        if r.head_state.lined_ns >= 0:
            wait_for(requests, i, WAITS_TURN, lined_since(r))
    return w


cdef inline int64_t lined_since(const Request* r) noexcept nogil:
    """Return when the request joined the line; its place there may be older than it is."""
    return max(r.head_state.head_ns, r.head_state.lined_ns)


cdef int wait_for(Requests requests, int32_t i, int kind, int64_t now_ns) except -1:
    """Let a request wait for this from now on. Where it does so again in the same moment, it has
    all along. O(1)."""
    cdef Request* r = &requests.items[i]
    cdef WaitTimes* w
    if r.head_state.waits_for == kind:
        return 0
    w = wait_times_of(requests, i)
    if w.changed_ns != now_ns:
        w.before, w.before_ns = r.head_state.waits_for, w.since_ns
        w.spent_ns[w.before] += now_ns - w.since_ns
        w.since_ns = w.changed_ns = now_ns
    if w.before == kind:
        w.spent_ns[kind] -= now_ns - w.before_ns
        w.since_ns = w.changed_ns = w.before_ns
    r.head_state.waits_for = <uint8_t>kind
    return 0


cdef int wait_outside(Requests requests, int32_t i, bint throttled, int64_t now_ns) except -1:
    """The head of a queue is not in the line. O(1)."""
    cdef Request* r = &requests.items[i]
    if r.head_state.waits_for or throttled or r.head_state.lined_ns >= 0:
        wait_for(requests, i, WAITS_SHARE if throttled else WAITS_QUOTA, now_ns)
    return 0


cdef inline int wait_inside(Requests requests, int32_t i, int64_t now_ns) except -1:
    """The head of a queue is in the line. O(1)."""
    if 0 < requests.items[i].head_state.waits_for < WAITS_TURN:
        wait_for(requests, i, WAITS_TURN, now_ns)
    return 0


cdef int waits_now(Requests requests, int32_t i, int64_t* since_ns) noexcept:
    """Return the thing that a queued request waits for, and since when without a break."""
    cdef const Request* r = &requests.items[i]
    if r.head_state.waits_for:
        since_ns[0] = r.head_state.wait_times.since_ns
        return r.head_state.waits_for
    if r.head_state.head_ns < 0:
        since_ns[0] = r.arrival_ns
        return WAITS_QUEUE
    since_ns[0] = r.head_state.head_ns if r.head_state.lined_ns < 0 else lined_since(r)
    return WAITS_QUOTA if r.head_state.lined_ns < 0 else WAITS_TURN


cdef void wait_times_until(
    Requests requests, int32_t i, int64_t until_ns, int64_t* spent_ns
) noexcept:
    """Find how long a request has waited for each thing until a moment, WAITS_KINDS of them. They
    add up to all its wait."""
    cdef const Request* r = &requests.items[i]
    cdef int64_t since_ns
    cdef int kind = waits_now(requests, i, &since_ns)
    memset(spent_ns, 0, WAITS_KINDS * sizeof(int64_t))
    if until_ns <= r.arrival_ns:  # it was granted at once, or restored as a lease
        return
    if r.head_state.waits_for:
        memcpy(spent_ns, r.head_state.wait_times.spent_ns, WAITS_KINDS * sizeof(int64_t))
    elif kind != WAITS_QUEUE:
        spent_ns[WAITS_QUEUE] = r.head_state.head_ns - r.arrival_ns
        spent_ns[WAITS_QUOTA] = since_ns - r.head_state.head_ns
    spent_ns[kind] += until_ns - since_ns
