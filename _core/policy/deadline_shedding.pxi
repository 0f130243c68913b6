# Early refusal: a request that cannot have its first token before its deadline is refused at once,
# so that it costs neither the engine nor its caller any time.
#
# It is refused at its arrival if wait and prefill, each less its average error, end beyond the
# deadline, and at its turn if the prefill does. A wrong estimate would refuse requests that could
# be served, and the scheduler would never learn of it. So the estimate has to earn trust, for the
# flow and for all flows. A request that it would refuse is let in and watched until
# `refusal_samples_min` more of these have missed their deadlines than have met them. From then on
# every PROBE_EVERY-th is still let in. One that meets its deadline costs the trust that TRUST_LOSS
# misses bring: if fewer than nine in ten miss it, all are let in again. Requests that are let in
# also correct the estimates.
#
# Forecasts are too long if other requests leave before their turn. So only a part of the expected
# time counts, such that about three in a hundred requests that are let in meet their deadlines.
# The part falls by an eighth for each that meets it, and grows by a 256th for each that does not.
# It also grows, slowly, for each request that missed its deadline and that only the whole expected
# time would have refused.

cdef enum:
    PROBE_EVERY = 8
    TRUST_LOSS = 9
    TRUST_MORE = 8  # a score grows this far beyond refusal_samples_min
    PART_PPM = 1_000_000
    PART_MIN_PPM = 62_500
    UNSURE = 3  # RareFields.shed_watch: the whole time is beyond the deadline, its part is not


cdef inline bint counts_deadline(Core core, const Request* r) noexcept:
    """Return whether a request may be refused for its deadline. Not one of an exempt or a dry-run
    tenant, nor one that was let in and is watched."""
    cdef const Flow* f = &core.flows.items[r.flow]
    cdef bint is_watched = 0 < core.requests.rare_of(r).shed_watch < UNSURE
    return core.settings.early_refusal and not is_watched and not f.exempt and not f.dry_runs


cdef bint sheds(Core core, Request* r, int kind, int64_t first_ns) noexcept:
    """Return whether a request whose first token is expected in `first_ns` is refused. If only a
    safeguard lets it in, it is watched. O(1)."""
    cdef RareFields* rare = &core.requests.rare[r.rare]
    cdef int64_t left_ns = rare.deadline_ns - core.now_ns
    cdef ShedAccuracy* own = &core.flows.items[r.flow].shed_accuracy
    cdef ShedAccuracy* overall = &core.shed_accuracy
    if first_ns < left_ns:
        return False
    if <wide>first_ns * (PART_PPM - core.shed_discount_ppm[kind]) // PART_PPM < left_ns:
        rare.shed_watch = <uint8_t>(kind + UNSURE)
        return False
    if (
        min(own.score[kind], overall.score[kind]) >= core.settings.refusal_samples_min
        and max(own.since[kind], overall.since[kind]) < PROBE_EVERY - 1
    ):
        own.since[kind] += 1
        overall.since[kind] += 1
        return True
    own.since[kind] = overall.since[kind] = 0
    rare.shed_watch = <uint8_t>(kind + 1)
    return False


cdef void record_shed_outcome(Core core, Request* r, bint missed) noexcept:
    """Learn whether a request that was let in missed its deadline, as expected. O(1)."""
    cdef RareFields* rare = &core.requests.rare[r.rare]
    cdef int kind = (rare.shed_watch - 1) % SHED_KINDS
    cdef int64_t part_ppm = PART_PPM - core.shed_discount_ppm[kind]
    if rare.shed_watch >= UNSURE:
        part_ppm += part_ppm // 2048 * missed
    else:
        learn_shed_outcome(core, &core.flows.items[r.flow].shed_accuracy, kind, missed)
        learn_shed_outcome(core, &core.shed_accuracy, kind, missed)
        part_ppm += part_ppm // 256 if missed else -(part_ppm // 8)
    part_ppm = min(max(part_ppm, <int64_t>PART_MIN_PPM), <int64_t>PART_PPM)
    core.shed_discount_ppm[kind] = <int32_t>(PART_PPM - part_ppm)
    rare.shed_watch = 0


cdef inline void learn_shed_outcome(
    Core core, ShedAccuracy* d, int kind, bint missed
) noexcept:
    d.judged += 1
    d.missed += missed
    if missed:
        d.score[kind] = <int32_t>min(
            d.score[kind] + 1, core.settings.refusal_samples_min + TRUST_MORE
        )
    else:
        d.score[kind] = max(d.score[kind] - TRUST_LOSS, 0)


cdef void settle_first(Core core, Request* r) noexcept:
    """Take a report with its first token, which came since the report before it, or since the
    grant. If the deadline was between the two, it counts as met. O(1)."""
    record_shed_outcome(
        core, r, r.due_ns - core.settings.lease_ttl_ns >= core.requests.rare_of(r).deadline_ns
    )


cdef void settle_shed(Core core, Request* r) noexcept:
    """Take the end of a request that never reported its first token: the token came before now,
    or not at all. O(1)."""
    cdef bint late = core.now_ns >= core.requests.rare_of(r).deadline_ns
    if late != (r.lease.output_tokens > 0):
        record_shed_outcome(core, r, late)
    core.requests.rare[r.rare].shed_watch = 0


cdef inline int64_t prefill_expected_ns(Core core, const Pool* p, int64_t tokens) noexcept:
    """Return the expected time of the prefill alone in a pool, less its average error."""
    if p.prefills_judged < core.settings.refusal_samples_min:
        return 0
    return max(<int64_t>0, prefill_ns(p, tokens) - p.prefill_error_ns)


cdef int64_t first_expected_ns(Core core, const Request* r) except -2:
    """Return the expected time to the first token of a request that arrives now, less the average
    errors; -1: unknown. A prefill that was never measured takes no time. O(SCAN_MAX + pools +
    classes)."""
    cdef const Flow* f = &core.flows.items[r.flow]
    cdef const Pool* p
    cdef int64_t wait_ns = 0, each, least = NONE
    cdef int32_t k, fresh = fresh_of(core, r)
    if has_to_wait(core, r.target):
        wait_ns = wait_of_new(
            core, r.flow, r.target, r.work, r.due_ns if r.has_deadline else NONE
        )
        if wait_ns < 0 or f.waits_judged < core.settings.refusal_samples_min:
            return NONE
        wait_ns = max(<int64_t>0, wait_ns - f.wait_error_ns)
    for k in range(core.ledger.count):
        p = &core.ledger.pools[k]
        if core.ledger.serves(k) and core.flows.may_take(k, r.target):
            each = prefill_expected_ns(core, p, fresh)
            least = each if least < 0 else min(least, each)
    return wait_ns + max(<int64_t>0, least)


cdef int deadline_refusal(Core core, Request* r) except -1:
    """Return the outcome that refuses a request with a deadline at its arrival, or 0. O(SCAN_MAX +
    pools + classes)."""
    if not counts_deadline(core, r):
        return 0
    if sheds(core, r, SHED_WAIT, first_expected_ns(core, r)):
        return OUT_REJECTED_DEADLINE
    if core.requests.rare_of(r).shed_watch == 1 + SHED_WAIT:
        r.work = 1  # requests behind it need not expect that it is served
    return 0


cdef int64_t feasible_in_ns(Core core, const Request* r) except -1:
    """Return when a request that is refused for its deadline could meet it, after the retries of
    earlier refusals. O(SCAN_MAX + pools + classes)."""
    cdef int64_t deadline_ns = core.requests.rare_of(r).deadline_ns
    cdef int64_t late_ns = first_expected_ns(core, r) - (deadline_ns - core.now_ns)
    return forecast_in_turn(
        core, &core.flows.items[r.flow].next_retry_at_ns, max(<int64_t>0, late_ns),
        turn_ns(core, r.flow, r.target, r.work),
    )


cdef void forget_shed_accuracy(Core core) noexcept:
    memset(&core.shed_accuracy, 0, sizeof(ShedAccuracy))
    memset(&core.shed_discount_ppm, 0, sizeof(core.shed_discount_ppm))


cdef inline int64_t work_done(Core core, const Request* r) noexcept:
    """Work that the grant of a request adds to the drain."""
    if core.requests.rare_of(r).shed_watch == 1 + SHED_WAIT:
        return work_of(core, r)
    return r.work
