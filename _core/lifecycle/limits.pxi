# Limits of tenants, groups, models and pools, as the configuration declares them.

cdef QuotaLimits checked_quota(
    int64_t requests, int64_t input_tokens, int64_t output_tokens, int64_t total_tokens,
    int64_t concurrency,
) except *:
    cdef QuotaLimits limits
    for name, value in (
        ("requests", requests), ("input_tokens", input_tokens), ("output_tokens", output_tokens),
        ("total_tokens", total_tokens), ("concurrency", concurrency),
    ):
        check_range(name, value, 0, QUOTA_LIMIT_MAX)
    memset(&limits, 0, sizeof(QuotaLimits))
    limits.rates[RATE_REQUESTS] = requests
    limits.rates[RATE_INPUT] = input_tokens
    limits.rates[RATE_OUTPUT] = output_tokens
    limits.rates[RATE_TOTAL] = total_tokens
    limits.concurrency = concurrency
    return limits


cdef int add_budgets(QuotaLimits* limits, int64_t day_tokens, int64_t month_tokens) except -1:
    check_range("day_tokens", day_tokens, 0, QUOTA_LIMIT_MAX)
    check_range("month_tokens", month_tokens, 0, QUOTA_LIMIT_MAX)
    limits.budgets[BUDGET_DAY], limits.budgets[BUDGET_MONTH] = day_tokens, month_tokens
    return 0


cdef int add_max_wait(QuotaLimits* limits, int64_t max_wait_ns) except -1:
    check_range("max_wait_ns", max_wait_ns, 0, <int64_t>1 << 60)
    limits.max_wait_ns = max_wait_ns
    return 0


cdef int64_t height(Core core, int32_t node) noexcept:
    """Return the number of levels from a node to the top, its own included. In a circle:
    QUOTA_DEPTH, which is more than any tree has."""
    cdef int levels = 0
    while node != NONE and levels < QUOTA_DEPTH:
        levels += 1
        node = core.quotas.nodes[node].parent
    return levels


cdef int check_parent(Core core, int32_t parent, int64_t below) except -1:
    # `below`: the levels below the node that gets this parent.
    if not NONE <= parent < core.quotas.count:
        invalid("quota", f"no quota has the index {parent}")
    if height(core, parent) + below > QUOTA_LEVELS_MAX:
        invalid("parent", f"at most {QUOTA_LEVELS_MAX} levels of quotas, and no circle")
    return 0


cdef int set_limits(Core core, int32_t node, const QuotaLimits* limits) except -1:
    cdef int k
    for k in range(RATES):
        core.quotas.limit(node, k, limits.rates[k])
    core.quotas.nodes[node].concurrency = limits.concurrency
    for k in range(BUDGETS):
        core.quotas.nodes[node].budgets[k].limit = limits.budgets[k]
        core.quotas.has_budgets = core.quotas.has_budgets or limits.budgets[k] > 0
    if core.quotas.in_escrow and core.quotas.nodes[node].escrow == NULL:
        hold_escrow(core, node)
    give_share(core, node, limits)
    core.quotas.is_new = core.quotas.has_work = True
    return 0


cdef int32_t set_named_quota(
    Core core, bytes name, int32_t parent, const QuotaLimits* limits, int64_t weight_milli
) except -1:
    """Add a group or a model, or give a known one new limits. O(1); O(quotas) where a known one
    gets another parent. With a weight it is a node of the tree of shares from the next poll on."""
    cdef int32_t node, n, before
    check_range("weight_milli", weight_milli, 0, WEIGHT_MILLI_MAX)
    if not 0 < len(name) <= NAME_BYTES_MAX:
        invalid("quota", f"a name has 1 to {NAME_BYTES_MAX} bytes")
    known = core.quota_names.get(name)
    check_parent(core, parent, 2)  # a tenant's own limits may come below
    if known is None:
        node = core.quotas.add()
        core.quota_keys.append(QUOTA_ROW + name)
        core.quota_names[name] = node
        core.quotas.nodes[node].parent = parent
    else:
        node = known
        before = core.quotas.nodes[node].parent
        if parent != before:
            core.quotas.nodes[node].parent = parent
            for n in range(core.quotas.count):
                if height(core, n) > QUOTA_LEVELS_MAX:
                    core.quotas.nodes[node].parent = before
                    invalid("parent", f"at most {QUOTA_LEVELS_MAX} levels of quotas, no circle")
            core.tree_is_stale = core.tree_is_stale or len(core.flows.families) > 0
    if weight_milli and core.ledger.count > POOLS_ORDERED:
        raise CallerError(
            CODE_FAILED_PRECONDITION, "weight_milli",
            f"groups with a weight share at most {POOLS_ORDERED} pools, and {core.ledger.count}"
            " are registered; run a second scheduler for the others",
        )
    if weight_milli and core.served_rows.on:
        invalid("weight_milli", "the members of a cluster share no groups with a weight")
    if weight_milli != core.quotas.nodes[node].weight_milli:
        core.quotas.nodes[node].weight_milli = <int32_t>weight_milli
        core.tree_is_stale = True
    set_limits(core, node, limits)
    return node


cdef bint is_limiting(const QuotaLimits* limits) noexcept:
    cdef int k
    for k in range(RATES):
        if limits.rates[k] > 0:
            return True
    for k in range(BUDGETS):
        if limits.budgets[k] > 0:
            return True
    return limits.concurrency > 0 or limits.share > 0


cdef int limit_flow(
    Core core, int32_t flow, int32_t parent, bint refuse, const QuotaLimits* limits
) except -1:
    """Give a tenant limits of its own, or none, below a group, or none, for all its flows but the
    exempt ones. O(classes * targets * log n), by deadline O(queued of it) where it ceases to
    refuse."""
    cdef int32_t own
    cdef Flow* f
    cdef bint refused
    cdef bint is_limited = is_limiting(limits)
    known_tenant(core, flow)
    check_parent(core, parent, 1)
    own = core.flows.items[flow].own_quota
    if is_limited or own != NONE:
        if own == NONE:
            own = core.quotas.add()
            core.quota_keys.append(TENANT_QUOTA_ROW + <bytes>core.flow_list[flow])
        core.quotas.nodes[own].parent = parent
        set_limits(core, own, limits)
    core.quotas.is_new = core.quotas.has_work = True
    core.flows.items[flow].max_wait_ns = limits.max_wait_ns
    while flow != NONE:
        f = &core.flows.items[flow]
        unpark_whole(core.flows, flow)
        refused, f.refuses = f.refuses, refuse
        if refused and not refuse:
            give_back_all(core, flow)
        f.own_quota, f.group = own, parent
        f.quota = own if is_limited else parent
        if f.exempt:
            f.quota = NONE
        place_flow(core, flow)
        rank_flow(core.flows, flow)
        flow = core.flows.items[flow].sibling
    return 0


cdef int turn_budget(
    Core core, bytes name, int which, int64_t period, int64_t ends_ns, int64_t spent
) except -1:
    """Begin a period of a tenant's or a group's budget. O(1)."""
    check_range("spent", spent, 0, <int64_t>1 << 60)
    core.quotas.turn(budget_node(core, name, which), which, period, ends_ns, spent)
    return 0


cdef int32_t budget_node(Core core, bytes name, int which) except -1:
    """Return the node of a tenant's or a group's budget. O(1)."""
    cdef int32_t flow, node = NONE
    check_range("which", which, 0, BUDGETS - 1)
    if name.startswith(b"tenant:"):
        known = core.flow_names.get(name[7:])
        if known is not None:
            flow = known
            node = core.flows.items[flow].own_quota
    else:
        known = core.quota_names.get(name)
        node = NONE if known is None else known
    if node == NONE:
        invalid("name", f"no quota has the name {name.decode(errors='replace')}")
    return node


cdef int spend_elsewhere(
    Core core, bytes name, int which, int64_t period, int64_t spent
) except -1:
    """Count what other members of a cluster have spent of a budget in its period. O(1)."""
    cdef int32_t node = budget_node(core, name, which)
    cdef Budget* b = &core.quotas.nodes[node].budgets[which]
    check_range("spent", spent, 0, <int64_t>1 << 60)
    if b.period == period and b.elsewhere != spent:
        b.elsewhere = spent
        core.digest_value = mix(core.digest_value, <uint64_t>spent)
        core.has_more = True
        core.quotas.mark_ready(node)
    return 0


cdef int refund_budgets(Core core, bytes tenant, int64_t tokens) except -1:
    """Take tokens back that were charged to a tenant's budgets twice. O(levels)."""
    cdef int32_t node
    cdef Budget* b
    cdef int k
    check_range("tokens", tokens, 0, <int64_t>1 << 40)
    flow = core.flow_names.get(tenant)
    node = NONE if flow is None else core.flows.items[<int32_t>flow].quota
    while node != NONE:
        for k in range(BUDGETS):
            b = &core.quotas.nodes[node].budgets[k]
            b.spent = max(
                core.quotas.nodes[node].open_input + core.quotas.nodes[node].open_output,
                b.spent - tokens,
            )
        core.quotas.mark_ready(node)
        node = core.quotas.nodes[node].parent
    return 0


cdef void charge_budgets(Core core, int32_t flow, int64_t tokens) noexcept:
    """Charge tokens that were used outside any lease to a flow's budgets. O(levels)."""
    cdef int32_t node = core.flows.items[flow].quota
    cdef int k
    while node != NONE:
        for k in range(BUDGETS):
            core.quotas.nodes[node].budgets[k].spent += tokens
        node = core.quotas.nodes[node].parent


cdef int budget_refusal(Core core, int32_t i, int outcome) except -1:
    """Return the outcome of a request at its arrival, as its budgets leave it: a spent budget
    refuses at once, because nothing waits in a queue for the next day. O(levels)."""
    cdef Take t = take_for(core, i)
    cdef int32_t node = core.flows.items[core.requests.items[i].flow].quota
    cdef int64_t due_ns
    cdef int spent_budget = 0
    core.quotas.budget_until_ns = 0
    if outcome not in (0, OUT_REJECTED_QUOTA):
        return outcome
    while node != NONE:
        due_ns = core.quotas.budget_due(node, &t)
        if due_ns > core.quotas.budget_until_ns:
            core.quotas.budget_until_ns, spent_budget = due_ns, core.quotas.spent_budget
        node = core.quotas.nodes[node].parent
    core.quotas.spent_budget = spent_budget
    return OUT_REJECTED_QUOTA if core.quotas.budget_until_ns else outcome


cdef int limit_pool(Core core, int32_t pool) except -1:
    """Give a pool its own limits, else those of all others. O(1)."""
    cdef PoolLimits limits
    known = core.pool_limits.get(core.pool_list[pool]) or core.pool_limits.get(b"")
    memset(&limits, 0, sizeof(PoolLimits))
    if known is not None:
        limits = known
    core.ledger.limit(pool, &limits)
    core.has_more = core.has_more or core.flows.agents.held > 0
    return 0


cdef int limit_pools(Core core, bytes name, PoolLimits limits) except -1:
    """Limit a pool, also a later one of that name; b"": all that have no limits of their own."""
    cdef int32_t pool
    if len(name) > ID_BYTES_MAX:
        invalid("pool", f"a name has at most {ID_BYTES_MAX} bytes")
    core.pool_limits[name] = limits
    for pool in range(core.ledger.count):
        limit_pool(core, pool)
    return 0


cdef int limit_no_pools(Core core) except -1:
    cdef int32_t pool
    core.pool_limits = {}
    for pool in range(core.ledger.count):
        limit_pool(core, pool)
    return 0


cdef int weigh_adapter(Core core, bytes name, int64_t tokens) except -1:
    """Let an adapter of this name take `tokens` of each pool in which it is active; -1: the usual
    number there. O(adapters * pools)."""
    cdef int32_t pool
    check_range("tokens", tokens, NONE, TOKENS_MAX)
    if not 0 < len(name) <= NAME_BYTES_MAX:
        invalid("adapter", f"a name has 1 to {NAME_BYTES_MAX} bytes")
    if len(core.adapters.weights) >= ADAPTERS_MAX and name not in core.adapters.weights:
        invalid("adapter", f"at most {ADAPTERS_MAX} adapters can have a figure of their own")
    core.adapters.weigh(name, tokens)
    core.ledger.touch_all()
    for pool in range(core.ledger.count):
        lora_weigh(
            &core.ledger.pools[pool].loras, core.adapters,
            core.ledger.pools[pool].limits.adapter_tokens,
        )
    return 0
