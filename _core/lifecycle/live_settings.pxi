# Settings that change while everything runs.


cdef int take_fairness(Core core) except -1:
    core.flows.credit_max = core.settings.credit_max_micro
    core.flows.positions.lead_max = core.settings.lead_max_micro
    core.flows.positions.domain = <int>core.settings.fairness_domain
    return 0


cdef int check_name(str field, str what, name, known) except -1:
    if name not in known:
        invalid(field, f"unknown {what} {name!r}; known: {', '.join(known)}")
    return 0


cdef int change_settings(Core core, policy, flow_order, dict limits) except -1:
    """Give a running core other settings; all that is checked first. O(1), for another policy
    O(flows * levels * log n)."""
    for name in limits:
        if name not in LIVE_SETTINGS:
            invalid(name, f"cannot change while it runs; what can: {', '.join(LIVE_SETTINGS)}")
    if policy is not None:
        check_name("policy", "policy", policy, POLICIES)
        if (policy == "external") != (core.policy == "external"):
            invalid("policy", "external is chosen when a core is made, for as long as it lives")
    if flow_order is not None:
        check_name("flow_order", "order", flow_order, FLOW_ORDERS)
        if core.flows.place_from is not None:
            invalid("flow_order", "requests have places from outside")
    core.settings = checked(SETTINGS, {**core.settings, **limits})
    take_fairness(core)
    time_turns(core)
    core.ledger.touch_all()  # levels of load may stand otherwise
    while core.answers.count > core.settings.answers_max:
        forget(core, core.answers.head)
    if policy is not None and policy != core.policy:
        core.policy = policy
        core.flows.order, core.flows.lifts, core.ahead, core.by_prefix = POLICIES[policy]
        settle_tree(core)
        ask_all_anew(core)
        place_all_nodes(core.flows)
    if flow_order is not None and FLOW_ORDERS[flow_order] != core.flows.by_deadline:
        change_order(core, FLOW_ORDERS[flow_order])
    set_grain(core)
    rekey_sessions(core, NONE)
    return limit_prefixes(core)


cdef int forget_learned(Core core) except -1:
    """Reset everything that earlier requests have taught, and the digest."""
    cdef int32_t pool
    end_resume(core)
    core.predictor.forget()
    forget_flows(core.flows)
    for pool in range(core.ledger.count):
        forget_footprints(core, pool)
        forget_turns(core, pool)
    forget_sessions(core)
    forget_absent_sessions(core)  # else the first requests would find lines of before
    core.ledger.forget()
    for pool in range(core.ledger.count):
        core.prefixes.index(pool).forget()
    fill_quotas(core)
    core.digest_value = 0
    core.prompt_seen_max = core.output_seen_max = core.flows.lead_given_max = 0
    forget_shed_accuracy(core)
    return 0
