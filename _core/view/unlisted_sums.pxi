# Sums over the tenants that the configuration does not list, and that the metrics do not name.

cdef dict unlisted_row(Core core):
    """Return sums and present levels of all tenants at first sight, forgotten ones included in the
    sums. Counters never fall. O(flows)."""
    cdef FlowCounters sums = core.carried
    cdef int64_t queued = 0, queued_tokens = 0, live = 0, promised = 0, posted = 0
    cdef const Flow* f
    cdef int32_t flow
    for flow in range(core.flows.count):
        f = &core.flows.items[flow]
        if core.flows.items[f.base].born:
            add_counters(&sums, f)
            queued += f.queued
            queued_tokens += f.queued_tokens
            live += f.live
            promised += f.promised_tokens
            posted += f.posted_tokens
    return {
        "received": sums.received,
        "granted": sums.granted,
        "completed": sums.completed,
        "cancelled": sums.cancelled,
        "expired": sums.expired,
        "input_tokens": sums.input_tokens,
        "cached_input_tokens": sums.cached_tokens,
        "output_tokens": sums.output_tokens,
        "refusals": refusal_counts(sums.refusals),
        "queued": queued,
        "queued_input_tokens": queued_tokens,
        "live_leases": live,
        "promised_tokens": promised,
        "posted_tokens": posted,
    }
