"""Lists known bugs of the rule that says which request may pass the head of a pool."""

from mutant import Mutant

BACKFILL = "tests/core/test_backfill.py"


def _mutant(
    name: str, what: str, above: str, lines: str, test: str, file: str = "policy/backfill.pxi",
    tests: str = BACKFILL,
) -> Mutant:  # fmt: skip
    return Mutant(name, what, ((file, above, lines),), 0, tests=(f"{tests}::{test}",))


BACKFILL_BUGS = (
    _mutant(
        "pass-without-weight",
        "a flow of any weight may be ahead by the whole charge of the head",
        "    return max(\n        core.flows.grain if core.by_prefix else 0,\n",
        "    if BUG:\n        return work\n",
        "test_flow_passes_until_it_leads_by_the_charge_of_the_head",
    ),
    _mutant(
        "pass-at-the-leaf",
        "tenants are compared, and not the groups above them",
        "    find_siblings(core.flows, &right.side, &of_head)\n",
        "    if BUG:\n"
        "        return core.flows.counter_at(r.flow, pool) <= (\n"
        "            core.flows.counter_at(head.flow, pool) + lead_allowed(core, head.flow, work)\n"
        "        )\n",
        "test_groups_are_compared_where_they_are_siblings",
    ),
    _mutant(
        "pass-in-the-group",
        "a tenant passes the next one of its own group, however far ahead of it",
        "    side = right.side\n",
        "    if BUG:\n        return True\n",
        "test_lead_over_the_next_of_the_own_group_is_bounded_too",
    ),
    _mutant(
        "lead-of-the-average",
        "how far service elsewhere keeps a flow back in a pool goes by the average charge",
        "    if lead == LEAD_AUTO:\n",
        "    if BUG and lead == LEAD_AUTO:\n"
        "        return 2 * flows.average_charge[f.depth] + flows.positions.pace[pool]\n",
        "test_it_is_four_of_the_largest_charge_however_many_small_ones_there_are",
        "policy/local_position.pxi",
        "tests/core/test_automatic_lead.py",
    ),
    _mutant(
        "lead-without-passes",
        "several pools forgive what passing a head brought a flow ahead in each",
        "    return lead + flows.lead_given_max\n",
        "    if BUG:\n        return lead\n",
        "test_passes_of_a_head_add_to_a_lead_that_is_set",
        "policy/local_position.pxi",
        "tests/core/test_automatic_lead.py",
    ),
    _mutant(
        "light-with-a-queue",
        "a flow with a long queue counts as light",
        "        right.light = (\n",
        "        if BUG:\n            right.light = plan.above\n            return True\n",
        "test_flow_with_a_queue_is_not_light",
    ),
    _mutant(
        "pass-by-sum",
        "the start of a head is projected from the sum of the reservations",
        "    start.left = growing_project(\n",
        "    if BUG:\n"
        "        start.left = growing_project(\n"
        "            &p.growing, core.requests, &run, room, False, &start.spare_tokens\n"
        "        )\n"
        "        start.known = True\n"
        "        return\n",
        "test_start_is_projected_in_the_form_of_the_ledger",
    ),
    _mutant(
        "pass-in-full",
        "a lease that passed is charged in full under a surplus",
        "    if r.lease.discount_ppm:\n",
        "    if BUG:\n        r.lease.discount_ppm = 0\n",
        "test_lease_that_passed_is_charged_less_under_a_surplus",
        "lifecycle/lease.pxi",
    ),
    _mutant(
        "pass-forgotten",
        "a lease that passed loses its discount over a restart",
        "    if core.saved_passes:\n",
        "    if BUG:\n        core.saved_passes.clear()\n",
        "test_lease_that_passed_is_charged_as_without_a_restart[500000]",
        "lifecycle/replay.pxi",
        "tests/core/test_saved_passes.py",
    ),
    _mutant(
        "better-class-locked-out",
        "a better class needs the surplus to pass a head that ageing brought",
        "    if core.classes.goes_before(cls, first):\n",
        "    if BUG:\n"
        "        return core.ledger.pools[pool].surplus_micro >= work_micro(core, r)\n",
        "test_better_class_passes_a_head_that_ageing_brought",
    ),
)
