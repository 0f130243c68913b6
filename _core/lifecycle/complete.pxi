# Complete and cancel: the holder ends its lease, or the client gives its request up.

cdef bint complete_lease(Core core, int32_t i, int outcome, Usage* u) except -1:
    """End a lease as its caller says; False where it had ended already. O(log n)."""
    cdef Request* r = &core.requests.items[i]
    if outcome == 0:
        outcome = OUT_COMPLETED
    if outcome != OUT_COMPLETED and outcome != OUT_CANCELLED:
        invalid("outcome", "must be COMPLETED or CANCELLED")
    if r.state == ENDED:
        return False
    account(core, i, u, True)
    end_lease(core, i, outcome)
    return True


cdef bint cancel_request(Core core, int32_t i) except -1:
    cdef Usage nothing
    if i == NONE or core.requests.items[i].state == ENDED:
        return False
    if core.requests.items[i].state == QUEUED:
        evict(core, i, OUT_EVICTED_CANCELLED)
        return True
    # Granted, but its caller never heard of it: nothing ran, and a retry is a new request.
    nothing.input_tokens = nothing.cached_tokens = nothing.output_tokens = 0
    account(core, i, &nothing, True)
    close_bill(core, i, False)
    end_lease(core, i, OUT_CANCELLED)
    forget(core, i)
    return True
