# Complete and cancel: the holder ends its lease, or the client gives its request up.

cdef int correct_usage(Core core, int32_t i, Usage* reported) except -1:
    """Make a second row of a lease that had expired: its holder reports at last what it used. The
    ledger takes it instead of the first. O(1)."""
    cdef Request* r = &core.requests.items[i]
    cdef Usage u = reported[0]
    if u.input_tokens < 0 and u.output_tokens < 0:
        return 0
    r.lease.is_corrected = True
    limit_usage(core, r, &u, True)
    if u.input_tokens < 0:
        u.input_tokens = max(<int32_t>0, r.lease.input_tokens)
    if u.output_tokens < 0:
        u.output_tokens = r.lease.output_tokens
    if u.cached_tokens < 0:
        u.cached_tokens = r.lease.cached_tokens
    return core.usage_rows.add((
        r.lease.lease_id, core.flow_list[r.flow],
        core.classes.names[core.flows.items[r.flow].cls], core.pool_list[r.pool], b"", False,
        u.input_tokens, min(u.cached_tokens, u.input_tokens), u.output_tokens, was_restored(r),
    ))


cdef bint complete_lease(Core core, int32_t i, int outcome, Usage* u) except -1:
    """End a lease as its caller says; False where it had ended already. O(log n)."""
    cdef Request* r = &core.requests.items[i]
    if outcome == 0:
        outcome = OUT_COMPLETED
    if outcome != OUT_COMPLETED and outcome != OUT_CANCELLED:
        invalid("outcome", "must be COMPLETED or CANCELLED")
    if r.state == ENDED:
        # Else each repeat would refund what the ledger knows already.
        if core.usage_rows.is_kept and r.lease.outcome == OUT_EXPIRED and not r.lease.is_corrected:
            correct_usage(core, i, u)
        return False
    account(core, i, u, True)
    if outcome == OUT_CANCELLED and u.output_tokens < 0:
        estimate_output(core, i)
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
