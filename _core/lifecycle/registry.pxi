# Registry: gives names, flows of classes, and pools their numbers.

cdef int put_name(Core core, bytes name, int32_t flow) except -1:
    """Let a name stand for a flow, or for none where it is gone."""
    cdef Hash128 h = sip128(
        core.k0, core.k1 ^ NAME_SALT, <const uint8_t*><const char*>name, len(name)
    )
    if flow == NONE:
        core.names.remove(h.hi, h.lo)
        end_share(core, name)
    else:
        core.names.put(h.hi, h.lo, flow)
    return 0


cdef int enter_class(Core core, Ask* ask) except -1:
    """Let what is asked be of the tenant's flow in its class, made at its first request.
    O(classes)."""
    cdef int32_t base = ask.flow
    while ask.flow != NONE:
        if core.flows.items[ask.flow].cls == ask.cls:
            return 0
        ask.flow = core.flows.items[ask.flow].sibling
    ask.flow = core.flows.add_sibling(base, ask.cls)
    core.flow_list.append(core.flow_list[base])
    if core.flows.items[base].dry_runs:
        core.dry_run_counts[ask.flow] = [0] * (REFUSAL_KINDS + 1)
    return 0


cdef list flows_of(Core core, bytes name):
    cdef int32_t flow = core.flow_names.get(name, NONE)
    cdef list found = []
    while flow != NONE:
        found.append(flow)
        flow = core.flows.items[flow].sibling
    return sorted(found)


cdef inline bint is_owned(Core core, const Pool* p) noexcept:
    return p.attached > p.configured or core.now_ns < p.owned_until_ns


cdef int32_t new_pool(Core core, bytes name, int32_t principal) except -1:
    # Takes a free place; if none is left, that of a pool without engine, leases or requests, which
    # no other principal owns.
    cdef int32_t pool
    cdef Pool* p
    if core.ledger.count < POOLS_MAX:
        pool = core.ledger.add()
        core.pool_list.append(name)
        core.prefixes.pools.append(PrefixIndex())
        core.flows.candidates.append(Line(core.classes))
        core.quotas.guarantees.throttled_for.append(Line(core.classes))
    else:
        for pool in range(POOLS_MAX):
            p = &core.ledger.pools[pool]
            if (
                p.attached == 0
                and (p.principal == principal or not is_owned(core, p))
                and not p.draining
                and p.live == 0
                and core.flows.queued_for[pool + 1] == 0
            ):
                break
        else:
            raise CallerError(
                CODE_RESOURCE_EXHAUSTED, "pool", f"at most {POOLS_MAX} pools can be in use"
            )
        del core.pool_names[core.pool_list[pool]]
        core.pool_list[pool] = name
        core.ledger.clear(pool)
        core.prefixes.pools[pool] = PrefixIndex()
    core.pool_names[name] = pool
    core.ledger.pools[pool].quota = core.pool_models.get(name, NONE)
    limit_pool(core, pool)
    return pool
