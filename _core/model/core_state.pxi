# The state of one scheduler, which every layer above reads and changes.

# Counters of flows since the start.
ctypedef struct FlowCounters:
    int64_t received, granted, completed, cancelled, expired
    int64_t input_tokens, cached_tokens, output_tokens
    int64_t refusals[REFUSAL_KINDS]


cdef void add_counters(FlowCounters* sums, const Flow* f) noexcept:
    cdef int k
    sums.received += f.received
    sums.granted += f.granted
    sums.completed += f.completed
    sums.cancelled += f.cancelled
    sums.expired += f.expired
    sums.input_tokens += f.input_tokens
    sums.cached_tokens += f.cached_tokens
    sums.output_tokens += f.output_tokens
    for k in range(REFUSAL_KINDS):
        sums.refusals[k] += f.refusals.counts[k]


cdef class Core:
    """Holds the state of one scheduler. The layers above define its events."""

    cdef Settings settings  # as they are now
    cdef bint backfills, by_prefix
    cdef ShedAccuracy shed_accuracy  # accuracy over all flows
    cdef int32_t shed_discount_ppm[SHED_KINDS]  # part of the forecast that does not count
    cdef str policy
    cdef int ahead  # AHEAD_*
    cdef readonly uint64_t incarnation
    cdef uint64_t k0, k1
    cdef Principals principals
    cdef Requests requests
    cdef Flows flows
    cdef TimeBounds time_bounds  # of all histograms
    cdef Ledger ledger
    cdef Quotas quotas
    cdef Classes classes
    cdef Predictor predictor
    cdef Heap deadlines  # every queued request and every lease, by due_ns or earlier
    cdef Heap pool_wakes  # pools, by the time at which what their next request waits for has come
    cdef int64_t own_ids  # request ids that more than one principal uses
    cdef Table ids, leases, tags, names
    cdef Adapters adapters
    cdef UsageRows usage_rows
    cdef Prefixes prefixes
    cdef RejectionLog rejection_log
    cdef RecentIds recent_ids
    cdef ClientIds client_ids
    cdef Places places
    cdef dict flow_names, keys, pool_names
    cdef dict quota_names, pool_models  # nodes of groups and models by name, and of pools' models
    cdef dict pool_limits  # limits by name of the pool; b"": those of all others
    cdef object listed_pools  # names of pools that the configuration lists
    cdef list flow_list, pool_list, sessions, ready_slots, free_slots
    cdef Writer writer
    cdef Chain answers  # ended requests, oldest first
    cdef Verdict* verdicts  # that belong to no session
    cdef int32_t verdict_count, verdict_taken, verdicts_max
    cdef int64_t now_ns, seq
    cdef int64_t lease_next  # the next lease id; if ids are random, the counter they are made of
    cdef bint draws_lease_ids
    cdef uint64_t lease_k0, lease_k1  # the seed of random lease ids
    cdef int64_t lease_drawn_from, lease_drawn  # the counter of the last random id, and that id
    cdef bytes leadership  # the message that names term and leader; empty without a term
    cdef int64_t replays_refused
    cdef int64_t reports_limited  # leases of which a report was cut, see limit_usage()
    cdef int64_t rounds  # times that all pools were looked at, since the start
    cdef int64_t refusals[REFUSAL_KINDS]  # refusals of requests whose tenant has no flow
    cdef int64_t received, granted, completed, cancelled, expired, rejected, evicted
    cdef int64_t prompt_seen_max, output_seen_max  # of a request; of a sequence, as asked for
    cdef int64_t refused_wait_ns  # the last refusal's wait: after it a retry makes sense
    cdef uint64_t digest_value
    cdef int32_t unknown_flow
    cdef bint draining, has_more
    cdef bint tree_is_stale  # groups have changed: the next poll places all flows
    cdef bint unknown_refused  # but for the audit, unknown tenants would be refused
    cdef Heap dry_running  # flows with something queued that is granted whatever it costs
    cdef dict dry_run_counts  # flow: what its requests would have met
    cdef Fuse fuse
    cdef list tenant_rules  # TenantRules, in the order in which they are tried
    cdef TenantRule default_rule  # where none of them fits
    cdef bint unknown_own  # a proved name that is unknown gets a flow
    cdef int64_t born_count, shared_requests, forgotten
    # Grants of tenants that are forgotten, less those of a class that had the place before.
    cdef int64_t granted_apart[CLASSES_MAX]
    cdef FlowCounters carried  # sums of forgotten tenants at first sight
    cdef int32_t forget_at  # flow that is looked at next
    cdef object retired  # flows of tenants that an operator has deleted, the earliest first
    cdef list gone_rows  # keys of saved rows that are to be deleted
    cdef list quota_keys  # each node's key in saved rows
    cdef dict saved_pools  # rows of pools that are not registered yet
    cdef int64_t passes  # leases that passed a head and have a discount for it
    cdef dict saved_passes  # by pool: leases of before a restart that passed, and their discounts
    cdef dict void_passes  # by pool: void leases that passed, and their discounts
    cdef dict saved_positions, saved_levels  # of these, and of all until there are several
    cdef int64_t resume_until_ns  # until then leases of before a restart are awaited; 0: none are
    cdef bint was_restored  # the debts of pools are known
    cdef bint is_cold  # leases of an earlier leader run, of which nothing is known
    cdef int64_t awaits_until_ns  # the first time at which a pool waits for no stream; 0: none does
    cdef bint save_rest  # to be saved behind all that has changed
    cdef int32_t sweep_next  # queue that a drain looks at next, see drain.pxi; -1: none
    cdef int32_t sweep_hold  # hold of a session that it looks at before
    cdef dict contests  # pools that are claimed: when their streams have to have answered, by whom
    cdef dict offers  # the streams that offer each pool, by its name, oldest first
    cdef ServedRows served_rows  # for other members of a cluster
    cdef list notes  # for a log, see note()

    def __dealloc__(self):
        free(self.verdicts)


cdef enum:
    NOTES_MAX = 64  # more are dropped until they are taken


cdef int note(Core core, str event, bytes pool, int64_t count, str why) except -1:
    """Keep what an operator has to learn; it changes nothing. O(1)."""
    if len(core.notes) < NOTES_MAX:
        core.notes.append((event, pool, count, why))
    return 0


cdef int known_pool(Core core, int32_t pool) except -1:
    if not 0 <= pool < core.ledger.count:
        invalid("pool", f"no pool has the index {pool}")
    return 0


cdef int known_flow(Core core, int32_t flow) except -1:
    if not 0 <= flow < core.flows.count:
        invalid("flow", f"no flow has the index {flow}")
    return 0


cdef int known_tenant(Core core, int32_t flow) except -1:
    # A tenant goes by its flow in the default class.
    known_flow(core, flow)
    if core.flows.items[flow].base != flow:
        invalid("flow", f"{flow} is another one of the tenant {core.flows.items[flow].base}")
    return 0


cdef int check_invariant(Core core, bint holds, str what) except -1:
    if not holds:
        raise core.fuse.blow(what)
    return 0


cdef int check_line(Core core, Line line) except -1:
    cdef int32_t c, count = 0
    for c in range(CLASSES_MAX):
        check_invariant(core, line.heap(c).valid(), "heap order of a line")
        check_invariant(
            core, line.heap(c).count == 0 or line.since_ns[c] <= core.now_ns,
            "a class that is in a line came before now",
        )
        count += line.heap(c).count
    return check_invariant(core, count == line.count, "a line counts all classes")
