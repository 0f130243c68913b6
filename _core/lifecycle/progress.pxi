# Progress: posts what a lease reports.

cdef inline bint shows_first(const Request* r) noexcept nogil:
    """Return whether a report with output says when the first token came. O(1).

    An answer in one piece is reported once it is there: so only if it has no second token.
    """
    return not r.whole_answer or r.lease.output_tokens <= r.sequences


cdef int note_first(Core core, Request* r) noexcept:
    """Take the first report with output of a request. O(1)."""
    cdef Pool* p = &core.ledger.pools[r.pool]
    cdef Flow* f = &core.flows.items[r.flow]
    cdef int64_t took_ns = core.now_ns - r.arrival_ns - r.lease.waited_ns, error_ns
    r.lease.first_us = <int32_t>min((core.now_ns - r.arrival_ns) // 1000 + 1, FORETOLD_MAX_US)
    if r.payload:  # else it was restored, and when it arrived is not known
        observe(core.time_bounds, &f.times.first_output, core.now_ns - r.arrival_ns)
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
        note_prefill_rate(p, r, took_ns)
        p.prefills_judged += 1
    if r.forecast_wait_us >= 0:
        if f.first_judged == 0:
            f.first_us, f.forecast_first_us = r.lease.first_us, r.forecast_first_us
        else:
            f.first_us = averaged(f.first_us, r.lease.first_us)
            f.forecast_first_us = averaged(f.forecast_first_us, r.forecast_first_us)
        f.first_judged += 1
    if core.requests.rare_of(r).shed_watch:
        settle_first(core, r)
    return 0


cdef int grow_lease(Core core, int32_t i) except -1:
    """Raise the reservation of a lease that outlives its prediction, and post what it holds."""
    cdef Request* r = &core.requests.items[i]
    cdef Pool* p = &core.ledger.pools[r.pool]
    cdef int64_t each = (r.lease.output_tokens + r.sequences - 1) // r.sequences
    cdef int64_t input_tokens, held, reserved = r.lease.reserved_blocks
    cdef Asked asked
    # However wrong a report is, a lease cannot hold more than there is.
    cdef int64_t most = min(p.capacity_blocks, <int64_t>1 << 30)
    if each > r.lease.predicted_output:
        core.ledger.order.stirred = True  # other requests will be promised more
        core.predictor.record_coverage(r.flow, adapter_of(core, r), r.evidence, False)
        r.evidence = BY_NOTHING
        asked_of(core, r, &asked)
        r.lease.predicted_output = <int32_t>max(
            each, min(core.predictor.beyond(&asked, each), r.output_max_tokens)
        )
        reserved = max(reserved, min(core.ledger.need(r.pool, r, r.lease.predicted_output), most))
    # Once there is output, all input is in the cache, even if no report counted it.
    input_tokens = r.prompt_tokens if r.lease.output_tokens else max(0, r.lease.input_tokens)
    held = input_tokens * r.n + r.lease.output_tokens
    held = min(blocks_for(p, held, r.sequences), most) if held else 0
    held = max(held, <int64_t>r.lease.posted_blocks)
    core.ledger.resize(i, max(reserved, held), held)
    return core.ledger.place(i)


cdef int progress_lease(Core core, int64_t lease_id, int64_t epoch, Usage* u, int32_t principal
) except -1:
    """Apply one report, and return a LEASE_* state. O(log n); O(BUCKETS) where a prediction is
    outgrown."""
    cdef int32_t i = find_lease(core, lease_id, principal)
    return LS_UNKNOWN if i == NONE else progress_granted(core, i, epoch, u)


cdef int progress_granted(Core core, int32_t i, int64_t epoch, Usage* u) except -1:
    """Count the progress of a request that was granted, as above."""
    cdef Request* r = &core.requests.items[i]
    if r.state == ENDED:
        return LS_ENDED
    account(core, i, u, False)
    if r.lease.in_prefill_budget and is_computed(r):
        core.ledger.note_prefill(i, core.now_ns)
    if r.lease.output_tokens and r.lease.first_us == 0 and shows_first(r):
        note_first(core, r)
    recharge(
        core, i, max(r.prompt_tokens, r.lease.input_tokens),
        max(r.lease.cached_tokens, r.lease.matched_tokens),
        max(<int64_t>r.lease.output_tokens, <int64_t>r.lease.ahead_output * r.sequences),
    )
    if r.bill:
        raise_bill(core, i)
    if r.lease.is_void:
        renew(core, i)
        return LS_VOID
    if epoch != r.lease.epoch:
        core.ledger.place(i)  # its totals are known better; what is reserved stays
        return LS_VOID
    renew(core, i)
    grow_lease(core, i)
    return LS_LIVE
