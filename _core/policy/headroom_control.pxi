# How large the headroom of a pool has to be, so that few requests are preempted.
#
# A grant keeps the predicted peak of a pool within its room, the capacity less the headroom. A round
# ends when as many requests were served as run, and after 20 s at the latest. The most that the
# engine held in a round, less the room, is the round's excess. Every round in which requests wait
# for room has one, so its average and its mean deviation, the spread, are known after a few rounds.
# The headroom is the average and so many spreads as few rounds exceed.
#
# How many spreads that are, preemptions correct. Each adds a step, and each served request takes
# off such a part of the step that they cancel out at the target. The correction also fades with
# time, so that one unlucky preemption costs minutes where few requests are served.
#
# The core has no clock: time is what passes between the reports of the engine.

cdef int64_t TELEMETRY_FRESH_NS = 5_000_000_000
cdef int64_t ROUND_MAX_NS = 20_000_000_000
cdef int64_t FORGET_NS = 600_000_000_000
cdef int64_t STEP_MICRO = 250_000
# Until the averages are full it falls no farther than to this part: first predictions are too long.
cdef int64_t EARLY_MIN_PPM = 40_000
cdef int64_t CORRECTION_MIN_MICRO = -1_000_000
cdef int64_t CORRECTION_MAX_MICRO = 2_000_000

cdef enum:
    ROUNDS_KEPT = 64
    RISE_ROUNDS = 8  # the first rounds teach no faster than so many that more is needed
    ROUND_SERVED_MIN = 8
    LN_2_MILLI = 693
    EULER_MILLI = 577
    SPREADS_MIN_MILLI = 1_000
    SPREADS_MAX_MILLI = 6_000
    FALL_PPM_S = 1_000  # at most, because engines fill only as fast as requests grow
    PREEMPTED_MAX = 4  # that count in a round: what is thrown out together has one cause
    SPREAD_MIN_PPM = 1_000
    EXCESS_MAX_PPM = 4_000_000
    OUTLIER_SPREADS = 4  # an excess farther from the average counts as so far


cdef inline int64_t preemptions_wanted_ppm(const Pool* p) noexcept:
    """Return the target: preempted requests of a million served ones."""
    return 1_000


cdef inline int64_t bounded(int64_t value, int64_t least, int64_t most) noexcept:
    return min(max(value, least), most)


cdef inline int64_t headroom_ppm(const HeadroomControl* h) noexcept:
    """Return the headroom that was learned. O(1)."""
    return h.excess_ppm + (
        (h.spreads_milli * 1_000 + h.correction_micro) * h.spread_ppm // 1_000_000
    )


cdef void set_headroom(Core core, Pool* p, int64_t ppm) noexcept:
    """Let a pool have a headroom, within the bounds of the settings. O(1)."""
    p.headroom.ppm = bounded(
        ppm, core.settings.headroom_min_ppm, core.settings.headroom_max_ppm
    )
    p.headroom_blocks = p.capacity_blocks * p.headroom.ppm // 1_000_000  # towards 0


cdef void adapt_headroom(
    Core core, Pool* p, int64_t preempted, int64_t elapsed_ns
) noexcept:
    """Adapt the headroom once for each report of the engine, with the preemptions since the last.
    O(1)."""
    cdef HeadroomControl* h = &p.headroom
    cdef int64_t least_ppm
    elapsed_ns = min(elapsed_ns, TELEMETRY_FRESH_NS)
    preempted = min(preempted, <int64_t>PREEMPTED_MAX - h.preempted)
    h.preempted += preempted
    h.correction_micro = min(h.correction_micro + STEP_MICRO * preempted, CORRECTION_MAX_MICRO)
    h.round_ns += elapsed_ns
    if p.pressed:
        h.pressed_ns += elapsed_ns
    p.pressed = False
    h.used_tokens = max(h.used_tokens, p.engine_used_tokens)
    if h.round_ns >= ROUND_MAX_NS or h.served >= max(<int64_t>ROUND_SERVED_MIN, p.live):
        least_ppm = h.ppm - FALL_PPM_S * h.round_ns // NS_PER_S
        end_round(p)
        if h.rounds < ROUNDS_KEPT:
            least_ppm = max(least_ppm, min(h.ppm, EARLY_MIN_PPM))
        set_headroom(core, p, max(headroom_ppm(h), least_ppm))
    elif preempted:
        set_headroom(core, p, max(headroom_ppm(h), h.ppm))


cdef int64_t spreads_for(const Pool* p, int64_t served) noexcept:
    """Return the spreads above its average that the excess of a round reaches so rarely as the
    target says, in thousandths, for rounds of so many served requests.

    The greatest of many values has Gumbel's distribution, whose scale is about the mean deviation:
    a part q of them is beyond the average and -ln(q) - 0.577 scales. What engines hold has lighter
    tails, so seven eighths of that are taken. O(1)."""
    cdef int64_t one_in = 1_000_000 // max(
        <int64_t>1, preemptions_wanted_ppm(p) * max(<int64_t>1, served)
    )
    return bounded(
        (ln_milli(one_in) - EULER_MILLI) * 7 // 8, SPREADS_MIN_MILLI, SPREADS_MAX_MILLI
    )


cdef int64_t ln_milli(int64_t value) noexcept:
    """Return 1,000 times the natural logarithm; between powers of two in a straight line. O(1)."""
    cdef int64_t twice = 0, scaled = max(<int64_t>1, value) << 10
    while scaled >= 2 << 10:
        scaled >>= 1
        twice += 1
    return LN_2_MILLI * ((twice << 10) + scaled - (1 << 10)) >> 10


cdef void end_round(Pool* p) noexcept:
    """Learn from a round in which requests waited for room for most of the time. O(1)."""
    cdef HeadroomControl* h = &p.headroom
    cdef bint pressed = h.pressed_ns * 4 >= h.round_ns * 3
    cdef int64_t tokens = p.capacity_blocks * p.block_size, earned
    if not pressed:
        h.skip_ns = max(h.skip_ns, <int64_t>1)
    elif h.skip_ns:
        h.skip_ns = max(<int64_t>0, h.skip_ns - h.round_ns)
    else:
        earned = STEP_MICRO * h.served // 1_000 * preemptions_wanted_ppm(p) // 1_000
        h.correction_micro = max(h.correction_micro - earned, CORRECTION_MIN_MICRO)
        h.spreads_milli = spreads_for(p, h.served)
        learn_excess(
            h,
            <int64_t>(<wide>min(h.used_tokens, tokens) * 1_000_000 // tokens)
            - 1_000_000 + h.before_ppm,
        )
    h.correction_micro -= h.correction_micro * h.round_ns // FORGET_NS
    h.before_ppm, h.round_ppm = h.round_ppm, h.ppm
    h.round_ns = h.pressed_ns = h.served = h.preempted = h.used_tokens = 0


cdef void learn_excess(HeadroomControl* h, int64_t excess_ppm) noexcept:
    """Count the excess of a round in the averages. The first replaces what the headroom began
    with. O(1)."""
    cdef int64_t off = excess_ppm - h.excess_ppm
    cdef int64_t most = OUTLIER_SPREADS * h.spread_ppm
    if h.preempted:
        off = most  # the engine could not hold what it would have
    if h.rounds:
        off = bounded(off, -most, most)
        h.spread_ppm += ((-off if off < 0 else off) - h.spread_ppm) // ROUNDS_KEPT
        h.spread_ppm = max(h.spread_ppm, <int64_t>SPREAD_MIN_PPM)
    h.rounds = min(h.rounds + 1, <int64_t>ROUNDS_KEPT)
    h.excess_ppm += off // (max(h.rounds, <int64_t>RISE_ROUNDS) if off > 0 else h.rounds)
