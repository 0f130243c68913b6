# Positions in several pools, in the rows that outlive the process. The row of a flow has its
# positions; the row of a node also has the level of its children in each pool. The row of a pool
# has the levels of the root. A pool that is not registered again after a restart keeps its saved
# values.

cdef int write_positions(Core core, Writer w, int32_t flow) except -1:
    """Write field 8 of a flow's row. O(pools)."""
    cdef int32_t n = core.flows.items[flow].first_position
    cdef int64_t level
    cdef Position p
    while n != NONE:
        p = core.flows.positions.items[n]
        if p.waits_at != NONE:  # it is lifted, since after the restart it waits for nothing
            keep_lift(core.flows, &p)
        level = core.flows.family_of(flow).levels[p.pool] if is_node(core.flows, flow) else 0
        write_position(w, <bytes>core.pool_list[p.pool], p.key, p.foreign, level)
        n = p.next_position
    for name, positions in core.saved_positions.items():
        if flow in positions:
            key, foreign, level = positions[flow]
            write_position(w, <bytes>name, key, foreign, level)
    return 0


cdef int write_position(
    Writer w, bytes pool, int64_t key, int64_t foreign, int64_t level
) except -1:
    cdef size_t before = w.length()
    w.varint(4, level)
    w.text(3, pool)
    w.varint(2, foreign)
    w.varint(1, key)
    return w.close(8, before)


cdef list levels_in(Core core, bytes name):
    """Return class and level of each class that has one in a pool. O(classes)."""
    cdef int32_t cls, pool
    if name in core.saved_levels:  # it is not registered again, or still alone
        return core.saved_levels[name]
    if name not in core.pool_names:
        return []
    pool = core.pool_names[name]
    return [
        (cls, core.flows.positions.level(cls, pool)[0])
        for cls in range(CLASSES_MAX)
        if core.flows.positions.level(cls, pool)[0]
    ]


cdef int read_positions(Core core, int32_t flow, Cursor* c, bint applies) except -1:
    """Keep what a flow's row says of pools, until they come. O(bytes)."""
    cdef int64_t v[4]
    cdef int64_t tag
    cdef Cursor inner, again
    cdef Slice pool
    while True:
        tag = read_tag(c)
        if tag == 0:
            return 0
        if tag != 8 << 3 | LENGTH:
            skip(c, tag)
            continue
        inner = read_message(c)
        again = inner
        read_numbers(&inner, v, 4)
        check_range("key", v[0], 0, VTC_MAX)
        check_range("foreign", v[1], 0, VTC_MAX)
        check_range("level", v[3], 0, VTC_MAX)
        memset(&pool, 0, sizeof(Slice))
        while True:
            tag = read_tag(&again)
            if tag == 0:
                break
            if tag == 3 << 3 | LENGTH:
                pool = read_slice(&again)
            else:
                skip(&again, tag)
        check_pool_name(&pool)
        if applies and flow != NONE:
            name = slice_bytes(&pool)
            if name in core.saved_positions or len(core.saved_positions) < core.settings.pools_max:
                core.saved_positions.setdefault(name, {})[flow] = (v[0], v[1], v[3])


cdef int read_levels(Core core, bytes pool, Cursor* c, bint applies) except -1:
    cdef int64_t tag, level = 0
    cdef int32_t cls
    while True:
        tag = read_tag(c)
        if tag == 0:
            return 0
        if tag != 6 << 3 | LENGTH:
            skip(c, tag)
            continue
        cls = read_of_class(core, read_message(c), "level", &level)
        if applies and cls != NONE:
            core.saved_levels.setdefault(pool, []).append((cls, level))
