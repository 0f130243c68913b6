# Histograms of a tenant, or of all tenants that are not shown, as dictionaries.

cdef list histogram_rows(Core core, int32_t base):
    """Return a tenant's own histograms (-1: those of all others) in each class that its requests
    may name, or have named. O(classes)."""
    cdef const FlowTimes* t
    cdef int32_t k, c, flow
    cdef list rows = []
    for k in range(core.classes.count):
        c = core.classes.order[k]
        flow = base
        while flow != NONE and core.flows.items[flow].cls != c:
            flow = core.flows.items[flow].sibling
        if base == NONE:
            t = &core.flows.other_times[c]
        elif flow != NONE and core.flows.items[flow].own_times != NULL:
            t = core.flows.items[flow].own_times
        else:
            t = &NO_TIMES
        # A class without a name was one that is exempt now, or was it.
        if core.classes.names[c] and (
            may_have_times(core, base, c) or counted(&t.waited) or counted(&t.evicted)
        ):
            rows.append({
                "request_class": core.classes.names[c].decode(),
                "queue_wait": histogram_figures(&t.waited),
                "evicted_wait": histogram_figures(&t.evicted),
                "time_to_first_token": histogram_figures(&t.first_output),
                "completed": histogram_figures(&t.completed),
                "output_token": histogram_figures(&t.output_token),
            })
    return rows


cdef bint may_have_times(Core core, int32_t base, int32_t cls) noexcept:
    if core.classes.items[cls].gone:
        return False
    return base == NONE or may_name_class(core, base, cls)


cdef tuple histogram_figures(const TimeHistogram* h):
    cdef int k
    cdef list counts = []
    for k in range(TIME_BUCKETS):
        counts.append(h.counts[k])
    return counts, h.sum_us
