# Early refusal: a request that cannot be served in time is refused at once, so that it costs
# neither the engine nor its caller any time.
#
# In time is within its longest wait, and if it has a deadline so early that its prefill ends before
# that. A request is refused at its arrival if its expected wait is longer, less the time by which
# such expectations of its flow have exceeded the waits on average, and a twelfth of their average
# error. With a deadline it is also refused if its prefill alone, less its average error, is longer,
# at its arrival or at its turn.
# A flow that has nothing queued does not wait as far as this rule is concerned: what others have
# queued refuses none of its requests.
#
# A request that is expected too late but let in is hopeless: its work counts as 1, because it is
# expected to leave before its turn, and so those behind it need not wait for it.
#
# The wait counts once `refusal_samples_min` waits of the flow have shown its error. Every 64th of
# those that it would refuse is let in for a probe. It could have been served in time if it is, and
# no request of its flow has left the queue at the end of its longest wait meanwhile: such a request
# would have had the turn that the probe took. A prefill has to earn trust: a request that it would
# refuse is let in until `refusal_samples_min` more of these have missed their deadlines than have
# met them, and then every eighth. One that meets its deadline costs the trust that TRUST_LOSS
# misses bring.
#
# Where requests state deadlines or longest waits of their own, those with the shortest are refused,
# and these are the ones whose forecasts are too long more often. So only a part of the expected
# time counts there, such that about three in a hundred probes could have been served in time. The
# part falls by an eighth for each that could, and grows by a 256th for each that could not. It also
# grows for each request that was too late and that only the whole expected time would have refused:
# by a 128th if that is a wait.

cdef enum:
    TRUST_LOSS = 9
    TRUST_MORE = 8  # a score grows this far beyond what is needed
    PART_PPM = 1_000_000
    PART_MIN_PPM = 62_500
    UNSURE = 3  # RareFields.shed_watch: the whole time is too long, its part is not


cdef inline int32_t probe_every(int kind) noexcept nogil:
    return 64 if kind == SHED_WAIT else 8


cdef inline bint may_shed(Core core, const Request* r) noexcept:
    """Return whether a request may be refused early. Not one of an exempt or a dry-run tenant, nor
    one that was let in and is watched."""
    cdef const Flow* f = &core.flows.items[r.flow]
    cdef bint is_watched = 0 < core.requests.rare_of(r).shed_watch < UNSURE
    return not is_watched and not f.exempt and not f.dry_runs


cdef bint sheds(Core core, int32_t i, int kind, int64_t wait_ns, int64_t left_ns) except -1:
    """Return whether a request is refused that is expected to take `wait_ns` and may take
    `left_ns`. If only a safeguard lets it in, it is watched. O(1)."""
    cdef ShedAccuracy* own = &core.flows.items[core.requests.items[i].flow].shed_accuracy
    cdef ShedAccuracy* overall = &core.shed_accuracy
    cdef int64_t trust = min(own.score, overall.score)
    if wait_ns < left_ns:
        return False
    if (
        is_in_part(core, &core.requests.items[i], kind)
        and <wide>wait_ns * (PART_PPM - core.shed_discount_ppm[kind]) // PART_PPM < left_ns
    ):
        core.requests.own_rare(i).shed_watch = <uint8_t>(kind + UNSURE)
        return False
    if (
        core.settings.early_refusal
        and (kind == SHED_WAIT or trust >= core.settings.refusal_samples_min)
        and max(own.since[kind], overall.since[kind]) < probe_every(kind) - 1
    ):
        own.since[kind] += 1
        overall.since[kind] += 1
        return True
    own.since[kind] = overall.since[kind] = 0
    core.requests.own_rare(i).shed_watch = <uint8_t>(kind + 1)
    return False


cdef void record_shed_outcome(Core core, Request* r, bint missed) noexcept:
    """Learn whether a request that was let in was too late, as expected. O(1)."""
    cdef RareFields* rare = &core.requests.rare[r.rare]
    cdef Flow* f = &core.flows.items[r.flow]
    cdef int kind = (rare.shed_watch - 1) % SHED_KINDS
    missed = missed or (kind == SHED_WAIT and f.gave_up_ns >= r.arrival_ns)
    if is_in_part(core, r, kind):
        learn_part(core, kind, rare.shed_watch >= UNSURE, missed)
    if rare.shed_watch < UNSURE:
        learn_shed_outcome(core, &f.shed_accuracy, kind, missed)
        learn_shed_outcome(core, &core.shed_accuracy, kind, missed)
    rare.shed_watch = 0


cdef inline bint is_hurried(Core core, const Request* r) noexcept:
    """Return whether a request states how long it may wait, or its deadline. O(1)."""
    return r.has_deadline or core.requests.rare_of(r).deadline_ns


cdef inline bint is_in_part(Core core, const Request* r, int kind) noexcept:
    """Return whether only a part of an expected time counts. O(1)."""
    return kind == SHED_PREFILL or is_hurried(core, r)


cdef inline int64_t wait_margin_ns(Core core, const Request* r) noexcept:
    """Return by how much the wait of a request may be expected too long. O(1)."""
    cdef const Flow* f = &core.flows.items[r.flow]
    if is_hurried(core, r):
        return f.wait_error_ns
    return max(<int64_t>0, f.too_long_ns) + f.wait_error_ns // 12


cdef inline void learn_part(Core core, int kind, bint unsure, bint missed) noexcept:
    """Learn which part of an expected time counts. O(1)."""
    cdef int64_t part_ppm = PART_PPM - core.shed_discount_ppm[kind]
    if unsure:
        part_ppm += part_ppm // (128 if kind == SHED_WAIT else 2048) * missed
    else:
        part_ppm += part_ppm // 256 if missed else -(part_ppm // 8)
    part_ppm = min(max(part_ppm, <int64_t>PART_MIN_PPM), <int64_t>PART_PPM)
    core.shed_discount_ppm[kind] = <int32_t>(PART_PPM - part_ppm)


cdef inline void learn_shed_outcome(
    Core core, ShedAccuracy* d, int kind, bint missed
) noexcept:
    d.judged += 1
    d.missed += missed
    if kind == SHED_WAIT:
        return
    if missed:
        d.score = <int32_t>min(d.score + 1, core.settings.refusal_samples_min + TRUST_MORE)
    else:
        d.score = max(d.score - TRUST_LOSS, 0)


cdef void settle_granted(Core core, Request* r) noexcept:
    """Take the grant of a request that is watched and has no deadline. O(1)."""
    if core.requests.rare_of(r).deadline_ns == 0:
        record_shed_outcome(core, r, False)


cdef void settle_first(Core core, Request* r) noexcept:
    """Take a report with its first token, which came since the report before it, or since the
    grant. If the deadline was between the two, it counts as met. O(1)."""
    record_shed_outcome(
        core, r, r.due_ns - core.settings.lease_ttl_ns >= core.requests.rare_of(r).deadline_ns
    )


cdef void settle_shed(Core core, Request* r, bint in_queue) noexcept:
    """Take the end of a request that never reported its first token: the token came before now,
    or not at all. O(1)."""
    cdef int64_t deadline_ns = core.requests.rare_of(r).deadline_ns
    cdef bint late = core.now_ns >= (deadline_ns if deadline_ns else r.due_ns)
    if late if in_queue else late != (r.lease.output_tokens > 0):
        record_shed_outcome(core, r, late)
    core.requests.rare[r.rare].shed_watch = 0


cdef inline int64_t prefill_expected_ns(Core core, const Pool* p, int64_t tokens) noexcept:
    """Return the expected time of the prefill alone in a pool, less its average error."""
    if p.prefills_judged < core.settings.refusal_samples_min:
        return 0
    return max(<int64_t>0, prefill_ns(p, tokens) - p.prefill_error_ns)


cdef int64_t least_prefill_ns(Core core, const Request* r) noexcept:
    """Return the same in the best pool that a request may go to. A prefill that was never measured
    takes no time. O(pools)."""
    cdef int64_t least = NONE, each
    cdef int32_t k, fresh = fresh_of(core, r)
    for k in range(core.ledger.count):
        if core.ledger.serves(k) and core.flows.may_take(k, r.target):
            each = prefill_expected_ns(core, &core.ledger.pools[k], fresh)
            least = each if least < 0 else min(least, each)
    return max(<int64_t>0, least)


cdef bint may_be_late(Core core, const Request* r, int64_t left_ns) noexcept:
    """Return whether a request may wait for `left_ns` if all that is queued is ahead of it.
    O(pools + levels)."""
    cdef Pace pace = pace_of(core, r.target)
    cdef Flow* f = &core.flows.items[r.flow]
    cdef int64_t most_ns
    if pace.whole == 0:
        return False
    most_ns = time_for(f.queued_work, own_pace(core, r.flow, &pace))
    return most_ns + time_for(core.flows.queued_work + r.work, pace.whole) >= left_ns


cdef int64_t counted_wait_ns(Core core, const Request* r, int64_t left_ns) except -2:
    """Return the wait of a request that arrives now, less the average by which such forecasts are
    too long, as far as it may refuse it; -1: it may not. O(SCAN_MAX + pools + classes)."""
    cdef const Flow* f = &core.flows.items[r.flow]
    cdef int64_t wait_ns
    if f.queued == 0 or f.waits_judged < core.settings.refusal_samples_min:
        return NONE
    if not has_to_wait(core, r.target) or not may_be_late(core, r, left_ns):
        return NONE
    wait_ns = wait_of_new(core, r.flow, r.target, r.work, r.due_ns if r.has_deadline else NONE)
    return NONE if wait_ns < 0 else max(<int64_t>0, wait_ns - wait_margin_ns(core, r))


cdef int64_t longest_wait_ns(Core core, const Request* r) noexcept:
    """Return the longest time for which a request may wait, its prefill left out if it has a
    deadline. O(pools)."""
    cdef int64_t deadline_ns = core.requests.rare_of(r).deadline_ns
    cdef int64_t left_ns = r.due_ns - core.now_ns
    if deadline_ns:
        left_ns = min(left_ns, deadline_ns - core.now_ns - least_prefill_ns(core, r))
    return left_ns


cdef int refuse_early(Core core, int32_t i) except -1:
    """Return the outcome that refuses a request at its arrival because it cannot be served in time,
    or 0. O(SCAN_MAX + pools + classes)."""
    cdef Request* r = &core.requests.items[i]
    cdef int64_t left_ns, wait_ns, deadline_ns = core.requests.rare_of(r).deadline_ns
    if not may_shed(core, r):
        return 0
    left_ns = longest_wait_ns(core, r)
    wait_ns = counted_wait_ns(core, r, left_ns)
    if wait_ns >= 0 and sheds(core, i, SHED_WAIT, wait_ns, left_ns):
        return OUT_REJECTED_DEADLINE
    if core.requests.rare_of(r).shed_watch == 1 + SHED_WAIT:
        core.requests.rare[r.rare].whole_work, r.work = r.work, 1
    if core.requests.rare_of(r).shed_watch or deadline_ns == 0 or not core.settings.early_refusal:
        return 0
    if sheds(core, i, SHED_PREFILL, least_prefill_ns(core, r), deadline_ns - core.now_ns):
        return OUT_REJECTED_DEADLINE
    return 0


cdef int64_t feasible_in_ns(Core core, const Request* r) except -1:
    """Return when a request that is refused early could be served in time, after the retries of
    earlier refusals: half of its longest wait before its turn. O(SCAN_MAX + pools + classes)."""
    cdef int64_t* next_ns = &core.flows.items[r.flow].next_retry_at_ns
    cdef int64_t left_ns = max(<int64_t>0, longest_wait_ns(core, r))
    cdef int64_t step_ns = turn_ns(core, r.flow, r.target, r.work)
    cdef int64_t wait_ns = counted_wait_ns(core, r, left_ns)
    if wait_ns < 0:  # its prefill alone takes too long
        return forecast_in_turn(core, next_ns, 0, step_ns)
    wait_ns += wait_margin_ns(core, r)
    return before_turn_ns(core, next_ns, wait_ns, step_ns, left_ns)


cdef void forget_shed_accuracy(Core core) noexcept:
    memset(&core.shed_accuracy, 0, sizeof(ShedAccuracy))
    memset(&core.shed_discount_ppm, 0, sizeof(core.shed_discount_ppm))


cdef inline int64_t work_done(Core core, const Request* r) noexcept:
    """Work that the grant of a request adds to the drain."""
    if core.requests.rare_of(r).shed_watch == 1 + SHED_WAIT:
        return core.requests.rare[r.rare].whole_work
    return r.work
