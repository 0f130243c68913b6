# Places in the queue that outlive the leader: what followers read, and what the next leader takes
# over. See model/places.pxi.
#
# A kept place counts in the order inside a queue, between flows under `fcfs`, and in the time that
# a request may wait. It is taken once, until the lease TTL and grace have passed in the new term,
# as for replays. All other times begin at this leader, also `waited_ns` of a verdict.

cdef void find_place(
    Core core, Ask* ask, const uint8_t* request_id, size_t size, uint64_t tenant
) noexcept:
    """Note for how long a request has waited at an earlier leader. `tenant` separates those that
    share a flow. Names stand for principal and tenant, whose numbers can differ at each leader.
    O(names)."""
    cdef bytes name = <bytes>core.flow_list[ask.flow]
    cdef bytes caller = b""
    if ask.principal < core.principals.count:
        caller = <bytes>core.principals.names[ask.principal]
    if not caller:  # principals without a name have the same numbers everywhere
        tenant ^= <uint64_t>(ask.principal + 1) << 40
    tenant ^= sip128(
        core.k0, core.k1 ^ NAME_SALT, <const uint8_t*>PyBytes_AS_STRING(name), len(name)
    ).lo
    tenant = mix(tenant, sip128(
        core.k0, core.k1 ^ PLACE_SALT, <const uint8_t*>PyBytes_AS_STRING(caller), len(caller)
    ).lo)
    ask.place = sip128(core.k0, core.k1 ^ tenant, request_id, size)
    ask.waited_ns = core.places.waited_ns(&ask.place, core.now_ns)
    if core.places.former_count and core.now_ns >= core.places.until_ns:
        end_former_places(core)


cdef inline int64_t left_of(int64_t limit_ns, int64_t waited_ns) noexcept nogil:
    """Return the part of a limit that a wait has left; 0: there is no limit."""
    return max(<int64_t>1, limit_ns - waited_ns) if limit_ns else 0


cdef int end_former_places(Core core) noexcept:
    """Forget the places that no client has asked for. O(1)."""
    core.places.former_count = 0
    core.flows.keeps_places = False
    return 0


cdef int begin_term(Core core, list rows, bint cold) except -1:
    """Keep places from now on, and take over those of an earlier leader; `cold`: its rows are not
    known. O(rows + pools)."""
    cdef Hash128 key
    cdef int32_t q
    if core.received or core.places.is_kept:
        invalid("rows", "must be set once, before the first request")
    if len(rows) > PLACES_MAX:
        invalid("rows", f"must be {PLACES_MAX:,} at most, not {len(rows):,}")
    for name, waited_ns in rows:
        if len(name) != sizeof(Hash128):
            invalid("rows", f"a key must have {sizeof(Hash128)} bytes, not {len(name):,}")
        check_range("waited_ns", waited_ns, 0, <int64_t>1 << 60)
    if cold:
        lead_cold(core)
    core.places.begin(
        core.now_ns, core.now_ns + core.settings.lease_ttl_ns + core.settings.lease_grace_ns,
        <int32_t>len(rows),
    )
    for name, waited_ns in rows:
        memcpy(&key, <const char*><bytes>name, sizeof(Hash128))
        core.places.expect(
            &key, min(<int64_t>waited_ns, min(core.settings.queue_ttl_ns, WAITED_MAX_NS))
        )
        core.digest_value = mix(mix(core.digest_value, key.hi), <uint64_t>waited_ns)
    core.flows.keeps_places = core.places.former_count > 0
    for q in range(core.flows.queue_count):
        core.flows.queues[q].in_tree = core.flows.needs_tree(&core.flows.queues[q])
    return 0


cdef list told_places(Core core, int64_t rows_max):
    """Return rows of the places that changed since the last call. O(changes)."""
    cdef list rows = []
    cdef int32_t i
    while len(rows) < rows_max:
        i = core.places.changed.take()
        if i == NONE:
            break
        row = core.places.row(i, core.requests.items[i].state == QUEUED, core.now_ns)
        if row is not None:
            rows.append(row)
    return rows
