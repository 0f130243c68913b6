"""Known bugs of what one caller can do to another."""

from mutant import Mutant

REPORTS = frozenset({"report-false"})
HOSTILE = 1 << 48  # from here on there is a principal that acts against all others
ALIVE = 1 << 52  # from here on a newcomer waits for a sign of life
LEAVES = 7 << 51  # from here on engines generate more than they may

TRUST_BUGS = (
    Mutant(
        "report-unlimited",
        "a report is charged whatever its request can use",
        (
            (
                "lifecycle/lease.pxi",
                "    if u.input_tokens > input_max or u.output_tokens > output_most:\n",
                "    if BUG:\n        return\n",
            ),
        ),
        40,
        REPORTS,
    ),
    Mutant(
        "output-above-limit-free",
        "a final output above the limit of its request is cut",
        (
            (
                "lifecycle/lease.pxi",
                "    if u.input_tokens > input_max or u.output_tokens > output_most:\n",
                "    if BUG:\n        output_most = output_max\n",
            ),
        ),
        40,
        first=LEAVES,
    ),
    Mutant(
        "report-counted-each-time",
        "a lease counts as limited with each of its reports",
        (
            (
                "lifecycle/lease.pxi",
                "        core.reports_limited += not r.was_limited\n",
                "        if BUG:\n            core.reports_limited += r.was_limited\n",
            ),
        ),
        40,
        REPORTS,
    ),
    Mutant(
        "output-limited-once",
        "the output of several sequences is limited as that of one",
        (
            (
                "lifecycle/lease.pxi",
                "    if not r.has_exact_input:\n",
                "    if BUG:\n        output_max = r.output_max_tokens\n",
            ),
        ),
        40,
    ),
    Mutant(
        "foreign-replay-accepted",
        "a replay into a pool of another principal makes a lease",
        (
            (
                "lifecycle/replay.pxi",
                "        if (\n            p.principal not in (NONE, ask.principal)\n",
                "        if BUG and core.leases.get(<uint64_t>lease_id, 0) == NONE:\n"
                "            if find_request(core, ask) == NONE:\n"
                "                enter_class(core, ask)\n"
                "                restore_lease(core, ask, lease_id, reserved_tokens)\n"
                "                return progress_lease(core, lease_id, epoch, u, ask.principal)\n",
            ),
        ),
        20,
        first=HOSTILE,
    ),
    Mutant(
        "replays-uncapped",
        "the owner of a pool may replay more than the pool can have granted",
        (
            (
                "lifecycle/replay.pxi",
                "    while left and reserved_tokens > 0:\n",
                "    if BUG:\n        return False\n",
            ),
        ),
        60,
        first=HOSTILE,
    ),
    Mutant(
        "foreign-lease-ids",
        "a caller that knows the id of a lease may report on it and end it",
        (
            (
                "lifecycle/lease.pxi",
                "    if i != NONE and core.requests.items[i].principal != principal:\n",
                "    if BUG:\n        return i\n",
            ),
        ),
        20,
        first=HOSTILE,
    ),
    Mutant(
        "foreign-complete",
        "a Complete on a stream ends the lease of any principal",
        (
            (
                "session/session.pxi",
                "        if i == NONE:\n            return self.notice(m.lease_id, LS_UNKNOWN)\n",
                "        if BUG:\n            i = self.core.leases.get(<uint64_t>m.lease_id, 0)\n",
            ),
        ),
        20,
        first=HOSTILE,
    ),
    Mutant(
        "ids-shared",
        "a request id of a tenant belongs to whichever principal used it first",
        (
            (
                "lifecycle/request_ids.pxi",
                "    if i != NONE and core.requests.items[i].principal == ask.principal:\n",
                "    if BUG and i != NONE:\n        return i\n",
            ),
        ),
        60,
        first=HOSTILE,
    ),
    Mutant(
        "no-share-of-queue",
        "one principal may take all places of the queue",
        (
            (
                "lifecycle/admit.pxi",
                "    if tokens_max:\n        tokens_max = core.principals",
                "    if BUG:\n        return False\n",
            ),
        ),
        60,
        first=HOSTILE,
    ),
    Mutant(
        "queue-of-the-first-to-fill-it",
        "one principal may take all places in the queue of a tenant",
        (
            (
                "lifecycle/admit.pxi",
                "    first = own = first_voucher(f)\n",
                "    if BUG:\n        return True\n",
            ),
        ),
        60,
        first=HOSTILE,
    ),
    Mutant(
        "part-of-a-queue-uncounted",
        "a principal always has less than its part of a queue",
        (
            (
                "lifecycle/admit.pxi",
                "    sharers = f.vouchers + ",
                "    if BUG:\n        own.queued = 0\n",
            ),
        ),
        60,
        first=HOSTILE,
    ),
    Mutant(
        "no-share-of-leases",
        "one principal may replay as many leases as there can be",
        (
            (
                "lifecycle/admit.pxi",
                "    return queued + p.requests[LIVE] + p.requests[SUSPECT] >=",
                "    if BUG:\n        return False\n",
            ),
        ),
        40,
        tests=("tests/core/test_principals.py::test_share_limits_replayed_leases",),
    ),
    Mutant(
        "no-share-of-answers",
        "the answers of one principal push out those of others",
        (
            (
                "lifecycle/lease.pxi",
                "    if has_all_answers(core, r.principal):\n",
                "    if BUG:\n"
                "        if core.answers.count > core.settings.answers_max:\n"
                "            forget(core, core.answers.head)\n"
                "        return 0\n",
            ),
        ),
        60,
        first=HOSTILE,
    ),
    Mutant(
        "no-share-of-sessions",
        "one principal may open all streams",
        (
            (
                "model/principals.pxi",
                "        return self.items[number].sessions if",
                "        if BUG:\n            return 0\n",
            ),
        ),
        60,
        first=HOSTILE,
    ),
    Mutant(
        "no-share-of-pools",
        "one principal may offer all pools",
        (
            (
                "lifecycle/configure.pxi",
                "    most = core.principals.places(principal, <int32_t>core.settings.pools_max)\n",
                "    if BUG:\n        return 0\n",
            ),
        ),
        60,
        first=HOSTILE,
    ),
    Mutant(
        "no-share-of-adapters",
        "one principal may use all adapters",
        (
            (
                "model/principals.pxi",
                "        return self.items[number].adapters if",
                "        if BUG:\n            return 0\n",
            ),
        ),
        60,
        first=HOSTILE,
    ),
    Mutant(
        "squatting",
        "a pool is free as soon as its owner's stream breaks",
        (
            (
                "lifecycle/registry.pxi",
                "    return p.attached > p.configured or core.now_ns < p.owned_until_ns\n",
                "    if BUG:\n        return p.attached > p.configured\n",
            ),
        ),
        60,
        first=HOSTILE,
    ),
    Mutant(
        "goodbye-of-another",
        "a goodbye releases every pool that has no stream",
        (
            (
                "session/session.pxi",
                "        self.said_goodbye = True\n",
                "        if BUG:\n"
                "            for k in range(self.core.ledger.count):\n"
                "                self.core.ledger.pools[k].owned_until_ns = 0\n",
            ),
        ),
        120,
        frozenset({"foreign-goodbye", "pool-squatted", "half-open", "stream-cut", "shim-killed"}),
        first=HOSTILE,
    ),
    Mutant(
        "pool-free-too-early",
        "a pool is free a grace before the leases of its owner have ended",
        (
            (
                "lifecycle/configure.pxi",
                "            p.owned_until_ns +="
                " core.settings.lease_ttl_ns + core.settings.lease_grace_ns\n",
                "            if BUG:\n"
                "                p.owned_until_ns -= core.settings.lease_grace_ns\n",
            ),
        ),
        40,
        tests=(
            "tests/core/test_sessions.py::test_pool_stays_reserved_for_an_owner_that_reconnects",
        ),
    ),
    Mutant(
        "tenant-grant-not-checked-on-replay",
        "a replay may name a tenant that was not granted",
        (
            (
                "session/events.pxi",
                "    ask.target = target_of(core, &pool)\n",
                "    if BUG:\n        ask.flow = flow_of(core, &tenant, &key)\n",
            ),
        ),
        40,
        tests=(
            "tests/core/test_principals.py"
            "::test_replay_under_a_revoked_name_goes_on_without_its_rights",
        ),
    ),
    Mutant(
        "forgiven-twice",
        "a debt that is forgiven becomes a credit",
        (
            (
                "lifecycle/drain.pxi",
                "        if n.rate[k] and n.level[k] < 0:\n",
                "        if BUG and n.rate[k] and n.level[k] < 0:\n"
                "            n.level[k] = -n.level[k]\n"
                "            found += 1\n",
            ),
        ),
        40,
        tests=("tests/core/test_report_bounds.py::test_forgiven_tenant_owes_nothing",),
    ),
    Mutant(
        "newcomer-at-once",
        "a newcomer has a pool before its engine could answer",
        (
            (
                "session/contest.pxi",
                "        if core.now_ns >= due_ns or p == NULL or p.attached == p.configured:\n",
                "        if BUG:\n            due_ns = core.now_ns\n",
            ),
        ),
        120,
        first=ALIVE,
    ),
    Mutant(
        "answer-unheard",
        "a newcomer has a pool although its engine answers",
        (
            (
                "session/pools.pxi",
                "        for key in list(self.core.contests):\n",
                "        if BUG:\n            return 0\n",
            ),
        ),
        120,
        first=ALIVE,
    ),
    Mutant(
        "call-before-what-is-due",
        "a call of Admit grants before the timers that have ended by then",
        (
            (
                "lifecycle/expire.pxi",
                "    cdef int64_t first_ns = first_due_ns(core)\n",
                "    if BUG:\n        return False\n",
            ),
        ),
        0,
        tests=("tests/core/test_due_first.py", "tests/core/test_sign_of_life.py"),
    ),
    Mutant(
        "gates-not-awaited",
        "a pool grants before all its streams have replayed",
        (
            (
                "lifecycle/configure.pxi",
                "    if is_first and (f.gates or core.is_cold) and not core.was_restored:\n",
                "    if BUG:\n        is_first = False\n",
            ),
        ),
        0,
        tests=("tests/core/test_gates.py::test_a_pool_grants_once_all_gates_have_replayed",),
    ),
    Mutant(
        "share-of-all-pools",
        "who offers large pools is never above its share of others' pools",
        (
            (
                "policy/headroom.pxi",
                "    return (\n        <wide>(held + blocks) *",
                "    if BUG and core.ledger.count > 1:\n        return False\n",
            ),
        ),
        600,
        first=HOSTILE,
    ),
)
