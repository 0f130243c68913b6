# One pool: its figures, its limits, and what runs and is promised in it.

# The engine has begun with a request when so much time has passed, whatever is reported of it.
cdef int64_t PREFILL_MAX_NS = 1_000_000_000

cdef enum:
    BATCH_AUTO = -1
    RATES_KEPT = 64  # the last judged prefills
    AS_FAST_MILLI = 875  # a prefill is about as fast as another one at this part of its rate
    PREFILL_BUDGET_PART = 6  # divisor of the capacity

# A round is the input that was granted and has not been computed yet, as far as is known: until
# the first tokens of a request are reported, at most for PREFILL_MAX_NS. Requests whose callers
# report nothing are in no round.
ctypedef struct PrefillBudget:
    Chain chain  # leases, in the order of their grants
    int64_t tokens
    int64_t max_tokens  # in force; 0: no limit

cdef enum:  # how busy a pool is (schedsvc.v1.OverloadState), see overload.pxi
    LOAD_UNDER = 1
    LOAD_NEARLY = 2
    LOAD_OVER = 3

ctypedef struct Pool:
    int64_t epoch
    int64_t engine_tokens, engine_max_running  # as registered
    PoolLimits limits
    PrefillBudget prefill_budget
    Loras loras
    int64_t capacity_blocks
    int64_t headroom_blocks  # less than 0: more is promised than there is
    int64_t promised_blocks, posted_blocks
    int64_t block_size
    int64_t max_running, max_model_tokens
    int64_t live, suspect
    int64_t running_sequences
    GrowingLeases growing
    int32_t first_lease  # chain through pool_next and pool_prev
    int32_t attached  # sessions that offer it, plus one where it is configured
    int32_t configured
    bint draining  # an operator lets nothing in any more
    int32_t principal  # that offered it last; -1: none
    int64_t owned_until_ns  # it stays that principal's until then, after its last stream
    int64_t detached_at_ns  # when its last stream ended; 0: never offered
    bint said_goodbye  # before that
    int64_t replays_until_ns  # replays of unknown leases are accepted until then; 0: not offered
    int32_t gates, replayed  # streams that will offer it, and those that have replayed their leases
    int64_t contest_told_ns  # the last notice to its streams that another caller claims it
    int64_t replay_debt  # tokens that it owed when the saved state was read
    int64_t replayed_tokens, replayed_sequences  # sums over the restored leases of its epoch
    bint caps_replays  # one was refused, and the log has it
    bint awaits_replays  # nothing is granted before these are as many, or that time has come
    int32_t reason
    int32_t next  # request that it would grant if it could; -1: none
    int64_t named  # that request's handle, where it waits for this pool's reason; 0: none
    int32_t quota  # node of its model; -1: none
    bint aged  # whom it served last, ageing had brought before better classes
    int64_t engine_running, engine_waiting, engine_used_tokens, engine_preemptions
    int64_t telemetry_at_ns
    int64_t headroom_ppm
    bint probes  # no preemption has been seen yet
    bint pressed  # something has waited for cache since the last report of the engine
    int64_t served  # requests that were completed since then
    int64_t light_since_ns  # start of the window that runs; -1: none
    int64_t light_milli, kept_milli  # milli-tokens that flows below their share took, see headroom
    int64_t* held  # blocks that are promised to each flow
    int32_t held_count
    int64_t engine_excess_tokens  # that the engine holds beyond all that was promised
    int64_t owed_tokens  # promised before a restart to leases that no shim has replayed yet
    int32_t overload  # LOAD_*, see overload.pxi
    Rate drain  # what is granted while requests wait
    int64_t prefilling  # input of leases that is still to be computed, see forecast.pxi
    int64_t prefill_ns, prefill_tokens  # moving averages of times to the first output, and for what
    int64_t prefill_error_ns, prefills_judged  # moving average of their errors
    int64_t prefill_rates[RATES_KEPT]  # thousandths of tokens a second, the oldest is overwritten
    int32_t prefill_sizes[RATES_KEPT]  # their tokens
    int64_t calm_since_ns  # it could fall since then; -1: it could not
    int64_t last_prefill_ns  # from the last grant whose first tokens were reported until then
    int64_t opened_ns  # moment at which it has stopped holding what waits; -1: none
    int64_t decode_ns, decode_milli  # moving averages: from first tokens to ends, and their output
    bint saturated  # shares bind, see guarantees.pxi
    int64_t output_above_limit  # tokens that final counts state above what requests can use
    int64_t surplus_micro  # work with which worse classes may pass, see backfill.pxi
    int64_t sessions_tokens  # footprint of its active sessions of agents, see agent_sessions.pxi
    int32_t sessions_active, oldest_session, newest_session  # in the order of their begins
    int64_t turn_ns  # when the first that waits for the cap became the next
    int64_t turns_ended_ns  # when the last one that waited has gone


cdef inline int64_t blocks_for(const Pool* p, int64_t tokens, int64_t sequences) noexcept nogil:
    # Each sequence may leave its last block partly filled.
    return (tokens + p.block_size - 1) // p.block_size + sequences - 1


cdef inline int64_t sized_tokens(const Request* r, int64_t output_tokens) noexcept nogil:
    """Return the tokens of this much output of each sequence, and of a copy of its prompt for
    each."""
    return <int64_t>r.prompt_tokens * r.n + output_tokens * r.sequences


cdef inline bint is_above(int64_t limit, int64_t value) noexcept nogil:
    # 0: no limit.
    return limit != 0 and value > limit


cdef inline bint is_below_engine(const Pool* p) noexcept nogil:
    """Return whether the pool may hold less than its engine can."""
    return p.capacity_blocks < p.engine_tokens // p.block_size


cdef inline bint is_computed(const Request* r) noexcept nogil:
    """Return whether all input of a lease is known to be in the cache."""
    return r.lease.output_tokens > 0 or r.lease.input_tokens >= r.prompt_tokens


cdef inline int64_t granted_at_ns(const Request* r) noexcept nogil:
    return r.arrival_ns + r.lease.waited_ns


cdef inline int64_t unaccounted_tokens(const Pool* p) noexcept nogil:
    # Tokens held besides the known leases. The engine's figure may include the debt.
    return max(p.engine_excess_tokens, p.owed_tokens)
