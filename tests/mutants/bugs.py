"""Lists known bugs: lines inserted into a copy of the core's source, and what catches each.

The production source holds none of this.
"""

from bugs_backfill import BACKFILL_BUGS
from bugs_fairness import FAIRNESS_BUGS
from bugs_named import NAMED_BUGS
from bugs_operator import OPERATOR_BUGS
from bugs_rest import REST_BUGS
from bugs_sessions import SESSION_BUGS
from bugs_sets import SET_BUGS
from bugs_tenants import TENANT_BUGS
from bugs_tree import TREE_BUGS
from bugs_trust import TRUST_BUGS
from mutant import Mutant

RELEASE = (
    "    if not r.lease.is_void:\n"
    "        core.ledger.pools[r.pool].served += outcome == OUT_COMPLETED\n"
)
HEADROOM = "        # Headroom is for growth; what is alone in the pool may use it all.\n"
LIFT = "        self.lift(flow, self.credit(f.depth))\n"
RESTART = "tests/core/test_restart.py"
SECOND = 1 << 22
THIRD = 1 << 23
FOURTH = 1 << 24  # from here on there are deadlines
RESTARTS = frozenset(
    {"scheduler-restarted", "power-lost", "state-damaged", "client-leaves-run", "burst",
     "client-leaves-queue", "complete-twice", "admit-twice", "engine-slow"}
)  # fmt: skip
RENEWED = "        if r.due_ns > core.deadlines.nodes[0].key:  # renewed since\n"


def leak(outcome: str) -> tuple[tuple[str, str, str], ...]:
    """End a lease, and keep its blocks promised."""
    line = (
        f"    if BUG and outcome == {outcome} and not r.lease.is_void:\n"
        "        core.ledger.pools[r.pool].promised_blocks += r.lease.reserved_blocks\n"
    )
    return (("lifecycle/lease.pxi", RELEASE, line),)


MUTANTS = (
    Mutant(
        "leak-on-timeout", "a lease that expires keeps its reservation", leak("OUT_EXPIRED"), 40
    ),
    Mutant(
        "leak-on-cancel",
        "a lease that is cancelled keeps its reservation",
        leak("OUT_CANCELLED"),
        40,
    ),
    Mutant(
        "refund-of-what-ran",
        "a request that leaves before its first token pays nothing",
        (
            (
                "lifecycle/lease.pxi",
                "        f.input_tokens += r.lease.input_tokens\n",
                "        if BUG and r.lease.is_estimated:\n            r.lease.input_tokens = 0\n",
            ),
        ),
        40,
        None,
        SECOND,
    ),
    Mutant(
        "leak-on-refusal",
        "a request that is refused at once leaves a block promised",
        (
            (
                "lifecycle/admit.pxi",
                "        return -refuse(core, ask.flow, outcome, ask.tag)\n    core.seq += 1\n",
                "        if BUG and core.ledger.count:\n"
                "            core.ledger.pools[0].promised_blocks += 1\n",
            ),
        ),
        40,
    ),
    Mutant(
        "leak-on-exception",
        "a request that ends in an error leaves a block promised",
        (
            (
                "lifecycle/admit.pxi",
                "        raise CallerError(\n"
                '            CODE_ALREADY_EXISTS, "request_id", "was used for another',
                "        if BUG:\n            core.ledger.pools[0].promised_blocks += 1\n",
            ),
        ),
        100,
    ),
    Mutant(
        "head-of-line",
        "a pool that is full holds up all others",
        (
            (
                "lifecycle/dispatch.pxi",
                "            is_left = True\n",
                "            if BUG:\n                return 0\n",
            ),
        ),
        60,
    ),
    Mutant(
        "starvation",
        "whatever fits goes before a large request, as often as it likes",
        (
            (
                "policy/backfill.pxi",
                "    return head.head_state.bypassed >= core.settings.bypass_max or (\n",
                "    if BUG:\n        return False\n",
            ),
            (
                "policy/backfill.pxi",
                "        if not right.light and not leaves(",
                "        if BUG:\n            right.light = True\n",
            ),
        ),
        300,
        frozenset({"burst", "client-leaves-run", "engine-slow"}),
    ),
    Mutant(
        "lift-after-eviction",
        "a flow that was idle comes back with a counter of 0",
        (
            (
                "model/flows.pxi",
                LIFT,
                "        if BUG:\n"
                "            f.vtc = 0\n"
                "            return self.join(flow, True)\n",
            ),
        ),
        0,
        tests=("tests/core/test_credit.py::test_idleness_earns_no_more_than_the_credit",),
    ),
    Mutant(
        "reverse-resume",
        "what comes back to a queue goes before what it came behind",
        (
            (
                "policy/queueing.pxi",
                "    displaced = choose_head(flows, q)\n",
                "    if BUG and flows.queues[q].chain.count > 1:\n"
                "        other = flows.queues[q].chain.head\n"
                "        chain_remove(&flows.queues[q].chain, flows.requests.items, other)\n"
                "        chain_push(&flows.queues[q].chain, flows.requests.items, other)\n",
            ),
        ),
        40,
    ),
    Mutant(
        "reaper",
        "a lease ends after its first TTL, though its holder renews it",
        (
            (
                "lifecycle/expire.pxi",
                RENEWED,
                "        if BUG and (r.state == LIVE or r.state == SUSPECT):\n"
                "            end_lease(core, i, OUT_EXPIRED)\n"
                "            continue\n",
            ),
        ),
        40,
    ),
    Mutant(
        "negative-after-flap",
        "the end of a lease of an old epoch is booked on the new one",
        (
            (
                "lifecycle/lease.pxi",
                RELEASE,
                "    if BUG and r.lease.is_void:\n        core.ledger.release(i)\n",
            ),
        ),
        60,
    ),
    Mutant(
        "stale-telemetry",
        "the ledger believes what the engine said last, not what it has promised itself",
        (
            (
                "model/ledger.pxi",
                HEADROOM,
                "        if BUG and p.telemetry_at_ns >= 0:\n"
                "            if p.engine_used_tokens // p.block_size + blocks"
                " <= p.capacity_blocks:\n"
                "                return WAIT_NONE\n"
                "            return WAIT_KV\n",
            ),
        ),
        100,
    ),
    Mutant(
        "over-holding",
        "half of the cache is never granted, so that the engine idles",
        (
            (
                "model/ledger.pxi",
                HEADROOM,
                "        if BUG and p.promised_blocks + blocks > p.capacity_blocks // 2:\n"
                "            return WAIT_KV\n",
            ),
        ),
        100,
    ),
    Mutant(
        "suspect-does-not-count",
        "while a lease is suspect, its pool grants what it holds to others",
        (
            (
                "model/ledger.pxi",
                HEADROOM,
                "        if BUG and p.suspect:\n            return WAIT_NONE\n",
            ),
        ),
        100,
    ),
    Mutant(
        "repeat-is-new",
        "a repeated request is taken for a new one: two reservations, two charges",
        (
            (
                "lifecycle/admit.pxi",
                "    if i != NONE:\n        return answer_repeat(core, i, ask)\n",
                "    if BUG:\n        i = NONE\n",
            ),
        ),
        40,
    ),
    Mutant(
        "epoch-forgotten",
        "leases of an engine that restarted keep their reservations",
        (
            (
                "lifecycle/lease.pxi",
                "    while i != NONE:\n        after = core.requests.items[i].lease.pool_next\n",
                "    if BUG:\n        return 0\n",
            ),
        ),
        40,
    ),
    Mutant(
        "overdue-grant",
        "a request is granted after its queue TTL",
        (
            (
                "lifecycle/evict.pxi",
                "    if r.due_ns <= core.now_ns:  # its timer has not been reached yet\n",
                "    if BUG:\n        r.due_ns = max(r.due_ns, core.now_ns + 1)\n",
            ),
            (
                "lifecycle/expire.pxi",
                RENEWED,
                "        if BUG and r.state == QUEUED and r.due_ns <= core.now_ns:\n"
                "            r.due_ns = core.now_ns + NS_PER_S\n",
            ),
        ),
        60,
    ),
    Mutant(
        "peak-forgets-silent",
        "the peak form does not count leases that report nothing, or are suspect",
        (
            (
                "model/peak_usage.pxi",
                "    if one_more != NULL and is_alone:\n",
                "    if BUG:\n        fixed = 0\n",
            ),
        ),
        100,
    ),
    Mutant(
        "peak-forgets-growth",
        "the peak form counts what leases hold now, not what they will",
        (
            (
                "model/peak_usage.pxi",
                "    return most * block_tokens + fixed\n",
                "    if BUG:\n        most = blocks\n",
            ),
        ),
        100,
    ),
    Mutant(
        "quota-ignored",
        "no bucket and no cap ever makes a request wait",
        (
            (
                "model/quotas.pxi",
                "        if self.lacks_slot(n):\n            return NONE\n",
                "        if BUG:\n            return 0\n",
            ),
        ),
        100,
        first=SECOND,
    ),
    Mutant(
        "quota-leak",
        "what is evicted at the head of its queue keeps what it took from its quotas",
        (
            (
                "policy/quota_admission.pxi",
                "    if core.requests.items[i].bill:\n        core.quotas.settle(i, has_run)\n",
                "    if BUG:\n        core.requests.items[i].bill = 0\n        return 0\n",
            ),
        ),
        100,
        first=SECOND,
    ),
    Mutant(
        "counter-forgotten",
        "after a restart, all tenants count as never served",
        (
            (
                "lifecycle/restore.pxi",
                "    if v[6]:\n        f.granted_at_ns",
                "    if BUG:\n        f.vtc = 0\n",
            ),
        ),
        0,
        tests=(f"{RESTART}::test_the_order_of_service_goes_on",),
    ),
    Mutant(
        "restart-without-lift",
        "after a restart, whoever was active counts as idle until he comes back",
        (
            (
                "lifecycle/restore.pxi",
                "        if level < 0:\n            put_back(flows, flow)\n",
                "        if BUG:\n            continue\n",
            ),
        ),
        0,
        tests=(f"{RESTART}::test_active_flow_stays_active_for_a_lease_ttl",),
    ),
    Mutant(
        "replay-charged-twice",
        "a lease that is told of after a restart is charged once more",
        (("lifecycle/replay.pxi", "    f.owed -= paid\n", "    if BUG:\n        paid = 0\n"),),
        0,
        tests=(f"{RESTART}::test_a_replayed_lease_is_charged_once",),
    ),
    Mutant(
        "quota-full-again",
        "after a restart, all buckets are full",
        (
            (
                "lifecycle/restore.pxi",
                "    n.at_ns[which] = at_ns\n",
                "    if BUG:\n        n.level[which] = rate * MICRO\n",
            ),
        ),
        200,
        RESTARTS,
        THIRD,
    ),
    Mutant(
        "untold-not-held",
        "after a restart, blocks of leases that nobody told of yet are granted to others",
        (
            (
                "lifecycle/restore.pxi",
                "        p.owed_tokens = p.replay_debt = v[1]\n",
                "        if BUG:\n            v[1] = 0\n",
            ),
        ),
        200,
        RESTARTS,
        THIRD,
    ),
    Mutant(
        "untold-held-for-ever",
        "blocks of leases that nobody tells of are never free again",
        (
            (
                "lifecycle/restore.pxi",
                "        core.ledger.pools[pool].owed_tokens = 0\n",
                "        if BUG:\n            continue\n",
            ),
        ),
        1_000,
        RESTARTS,
        THIRD,
    ),
    Mutant(
        "change-not-saved",
        "what changes of the first tenant is not saved",
        (
            (
                "base/dirty_queue.pxi",
                "        if self.on and not self.marks[number]:\n",
                "        if BUG and number == 0:\n            return\n",
            ),
        ),
        0,
        tests=(f"{RESTART}::test_the_order_of_service_goes_on",),
    ),
    Mutant(
        "damaged-half-counts",
        "of a damaged file, the rows before the wrong one count",
        (
            (
                "lifecycle/restore.pxi",
                "    for applies in (False, True):\n",
                "    if BUG:\n"
                "        for key, value, age_ns in rows:\n"
                "            restore_row(core, key, value, age_ns, True, [])\n",
            ),
        ),
        0,
        tests=(f"{RESTART}::test_a_wrong_row_is_refused_and_none_counts",),
    ),
    Mutant(
        "class-ignored",
        "the worst class goes first",
        (
            (
                "model/classes.pxi",
                "        return EXEMPT_PRIORITY if self.items[c].exempt else self.items[c].rank\n",
                "        if BUG:\n            return -self.items[c].rank\n",
            ),
        ),
        100,
        frozenset({"burst", "engine-slow"}),
        THIRD,
    ),
    Mutant(
        "adapters-unlimited",
        "more LoRA adapters are active than may be",
        (
            (
                "model/ledger.pxi",
                "            if is_above(p.limits.max_loras, p.loras.active + 1):\n",
                "            if BUG:\n                self.pools[pool].limits.max_loras = 0\n",
            ),
        ),
        100,
        frozenset({"burst", "engine-slow"}),
        THIRD,
    ),
    Mutant(
        "round-unlimited",
        "a round takes any number of prompts",
        (
            (
                "model/ledger.pxi",
                "        if p.prefill_budget.tokens and r.reports_progress and is_above(\n",
                "        if BUG:\n            self.pools[pool].prefill_budget.max_tokens = 0\n",
            ),
        ),
        100,
        frozenset({"burst", "engine-slow"}),
        THIRD,
    ),
    Mutant(
        "early-for-others",
        "a request is refused early for what other tenants have queued",
        (
            (
                "lifecycle/admit.pxi",
                "    if outcome == 0 and ask.waited_ns == 0:\n",
                "    if BUG and outcome == 0 and core.settings.early_refusal"
                " and f.queued == 0 and not ask.deadline_ns:\n"
                "        outcome = OUT_REJECTED_DEADLINE if core.seq % 50 == 49 else 0\n",
            ),
        ),
        60,
        first=FOURTH,
    ),
    *OPERATOR_BUGS,
    *FAIRNESS_BUGS,
    *BACKFILL_BUGS,
    *TRUST_BUGS,
    *NAMED_BUGS,
    *TENANT_BUGS,
    *TREE_BUGS,
    *SESSION_BUGS,
    *SET_BUGS,
    *REST_BUGS,
)

NUMBERS = {mutant.name: number for number, mutant in enumerate(MUTANTS, 1)}
