"""Lists known bugs of sessions of agents."""

from mutant import Mutant

TESTS = "tests/core/test_agent_sessions.py::"

SESSION_BUGS = (
    Mutant(
        "session-uncharged",
        "service of a lease is not charged to its session",
        (
            (
                "policy/queue_order.pxi",
                "    a = &flows.agents.items[s]\n",
                "    if BUG:\n        return 0\n",
            ),
        ),
        0,
        tests=(f"{TESTS}test_sessions_of_a_tenant_take_turns_however_many_requests_each_has",),
    ),
    Mutant(
        "session-saves-up",
        "a session that begins to wait is not lifted",
        (
            (
                "policy/session_order.pxi",
                "        t = agents.add_strand(s, q)\n",
                "        if BUG:\n            agents.items[s].vtc = 0\n",
            ),
        ),
        0,
        tests=(f"{TESTS}test_a_session_that_returns_is_not_paid_for_its_absence",),
    ),
    Mutant(
        "session-by-target",
        "sessions whose requests name the pool and those that name none go by arrival",
        (
            (
                "policy/line_heads.pxi",
                "    while q != NONE:\n        if flows.queues[q].stands and",
                "    if BUG:\n        return i\n",
            ),
        ),
        0,
        tests=(f"{TESTS}test_sessions_take_turns_whether_they_name_the_pool_or_not",),
    ),
    Mutant(
        "session-level-by-target",
        "a session that names the pool begins below those that wait and name none",
        (
            (
                "policy/session_order.pxi",
                "    line.level = level_of_lines(flows, flow)\n",
                "    if BUG:\n        return level_of_line(flows, line)\n",
            ),
        ),
        0,
        tests=(f"{TESTS}test_a_session_that_names_the_pool_begins_no_lower_than_those_that_wait",),
    ),
    Mutant(
        "session-cap-without-turns",
        "a session that waits for the cap waits until another pauses, however long",
        (
            (
                "policy/session_cap.pxi",
                "        make_room(core, pool, tokens)\n",
                "        if BUG:\n            return False\n",
            ),
        ),
        0,
        tests=(f"{TESTS}test_the_wait_ends_before_half_of_the_queue_ttl",),
    ),
)
