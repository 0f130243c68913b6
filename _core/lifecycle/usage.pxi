# The usage of a lease becomes a row for the ledger when the lease ends.

cdef inline bint was_restored(const Request* r) noexcept nogil:
    """Return whether an earlier process granted a lease: its holder has replayed it. O(1)."""
    return r.payload == 0


cdef int keep_usage(Core core, int32_t i, int outcome) except -1:
    """Make the row of a lease that ends; none if it computed no token. O(1)."""
    cdef Request* r = &core.requests.items[i]
    cdef int64_t input_tokens = max(<int32_t>0, r.lease.input_tokens)
    cdef int32_t adapter = core.requests.rare_of(r).adapter
    if outcome == OUT_CANCELLED and input_tokens == 0 and r.lease.output_tokens == 0:
        return 0
    return core.usage_rows.add((
        r.lease.lease_id,
        core.flow_list[r.flow],
        core.classes.names[core.flows.items[r.flow].cls],
        core.pool_list[r.pool],
        b"" if adapter == NONE else core.adapters.names[adapter],
        outcome == OUT_EXPIRED or r.lease.is_estimated != 0,
        input_tokens,
        <int64_t>r.lease.cached_tokens,
        <int64_t>r.lease.output_tokens,
        was_restored(r),
    ))
