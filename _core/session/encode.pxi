# Answers and verdicts as messages.

cdef int write_limit(Writer w, int kind, int64_t limit, int64_t left, int64_t reset_ms) except -1:
    cdef size_t before = w.length()
    w.varint(4, reset_ms)
    w.varint(3, left)
    w.varint(2, limit)
    w.varint(1, kind)
    return w.close(1, before)


# Kinds of limits in the contract, by their place in told_limits().
cdef int32_t* LIMIT_KINDS = [3, 4, 5, 6, 7, 8, 9]


# The sentence of a refusal if a budget is spent, by `spent_budget` of the verdict.
cdef tuple SPENT_BUDGETS = (
    b"",
    b"the tokens per day of the tenant's budget, or of a group's above it, are spent",
    b"the tokens per month of the tenant's budget, or of a group's above it, are spent",
)


cdef int write_quotas(Writer w, Quotas quotas, int32_t node) except -1:
    cdef Told told[LIMITS_TOLD]
    cdef int k
    quotas.tightest_limits(node, NONE, 0, told)
    for k in range(LIMITS_TOLD - 1, -1, -1):
        if told[k].limit:
            write_limit(w, LIMIT_KINDS[k], told[k].limit, told[k].left, told[k].reset_ms)
    return 0


cdef int write_admit_response(
    Writer w, Verdict* v, bytes pool_name, int64_t lease_ttl_ms, Quotas quotas, int32_t node
) except -1:
    """Write the fields of an AdmitResponse; `node` begins the chain of quotas to report, -1: none.
    O(levels)."""
    cdef size_t before, quota
    w.varint(4, v.waited_ns // 1000)
    before = quota = w.length()
    if v.outcome == OUT_GRANTED:
        if node != NONE:
            write_quotas(w, quotas, node)
        if w.length() != quota:
            w.close(7, quota)
        w.varint(6, v.engine_priority)
        w.varint(5, v.reserved_tokens)
        w.varint(4, lease_ttl_ms)
        w.varint(3, v.epoch)
        w.text(2, pool_name)
        w.fixed64(1, <uint64_t>v.lease_id)
        w.close(2, before)
    else:
        text = ONLY_NAMED if v.only_named else OUTCOME_BYTES[v.outcome]
        w.text(4, SPENT_BUDGETS[v.spent_budget] or text)
        w.varint(3, v.position)
        quota = w.length()
        if node != NONE:
            write_quotas(w, quotas, node)
        if v.pool_capacity_tokens:
            write_limit(w, 2, v.pool_capacity_tokens, v.pool_free_tokens, v.retry_after_ms)
        if v.queue_max:
            write_limit(w, 1, v.queue_max, v.queue_left, v.retry_after_ms)
        w.close(2, quota)
        w.varint(1, v.retry_after_ms)
        w.close(3, before)
    return w.varint(1, v.outcome)


cdef bytes encode_verdict(Core core, Verdict* v):
    cdef bytes name = core.pool_list[v.pool] if v.pool >= 0 and v.outcome == OUT_GRANTED else b""
    core.writer.text(5, core.leadership)
    write_admit_response(
        core.writer, v, name, core.settings.lease_ttl_ns // NS_PER_MS, core.quotas,
        told_quota(core, v),
    )
    return core.writer.take()


cdef bytes encode_decision(Core core, decision):
    cdef Verdict v
    memset(&v, 0, sizeof(Verdict))  # a decision has no word on budgets and named pools
    (
        v.handle, v.tag, v.outcome, v.lease_id, v.pool, v.epoch, v.reserved_tokens,
        v.retry_after_ms, v.position, v.waited_ns, v.queue_max, v.queue_left,
        v.pool_capacity_tokens, v.pool_free_tokens, v.flow, v.engine_priority,
    ) = decision
    if v.outcome not in OUTCOME_BYTES:
        invalid("outcome", f"unknown outcome {v.outcome}")
    if v.outcome == OUT_GRANTED:
        known_pool(core, v.pool)
    return encode_verdict(core, &v)


cdef int32_t told_quota(Core core, const Verdict* v) except -2:
    """Return where the quotas begin that a verdict reports, -1: none. The quota of all unknown
    tenants would show each of them how much the others use. O(1)."""
    cdef int32_t quota = NONE if v.flow == NONE else core.flows.items[v.flow].quota
    if quota != NONE and core.unknown_flow != NONE:
        if core.flow_list[v.flow] is core.flow_list[core.unknown_flow]:
            return NONE
    return quota


cdef int write_prefix_uses(Core core, Writer w, int uses) except -1:
    """Send a stream the use of hashes, with the key of its hashes. O(1)."""
    cdef size_t before = w.length()
    cdef const uint8_t* name = <const uint8_t*><const char*>PREFIX_KEY_NAME
    if uses:
        w.fixed64(4, sip128(core.k0, core.k1, name, len(PREFIX_KEY_NAME)).hi)
        w.varint(3, uses & USE_ORDER != 0)
        w.varint(2, uses & USE_PLACEMENT != 0)
        w.varint(1, PREFIX_KEPT_MAX)
    return w.close(6, before)
