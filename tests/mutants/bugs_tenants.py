"""Lists known bugs of tenants at first sight: who gets a flow, and who is forgotten for it."""

from mutant import Mutant

FORGETTING = "tests/core/test_forgetting.py"

TENANT_BUGS = (
    Mutant(
        "flow-for-any-name",
        "a name that nothing proves gets a flow of its own",
        (
            (
                "lifecycle/admit.pxi",
                "    return core.unknown_own and flow == core.unknown_flow and tenant.size > 0"
                " and proof > 0\n",
                "    if BUG:\n        return core.unknown_own and flow == core.unknown_flow\n",
            ),
        ),
        0,
        tests=("tests/core/test_first_sight.py::test_any_other_name_shares_the_unknown_flow",),
    ),
    Mutant(
        "forgets-who-is-ahead",
        "a tenant is forgotten although its counter is ahead of where a newcomer begins",
        (
            (
                "lifecycle/forgetting.pxi",
                "    if f.vtc > newcomer:",
                "    if BUG:\n        return core.predictor.knows_little(flow)\n",
            ),
        ),
        0,
        tests=(f"{FORGETTING}::test_a_forgotten_tenant_gets_no_more_than_one_that_stayed",),
    ),
    Mutant(
        "forgets-what-a-bucket-lacks",
        "a tenant is forgotten although its quota is not whole again",
        (
            (
                "lifecycle/forgetting.pxi",
                "        if n.rate[k] and n.level[k] < n.rate[k] * MICRO:\n",
                "        if BUG:\n            continue\n",
            ),
        ),
        0,
        tests=(f"{FORGETTING}::test_a_tenant_is_kept_until_its_bucket_is_full",),
    ),
    Mutant(
        "fades-only-if-forgotten",
        "what a tenant's outputs taught counts for good, unless the tenant is forgotten",
        (
            (
                "lifecycle/forgetting.pxi",
                "    if has_faded(core, flow):\n        core.predictor",
                "    if BUG:\n        return\n",
            ),
        ),
        0,
        tests=(f"{FORGETTING}::test_a_tenant_that_stayed_is_predicted_afresh_after_an_hour",),
    ),
    Mutant(
        "flows-beyond-the-share",
        "a principal makes flows of new names beyond its share, until others get none",
        (
            (
                "lifecycle/first_sight.pxi",
                "        flow = reclaim_retired(core) if only == NONE else NONE\n",
                "        if BUG:\n            only = NONE\n",
            ),
        ),
        0,
        tests=(
            "tests/core/test_first_sight.py::test_names_beyond_a_share_spare_the_flows_of_others",
        ),
    ),
    Mutant(
        "gives-away-a-flow-in-use",
        "the flow of a deleted tenant goes to a new one while something of it runs or waits",
        (
            (
                "lifecycle/forgetting.pxi",
                "        if may_forget(core, flow, True):\n",
                "        if BUG:\n            forget_tenant(core, flow)\n            return flow\n",
            ),
        ),
        0,
        tests=(
            "tests/core/test_retiring.py::test_a_flow_is_not_given_away_while_it_has_something",
        ),
    ),
)
