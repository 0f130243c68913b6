"""Lists known bugs of pools that rest: a change affects what a look would find, unseen."""

from mutant import Mutant

REST = "tests/core/test_rest.py"
WALK = "test_looking_at_all_pools_would_change_nothing_in_long_histories"


def _mutant(name: str, what: str, file: str, above: str, lines: str, test: str = WALK) -> Mutant:
    return Mutant(name, what, ((file, above, lines),), 0, tests=(f"{REST}::{test}",))


REST_BUGS = (
    _mutant(
        "rest-through-a-new-head",
        "a pool that rests does not hear of changes of the line",
        "policy/tree_lines.pxi",
        "    if target:\n        flows.pool_order.touch(target - 1)\n    else:\n",
        "    if BUG:\n        return\n",
    ),
    _mutant(
        "rest-through-a-charge",
        "a charge of the next request's tenant leaves pools at rest",
        "policy/fair_queue.pxi",
        "    if (\n        weighted_micro < 0 or flows.grain > 1\n",
        "    if BUG:\n        return\n",
    ),
    _mutant(
        "rest-behind-a-hidden-request",
        "only the next request is watched, and not a first one that the pool cannot hold",
        "lifecycle/rest.pxi",
        "    cdef Line free = free_line(core.flows, pool)\n",
        "    if BUG:\n        return\n",
        "test_charge_of_a_first_request_that_a_pool_cannot_hold_shows_it_the_next",
    ),
    _mutant(
        "rest-through-the-wait",
        "the wait of the next request does not end a rest",
        "lifecycle/rest.pxi",
        "    if lined_ns + core.settings.queue_target_ns >= core.now_ns:\n",
        "    if BUG:\n        return NEVER\n",
        "test_load_of_a_pool_that_rests_rises_with_the_wait",
    ),
    _mutant(
        "rest-through-ageing",
        "a class that is due brings nothing forward in a pool that rests",
        "lifecycle/rest.pxi",
        "    if core.classes.count == 1:\n",
        "    if BUG:\n        return NEVER\n",
    ),
    _mutant(
        "rest-beside-a-choice",
        "pools that rest have no part in the choice of a pool for an adapter or a prefix",
        "lifecycle/rest.pxi",
        "    return has_choice(core) and (\n"
        "        (core.settings.adapter_affinity_ppm and core.adapters.count)\n",
        "    if BUG:\n        return False\n",
    ),
    _mutant(
        "rest-unnamed",
        "the last pool that was looked at states what a request waits for",
        "policy/wait_tracking.pxi",
        "    if w.round != core.rounds and core.ledger.order.asleep:\n",
        "    if BUG:\n"
        "        w.round, w.pool = core.rounds, pool\n"
        "        p.named = core.requests.handle(i)\n"
        "        return wait_for(core.requests, i, WAITS_POOL + p.reason, core.now_ns)\n",
    ),
)
