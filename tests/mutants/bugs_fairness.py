"""Lists known bugs of the lift (the level, the credit, what a restart keeps), and the charge."""

from mutant import Mutant

from schedsvc_lab.faults.leaver_options import LEAVES

CLUSTERS = 1 << 54  # seeds from here on are runs of several schedulers

KV_PRICE = "tests/core/test_kv_price.py"
CREDIT = "tests/core/test_credit.py"
HISTORIES = "tests/core/test_local_position.py::test_random_histories_of_pools_keep_the_promise"
REMOTE = "tests/core/test_remote_service.py::test_domains_keep_their_service_apart"
ESCROW = "tests/core/test_escrow.py"

FAIRNESS_BUGS = (
    Mutant(
        "cache-not-charged",
        "a price of the KV cache is not charged for the output that reports state",
        (
            (
                "lifecycle/lease.pxi",
                "    charge_nodes(core.flows, r.flow, r.lease.weight_milli, r.lease.charged,"
                " weighted, r.pool)\n",
                "    if BUG:\n"
                "        weighted -= weighted_by(\n"
                "            held * core.settings.kv_price_micro, r.lease.weight_milli\n"
                "        )\n",
            ),
        ),
        0,
        tests=(
            f"{KV_PRICE}::test_cache_is_charged_with_each_progress_and_is_the_formula_at_the_end",
        ),
    ),
    Mutant(
        "level-falls",
        "the level of a class is its least active counter, and falls with it",
        (
            (
                "model/flows.pxi",
                "            level[0] = max(level[0], self.least_active(flow))\n",
                "            if BUG:\n"
                "                level[0] = self.least_active(flow)\n"
                "                return level[0]\n",
            ),
        ),
        0,
        tests=(f"{CREDIT}::test_the_level_does_not_fall_with_newcomers_below_it",),
    ),
    Mutant(
        "credit-per-weight",
        "a flow of twice the weight gets half the credit",
        (
            (
                "model/flows.pxi",
                "        self.lift(flow, self.credit(f.depth))\n",
                "        if BUG:\n"
                "            self.lift(flow, self.credit(f.depth) * 1000 // f.weight_milli)\n"
                "            return self.join(flow, True)\n",
            ),
        ),
        0,
        tests=(f"{CREDIT}::test_idleness_earns_no_more_than_the_credit",),
    ),
    Mutant(
        "credit-without-end",
        "a flow that runs keeps its counter when it waits again",
        (
            (
                "model/flows.pxi",
                "        self.lift(flow, self.credit(f.depth))\n",
                "        if BUG and f.live:\n            return self.join(flow, True)\n",
            ),
        ),
        0,
        tests=(f"{CREDIT}::test_a_flow_that_trickles_saves_up_no_more_than_the_credit",),
    ),
    Mutant(
        "level-forgotten",
        "after a restart, the levels of all classes are 0",
        (
            (
                "lifecycle/restore.pxi",
                "        core.flows.level[cls] = levels[cls]\n",
                "        if BUG:\n            continue\n",
            ),
        ),
        0,
        tests=(f"{CREDIT}::test_a_newcomer_is_lifted_to_the_level_of_before_the_restart",),
    ),
    Mutant(
        "lead-without-end",
        "service elsewhere keeps a flow back in a pool until the others have had as much",
        (
            (
                "policy/lead.pxi",
                "    if flows.order != ORDER_COUNTER or not flows.lifts:\n        return 0\n",
                "    if BUG:\n        return 0\n",
            ),
        ),
        0,
        tests=(HISTORIES,),
    ),
    Mutant(
        "lead-forgives-own-service",
        "a flow is brought back in a pool by what it was served there",
        (
            (
                "policy/lead.pxi",
                "        if p.foreign == 0:\n            continue\n        if is_node(",
                "        if BUG:\n            p.foreign = VTC_MAX\n",
            ),
        ),
        0,
        tests=(HISTORIES,),
    ),
    Mutant(
        "lead-lowers-everywhere",
        "a flow that is brought back in one pool is brought back in all",
        (
            (
                "policy/lead.pxi",
                "            p.key -= less_by\n",
                "            if BUG:\n                lower_everywhere(flows, flow, less_by, p)\n",
            ),
            (
                "policy/lead.pxi",
                "cdef int bring_back(Flows flows, int32_t flow, int64_t charged) except -1:\n",
                "cdef void lower_everywhere(\n"
                "    Flows flows, int32_t flow, int64_t less_by, Position* but\n"
                ") noexcept:\n"
                "    cdef int32_t n = flows.items[flow].first_position\n"
                "    while n != NONE and BUG:\n"
                "        if &flows.positions.items[n] == but:\n"
                "            n = but.next_position\n"
                "            continue\n"
                "        flows.positions.items[n].key -= min(\n"
                "            less_by, flows.positions.items[n].key\n"
                "        )\n"
                "        n = flows.positions.items[n].next_position\n"
                "\n\n",
            ),
        ),
        0,
        tests=(HISTORIES,),
    ),
    Mutant(
        "remote-counts-everywhere",
        "service at other members of a cluster counts in pools of other models too",
        (
            (
                "model/positions.pxi",
                "        if served_in < NONE:\n",
                "        if BUG and served_in < NONE:\n            return True\n",
            ),
        ),
        0,
        tests=(REMOTE,),
    ),
    Mutant(
        "level-of-pool-missing",
        "a flow that gets something queued in a pool begins where it stood there",
        (
            (
                "policy/local_position.pxi",
                "    p.waits_at = NONE\n    if flows.lifts:\n",
                "    if BUG:\n        return 0\n",
            ),
        ),
        0,
        tests=(HISTORIES,),
    ),
    Mutant(
        "escrow-leak",
        "a chunk that is returned to the store stays here too",
        (
            (
                "lifecycle/escrow.pxi",
                "        n.level[k] = min(n.level[k] + units * MICRO, n.rate[k] * MICRO)\n",
                "        if BUG and units < 0:\n"
                "            applied.append(units)\n"
                "            continue\n",
            ),
        ),
        0,
        tests=(f"{ESCROW}::test_a_return_takes_what_is_held_at_most",),
    ),
    Mutant(
        "escrow-chunk-endless",
        "a chunk is spent after its end",
        (
            (
                "model/quotas.pxi",
                "        if now_ns >= n.escrow.ends_ns:\n",
                "        if BUG:\n            return\n",
            ),
        ),
        0,
        tests=(f"{ESCROW}::test_a_chunk_ends_when_it_is_used_too_late",),
    ),
    Mutant(
        "lead-without-end-in-a-cluster",
        "service at other members keeps a tenant back until the others have had as much",
        (
            (
                "policy/lead.pxi",
                "    if flows.order != ORDER_COUNTER or not flows.lifts:\n        return 0\n",
                "    if BUG:\n        return 0\n",
            ),
        ),
        200,
        None,
        CLUSTERS,
    ),
    Mutant(
        "escrow-leak-in-a-cluster",
        "a chunk that is returned to the store stays here too",
        (
            (
                "lifecycle/escrow.pxi",
                "        n.level[k] = min(n.level[k] + units * MICRO, n.rate[k] * MICRO)\n",
                "        if BUG and units < 0:\n"
                "            applied.append(units)\n"
                "            continue\n",
            ),
        ),
        200,
        None,
        CLUSTERS,
    ),
    Mutant(
        "charge-at-the-slowest-pace",
        "a request that leaves before its first token pays by the slowest of the last prefills",
        (
            (
                "lifecycle/lease.pxi",
                "        rate = max(rate, p.prefill_rates[k])\n",
                "        if BUG:\n"
                "            rate = min(rate or p.prefill_rates[k], p.prefill_rates[k])\n"
                "            continue\n",
            ),
        ),
        200,
        None,
        LEAVES,
    ),
)
