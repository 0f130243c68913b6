"""Known bugs of an operator's handles, of the order inside a flow, and of prefixes."""

from mutant import Mutant

NEWEST = 1 << 40  # seeds from here on have operators, order by deadline, prefixes
DRAINS = frozenset({"pool-drained", "all-drained", "burst", "engine-slow"})
REVOKES = frozenset({"lease-revoked", "burst", "engine-slow"})
DRY_RUNS = frozenset({"mode-dry-run", "burst", "engine-slow"})

OPERATOR_BUGS = (
    Mutant(
        "drain-still-grants",
        "a pool that is drained grants on",
        (
            (
                "model/ledger.pxi",
                "        return p.attached and not p.draining and not self.closed\n",
                "        if BUG:\n            return p.attached and not self.closed\n",
            ),
        ),
        60,
        DRAINS,
        NEWEST,
    ),
    Mutant(
        "drain-leaves-queue",
        "what waits for a pool that is drained is not told",
        (
            (
                "lifecycle/drain.pxi",
                "            evict(core, i, OUT_EVICTED_DRAINING)\n",
                "            if BUG:\n                i = after\n                continue\n",
            ),
        ),
        60,
        DRAINS,
        NEWEST,
    ),
    Mutant(
        "drain-forgotten",
        "a pool that is drained serves again after a restart",
        (
            (
                "lifecycle/restore.pxi",
                "    p.draining = v[4] != 0\n",
                "    if BUG:\n        v[4] = 0\n",
            ),
        ),
        200,
        DRAINS | {"scheduler-restarted"},
        NEWEST,
    ),
    Mutant(
        "revoke-keeps-reservation",
        "what a revoked lease held is not free",
        (
            (
                "lifecycle/drain.pxi",
                "    void_lease(core, i)\n"
                "    core.save_rest = True  # the debt of its pool, which no other row holds\n",
                "    if BUG:\n"
                "        deliver_lease_state(core, i, LS_VOID)\n        return LS_LIVE\n",
            ),
        ),
        60,
        REVOKES,
        NEWEST,
    ),
    Mutant(
        "revoke-untold",
        "who holds a revoked lease is not told",
        (
            (
                "lifecycle/lease.pxi",
                "    return deliver_lease_state(core, i, LS_VOID)\n",
                "    if BUG:\n        return 0\n",
            ),
        ),
        60,
        REVOKES,
        NEWEST,
    ),
    Mutant(
        "dry-run-refuses",
        "in a dry run, what would be refused is refused",
        (
            (
                "policy/dry_run.pxi",
                "    if outcome in (OUT_REJECTED_NO_POOL, OUT_REJECTED_DRAINING,"
                " OUT_REJECTED_LIMIT):\n",
                "    if BUG and outcome:\n        return outcome\n",
            ),
        ),
        200,
        DRY_RUNS,
        NEWEST,
    ),
    Mutant(
        "dry-run-waits",
        "in a dry run, what would wait waits",
        (
            (
                "lifecycle/grant.pxi",
                "    while core.dry_running.count and work < core.settings.work_max:\n",
                "    if BUG:\n        return 0\n",
            ),
        ),
        200,
        DRY_RUNS,
        NEWEST,
    ),
    Mutant(
        "deadline-last",
        "inside a flow, whose wait is over first goes last",
        (
            (
                "policy/edf_queue.pxi",
                "    return r.due_ns if r.has_deadline else NEVER\n",
                "    if BUG:\n        return NEVER - r.due_ns if r.has_deadline else NEVER\n",
            ),
        ),
        60,
        frozenset({"burst", "engine-slow"}),
        NEWEST,
    ),
    Mutant(
        "cached-is-not-reserved",
        "what a pool is thought to have cached is not reserved",
        (
            (
                "policy/pick_next.pxi",
                "    plan.tokens = plan.blocks * p.block_size"
                " + core.ledger.lora_more(pool, r, False)\n",
                "    if BUG and core.prefixes.queued:\n"
                "        plan.blocks -= matched_tokens(\n"
                "            core, pool, <int32_t>(r - core.requests.items)\n"
                "        ) // p.block_size\n",
            ),
        ),
        60,
        frozenset({"burst", "engine-slow"}),
        NEWEST,
    ),
)
