# Overload: how busy a pool is. Lending, borrowing and refusals depend on it.
#
# A pool is nearly overloaded if its promises reach the saturation, or a request waits for room. It
# is overloaded if its next request has waited for longer than the target, or the engine preempted.
# The level rises at once. It falls by one if the pool has been calm for `overload_hold_ns`. Calm
# means below half the target and 7/8 of the saturation. A request that waits for a quota, or for
# the next batch of prefills, does not count: more room would not help it.

cdef inline int64_t held_tokens(const Pool* p) noexcept:
    """Return the tokens that are promised, owed since a restart, or held by others."""
    return p.promised_blocks * p.block_size + unaccounted_tokens(p)


cdef inline int64_t fill_ppm(const Pool* p) noexcept:
    """Return the part of the capacity that is held; it may exceed the capacity."""
    return <int64_t>(<wide>held_tokens(p) * 1_000_000 // (p.capacity_blocks * p.block_size))


cdef inline bint is_filled(const Pool* p, int64_t ppm) noexcept:
    """Return whether fill_ppm() is at least this, without its division: each event asks for it."""
    return <wide>held_tokens(p) * 1_000_000 >= <wide>ppm * (p.capacity_blocks * p.block_size)


cdef inline bint lacks_room(const Pool* p) noexcept:
    """Return whether more room would let the next request of a pool go."""
    return p.reason not in (
        WAIT_NONE, WAIT_DETACHED, WAIT_DRAINING, WAIT_STRICT, WAIT_QUOTA, WAIT_DELAY,
        WAIT_SESSION_CAP,
    )


cdef inline int64_t stood_ns(Core core, int32_t i, int64_t now_ns) noexcept:
    """Return how long a request has been in the line; -1: there is none."""
    return NONE if i == NONE else now_ns - core.requests.items[i].head_state.lined_ns


cdef int load_level(
    Core core, const Pool* p, int64_t waits_ns, int64_t target_ns, int64_t saturation_ppm
) noexcept:
    if waits_ns > target_ns:
        return LOAD_OVER
    return LOAD_NEARLY if waits_ns >= 0 or is_filled(p, saturation_ppm) else LOAD_UNDER


cdef int lowest_level(Core core, const Pool* p, int64_t waits_ns) noexcept:
    """Return the lowest level that a pool with these figures may fall to."""
    return load_level(
        core, p, waits_ns, core.settings.queue_target_ns // 2, core.settings.saturation_ppm * 7 // 8
    )


cdef int level_now(Core core, const Pool* p, int64_t waits_ns, int64_t now_ns) noexcept:
    """Return the level of a pool by the wait of its next request for room; -1: none waits."""
    cdef int64_t fallen = 0
    cdef const Settings* s = &core.settings
    cdef int level = load_level(core, p, waits_ns, s.queue_target_ns, s.saturation_ppm)
    if level >= p.overload:
        return level
    if p.calm_since_ns >= 0:
        fallen = min((now_ns - p.calm_since_ns) // s.overload_hold_ns, <int64_t>LOAD_OVER)
    return max(min(p.overload, lowest_level(core, p, waits_ns)), <int>(p.overload - fallen))


cdef int overload_now(Core core, int32_t pool, int64_t now_ns) except -1:
    """Return the level of a pool at this time, the last event's or later. Changes nothing.
    O(classes)."""
    cdef Pool* p = &core.ledger.pools[pool]
    cdef bint aged
    cdef int64_t waits_ns = NONE
    if lacks_room(p):
        waits_ns = stood_ns(core, head_for(core, pool, &aged), now_ns)
    return level_now(core, p, waits_ns, now_ns)


cdef void judge_load(Core core, int32_t pool) noexcept:
    """Take the level of a pool that has granted what it can; its next request is known. O(1)."""
    cdef Pool* p = &core.ledger.pools[pool]
    cdef int64_t waits_ns = stood_ns(core, p.next, core.now_ns) if lacks_room(p) else NONE
    cdef int level = level_now(core, p, waits_ns, core.now_ns)
    if level != p.overload:
        p.overload = level
        p.calm_since_ns = NONE
    if lowest_level(core, p, waits_ns) >= level:
        p.calm_since_ns = NONE
    elif p.calm_since_ns < 0:
        p.calm_since_ns = core.now_ns


cdef inline void note_preemption(Core core, Pool* p) noexcept:
    p.overload = LOAD_OVER
    p.calm_since_ns = core.now_ns


cdef int overload_of_all(Core core) except -1:
    """Return the least level of all pools that serve, because a waiting request may go to any;
    LOAD_UNDER if there is none. O(pools * classes)."""
    cdef int32_t pool
    cdef int level = LOAD_OVER + 1
    for pool in range(core.ledger.count):
        if core.ledger.serves(pool):
            level = min(level, overload_now(core, pool, core.now_ns))
    return LOAD_UNDER if level > LOAD_OVER else level
