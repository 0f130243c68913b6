# The usage of a lease that the core does not know and does not restore: its holder replays it later
# than lease TTL and grace after a restart, or after its engine has restarted, too.
#
# Nothing is reserved for such a lease, and no service is charged to its flow. Only its Complete
# counts: it becomes a row of the ledger, and is charged to budgets. A Complete does not say whose
# lease it ends, so a stream remembers the last lease that it replayed in vain. Clients send a
# Complete right after the replay. The ledger counts each lease once, also if this comes twice.

cdef struct LateLease:
    int64_t lease_id  # 0: none
    int32_t flow, pool, cls
    int32_t prompt_tokens, output_max_tokens, sequences
    Usage usage


cdef bint note_late(Core core, LateLease* late, Ask* ask, int64_t lease_id, Usage* u) except -1:
    """Remember a lease whose replay was refused, if its caller may report it. O(1).

    A caller may report what it could have replayed in time: it offers the pool, and the id is
    no other caller's.
    """
    cdef int32_t owner = core.ledger.pools[ask.target].principal
    late.lease_id = 0
    if (
        not core.usage_rows.is_kept
        or not 0 < lease_id <= LEASE_ID_MAX
        or core.leases.get(<uint64_t>lease_id, 0) != NONE
        or owner not in (NONE, ask.principal)
        or not core.principals.may_offer(ask.principal, core.pool_list[ask.target])
    ):
        return False
    late.lease_id, late.flow, late.pool, late.cls = lease_id, ask.flow, ask.target, ask.cls
    late.prompt_tokens, late.output_max_tokens = ask.prompt_tokens, ask.output_max_tokens
    late.sequences, late.usage = ask.sequences, u[0]
    return True


cdef int keep_late_usage(
    Core core, LateLease* late, bytes adapter, int outcome, Usage* reported
) except -1:
    """Make the row of a lease that only its stream remembers; it counts once. O(levels)."""
    cdef Request r
    cdef Usage u = reported[0]
    cdef int64_t lease_id
    cdef bint is_estimated
    if outcome not in (0, OUT_COMPLETED, OUT_CANCELLED):
        invalid("outcome", "must be COMPLETED or CANCELLED")
    memset(&r, 0, sizeof(Request))
    r.pool, r.prompt_tokens = late.pool, late.prompt_tokens
    r.output_max_tokens, r.sequences, r.n = late.output_max_tokens, late.sequences, 1
    if u.input_tokens < 0:
        u.input_tokens = late.usage.input_tokens
    if u.cached_tokens < 0:
        u.cached_tokens = late.usage.cached_tokens
    if u.output_tokens < 0:
        u.output_tokens = late.usage.output_tokens
    # No report has counted its input, and when it was granted is not known: it is the whole prompt.
    is_estimated = reported.input_tokens < 0 and late.usage.input_tokens == 0
    if is_estimated:
        u.input_tokens = late.prompt_tokens
    is_estimated = is_estimated and outcome == OUT_CANCELLED and u.output_tokens == 0
    limit_usage(core, &r, &u, True)
    lease_id, late.lease_id = late.lease_id, 0
    if u.input_tokens == 0 and u.output_tokens == 0:
        return 0
    if not core.classes.items[late.cls].exempt:
        charge_budgets(core, late.flow, u.input_tokens + u.output_tokens)
    return core.usage_rows.add((
        lease_id, core.flow_list[late.flow], core.classes.names[late.cls],
        core.pool_list[late.pool], adapter, is_estimated,
        u.input_tokens, min(u.cached_tokens, u.input_tokens), u.output_tokens, True,
    ))
