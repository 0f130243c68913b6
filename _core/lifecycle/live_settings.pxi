# Settings that change while everything runs.

LIVE_SETTINGS = frozenset((
    "queue_ttl_ns", "lease_ttl_ns", "lease_grace_ns", "sign_of_life_ns", "leases_max",
    "flow_queue_max", "queue_max",
    "flow_queue_tokens_max", "queue_tokens_max", "queue_target_ns", "overload_hold_ns",
    "saturation_ppm", "early_refusal",
    "answers_max", "answer_ttl_ns", "input_price_micro", "output_price_micro", "cached_price_ppm",
    "session_open_max", "sessions_max", "saturation_band_ppm", "delay_factor_milli",
    "adapter_affinity_ppm", "prefix_affinity_ppm", "prefix_blocks_max", "quantum_tokens",
    "credit_max_micro", "lead_max_micro", "fairness_domain", "flows_max",
))


cdef int take_settings(Core core, dict limits) except -1:
    core.settings = limits
    core.queue_ttl_ns, core.lease_ttl_ns = limits["queue_ttl_ns"], limits["lease_ttl_ns"]
    core.lease_grace_ns = limits["lease_grace_ns"]
    core.sign_of_life_ns = limits["sign_of_life_ns"]
    core.answer_ttl_ns, core.answers_max = limits["answer_ttl_ns"], limits["answers_max"]
    core.flow_queue_max, core.queue_max = limits["flow_queue_max"], limits["queue_max"]
    core.flow_queue_tokens_max = limits["flow_queue_tokens_max"]
    core.queue_tokens_max = limits["queue_tokens_max"]
    core.queue_target_ns = limits["queue_target_ns"]
    core.overload_hold_ns = limits["overload_hold_ns"]
    core.saturation_ppm = limits["saturation_ppm"]
    core.refuses_early = limits["early_refusal"]
    core.refusal_samples_min = limits["refusal_samples_min"]
    core.leases_max = limits["leases_max"]
    core.delay_factor_milli = limits["delay_factor_milli"]
    core.affinity_ppm = limits["adapter_affinity_ppm"]
    core.prefix_ppm, core.prefix_max = limits["prefix_affinity_ppm"], limits["prefix_blocks_max"]
    core.quantum_tokens = limits["quantum_tokens"]
    core.session_open_max = limits["session_open_max"]
    core.sessions_max = limits["sessions_max"]
    core.pools_max, core.session_pools_max = limits["pools_max"], limits["session_pools_max"]
    core.message_bytes_max = limits["message_bytes_max"]
    core.input_price = limits["input_price_micro"]
    core.output_price = limits["output_price_micro"]
    core.cached_ppm = limits["cached_price_ppm"]
    core.saturation_band_ppm = limits["saturation_band_ppm"]
    core.flows_max = limits["flows_max"]
    return 0


cdef int take_fairness(Core core) except -1:
    core.flows.credit_max = core.settings["credit_max_micro"]
    core.flows.positions.lead_max = core.settings["lead_max_micro"]
    core.flows.positions.domain = core.settings["fairness_domain"]
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
    if flow_order is not None:
        check_name("flow_order", "order", flow_order, FLOW_ORDERS)
    take_settings(core, checked_limits({**core.settings, **limits}))
    take_fairness(core)
    time_turns(core)
    core.ledger.touch_all()  # levels of load may stand otherwise
    while core.answers.count > core.answers_max:
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
    """Everything that earlier requests have taught, and the digest, as new."""
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
    core.prompt_seen_max = core.flows.lead_given_max = 0
    forget_shed_accuracy(core)
    return 0
