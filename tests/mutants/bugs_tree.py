"""Lists known bugs of the tree of shares."""

from mutant import Mutant

TESTS = "tests/core/test_tree.py::"
POOLS = f"{TESTS}test_random_trees_over_pools_grant_what_the_model_picks"

TREE_BUGS = (
    Mutant(
        "node-uncharged",
        "service of a tenant is not charged to the groups above it",
        (
            (
                "policy/fair_queue.pxi",
                "        add_service(flows, node, more)\n",
                "        if BUG:\n            more = 0\n",
            ),
        ),
        0,
        tests=(f"{TESTS}test_organisations_share_by_weight_whatever_their_size",),
    ),
    Mutant(
        "node-saves-up",
        "a group that begins to wait is not lifted",
        (
            (
                "model/flows.pxi",
                "            self.lift(flow, self.credit(self.items[flow].depth) if",
                "            if BUG:\n                self.rekey_active(flow)\n"
                "                continue\n",
            ),
        ),
        0,
        tests=(f"{TESTS}test_newcomer_group_begins_at_the_level_of_its_siblings",),
    ),
    Mutant(
        "node-looks-at-one-line",
        "below a group, only what stands in the line of its own first request is looked at",
        (
            (
                "policy/line_heads.pxi",
                "        own, free = own_heap(flows, node, cls, pool), free_heap(",
                "        if BUG and flows.queues[q].target == 0:\n"
                "            own = flows.family_of(node).no_line\n"
                "            free = free_heap(flows, node, cls, pool)\n"
                "            continue\n"
                "        elif BUG:\n"
                "            own = own_heap(flows, node, cls, pool)\n"
                "            free = flows.family_of(node).no_line\n"
                "            continue\n",
            ),
        ),
        0,
        tests=(f"{TESTS}test_random_trees_grant_what_the_model_picks",),
    ),
    Mutant(
        "node-level-forgotten",
        "after a restart, the levels below all groups are 0",
        (
            (
                "lifecycle/saved_tree.pxi",
                "    core.flows.family_of(node).level = v[1]\n",
                "    if BUG:\n        return 1\n",
            ),
        ),
        0,
        tests=(f"{TESTS}test_counters_and_levels_of_nodes_outlive_a_restart",),
    ),
    Mutant(
        "node-uncharged-in-pools",
        "with several pools, service of a tenant moves no position of the groups above it",
        (
            (
                "policy/fair_queue.pxi",
                "        if flows.local and charge_node(flows, node, family, above, more, pool):\n",
                "        if BUG:\n            more = 0\n",
            ),
        ),
        0,
        tests=(POOLS,),
    ),
    Mutant(
        "node-never-looked-at-in-pools",
        "a report does not see that it has brought a group too far ahead in a pool",
        (
            (
                "policy/lead.pxi",
                "                looks = True\n",
                "                if BUG:\n                    continue\n",
            ),
        ),
        0,
        tests=(POOLS,),
    ),
    Mutant(
        "node-forgiven-where-it-waits-not",
        "a group forgets service elsewhere in a pool in which nothing of it waits",
        (
            (
                "policy/lead.pxi",
                "        if p.foreign and compares and (<Family>family).stands_in(p.pool):\n",
                "        if BUG and compares and not (<Family>family).stands_in(p.pool):\n"
                "            p.foreign = 0\n",
            ),
        ),
        0,
        tests=(POOLS,),
    ),
    Mutant(
        "node-saves-up-in-pools",
        "a group that begins to wait in a pool is not lifted there",
        (
            (
                "policy/local_position.pxi",
                "        if flows.lifts and lifts:\n",
                "        if BUG:\n            lifts = False\n",
            ),
        ),
        0,
        tests=(POOLS,),
    ),
    Mutant(
        "nodes-stay-stale",
        "a group that was charged is picked by its counter of before",
        (
            (
                "policy/tree_lines.pxi",
                "    while flows.stale_count:\n",
                "    if BUG:\n        return 0\n",
            ),
        ),
        0,
        tests=(f"{TESTS}test_random_trees_grant_what_the_model_picks",),
    ),
    Mutant(
        "stale-node-is-first",
        "a group is lifted in a pool to the counter that another one had before its last reports",
        (
            (
                "policy/tree_lines.pxi",
                "    while flows.stale_count and line.count:\n",
                "    if BUG:\n        return\n",
            ),
        ),
        0,
        tests=(POOLS,),
    ),
)
