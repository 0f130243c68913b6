"""Known bugs of tenants at first sight: who gets a flow, and who is forgotten for it."""

from mutant import Mutant

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
)
