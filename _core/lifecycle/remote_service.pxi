# Service at other members of a cluster. It is charged like service in another pool of this process.
# It moves the flow's counter, and its keys in the pools of the domain. The lead of each pool bounds
# how far that brings the flow ahead of the others there; the excess is forgiven.
#
# So a member that was cut off for an hour catches up at once, and starves no tenant.

# Less than a counter may add at once, see VTC_REBASE.
cdef int64_t REMOTE_MAX = <int64_t>1 << 61


cdef int share_service(Core core) except -1:
    """Count what flows are served here, for other members, and let flows stand in pools by
    positions also while there is one pool, so that its lead binds. O(flows + queues * log n)."""
    if has_weights(core):
        invalid("weight_milli", "the members of a cluster share no groups with a weight")
    core.served_rows.on = True
    if core.ledger.count == 1 and not core.flows.local:
        return begin_positions(core)
    return 0


cdef inline int64_t weigh(int64_t micro, int64_t weight_milli) noexcept:
    """Divide service of 0 or more by a weight; the result is at most REMOTE_MAX. O(1)."""
    cdef int64_t whole = micro // weight_milli
    if whole >= REMOTE_MAX // 1000:
        return REMOTE_MAX
    return whole * 1000 + micro % weight_milli * 1000 // weight_milli


cdef int32_t flow_in_class(Core core, bytes tenant, bytes cls) except -2:
    """Return the flow of a tenant in a class; -1: it has not asked for anything there.
    O(classes)."""
    cdef int32_t flow = core.flow_names.get(tenant, NONE), c = core.classes.find(cls)
    while flow != NONE and (c == NONE or core.flows.items[flow].cls != c):
        flow = core.flows.items[flow].sibling
    return flow


cdef int32_t domain_of(Core core, bytes name) except -2:
    """Return the number that stands for all pools of a domain; -1: there are none."""
    if core.flows.positions.domain == DOMAIN_POOL or core.ledger.count == 0:
        return NONE
    if not name:
        return remote_pool(NONE)
    node = core.quota_names.get(name)
    return NONE if node is None else remote_pool(node)


cdef bint charge_remote(
    Core core, bytes tenant, bytes cls, bytes domain, int64_t charged, int64_t refunded
) except -1:
    """Charge a flow for what it was served elsewhere; whether it is known here.
    O(classes + positions * log n)."""
    cdef int32_t flow = flow_in_class(core, tenant, cls), pool = domain_of(core, domain)
    cdef int64_t weighted, weight
    if flow == NONE or pool == NONE:
        return False
    weight = core.flows.items[flow].weight_milli
    if charged >= refunded:
        weighted = weigh(charged - refunded, weight)
    else:
        weighted = -weigh(refunded - charged, weight)
    charge_flow(core.flows, flow, weighted, pool)
    core.digest_value = mix(mix(core.digest_value, <uint64_t>flow), <uint64_t>weighted)
    return True


cdef int check_remote(Core core, rows) except -1:
    """Refuse a row that no member sends, before anything is charged. O(rows)."""
    for tenant, cls, domain, charged, refunded in rows:
        if not (isinstance(tenant, bytes) and isinstance(cls, bytes) and isinstance(domain, bytes)):
            invalid("rows", "names must be bytes")
        check_range("charged", charged, 0, VTC_MAX)
        check_range("refunded", refunded, 0, VTC_MAX)
    return 0
