# The life of a lease: Progress, Complete, expiry, void, replay.
#
# The state of a request after each event. tests/core/test_transitions.py plays every order of
# events up to a length, and reads the expected states from this table. none: never seen, or
# forgotten. VOID: it lives, but its engine has restarted, or an operator revoked it, so nothing is
# reserved. "time": the queue TTL passes, or the lease TTL, or the grace of a SUSPECT. "room":
# another lease ends.
#
#   event       none    QUEUED  LIVE    SUSPECT       VOID          VOID_SUSPECT  ENDED
#   admit       QUEUED  QUEUED  LIVE    SUSPECT       VOID          VOID_SUSPECT  ENDED
#   room        none    LIVE    LIVE    SUSPECT       VOID          VOID_SUSPECT  ENDED
#   cancel      none    none    LIVE    SUSPECT       VOID          VOID_SUSPECT  ENDED
#   progress    none    QUEUED  LIVE    LIVE          VOID          VOID          ENDED
#   complete    none    QUEUED  ENDED   ENDED         ENDED         ENDED         ENDED
#   time        none    none    SUSPECT ENDED         VOID_SUSPECT  ENDED         ENDED
#   epoch       none    QUEUED  VOID    VOID_SUSPECT  VOID          VOID_SUSPECT  ENDED
#   disconnect  none    none    LIVE    SUSPECT       VOID          VOID_SUSPECT  ENDED
#   replay      LIVE    QUEUED  LIVE    LIVE          VOID          VOID          ENDED
#   revoke      none    QUEUED  VOID    VOID_SUSPECT  VOID          VOID_SUSPECT  ENDED
#
# An event that a state does not list has no effect there, and never raises. A replay of an unknown
# lease makes it LIVE only while the core still accepts such replays, see replay.pxi.

cdef int32_t find_lease(Core core, int64_t lease_id, int32_t principal) noexcept:
    # Another caller's lease is not mentioned.
    cdef int32_t i = core.leases.get(<uint64_t>lease_id, 0)
    if i != NONE and core.requests.items[i].principal != principal:
        return NONE
    return i


cdef int renew(Core core, int32_t i) except -1:
    cdef Request* r = &core.requests.items[i]
    r.due_ns = core.now_ns + core.settings.lease_ttl_ns
    if r.state == SUSPECT:
        set_suspect(core, i, False)
    # Later than it was: the heap learns of it when the old time comes.
    if not core.deadlines.has(i) or r.due_ns < core.deadlines.nodes[
        core.deadlines.places[i] - 1
    ].key:
        core.deadlines.put(i, r.due_ns, r.seq)
    return 0


cdef int set_suspect(Core core, int32_t i, bint suspect) except -1:
    cdef Request* r = &core.requests.items[i]
    core.requests.enter(i, SUSPECT if suspect else LIVE)
    if not r.lease.is_void:
        core.ledger.pools[r.pool].suspect += 1 if suspect else -1
        core.ledger.place(i)
    return 0


cdef void limit_usage(Core core, Request* r, Usage* u, bint is_final) noexcept:
    """Limit a report to what its request can use: a wrong one costs its tenant no more. O(1).

    An exact prompt may turn out 5 % longer, by tokens that the engine adds. An estimated one may be
    as long as the model's context, for each sequence; or shorter, and then an output that only the
    context ends is longer. An engine that does not keep to the limit of output has computed what it
    states, so the final output may be all of the context that the prompt leaves.
    """
    cdef Pool* p = &core.ledger.pools[r.pool]
    cdef int64_t context = p.max_model_tokens or p.capacity_blocks * p.block_size
    cdef int64_t input_max = <int64_t>r.prompt_tokens + (r.prompt_tokens + 19) // 20
    cdef int64_t output_max = <int64_t>r.output_max_tokens * r.sequences
    cdef int64_t whole = min(context, TOKENS_MAX) * r.sequences, left, output_most
    if not r.has_exact_input:
        input_max = max(input_max, whole)
    left = whole - min(max(<int64_t>0, u.input_tokens), input_max) * r.n
    if not r.has_exact_input and <int64_t>r.prompt_tokens * r.n + output_max >= whole:
        output_max = max(output_max, left)
    output_most = max(output_max, left) if is_final else output_max
    if u.input_tokens > input_max or u.output_tokens > output_most:
        core.reports_limited += not r.was_limited
        r.was_limited = 1
    u.input_tokens = min(u.input_tokens, input_max)
    u.output_tokens = min(u.output_tokens, output_most)
    p.output_above_limit += max(<int64_t>0, u.output_tokens - output_max) if is_final else 0


cdef int account(Core core, int32_t i, Usage* reported, bint is_final) except -1:
    """Take over reported totals, as far as the limits let them. While it runs they only grow;
    the final ones are the truth."""
    cdef Request* r = &core.requests.items[i]
    cdef Flow* f = &core.flows.items[r.flow]
    cdef Usage limited = reported[0]
    cdef Usage* u = &limited
    cdef int64_t known
    limit_usage(core, r, u, is_final)
    known = max(0, r.lease.input_tokens)
    if u.input_tokens >= 0 and (is_final or u.input_tokens > known):
        f.input_tokens += u.input_tokens - known
        r.lease.input_tokens = <int32_t>u.input_tokens
    known = r.lease.input_tokens if r.lease.input_tokens >= 0 else r.prompt_tokens
    if u.cached_tokens >= 0 and (is_final or u.cached_tokens > r.lease.cached_tokens):
        f.cached_tokens += min(u.cached_tokens, known) - r.lease.cached_tokens
        r.lease.cached_tokens = <int32_t>min(u.cached_tokens, known)
    elif r.lease.cached_tokens > known:
        f.cached_tokens += known - r.lease.cached_tokens
        r.lease.cached_tokens = <int32_t>known
    if u.output_tokens >= 0 and (is_final or u.output_tokens > r.lease.output_tokens):
        f.output_tokens += u.output_tokens - r.lease.output_tokens
        r.lease.output_tokens = <int32_t>u.output_tokens
    return 0


cdef int recharge(
    Core core, int32_t i, int64_t input_tokens, int64_t cached_tokens, int64_t output_tokens
) except -1:
    """Let the flow's counter carry exactly this service for the request; what it carried before is
    refunded. The charge is of totals, so that rounding does not add up. O(log n)."""
    cdef Request* r = &core.requests.items[i]
    cdef int64_t held = kv_steps(r, input_tokens, output_tokens)
    cdef int64_t weighted = weighted_by(
        price_of(&core.settings, r, input_tokens, cached_tokens, output_tokens),
        r.lease.weight_milli,
    )
    if r.lease.discount_ppm:
        weighted -= <int64_t>(<wide>weighted * r.lease.discount_ppm // 1_000_000)
    charge_nodes(core.flows, r.flow, r.lease.weight_milli, r.lease.charged, weighted, r.pool)
    charge_flow(core.flows, r.flow, weighted - r.lease.charged, r.pool)
    if core.flows.items[r.flow].agents:
        charge_session(core, i, weighted - r.lease.charged)
    count_served(core, r.flow, r.pool, weighted - r.lease.charged, r.lease.weight_milli)
    core.flows.items[r.flow].open_charged += weighted - r.lease.charged
    core.flows.items[r.flow].kv_steps += held - r.lease.kv_steps
    r.lease.charged, r.lease.kv_steps = weighted, held
    return 0


cdef int32_t input_by_now(Core core, const Request* r) noexcept:
    """Return the most input of a lease that its engine has computed by now. O(RATES_KEPT).

    That is the time since the grant times the greatest rate of the last judged prefills. A prefill
    takes a time that does not depend on its size, so a longer one is faster than that rate says:
    beyond the size of the longest that was about as fast, it is the whole prompt. So it is while
    the rate is not known, or the time of the grant.
    """
    cdef const Pool* p = &core.ledger.pools[r.pool]
    cdef int64_t rate = 0, k, kept = min(p.prefills_judged, <int64_t>RATES_KEPT)
    cdef int32_t longest = 0
    cdef wide tokens
    if kept == 0 or was_restored(r):
        return r.prompt_tokens
    for k in range(kept):
        rate = max(rate, p.prefill_rates[k])
    for k in range(kept):
        if p.prefill_rates[k] >= <wide>rate * AS_FAST_MILLI // 1000:
            longest = max(longest, p.prefill_sizes[k])
    tokens = <wide>(core.now_ns - granted_at_ns(r)) * rate // MILLI_NS_PER_S
    if tokens > longest:
        return r.prompt_tokens
    return <int32_t>min(<wide>r.prompt_tokens, tokens + 1)


cdef int estimate_output(Core core, int32_t i) noexcept:
    """Charge the output of an answer in one piece that was given up: none of it was counted. O(1).

    That is the time after its expected first token, by the pool's time for a token of one sequence;
    while that is not known, what was promised. When a restored lease was granted is not known.
    """
    cdef Request* r = &core.requests.items[i]
    cdef const Pool* p = &core.ledger.pools[r.pool]
    cdef int64_t ran_ns = core.now_ns - granted_at_ns(r) - first_after_ns(r), tokens
    if not r.whole_answer or was_restored(r) or r.lease.output_tokens or ran_ns <= 0:
        return 0
    tokens = min(r.lease.promised_output, r.output_max_tokens)
    if p.decode_milli:
        tokens = <int64_t>min(
            <wide>r.output_max_tokens,
            <wide>ran_ns * p.decode_milli // (<wide>p.decode_ns * 1000) + 1,
        )
    r.lease.is_estimated = tokens > 0
    r.lease.output_tokens = <int32_t>min(tokens * r.sequences, TOKENS_MAX)
    core.flows.items[r.flow].output_tokens += r.lease.output_tokens
    return 0


cdef int64_t final_input(Core core, Request* r, int outcome) noexcept:
    """Return the input of a lease that ends: as reported, else what its outcome says of it.
    O(RATES_KEPT)."""
    cdef Flow* f = &core.flows.items[r.flow]
    if r.lease.input_tokens < 0:
        # Output means that the input was computed, even if no report counted it. Without output
        # the engine had it all the same, and has computed a part.
        r.lease.input_tokens = r.prompt_tokens
        if outcome == OUT_CANCELLED and r.lease.output_tokens == 0:
            r.lease.is_estimated = True
            r.lease.input_tokens = input_by_now(core, r)
        f.input_tokens += r.lease.input_tokens
        if r.lease.cached_tokens > r.lease.input_tokens:
            f.cached_tokens += r.lease.input_tokens - r.lease.cached_tokens
            r.lease.cached_tokens = r.lease.input_tokens
    return r.lease.input_tokens


cdef int learn_output(Core core, const Request* r) except -1:
    """Learn from a request that completed how long outputs are. O(log n)."""
    cdef int64_t each = (r.lease.output_tokens + r.sequences - 1) // r.sequences
    cdef uint64_t adapter = adapter_of(core, r)
    core.predictor.record_coverage(r.flow, adapter, r.evidence, each <= r.lease.promised_output)
    core.predictor.record_usage(r.flow, r.lease.promised_output, each)
    note_output(core.flows, r.flow, each)
    core.predictor.learn(r.flow, adapter, each)
    if not r.lease.is_void:
        note_decode(&core.ledger.pools[r.pool], r, each, core.now_ns)
    return 0


cdef void observe_completed(Core core, const Request* r) noexcept:
    """Count how long a request took that completed, and each of its output tokens after the first.
    When a restored one arrived is not known. O(1)."""
    cdef FlowTimes* times = core.flows.items[r.flow].times
    cdef int64_t took_ns = core.now_ns - r.arrival_ns
    cdef int64_t more = (r.lease.output_tokens + r.sequences - 1) // r.sequences - 1
    if r.payload == 0 or r.lease.is_void:
        return
    observe(core.time_bounds, &times.completed, took_ns)
    if 0 < r.lease.first_us < FORETOLD_MAX_US and more > 0:
        took_ns = max(<int64_t>0, took_ns - <int64_t>r.lease.first_us * 1000)
        observe(core.time_bounds, &times.output_token, took_ns // more)


cdef int end_lease(Core core, int32_t i, int outcome) except -1:
    """Settle the charge, give the reservation back, learn, and store the answer. O(log n)."""
    cdef Request* r = &core.requests.items[i]
    cdef Flow* f = &core.flows.items[r.flow]
    cdef int64_t input_tokens
    if r.state != LIVE and r.state != SUSPECT:
        raise core.fuse.blow("lease: ended twice")
    core.ledger.order.stirred = True
    input_tokens = final_input(core, r, outcome)
    recharge(core, i, input_tokens, r.lease.cached_tokens, r.lease.output_tokens)
    if core.usage_rows.is_kept:
        keep_usage(core, i, outcome)
    core.passes -= r.lease.discount_ppm > 0
    f.open_charged -= r.lease.charged
    note_charge(core.flows, r, &core.settings)
    core.flows.changed.mark(r.flow)
    if r.bill:
        core.quotas.correct(i, input_tokens, r.lease.output_tokens)
        follow_bill(core, i)
        core.quotas.settle(i, True)
    if outcome == OUT_COMPLETED:
        f.completed += 1
        core.completed += 1
        observe_completed(core, r)
        learn_output(core, r)
    elif outcome == OUT_CANCELLED:
        f.cancelled += 1
        core.cancelled += 1
    else:
        f.expired += 1
        core.expired += 1
        deliver_lease_state(core, i, LS_ENDED)
    if r.state == SUSPECT:
        set_suspect(core, i, False)
    if core.requests.rare_of(r).shed_watch:
        settle_shed(core, r, False)
    leave_prefill(core, r)
    if not r.lease.is_void:
        core.ledger.pools[r.pool].served += outcome == OUT_COMPLETED
        core.ledger.release(i)
    elif r.lease.discount_ppm:
        drop_void_pass(core, r)
    core.adapters.let_go(core.requests.rare_of(r).adapter)
    core.deadlines.remove(i)
    unlink_owner(core, i)
    log_decision(
        core, r.flow, outcome, core.now_ns - r.arrival_ns, r.lease.output_tokens, r.pool, r.tag
    )
    r.lease.outcome = outcome
    core.requests.enter(i, ENDED)
    f.answers += 1
    r.lease.ended_ns, r.due_ns = core.now_ns, core.now_ns + core.settings.answer_ttl_ns
    chain_push(&core.answers, core.requests.items, i)
    f.live -= 1
    core.flows.exempt_live -= f.exempt
    if f.live < 0:
        raise core.fuse.blow("flow: more leases ended than granted")
    core.flows.settle(r.flow)
    if core.requests.rare_of(r).session != NONE:
        end_turn(core, i)
    core.requests.drop_rare(r)
    if has_all_answers(core, r.principal):
        forget(core, i)
    elif core.answers.count > core.settings.answers_max:
        forget(core, core.answers.head)
    return 0


cdef inline bint has_all_answers(Core core, int32_t principal) noexcept:
    """Return whether the stored answers of a principal exceed its share: it cannot push out
    others'."""
    return core.principals.is_limited(principal) and (
        core.principals.items[principal].requests[ENDED]
        > core.principals.places(principal, core.settings.answers_max)
    )


cdef void fetch_oldest(Core core) noexcept:
    # Answers are forgotten in the order of this chain, long after they were last touched. So this
    # prefetches three answers ahead: the places of the next one in the tables, the fields and the
    # flow of the second, and the record of the third.
    cdef int32_t i = core.answers.head
    cdef Request* r
    if i == NONE:
        return
    r = &core.requests.items[i]
    core.ids.prefetch(r.key_hi, r.key_lo)
    core.leases.prefetch(<uint64_t>r.lease.lease_id, 0)
    if r.next == NONE:
        return
    r = &core.requests.items[r.next]
    prefetch_record(r.lease, sizeof(Lease))
    prefetch_line(r.head_state)
    prefetch_line(&core.flows.items[r.flow].answers)
    if r.next != NONE:
        prefetch_record(&core.requests.items[r.next], sizeof(Request))


cdef int forget(Core core, int32_t i) except -1:
    cdef Request* r = &core.requests.items[i]
    if r.state != ENDED:
        return 0  # forgotten already, where no answers are stored
    chain_remove(&core.answers, core.requests.items, i)
    fetch_oldest(core)
    drop_id(core, i)
    core.leases.remove(<uint64_t>r.lease.lease_id, 0)
    core.flows.items[r.flow].answers -= 1
    core.requests.release(i)
    return 0


cdef int deliver_lease_state(Core core, int32_t i, int state) except -1:
    # Its holder has to know: the session that holds it, or the caller that polls.
    cdef Request* r = &core.requests.items[i]
    cdef Verdict v
    if r.owner > 0:
        (<SessionState>core.sessions[r.owner]).notice(r.lease.lease_id, state)
    elif r.owner == 0 and state == LS_ENDED:
        fill_grant(core, &v, i)
        v.outcome = OUT_EXPIRED
        deliver_verdict(core, &v, 0)
    return 0


cdef int drop_void_pass(Core core, const Request* r) except -1:
    """Save the discount of a void lease no more: it has ended. O(1)."""
    cdef bytes pool = core.pool_list[r.pool]
    del core.void_passes[pool][r.lease.lease_id]
    if not core.void_passes[pool]:
        del core.void_passes[pool]
    return 0


cdef int void_lease(Core core, int32_t i) except -1:
    cdef Request* r = &core.requests.items[i]
    if r.state == SUSPECT:
        core.ledger.pools[r.pool].suspect -= 1
    leave_prefill(core, r)
    core.ledger.release(i)
    r.lease.is_void = True
    if r.lease.discount_ppm:  # the list of the pool's leases does not have it any more
        core.void_passes.setdefault(core.pool_list[r.pool], {})[r.lease.lease_id] = (
            r.lease.discount_ppm
        )
    return deliver_lease_state(core, i, LS_VOID)


cdef int void_leases(Core core, int32_t pool) except -1:
    """Void the leases of a pool whose engine restarted: what they held is gone. They stay live,
    without reservation, until their holder ends them or their TTL passes. How many there are.
    O(leases of the pool)."""
    cdef int32_t i = core.ledger.pools[pool].first_lease, after
    cdef int count = 0
    while i != NONE:
        after = core.requests.items[i].lease.pool_next
        void_lease(core, i)
        count += 1
        i = after
    return count
