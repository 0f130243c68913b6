"""Lists known bugs of requests that name several pools."""

from mutant import Mutant

TESTS = "tests/core/test_pool_sets.py::"

SET_BUGS = (
    Mutant(
        "set-in-one-line",
        "the core lets a request of several pools stand in the line of the first one only",
        (
            (
                "model/pool_sets.pxi",
                "        return self.of(queue_target - 1).count if",
                "        if BUG:\n            return 1\n",
            ),
        ),
        0,
        tests=(f"{TESTS}test_a_set_of_two_pools_fills_these_and_no_other",),
    ),
    Mutant(
        "set-runs-anywhere",
        "a request that names several pools is granted in a pool that it did not name",
        (
            (
                "model/flows.pxi",
                "            return set_has(&self.sets.of(target).members, pool)\n",
                "            if BUG:\n                return True\n",
            ),
        ),
        0,
        tests=(f"{TESTS}test_books_of_sets_balance_and_drain_to_zero",),
    ),
    Mutant(
        "set-forgotten-while-it-waits",
        "the number of a set is given to another one while requests wait that name it",
        (
            (
                "model/pool_sets.pxi",
                "        s.users += 1\n",
                "        if BUG:\n            return\n",
            ),
        ),
        0,
        tests=(f"{TESTS}test_books_of_sets_balance_and_drain_to_zero",),
    ),
    Mutant(
        "set-behind-a-strangers-cap",
        "a request waits for the cap of a pool that it did not name",
        (
            (
                "policy/session_cap.pxi",
                "        if not is_set(target) or core.flows.may_take(pool, target):\n",
                "        if BUG:\n            return pool\n",
            ),
        ),
        0,
        tests=(
            "tests/core/test_session_faults.py"
            "::test_a_set_waits_for_no_cap_of_a_pool_that_it_lacks",
        ),
    ),
    Mutant(
        "level-of-another-set",
        "sessions that wait for a set are lifted to the level of those of another one",
        (
            (
                "policy/session_order.pxi",
                "    of.level = max(of.level, agents.line(flows.queues[q].line).level)\n",
                "    if BUG:\n        return 0\n",
            ),
        ),
        0,
        tests=(f"{TESTS}test_sessions_begin_alike_whatever_sets_came_before",),
    ),
)
