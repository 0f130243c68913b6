# From an Admit to a queued request, a refusal or a stored answer.

cdef inline void fetch(Core core, const Ask* ask) noexcept:
    """Fetch what an Admit looks at besides its flow, while its id is looked up: among many flows,
    leases, answers and pools none of it is in the processor's cache. O(1)."""
    core.requests.prefetch()
    core.deadlines.prefetch(core.requests.first_free)
    if ask.flow == NONE:
        return
    if core.flows.one_line:
        fetch_pool(core, ask)
    fetch_places(core.flows, ask.flow, core.flows.sets.line_at(ask.target + 1, 0))
    if core.flows.items[ask.flow].queued:
        return
    # It becomes the first of its queue, and may be granted at once.
    core.requests.head_state_slab.prefetch()
    core.predictor.prefetch(ask.flow)
    core.leases.prefetch(<uint64_t>lease_id_ahead(core), 0)


cdef inline void fetch_places(Flows flows, int32_t flow, int32_t target) noexcept:
    """Fetch where a flow, which is being fetched, leads: to its queue, and if nothing waits there,
    to its places in the order, its idle neighbours and what a grant looks at."""
    cdef const Flow* f = &flows.items[flow]
    if f.first_queue != NONE:
        prefetch_line(&flows.queues[f.first_queue])
    if f.queued:
        return
    prefetch_record(&f.interval_ns, <const uint8_t*>(f + 1) - <const uint8_t*>&f.interval_ns)
    if f.parent == NONE:
        (<Heap>flows.active_at[f.cls]).prefetch(flow)
        (<Heap>(<Line>flows.candidates[target]).heap_at[f.cls]).prefetch(f.first_queue)
    if f.linger_until_ns:
        if f.linger_prev != NONE:
            prefetch_line(&flows.items[f.linger_prev].linger_next)
        if f.linger_next != NONE:
            prefetch_line(&flows.items[f.linger_next].linger_prev)


cdef void fetch_pool(Core core, const Ask* ask) noexcept:
    # The pool that would be served first now. If it is another one, nothing is lost but this.
    cdef Positions positions = core.flows.positions
    cdef int32_t pool = core.ledger.order.ahead() if ask.target == NONE else ask.target
    if not is_one_pool(pool):
        return
    core.ledger.prefetch(pool, ask.flow)
    prefetch_line((<Line>core.flows.candidates[pool + 1]).heap_at[ask.cls])
    prefetch_line(positions.level(ask.cls, pool))
    prefetch_line(positions.shift(ask.cls, pool))
    prefetch_line(&positions.pace[pool])


cdef void identify(
    Core core, Ask* ask, const uint8_t* request_id, size_t size, uint64_t tenant,
    uint64_t prompts,
) noexcept:
    # (principal, tenant, request_id) names a request; what was asked, without its deadlines, is its
    # payload. `tenant` separates those that share the flow of the unknown. Payload 0: any.
    cdef uint64_t h = prompts
    if ask.flow != NONE:
        core.flows.prefetch(ask.flow)
    ask.key = tenant_key(core, ask.flow, tenant, request_id, size)
    core.ids.prefetch(ask.key.hi, ask.key.lo)
    fetch(core, ask)
    h = mix(h, ask.prompt_tokens)
    h = mix(h, ask.prompt_max_tokens)
    h = mix(h, ask.output_max_tokens)
    if ask.adapter.size:
        h = mix(h, ask.adapter_key.lo)
    h = mix(h, (<uint64_t>ask.n << 32) | <uint64_t>ask.sequences)
    # Several names mean other pools as these come and go.
    h = mix(h, ask.pools_hash if ask.pools_hash else <uint64_t>(ask.target + 1))
    if ask.cls:
        h = mix(h, <uint64_t>ask.cls)
    if ask.session.size:
        h = mix(h, sip128(core.k0, core.k1 ^ SESSION_SALT, ask.session.at, ask.session.size).lo)
    ask.payload = h | 1
    ask.waited_ns = 0
    if core.places.is_kept:
        find_place(core, ask, request_id, size, tenant)


cdef bint lacks_place(Core core, int32_t principal, int32_t prompt_tokens) noexcept:
    """Return whether a principal's share of the places has none for one request more. O(1)."""
    cdef const Principal* p
    cdef int64_t tokens_max = core.settings.queue_tokens_max
    if not core.principals.is_limited(principal):
        return False
    p = &core.principals.items[principal]
    if tokens_max:
        tokens_max = core.principals.places(principal, tokens_max)
    return (
        p.requests[QUEUED] >= core.principals.places(principal, core.settings.queue_max)
        or lacks_lease(core, principal, p.requests[QUEUED])
        or is_over(p.queued_tokens, prompt_tokens, tokens_max)
    )


cdef bint lacks_lease(Core core, int32_t principal, int64_t queued) noexcept:
    """Return whether a principal's share of the leases is used up by its leases and its queued
    requests. O(1)."""
    cdef const Principal* p
    if not core.principals.is_limited(principal):
        return False
    p = &core.principals.items[principal]
    return queued + p.requests[LIVE] + p.requests[SUSPECT] >= core.principals.places(
        principal, core.settings.leases_max
    )


cdef bint may_name_class(Core core, int32_t flow, int32_t cls) noexcept:
    """Return whether requests of a tenant may name a class. O(1)."""
    cdef const Flow* f = &core.flows.items[flow]
    return cls == f.default_class or (f.named_classes >> cls) & 1


cdef int take_class(Core core, Ask* ask, const uint8_t* name, int64_t size) except -1:
    """Find the class that a request names, or its tenant's. O(classes)."""
    ask.cls = core.classes.find_slice(name, size) if size else 0
    if ask.cls == NONE:
        invalid("request_class", "unknown class; leave it empty, or name one that is configured")
    if ask.flow == NONE:  # an unknown tenant's, which is refused
        return 0
    if size == 0:
        ask.cls = core.flows.items[ask.flow].default_class
    elif not may_name_class(core, ask.flow, ask.cls):
        invalid("request_class", "the tenant may not name this class")
    elif not grants_class(core, ask.principal, ask.cls):
        not_granted(core, ask.principal, "request_class", "classes")
    return 0


cdef bint grants_class(Core core, int32_t principal, int32_t cls) except -1:
    """Return whether a principal may name a class. O(1), the first time O(name)."""
    if not core.principals.is_limited(principal):
        return True
    return core.principals.may_name_class(principal, cls, core.classes.names[cls])


cdef bint grants_tenant(Core core, int32_t principal, int32_t flow, const Slice* name) except -1:
    """Return whether a principal may vouch for a tenant. `flow`: the tenant's; -1: it is refused;
    the unknown tenants' stands for a tenant of that `name`. O(1), the first time O(name)."""
    cdef bytes known
    if not core.principals.is_limited(principal):
        return True
    if (flow == NONE or flow == core.unknown_flow) and name.size:
        return fits_any(core.principals.tenants[principal], name.at, name.size)
    if flow == NONE:  # an unknown key, which is refused anyway
        return True
    known = core.flow_list[flow]
    return core.principals.may_name_tenant(
        principal, flow, <const uint8_t*>PyBytes_AS_STRING(known), len(known)
    )


cdef int not_granted(Core core, int32_t principal, str field, str grant) except -1:
    name = core.principals.names[principal].decode(errors="replace")
    raise CallerError(
        CODE_PERMISSION_DENIED, field,
        f"is not granted to {name}: add it to `{grant}` of this entry of auth.principals",
    )


cdef int replayed_class(Core core, Ask* ask, const uint8_t* name, int64_t size) except -1:
    # A class that is unknown by now, or may not be named any more, does not end what runs.
    cdef int32_t cls = core.classes.find_slice(name, size)
    if (
        cls == NONE
        or not may_name_class(core, ask.flow, cls)
        or not grants_class(core, ask.principal, cls)
    ):
        cls = core.flows.items[ask.flow].default_class
    ask.cls = cls
    return 0


cdef int take_adapter(Core core, Ask* ask, bytes name) except -1:
    ask.adapter.at = <const uint8_t*>PyBytes_AS_STRING(name)
    ask.adapter.size = PyBytes_GET_SIZE(name)
    check_text("adapter", &ask.adapter, 0, NAME_BYTES_MAX)
    hash_adapter(core, ask)
    return 0


cdef int take_session(Ask* ask, bytes name) except -1:
    ask.session.at = <const uint8_t*>PyBytes_AS_STRING(name)
    ask.session.size = PyBytes_GET_SIZE(name)
    return check_text("session", &ask.session, 0, NAME_BYTES_MAX)


cdef inline void hash_adapter(Core core, Ask* ask) noexcept:
    if ask.adapter.size:
        ask.adapter_key = sip128(
            core.k0, core.k1 ^ ADAPTER_SALT, ask.adapter.at, ask.adapter.size
        )


cdef uint64_t tenant_salt(Core core, int32_t flow, Slice* tenant, Slice* key) noexcept:
    if flow != core.unknown_flow:
        return 0
    return name_salt(core, tenant if tenant.size else key)


cdef inline int64_t queue_ttl_of(Core core, int32_t flow) noexcept:
    """Return the longest wait of a tenant's requests: the queue TTL, or its own if that is shorter.
    O(1)."""
    return shortest(
        core.settings.queue_ttl_ns, core.flows.items[core.flows.items[flow].base].max_wait_ns
    )


cdef int32_t record_of(Core core, Ask* ask) except -1:
    """Make a record of an ask, which is in no queue yet. O(1)."""
    cdef int32_t i = core.requests.allocate()
    cdef int64_t longest_ns
    cdef Request* r = &core.requests.items[i]
    r.flow = ask.flow
    r.target = ask.target
    r.principal = ask.principal
    r.prompt_tokens = ask.prompt_tokens
    r.prompt_max_tokens = ask.prompt_max_tokens
    r.output_max_tokens = ask.output_max_tokens
    if ask.told_output:
        core.requests.own_rare(i).told_output = ask.told_output
    r.sequences = ask.sequences
    r.n = ask.n
    r.reports_progress, r.whole_answer = ask.reports_progress, ask.whole_answer
    r.has_exact_input = ask.has_exact_input
    if ask.adapter.size:
        core.requests.own_rare(i).adapter = core.adapters.hold(
            &ask.adapter_key, &ask.adapter, ask.principal
        )
    r.work = work_of(core, r)
    longest_ns = left_of(queue_ttl_of(core, ask.flow), ask.waited_ns)
    r.due_ns = core.now_ns + shortest(longest_ns, ask.queue_ttl_ns)
    r.has_deadline = ask.queue_ttl_ns > 0
    if ask.deadline_ns:
        core.requests.own_rare(i).deadline_ns = (
            core.now_ns + left_of(ask.deadline_ns, ask.waited_ns)
        )
    return i


cdef inline void note_sizes(Core core, const Request* r) noexcept:
    """Note the largest input and output that were asked for: the bound of Stats goes by them. O(1).
    """
    if r.prompt_tokens > core.prompt_seen_max or r.output_max_tokens > core.output_seen_max:
        core.prompt_seen_max = max(core.prompt_seen_max, <int64_t>r.prompt_tokens)
        core.output_seen_max = max(core.output_seen_max, <int64_t>r.output_max_tokens)
        core.save_rest = True


cdef int64_t admit_request(Core core, Ask* ask) except? -1:
    """Return a handle, or the negated outcome of a refusal. O(log n)."""
    cdef Flow* f = &core.flows.items[ask.flow]
    cdef Request* r
    cdef bint lacks_adapter
    cdef int outcome
    cdef int32_t i
    i = find_request(core, ask)
    if i != NONE:
        return answer_repeat(core, i, ask)
    f.received += 1
    core.received += 1
    fade(core, ask.flow)
    i = record_of(core, ask)
    r = &core.requests.items[i]
    lacks_adapter = ask.adapter.size > 0 and core.requests.rare_of(r).adapter == NONE
    outcome = reason_to_refuse(core, r, lacks_adapter)
    if not outcome or f.dry_runs:
        if lacks_adapter or lacks_place(core, ask.principal, ask.prompt_tokens) or (
            is_set(r.target) and lacks_set(core.flows, r.flow, r.target)
        ):
            outcome = OUT_REJECTED_LIMIT
    if outcome == 0 and core.quotas.count:
        outcome = quota_refusal(core, i)
    if core.quotas.has_budgets:
        outcome = budget_refusal(core, i, outcome)
    if outcome == 0 and ask.waited_ns == 0:
        outcome = refuse_early(core, i)
    if f.dry_runs:
        outcome = note_dry_run(core, i, outcome)
    if outcome:
        note_refused(core, i, outcome)
        log_rejection(
            core.rejection_log, core.requests, i, &ask.key, ask.principal, outcome, core.now_ns
        )
        core.adapters.let_go(core.requests.rare_of(r).adapter)
        core.requests.release(i)
        return -refuse(core, ask.flow, outcome, ask.tag)
    core.seq += 1
    r.seq = core.places.take(&ask.place) if ask.waited_ns else core.seq
    r.payload = ask.payload
    r.tag = ask.tag
    r.owner = ask.owner
    r.arrival_ns = core.now_ns
    if core.flows.place_from is not None:
        core.requests.own_rare(i).place = asked_place(core.flows, r)
    note_sizes(core, r)
    if f.queued:  # the last in line gets a neighbour
        prefetch_line(&core.requests.items[core.flows.queues[f.first_queue].chain.tail].next)
    else:
        core.predictor.prefetch_sketch(ask.flow)
    put_id(core, i, ask)
    core.deadlines.put(i, r.due_ns, r.seq)
    if f.dry_runs or (f.refuses and not core.quotas.asks_store):
        take_quota(core, i)
    forecast(core, i)
    if ask.session.size:
        join_session(core, i, &ask.session)
    line_up(core, i)
    if f.dry_runs:
        core.dry_running.put(r.flow, r.flow, 0)
    core.requests.enter(i, QUEUED)
    if core.places.is_kept:
        core.places.note(i, &ask.place, core.now_ns - ask.waited_ns)
    link_owner(core, i)
    return core.requests.handle(i)


cdef int64_t answer_repeat(Core core, int32_t i, Ask* ask) except? -1:
    # A retry or a hedge: one reservation, one charge, one answer, to the call that asked last.
    cdef Request* r = &core.requests.items[i]
    if r.payload and r.payload != ask.payload:
        raise CallerError(
            CODE_ALREADY_EXISTS, "request_id", "was used for another request of this tenant"
        )
    if r.state == QUEUED and ask.owner and ask.owner == r.owner:
        raise CallerError(
            CODE_ALREADY_EXISTS, "request_id", "is already open on this stream"
        )
    if r.state != ENDED and ask.owner != r.owner:
        adopt(core, i, ask.owner, ask.tag)
    return core.requests.handle(i)


cdef int reason_to_refuse(Core core, Request* r, bint lacks_adapter) except -1:
    """Return the outcome that refuses a request at its arrival, or 0. O(pools).

    `lacks_adapter`: no place is left for its adapter, so `can_hold` leaves out what that takes."""
    cdef int64_t queued = core.flows.exempt_queued, tokens = core.flows.exempt_tokens
    cdef int64_t places
    cdef int32_t p
    cdef bint attached = False, fits = False, drains = False
    if core.draining:
        return OUT_REJECTED_DRAINING
    for p in range(core.ledger.count):
        if fits:
            break
        if core.flows.may_take(p, r.target):
            if core.ledger.pools[p].attached:
                attached = True
                if not fits and core.ledger.can_hold(p, r):
                    fits = core.ledger.serves(p)
                    drains = not fits
    if not attached:
        return OUT_REJECTED_NO_POOL
    if not fits and drains and lacks_adapter:
        return OUT_REJECTED_LIMIT  # with its adapter, it may be larger than the drained pools
    if not fits:
        return OUT_REJECTED_DRAINING if drains else OUT_REJECTED_TOO_LARGE
    if is_full_to(core, r):
        return OUT_REJECTED_FLOW_QUEUE_FULL
    if not core.flows.items[r.flow].exempt:  # these have as many places of their own
        queued = core.requests.states[QUEUED] - queued
        tokens = core.flows.queued_tokens + core.flows.held_tokens - tokens
    places = slots_open_to(&core.flows.retry_slots, core.settings.queue_max, core.now_ns)
    if queued >= places or is_over(tokens, r.prompt_tokens, core.settings.queue_tokens_max):
        return OUT_REJECTED_QUEUE_FULL
    return 0


cdef bint is_full_to(Core core, const Request* r) noexcept:
    """Return whether the queue of its tenant has no place for a request: the queue is full, by
    requests or by tokens, and the request's principal has its part of these. O(1)."""
    cdef Flow* f = &core.flows.items[r.flow]
    cdef int64_t places = slots_open_to(
        &f.refusals.retry_slots, core.settings.flow_queue_max, core.now_ns
    )
    cdef int64_t tokens_max = core.settings.flow_queue_tokens_max
    cdef bint lacks_place = f.queued + f.held >= places
    cdef bint lacks_tokens = is_over(f.queued_tokens + f.held_tokens, r.prompt_tokens, tokens_max)
    cdef Voucher first, own
    cdef int64_t sharers
    if not (lacks_place or lacks_tokens):
        return False
    first = own = first_voucher(f)
    if r.principal != f.voucher:
        own = core.flows.vouchers.of(r.flow, r.principal)
    sharers = f.vouchers + (first.queued > 0) + (own.queued == 0)
    if lacks_place and own.queued >= max(<int64_t>1, places // sharers):
        return True
    return lacks_tokens and is_over(
        own.tokens, r.prompt_tokens, max(<int64_t>1, tokens_max // sharers)
    )


cdef inline bint is_over(int64_t queued, int64_t more, int64_t most) noexcept nogil:
    # A request that is alone in its queue may have any size: else it could never run.
    return most and queued and queued + more > most


cdef int refuse(Core core, int32_t flow, int outcome, uint64_t tag) except -1:
    if flow != NONE:
        count_refusal(core, flow, outcome)
    else:
        core.refusals[refusal_place(outcome)] += 1
    core.rejected += 1
    log_decision(core, flow, outcome, 0, 0, NONE, tag)
    return outcome


cdef int64_t admit_message(
    Core core, AdmitMessage* m, int32_t owner, int32_t principal, uint64_t tag,
    int64_t queue_ttl_ns,
) except? -1:
    """Admit a parsed message: a handle, or the negated outcome of a refusal."""
    cdef Ask ask
    cdef int64_t handle
    m.flow = ask.flow = flow_of(core, &m.tenant, &m.key)
    if ask.flow != NONE:
        core.flows.prefetch(ask.flow)
    ask.target = m.target = named_target(core, m)
    ask.pools_hash = m.pools_hash
    ask.owner = owner
    ask.principal = principal
    if not grants_tenant(core, principal, ask.flow, &m.tenant):
        not_granted(core, principal, "tenant" if m.tenant.size else "api_key_sha256", "tenants")
    if is_born(core, ask.flow, &m.tenant, m.proof):
        m.flow = ask.flow = flow_at_sight(core, &m.tenant, principal)
    take_class(core, &ask, m.request_class.at, m.request_class.size)
    ask.tag = tag
    if ask.flow == NONE:
        core.received += 1
        return -refuse(core, NONE, OUT_REJECTED_UNKNOWN_TENANT, tag)
    if core.unknown_refused and ask.flow == core.unknown_flow:
        count_dry_run(core, ask.flow, refusal_place(OUT_REJECTED_UNKNOWN_TENANT))
    if ask.target == NONE and m.pools:
        core.received += 1
        core.flows.items[ask.flow].received += 1
        return -refuse(core, ask.flow, OUT_REJECTED_NO_POOL, tag)
    ask.prompt_tokens = <int32_t>m.prompt_tokens
    ask.n = <int32_t>m.n
    ask.prompt_max_tokens = <int32_t>m.prompt_max_tokens
    ask.output_max_tokens = <int32_t>m.max_output_tokens
    ask.sequences = <int32_t>(m.prompts * m.n)
    ask.deadline_ns = m.deadline_ms * NS_PER_MS
    ask.reports_progress, ask.whole_answer = m.reports_progress, m.whole_answer
    ask.has_exact_input = m.has_exact_input
    ask.told_output = 0
    ask.adapter, ask.session = m.adapter, m.session
    hash_adapter(core, &ask)
    identify(
        core, &ask, m.request_id.at, m.request_id.size,
        tenant_salt(core, ask.flow, &m.tenant, &m.key), m.prompts_hash,
    )
    # The call's own time counts from now, and what the message says from the arrival.
    ask.queue_ttl_ns = shortest(
        queue_ttl_ns,
        left_of(shortest(m.queue_ttl_ms, m.deadline_ms) * NS_PER_MS, ask.waited_ns),
    )
    enter_class(core, &ask)
    m.flow = ask.flow
    core.recent_ids.note(m.request_id.at, m.request_id.size, principal)
    handle = admit_request(core, &ask)
    note_client_id(core, &ask, &m.client_id)
    if m.hashes and core.settings.prefix_blocks_max:
        keep_wire_hashes(core, handle, m)
    return handle


cdef int32_t flow_of(Core core, Slice* tenant, Slice* key) except? -1:
    cdef Hash128 h
    cdef int32_t flow
    known = None
    if tenant.size:
        h = sip128(core.k0, core.k1 ^ NAME_SALT, tenant.at, tenant.size)
        flow = core.names.get(h.hi, h.lo)
        return core.unknown_flow if flow == NONE else flow
    elif key.size:
        known = core.keys.get(slice_bytes(key))
    return core.unknown_flow if known is None else known


cdef inline bint is_born(Core core, int32_t flow, const Slice* tenant, int64_t proof) noexcept:
    """Return whether a name that stands for this flow gets one of its own."""
    return core.unknown_own and flow == core.unknown_flow and tenant.size > 0 and proof > 0
