# Dispatch delay: work is held for a part of the last prefill, so that prefills batch (the delay
# factor that vLLM had).
#
# While something runs in a pool, the pool holds the requests at the front of its line. When the
# oldest of them has waited for `delay_factor` times the last prefill, all that may run is granted
# at once. A request whose deadline would pass before that opens the pool for all. Nothing of an
# exempt class is held.

cdef int64_t hold_ends_ns(Core core, int32_t pool, const Request* head) noexcept:
    """Return until when a pool holds its next request; 0: it does not. O(LOOKAHEAD^2)."""
    cdef Pool* p = &core.ledger.pools[pool]
    cdef int32_t found[LOOKAHEAD]
    cdef int64_t ends_ns, oldest_ns = core.now_ns, due_ns = NEVER
    cdef int64_t delay_ns = p.last_prefill_ns * core.settings.delay_factor_milli // 1000
    cdef int32_t count, k
    if delay_ns == 0 or p.opened_ns == core.now_ns or core.flows.items[head.flow].exempt:
        return 0
    if p.live == 0:
        p.opened_ns = core.now_ns
        return 0
    count = next_in_line(core, pool, core.flows.items[head.flow].cls, found)
    for k in range(count):
        oldest_ns = min(oldest_ns, core.requests.items[found[k]].arrival_ns)
        due_ns = min(due_ns, core.requests.items[found[k]].due_ns)
    ends_ns = oldest_ns + delay_ns
    if ends_ns <= core.now_ns or due_ns <= ends_ns:
        p.opened_ns = core.now_ns
        return 0
    return ends_ns
