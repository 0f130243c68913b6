# Headroom: blocks of a pool that the ledger does not promise.
#
# Adaptive: a preemption shows that too much was promised, so headroom rises at once, by a step for
# each preemption. While requests wait for cache that the engine has not filled, headroom falls
# slowly. It falls below 0 if reservations are larger than what is used; the pool is then
# overcommitted. Before the first preemption it falls faster, so that it reaches its level within a
# minute. After that it falls only by what served requests have earned: a preemption costs what
# 2,000 served requests earn. So fewer than one served request in a thousand is preempted for the
# search, however long the search takes.
#
# Share-aware: room comes free only when a sequence ends, so a flow that sends now and then would
# wait for such an end each time. A flow above its max-min share of a pool therefore leaves a part
# of that pool free: the most that flows below their shares took lately in half a second. If one
# flow is alone, the part is 0.

cdef int64_t LIGHT_WINDOW_NS = 500_000_000
cdef int64_t TELEMETRY_FRESH_NS = 5_000_000_000

cdef enum:
    LIGHT_WINDOWS = 64  # after this number of windows without any, nothing is kept
    KEPT_PART = 8  # at most this part of the pool
    PROBE_PPM_S = 5_000  # ppm of the capacity a second, until the first preemption
    RELAX_PPM_S = 500
    RELAX_SERVED_PPM = 10
    PREEMPTED_PPM = 20_000
    PREEMPTED_EACH_PPM = 2_000
    PREEMPTED_MAX = 10
    FULL_PERCENT = 95
    PART_UNITS = 1 << 16  # units of a block, which count parts of parts


cdef void set_headroom(Pool* p, int64_t ppm) noexcept:
    p.headroom_ppm = ppm
    p.headroom_blocks = p.capacity_blocks * ppm // 1_000_000  # towards 0


cdef void adapt_headroom(
    Core core, Pool* p, int64_t preempted, int64_t elapsed_ns
) noexcept:
    """Adapt the headroom once for each report of the engine, with the preemptions since the last.
    O(1)."""
    cdef int64_t ppm = p.headroom_ppm
    cdef int64_t pace = PROBE_PPM_S if p.probes else RELAX_PPM_S
    cdef int64_t fall = pace * min(elapsed_ns, TELEMETRY_FRESH_NS) // NS_PER_S
    if not p.probes:
        fall = min(fall, RELAX_SERVED_PPM * p.served)
    if preempted > 0:
        p.probes = False
        ppm += PREEMPTED_PPM + PREEMPTED_EACH_PPM * min(preempted, <int64_t>PREEMPTED_MAX)
    elif (
        p.pressed
        and p.engine_used_tokens * 100 < p.capacity_blocks * p.block_size * FULL_PERCENT
    ):
        ppm -= fall
    p.pressed = False
    p.served = 0
    set_headroom(p, min(max(ppm, core.settings.headroom_min_ppm), core.settings.headroom_max_ppm))


cdef int64_t faded(const Pool* p, int64_t windows) noexcept:
    # Each window that has ended lets the greatest fade by a sixteenth. O(LIGHT_WINDOWS).
    cdef int64_t kept = p.kept_milli, k
    if windows >= LIGHT_WINDOWS:
        return 0
    for k in range(windows):
        kept = max(kept - (kept >> 4), p.light_milli if k == 0 else 0)
    return kept


cdef int64_t kept_tokens(const Pool* p, int64_t now_ns) noexcept:
    """Return the tokens of the pool that flows above their share leave free. O(LIGHT_WINDOWS)."""
    cdef int64_t kept
    if p.light_since_ns < 0:
        return 0
    kept = faded(p, (now_ns - p.light_since_ns) // LIGHT_WINDOW_NS)
    if now_ns - p.light_since_ns < LIGHT_WINDOW_NS:
        kept = max(kept, p.light_milli)
    return min(kept // 1000, p.capacity_blocks // KEPT_PART * p.block_size)


cdef void note_light(Pool* p, int64_t now_ns, int64_t blocks) noexcept:
    """Count blocks that a flow below its share took. O(LIGHT_WINDOWS)."""
    cdef int64_t windows
    if blocks > p.capacity_blocks // KEPT_PART:
        return  # the part that is kept would have no room for such a request
    windows = (now_ns - p.light_since_ns) // LIGHT_WINDOW_NS
    if p.light_since_ns < 0 or windows >= LIGHT_WINDOWS:
        # Nothing is kept, so the first window begins here, as after a restart.
        p.light_since_ns = now_ns
        p.kept_milli = 0
        p.light_milli = 0
    elif windows:
        p.kept_milli = faded(p, windows)
        p.light_milli = 0
        p.light_since_ns += windows * LIGHT_WINDOW_NS
    p.light_milli += blocks * p.block_size * 1000


cdef inline bint has_shares(Core core) noexcept:
    # Shares are what counters are for.
    return core.flows.recent_count > 1 and core.flows.order == ORDER_COUNTER


cdef inline int64_t sharing_weight(Flows flows, int32_t node) noexcept:
    """Return the weight of a node and its siblings that were active lately. The node itself counts
    in any case: the request may be the first below it. O(1)."""
    cdef int64_t weight = flows.recent_weight_of(node)[0]
    return weight if flows.is_recent(node) else weight + flows.items[node].weight_milli


cdef bint is_above_share(Core core, int32_t pool, int32_t flow, int64_t blocks) noexcept:
    """Return whether a flow with `blocks` more would hold more than its part of a pool: by weight
    among its siblings that were active lately, of the part of their node. Other pools do not count:
    their callers say how large they are. O(levels)."""
    cdef const Pool* p = &core.ledger.pools[pool]
    cdef const Flow* f = &core.flows.items[flow]
    cdef int64_t held = p.held[flow] if flow < p.held_count else 0
    cdef int32_t node = f.parent
    cdef wide part
    if not has_shares(core):
        return False
    part = <wide>max(p.capacity_blocks, p.promised_blocks) * PART_UNITS
    while node != NONE:
        part = part * core.flows.items[node].weight_milli // sharing_weight(core.flows, node)
        node = core.flows.items[node].parent
    return (
        <wide>(held + blocks) * PART_UNITS * core.flows.recent_weight_of(flow)[0]
        > part * f.weight_milli
    )
