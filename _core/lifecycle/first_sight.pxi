# Tenants at first sight. A tenant that the configuration does not list gets a flow of its own when
# its first request comes, if the caller has proved its name and unknown tenants may have flows. The
# first rule that fits the name says what the flow gets. Such a flow is `born`: not configured.
#
# As every bounded table, that of the tenants is divided between the principals: one that has made
# its share of the flows can only get those back of its own tenants that can be forgotten.
#
# A request id of such a tenant is found under a key of its name, not of the number of its flow,
# because the number may later be another tenant's.

cdef int32_t BORN_WEIGHT_MILLI = 1000
cdef bytes OTHER_TENANTS = b"other"  # the series of the metrics for tenants that are not shown


cdef TenantRule any_rule(bint dry_runs):
    """Return the settings of a tenant whose name fits no rule: weight 1 and no limits."""
    cdef TenantRule rule = TenantRule()
    rule.pattern, rule.named_classes = b"*", ()
    rule.weight_milli, rule.default_class = BORN_WEIGHT_MILLI, 0
    rule.parent = NONE
    rule.dry_runs = dry_runs
    add_share(&rule.limits, 0, NONE, NONE)
    return rule


cdef int32_t flow_at_sight(Core core, Slice* name, int32_t principal) except -1:
    """Return the flow of a tenant with a proved name that stands for no flow; make it if there is
    none. With as many tenants as there may be, in all or of this principal: that of the unknown
    tenants; -1 stands for no principal. O(rules * name + classes)."""
    cdef bytes text = slice_bytes(name)
    cdef int32_t flow, only
    cdef bint is_new = False
    if text == OTHER_TENANTS:
        return core.unknown_flow
    known = core.flow_names.get(text)
    if known == core.unknown_flow:
        return core.unknown_flow
    if known is None:
        only = principal if has_all_tenants(core, principal) else NONE
        flow = reclaim_retired(core) if only == NONE else NONE
        if flow == NONE and only == NONE and len(core.flow_names) < core.settings.flows_max:
            flow = core.flows.add(BORN_WEIGHT_MILLI)
            core.flow_list.append(text)
        elif flow == NONE:
            flow = reclaim_flow(core, only)
        if flow == NONE:
            core.shared_requests += 1
            return core.unknown_flow
        is_new = True
        name_flow(core, flow, text)
    else:  # it was gone
        flow = known
    set_born(core, flow, True)
    core.flows.items[flow].maker = principal + 1
    core.principals.count_tenant(principal, 1)
    put_name(core, text, flow)
    apply_rule(core, flow, is_new)
    return flow


cdef inline bint has_all_tenants(Core core, int32_t principal):
    """Return whether a principal has made its share of the flows that listed tenants leave.
    O(1)."""
    cdef int64_t listed = len(core.flow_names) - core.born_count
    return core.principals.is_limited(principal) and (
        core.principals.items[principal].tenants
        >= core.principals.places(principal, max(<int64_t>0, core.settings.flows_max - listed))
    )


cdef int apply_rule(Core core, int32_t flow, bint is_new) except -1:
    """Give a born flow what its rule says. O(rules * name), and as `apply_terms()`."""
    cdef TenantRule rule = rule_for(core.tenant_rules, core.flow_list[flow])
    return apply_terms(core, flow, core.default_rule if rule is None else rule, is_new)


cdef int apply_terms(Core core, int32_t flow, TenantRule rule, bint is_new) except -1:
    """Give a flow what a rule says, in all its classes. O(classes); for one that is not new, as
    `limit_flow()`."""
    cdef QuotaLimits limits
    cdef int32_t sibling = flow
    while sibling != NONE:
        core.flows.reweigh(sibling, rule.weight_milli)
        rank_shares(core, sibling)
        sibling = core.flows.items[sibling].sibling
    limits = rule.limits
    if is_new:
        limit_new_flow(core, flow, rule)
    else:
        limit_flow(core, flow, rule.parent, rule.refuses, &limits)
    set_classes_of(core, flow, rule.default_class, rule.named_classes)
    if core.flows.items[flow].dry_runs != rule.dry_runs:
        set_dry_run(core, flow, rule.dry_runs)
    return 0


cdef int limit_new_flow(Core core, int32_t flow, TenantRule rule) except -1:
    """Give a tenant that has nothing queued, and whose buckets are full, the limits of a rule. It
    changes what no other flow may take, so that none has to ask again. O(classes + levels)."""
    cdef QuotaLimits limits = rule.limits
    cdef bint is_limited = is_limiting(&limits)
    cdef int32_t own = core.flows.items[flow].own_quota, first = rule.parent, node
    cdef Flow* f
    cdef int k
    if is_limited and own == NONE:
        own = core.quotas.add()
        core.quota_keys.append(TENANT_QUOTA_ROW + <bytes>core.flow_list[flow])
    if own != NONE:
        core.quotas.nodes[own].parent = rule.parent
        core.quotas.nodes[own].concurrency = limits.concurrency
        for k in range(RATES):
            core.quotas.limit(own, k, limits.rates[k])
        if core.quotas.in_escrow and core.quotas.nodes[own].escrow == NULL:
            hold_escrow(core, own)
    if is_limited:
        first = own
    know_shares(core)
    node = first
    while node != NONE and not has_share(core, node):
        node = core.quotas.nodes[node].parent
    core.flows.items[flow].max_wait_ns = limits.max_wait_ns
    while flow != NONE:
        f = &core.flows.items[flow]
        f.own_quota, f.refuses, f.group = own, rule.refuses, rule.parent
        f.quota = NONE if f.exempt else first
        f.guarantee = NONE if f.exempt else node
        place_flow(core, flow)
        flow = core.flows.items[flow].sibling
    return 0


cdef int add_rule(Core core, TenantRule rule) except -1:
    """Append a rule; all that is checked first. O(named classes)."""
    cdef int32_t c
    if not 0 < len(rule.pattern) <= NAME_BYTES_MAX:
        invalid("match", f"a pattern has 1 to {NAME_BYTES_MAX} bytes")
    check_range("weight_milli", rule.weight_milli, 1, WEIGHT_MILLI_MAX)
    check_parent(core, rule.parent, 1)
    for c in (rule.default_class, *rule.named_classes):
        known_class(core, c)
    core.tenant_rules.append(rule)
    return 0


cdef int follow_rules(Core core) except -1:
    """Give all born flows what the rules say now; or, if unknown tenants may have none, let their
    names be unknown. O(flows * rules)."""
    cdef int32_t flow
    for flow in range(core.flows.count):
        if core.flows.items[flow].born:
            if core.unknown_own:
                apply_rule(core, flow, False)
            else:
                put_name(core, core.flow_list[flow], NONE)
    return 0
