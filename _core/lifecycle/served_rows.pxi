# Service of flows at this member, for the other members of a cluster: counted at each charge, and
# handed out with the names that all members know.

cdef inline int count_served(
    Core core, int32_t flow, int32_t pool, int64_t weighted_micro, int64_t weight_milli
) except -1:
    """Count a charge of a flow for service in a pool. Expected O(1)."""
    cdef int domain = core.flows.positions.domain
    cdef int32_t node
    if not core.served_rows.on or domain == DOMAIN_POOL or weighted_micro == 0:
        return 0
    node = core.flows.positions.model[pool] if domain == DOMAIN_MODEL else NONE
    return core.served_rows.add(flow, node, weighted_micro * weight_milli // 1000)


cdef int name_served(Core core) except -1:
    """Give all rows their names now, because a flow is about to lose its own. O(rows)."""
    cdef int32_t at
    cdef const ServedRow* row
    for at in range(core.served_rows.count):
        row = &core.served_rows.items[at]
        core.served_rows.ready.append((
            core.flow_list[row.flow], core.classes.names[core.flows.items[row.flow].cls],
            domain_name(core, row.domain), row.charged, row.refunded,
        ))
    core.served_rows.clear()
    return 0


cdef bytes domain_name(Core core, int32_t node):
    return (<bytes>core.quota_keys[node])[len(QUOTA_ROW):] if node != NONE else b""


cdef list take_served(Core core, int64_t rows_max):
    """Return at most `count` rows; none once all were handed out. O(rows)."""
    cdef list rows
    if not core.served_rows.ready:
        name_served(core)
    rows = core.served_rows.ready[:rows_max]
    del core.served_rows.ready[:rows_max]
    return rows
