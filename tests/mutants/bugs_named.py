"""Lists known bugs of pools that take only requests that name them."""

from mutant import Mutant

CLOSING = 15 << 50  # from here on some pools take only requests that name them
_FILE = "tests/core/test_named_only.py"
_WALK = f"{_FILE}::test_pools_that_close_and_open_keep_the_books"
_SAME = (
    "tests/core/test_named_only.py::test_closed_pools_change_nothing_for_requests_without_a_pool"
)

NAMED_BUGS = (
    Mutant(
        "strangers-pool-for-all",
        "a pool that registered itself takes requests that name none",
        (
            (
                "model/principals.pxi",
                "        if not self.is_limited(number) or self.tenants[number] == []:\n",
                "        if BUG:\n            return False\n",
            ),
        ),
        40,
        first=CLOSING,
    ),
    Mutant(
        "closed-pool-counts-at-arrival",
        "a request that names no pool is queued for pools that will never take it",
        (
            (
                "lifecycle/admit.pxi",
                "        if core.flows.may_take(p, r.target):\n",
                "        if BUG and r.target == NONE and core.ledger.pools[p].attached:\n"
                "            attached = True\n"
                "            fits = fits or core.ledger.can_hold(p, r)\n",
            ),
        ),
        0,
        tests=(
            "tests/core/test_named_only.py::test_without_any_pool_that_takes_them_they_are_refused",
        ),
    ),
    Mutant(
        "line-kept-by-a-closed-pool",
        "what waits stays in the line of a pool that closes",
        (
            (
                "lifecycle/pool_positions.pxi",
                "            take_from_anywhere(flows, q, pool)\n",
                "            if BUG:\n                continue\n",
            ),
        ),
        0,
        tests=(_WALK,),
    ),
    Mutant(
        "backlog-kept-in-a-closed-pool",
        "a tenant counts as backlogged in a pool that closed to its requests",
        (
            (
                "policy/local_position.pxi",
                "        if not is_for(flows, &queued, flows.positions.items[n].pool):\n",
                "        if BUG and set_has(&queued, 0):\n            return 0\n",
            ),
        ),
        0,
        tests=(f"{_FILE}::test_a_tenant_is_not_backlogged_in_a_closed_pool_that_it_does_not_name",),
    ),
    Mutant(
        "opened-pool-without-lift",
        "a pool that opens has what waits stand where it stood long ago",
        (
            (
                "lifecycle/pool_positions.pxi",
                "        own = flows.find_queue(flow, pool + 1)\n",
                "        if BUG and flows.find_position(flow, pool) != NONE:\n"
                "            continue\n",
            ),
        ),
        0,
        tests=(_WALK,),
    ),
    Mutant(
        "closed-pool-hides-the-wait",
        "requests of a closed pool count its line for any among their own",
        (
            (
                "policy/local_position.pxi",
                "            elif not flows.one_line and flows.may_take(target - 1, NONE):\n",
                "            elif BUG and not flows.one_line:\n                return 0\n",
            ),
        ),
        0,
        tests=(f"{_FILE}::test_a_tenant_that_comes_to_a_closed_pool_is_lifted_there",),
    ),
    Mutant(
        "session-waits-for-a-closed-pool",
        "a session that names no pool waits for the cap of one that takes only what names it",
        (
            (
                "lifecycle/pool_positions.pxi",
                "    let_unnamed_out(core, pool)\n",
                "    if BUG:\n        return 0\n",
            ),
        ),
        0,
        tests=(f"{_FILE}::test_session_that_waits_for_a_cap_follows",),
    ),
)
