# Stagger: requests of one length that begin together end together, and until then the peak form
# admits none for which there would be no room at that end. Begun one after the other, each holds
# half its output on average, and more of them fit.
#
# So if more requests of a flow wait than would fit, and its outputs are alike, each grant to it
# keeps the next away. The gap is the time that a request runs, times the part of the capacity that
# it holds meanwhile (Little, "A proof for the queuing formula L = lambda W", 1961). With several
# flows, only grants to flows above their share are spread. A policy without shares spreads none:
# requests of other lengths between them would undo the spacing. Below half of the pool's capacity
# nothing is spread. No request is held to the end of its queue TTL, and none with a deadline.

cdef enum:
    ALIKE_PERCENT = 90  # of the quantile that is promised are mean and median at least


cdef void note_run(Pool* p, const Request* r, int64_t output_tokens, int64_t now_ns) noexcept:
    """A request has ended after so much output of each sequence. O(1)."""
    cdef int64_t ran_ns = min(now_ns - granted_at_ns(r), WAIT_MAX_NS)
    cdef int64_t milli = output_tokens * 1000
    if not r.reports_progress or milli == 0:
        return
    p.run_ns = averaged(p.run_ns, ran_ns) if p.run_milli else ran_ns
    p.run_milli = averaged(p.run_milli, milli) if p.run_milli else milli


cdef int64_t pacing_gap_ns(
    Core core, const Pool* p, const Request* r, int64_t blocks, bint above, int64_t promise
) noexcept:
    """How long a grant with this promised output keeps the next of its kind away; 0: not at all.
    O(1)."""
    cdef const Flow* f = &core.flows.items[r.flow]
    cdef int64_t each, run_ns, held
    cdef Asked asked
    if (
        not core.paces_grants or not core.ledger.by_peak or promise == NONE or p.run_milli == 0
        or core.requests.rare_of(r).deadline_ns or not r.reports_progress or f.exempt
        or (not above and core.flows.recent_count > 1)
        or f.average_milli * 100 < promise * 1000 * ALIKE_PERCENT
        or p.promised_blocks * 2 < p.capacity_blocks
        or f.queued * blocks <= p.capacity_blocks - p.promised_blocks
    ):
        return 0
    asked_of(core, r, &asked)  # the mean is of the last few alone
    if core.predictor.quantile(&asked, MEDIAN) * 100 < promise * ALIKE_PERCENT:
        return 0
    each = min(f.average_milli, <int64_t>r.output_max_tokens * 1000)
    run_ns = <int64_t>min(<wide>WAIT_MAX_NS, <wide>p.run_ns * each // p.run_milli)
    # Half of its output, and half a block of each sequence.
    held = <int64_t>r.prompt_tokens * r.n + (each // 1000 + p.block_size) * r.sequences // 2
    return <int64_t>(<wide>run_ns * held // (p.capacity_blocks * p.block_size))


cdef void pace_next(Pool* p, int64_t ns, int64_t now_ns) noexcept:
    """Note a grant that keeps the next of its kind away for `ns`. The time runs from the moment at
    which that grant could begin, if the pool waited for that alone. A grant that was not held
    restarts the time, so that gaps never add up. O(1)."""
    p.paced_until_ns = (min(p.paced_until_ns, now_ns) if p.paced else now_ns) + ns
