# The public class: checks what a caller passes, and hands each event to the layer that does it.

@cython.final
cdef class Scheduler(ClusterApi):
    def __cinit__(
        self, *, bytes hash_key=b"\0" * 16, str policy=DEFAULT_POLICY, str ledger=DEFAULT_LEDGER,
        str dispatch=DEFAULT_DISPATCH, str flow_order=DEFAULT_FLOW_ORDER, str lease_seed="",
        uint64_t incarnation=1, key=None, place=None, **settings
    ):
        check_name("policy", "policy", policy, POLICIES)
        check_name("ledger", "form", ledger, LEDGER_FORMS)
        check_name("dispatch", "order", dispatch, DISPATCH_ORDERS)
        check_name("flow_order", "order", flow_order, FLOW_ORDERS)
        if (key is not None) != (policy == "external") or (place is not None and key is None):
            invalid("key", "policy external takes it, and no other")
        if len(hash_key) != 16:
            invalid("hash_key", "must be 16 bytes")
        self.settings = checked(SETTINGS, settings)
        cdef Settings* s = &self.settings
        s.headroom_min_ppm = min(s.headroom_min_ppm, s.headroom_ppm)
        s.headroom_max_ppm = max(s.headroom_max_ppm, s.headroom_ppm)
        self.backfills = dispatch == "backfill"
        self.lease_next = s.lease_id_base
        self.leadership = b""
        if lease_seed:
            seed_lease_ids(self, lease_seed)
        memcpy(&self.k0, <const char*>hash_key, 8)
        memcpy(&self.k1, <const char*>hash_key + 8, 8)
        self.principals = Principals()
        self.requests = Requests(self.principals)
        self.policy = policy
        order, lifts, self.ahead, self.by_prefix = POLICIES[policy]
        self.fuse = Fuse()
        self.classes = Classes()
        self.quotas = Quotas(self.requests, self.classes, self.fuse)
        self.flows = Flows(order, lifts, self.requests, self.quotas, self.classes)
        self.time_bounds = TimeBounds(s.queue_ttl_ns)
        self.flows.key_from, self.flows.place_from = key, place
        self.flows.by_deadline = place is None and FLOW_ORDERS[flow_order]
        self.flows.treaps.salt = self.k1
        set_grain(self)
        take_fairness(self)
        self.adapters = Adapters(<int32_t>s.adapters_max, self.principals)
        self.prefixes, self.usage_rows = Prefixes(self.k0, self.k1), UsageRows()
        self.rejection_log, self.recent_ids = RejectionLog(), RecentIds()
        self.client_ids, self.places = ClientIds(), Places()
        self.ledger = Ledger(
            ledger == "peak", s.headroom_ppm, self.requests, self.flows, self.adapters, self.fuse,
        )
        self.predictor = Predictor(s.quantile_ppm, s.samples_min)
        self.deadlines, self.pool_wakes = Heap(), Heap()
        self.ids, self.leases, self.tags, self.names = Table(), Table(), Table(), Table()
        self.leases.set_key(self.k0, self.k1 ^ LEASE_SALT)
        self.tags.set_key(self.k0, self.k1 ^ TAG_SALT)
        self.flow_names, self.keys, self.pool_names = {}, {}, {}
        self.quota_names, self.pool_models, self.pool_limits = {}, {}, {}
        self.listed_pools = frozenset()
        self.flow_list, self.pool_list = [], []
        self.sessions, self.ready_slots, self.free_slots = [None], [], []
        self.writer, self.incarnation = Writer(), incarnation
        self.answers.head = self.answers.tail = NONE
        self.unknown_flow = self.sweep_next = NONE
        self.dry_running, self.dry_run_counts = Heap(), {}
        self.tenant_rules, self.default_rule, self.gone_rows = [], any_rule(False), []
        self.retired = OrderedDict()
        self.quota_keys, self.saved_pools = [], {}
        self.saved_passes, self.void_passes = {}, {}
        self.saved_positions, self.saved_levels, self.notes = {}, {}, []
        self.contests, self.offers, self.served_rows = {}, {}, ServedRows()

    def set_flow(self, bytes name, int64_t weight_milli):
        if not 0 < len(name) <= NAME_BYTES_MAX:
            invalid("tenant", f"a name has 1 to {NAME_BYTES_MAX} bytes")
        if not 0 < weight_milli <= WEIGHT_MILLI_MAX:
            invalid("weight", f"must be from 0.001 to {WEIGHT_MILLI_MAX // 1000}")
        return add_flow(self, name, weight_milli)

    def set_class(
        self, bytes name, int64_t rank, int64_t ageing_ns=AGEING_NS, bint exempt=False
    ):
        return change_class(self, name, rank, ageing_ns, exempt)

    def set_class_gone(self, bytes name):
        cdef int32_t c = self.classes.find(name)
        if c > 0:
            self.classes.items[c].gone = True

    def set_principal(
        self, int64_t now_ns, int64_t number, bytes name=b"", list pools=None, list tenants=None,
        list classes=None, int64_t share_ppm=SHARE_PPM, bint sees_all=False,
    ):
        enter(self, now_ns)
        set_grants(self, number, name, pools, tenants, classes, share_ppm, sees_all)

    def set_pools_listed(self, int64_t now_ns, names):
        enter(self, now_ns)
        list_pools(self, tuple(names))

    def set_flow_class(self, int32_t flow, int32_t default_class=0, named=()):
        known_tenant(self, flow)
        set_classes_of(self, flow, default_class, tuple(named))

    def set_pool_quota(self, int64_t now_ns, bytes pool, int32_t quota):
        enter(self, now_ns)
        check_parent(self, quota, 1)
        self.pool_models[pool] = quota
        if pool in self.pool_names:
            self.ledger.pools[<int32_t>self.pool_names[pool]].quota = quota
            self.ledger.order.touch(<int32_t>self.pool_names[pool])
            self.flows.positions.model[<int32_t>self.pool_names[pool]] = quota

    def set_pool_limits(self, int64_t now_ns, bytes pool=b"", **limits):
        enter(self, now_ns)
        limit_pools(self, pool, checked(POOL_LIMITS, limits))

    def set_adapter(self, int64_t now_ns, bytes name, int64_t tokens):
        enter(self, now_ns)
        weigh_adapter(self, name, tokens)

    def set_no_pool_limits(self, int64_t now_ns):
        enter(self, now_ns)
        limit_no_pools(self)

    def set_key(self, bytes api_key_sha256, int32_t flow):
        if len(api_key_sha256) != 32:
            invalid("api_key_sha256", "must be 32 bytes")
        known_tenant(self, flow)
        self.keys[api_key_sha256] = flow

    def set_no_keys(self):
        self.keys = {}

    def set_gone(self, int64_t now_ns, bytes name):
        enter(self, now_ns)
        put_name(self, name, NONE)

    def set_flow_mode(self, int64_t now_ns, int32_t flow, bint dry_run):
        enter(self, now_ns)
        known_tenant(self, flow)
        set_dry_run(self, flow, dry_run)

    def set_options(self, int64_t now_ns, *, policy=None, flow_order=None, **limits):
        enter(self, now_ns)
        change_settings(self, policy, flow_order, limits)

    def flow_index(self, bytes name):
        return self.flow_names.get(name, NONE)

    def flow_indices(self, bytes name):
        return flows_of(self, name)

    def pool_index(self, bytes name):
        return self.pool_names.get(name, NONE)

    def pool_name(self, int32_t pool):
        known_pool(self, pool)
        return self.pool_list[pool]

    def set_pool(
        self, int64_t now_ns, bytes name, int64_t epoch, int64_t capacity_tokens,
        int64_t block_size_tokens, int64_t max_running=0, int64_t max_model_tokens=0,
    ):
        enter(self, now_ns)
        cdef PoolFigures f
        f.epoch, f.capacity_tokens, f.block_size = epoch, capacity_tokens, block_size_tokens
        f.max_running, f.max_model_tokens, f.principal = max_running, max_model_tokens, NONE
        return configure_pool(self, name, &f)

    def telemetry(
        self, int64_t now_ns, int32_t pool, int64_t epoch, int64_t running, int64_t waiting,
        int64_t used_tokens, int64_t preemptions,
    ):
        enter(self, now_ns)
        known_pool(self, pool)
        take_telemetry(self, pool, epoch, running, waiting, used_tokens, preemptions)

    def drain(self, int64_t now_ns):
        enter(self, now_ns)
        self.draining = True

    def set_draining(self, int64_t now_ns, bytes pool, bint draining):
        enter(self, now_ns)
        drain_some(self, pool, draining)

    def set_forgiven(self, int64_t now_ns, bytes tenant):
        enter(self, now_ns)
        return forgive_tenant(self, tenant)

    def set_released(self, int64_t now_ns, bytes pool):
        enter(self, now_ns)
        release_pool(self, pool)

    def revoke(self, int64_t now_ns, int64_t lease_id):
        enter(self, now_ns)
        return revoke_lease(self, lease_id)

    def list_leases(
        self, int64_t now_ns, int32_t start, int32_t scan_max, int32_t rows_max, bytes tenant=b"",
        bytes pool=b"", bytes client_id=b"", int64_t pool_epoch=0, int64_t age_min_ns=0,
        int32_t principal=NONE,
    ):
        cdef LeaseFilter f = lease_filter(
            self, tenant, pool, pool_epoch, now_ns - age_min_ns, principal
        )
        return lease_page(self, now_ns, start, scan_max, rows_max, &f, client_id)

    def open_session(self, int32_t principal=0):
        cdef Session session
        if self.fuse.what is not None:
            raise InvariantError(self.fuse.what)
        if len(self.sessions) - 1 - len(self.free_slots) >= self.settings.sessions_max:
            raise CallerError(
                CODE_RESOURCE_EXHAUSTED, "",
                f"at most {self.settings.sessions_max:,} sessions can be open",
            )
        if self.principals.sessions_of(principal) >= self.principals.places(
            principal, self.settings.sessions_max
        ):
            raise CallerError(
                CODE_RESOURCE_EXHAUSTED, "",
                "this caller has its share of sessions open; raise its share_of_places in"
                " auth.principals",
            )
        session = Session()
        session.core = self
        self.principals.count_session(principal, 1)
        session.principal = principal
        if self.free_slots:
            session.owner = self.free_slots.pop()
            self.sessions[session.owner] = session
        else:
            session.owner = <int32_t>len(self.sessions)
            self.sessions.append(session)
        return session

    def take_notes(self):
        out, self.notes = self.notes, []
        return out

    def ready(self):
        cdef list out = self.ready_slots
        self.ready_slots = []
        for owner in out:
            (<Session>self.sessions[owner]).is_listed = False
        return out

    def admit(
        self, int64_t now_ns, int32_t flow, bytes request_id, int64_t input_tokens,
        int64_t max_output_tokens, int32_t pool=NONE, int64_t sequences=1, int64_t queue_ttl_ns=0,
        int64_t deadline_ns=0, bint reports_progress=False, int32_t principal=0, uint64_t tag=0,
        int64_t n=1, bytes adapter=b"", int64_t told_output=0, bytes request_class=b"",
        tuple prefix_block_hashes=(), bint input_estimated=True, bint whole_answer=False,
        bytes session=b"", tuple pools=(),
    ):
        cdef Ask ask
        cdef int64_t prompts
        enter(self, now_ns)
        known_tenant(self, flow)
        check_id(request_id)
        check_range("sequences", sequences, 1, SEQUENCES_MAX)
        check_range("n", n, 1, sequences)
        if sequences % n:
            invalid("n", f"must divide sequences, {sequences}")
        prompts = sequences // n
        check_range("input_tokens", input_tokens, prompts, TOKENS_MAX)
        check_output(input_tokens * n, max_output_tokens, sequences)
        check_range("queue_ttl_ns", queue_ttl_ns, 0, <int64_t>1 << 60)
        check_range("deadline_ns", deadline_ns, 0, <int64_t>1 << 60)
        check_range("told_output", told_output, 0, PROMPT_TOKENS_MAX)
        if not NONE <= pool < self.ledger.count:
            invalid("pool", f"no pool has the index {pool}")
        ask.flow = flow
        ask.target = numbered_target(self, pools) if pools else pool
        ask.pools_hash = self.flows.sets.of(ask.target).hi | 1 if is_set(ask.target) else 0
        ask.prompt_tokens = <int32_t>input_tokens
        ask.prompt_max_tokens = <int32_t>((input_tokens + prompts - 1) // prompts)
        ask.output_max_tokens = <int32_t>max_output_tokens
        ask.sequences = <int32_t>sequences
        ask.n = <int32_t>n
        ask.told_output = <int32_t>told_output
        ask.queue_ttl_ns, ask.deadline_ns = shortest(queue_ttl_ns, deadline_ns), deadline_ns
        ask.reports_progress, ask.whole_answer = reports_progress, whole_answer
        ask.has_exact_input = not input_estimated
        ask.owner = 0
        ask.principal = principal
        ask.tag = tag
        take_adapter(self, &ask, adapter)
        take_class(self, &ask, <const uint8_t*><const char*>request_class, len(request_class))
        take_session(&ask, session)
        identify(self, &ask, <const uint8_t*><const char*>request_id, len(request_id), 0, 0)
        enter_class(self, &ask)
        return keep_hashes(self, admit_request(self, &ask), prefix_block_hashes)

    def admit_wire(self, int64_t now_ns, int32_t principal, bytes data, int64_t queue_ttl_ns=0):
        cdef AdmitMessage message
        cdef Verdict verdict
        cdef int64_t handle
        cdef int32_t i, first
        enter(self, now_ns)
        parse_admit(&message, data_cursor(data))
        handle = admit_message(self, &message, 0, principal, 0, queue_ttl_ns)
        if handle < 0:
            fill_refusal(
                self, &verdict, message.flow, message.target, <int>-handle,
                <uint64_t>self.received, principal,
            )
            verdict.only_named = verdict.only_named and message.pools == 0
            return encode_verdict(self, &verdict)
        i = self.requests.lookup(handle)
        if self.requests.items[i].state == QUEUED:
            if is_due(self):
                return handle
            first = self.verdict_count
            dispatch(self)
            return encode_verdict(self, &verdict) if take_verdict(
                self, handle, first, &verdict
            ) else handle
        fill_grant(self, &verdict, i)
        return encode_verdict(self, &verdict)

    def poll(self, int64_t now_ns):
        enter(self, now_ns)
        self.has_more = False
        run_timers(self)
        end_contests(self)
        if self.sweep_next != NONE:
            run_sweep(self)
        dispatch(self)
        return take_verdicts(self)

    def next_deadline(self):
        return next_due_ns(self)

    def evict_queued(self, int64_t now_ns):
        enter(self, now_ns)
        queued = sorted(queued_requests(self))
        for _, i in queued:
            evict(self, i, OUT_EVICTED_DRAINING)
        return len(queued)

    def cancel(self, int64_t now_ns, int64_t handle):
        enter(self, now_ns)
        return cancel_request(self, self.requests.lookup(handle))

    def progress(
        self, int64_t now_ns, int64_t lease_id, int64_t pool_epoch, int64_t input_tokens=NONE,
        int64_t cached_input_tokens=NONE, int64_t output_tokens=NONE, int32_t principal=0,
    ):
        cdef Usage u
        enter(self, now_ns)
        u = checked_usage(input_tokens, cached_input_tokens, output_tokens)
        return progress_lease(self, lease_id, pool_epoch, &u, principal)

    def complete(
        self, int64_t now_ns, int64_t lease_id, int64_t pool_epoch, int outcome=OUT_COMPLETED,
        int64_t input_tokens=NONE, int64_t cached_input_tokens=NONE, int64_t output_tokens=NONE,
        int32_t principal=0,
    ):
        cdef Usage u
        cdef int32_t i
        cdef bint repeated
        enter(self, now_ns)
        u = checked_usage(input_tokens, cached_input_tokens, output_tokens)
        i = find_lease(self, lease_id, principal)
        if i == NONE:
            return None
        repeated = not complete_lease(self, i, outcome, &u)
        return as_ended(self.requests.items[i].lease, repeated)

    def replay(
        self, int64_t now_ns, int32_t flow, bytes request_id, int64_t lease_id, int32_t pool,
        int64_t pool_epoch, int64_t reserved_tokens, int64_t prompt_tokens,
        int64_t max_output_tokens, int64_t input_tokens=0, int64_t cached_input_tokens=0,
        int64_t output_tokens=0, int64_t sequences=1, int32_t principal=0, bytes adapter=b"",
        bytes request_class=b"", bint whole_answer=False, bytes session=b"",
    ):
        cdef Ask ask
        cdef Usage u
        enter(self, now_ns)
        known_tenant(self, flow)
        check_id(request_id)
        check_range("reserved_tokens", reserved_tokens, 0, TOKENS_MAX)
        check_range("sequences", sequences, 1, SEQUENCES_MAX)
        check_range("prompt_tokens", prompt_tokens, 1, TOKENS_MAX)
        check_output(prompt_tokens, max_output_tokens, sequences)
        known_pool(self, pool)
        u = checked_usage(input_tokens, cached_input_tokens, output_tokens)
        memset(&ask, 0, sizeof(Ask))
        ask.flow = flow
        ask.target = pool
        ask.prompt_tokens = ask.prompt_max_tokens = <int32_t>prompt_tokens
        ask.output_max_tokens = <int32_t>max_output_tokens
        ask.sequences = <int32_t>sequences
        ask.n = 1
        ask.principal, ask.whole_answer = principal, whole_answer
        take_adapter(self, &ask, adapter)
        take_session(&ask, session)
        replayed_class(self, &ask, <const uint8_t*><const char*>request_class, len(request_class))
        identify(self, &ask, <const uint8_t*><const char*>request_id, len(request_id), 0, 0)
        return replay_lease(self, &ask, lease_id, pool_epoch, reserved_tokens, &u)

    def encode(self, decision):
        return encode_decision(self, decision)

    def save(self, int64_t now_ns, int64_t rows_max):
        if self.fuse.what is not None:
            raise InvariantError(self.fuse.what)
        check_range("now_ns", now_ns, self.now_ns, <int64_t>1 << 62)
        return changed_rows(self, now_ns, rows_max)

    def save_all(self):
        self.flows.changed.on = False

    def set_saved(self, int64_t now_ns, list rows):
        enter(self, now_ns)
        return restore_rows(self, rows)

    def digest(self):
        return self.digest_value

    def describe(self, int64_t now_ns):
        return state_text(self, now_ns)

    def reset_learned(self):
        forget_learned(self)

    def stats(
        self, int64_t now_ns, int flow_limit=1_000, int32_t principal=NONE, bint pools=True
    ):
        cdef bint sees_all = not self.principals.is_limited(principal)
        keys = []
        if flow_limit:
            keys = nlargest(flow_limit, self.flow_keys(0, self.flows.count, principal)[1])
        order = [-f for _, f in sorted((key[1:] for key in keys), reverse=True)]
        return {
            "pools": (
                self.pool_rows(now_ns, 0, self.ledger.count, principal)[1] if pools else []
            ),
            "flows": [self.flow_stats(now_ns, i) for i in order],
            "classes": class_rows(self),
            "tenants": tenants_row(self),
            "quotas": quota_stats(self, now_ns) if sees_all else [],
            "groups": group_rows(self) if sees_all else [],
            "totals": totals_of(self) if sees_all else None,
            "prices": price_row(self),
            "policy": self.policy,
            "flow_order": "deadline" if self.flows.by_deadline else "arrival",
            "digest": self.digest_value,
            "draining": bool(self.draining),
        }

    def pool_rows(
        self, int64_t now_ns, int32_t first, int32_t end, int32_t principal=NONE
    ):
        cdef int32_t i, count = self.ledger.count
        return end if end < count else 0, [
            pool_stats(self, now_ns, i)
            for i in range(max(0, first), min(end, count))
            if self.principals.may_offer(principal, self.pool_list[i])
        ]

    def flow_stats(self, int64_t now_ns, int32_t flow):
        known_flow(self, flow)
        return flow_row(self, now_ns, flow)

    def show_histograms(self, int32_t flow, bint shown):
        known_tenant(self, flow)
        show_times(self.flows, flow, shown)

    def histogram_bounds_ms(self):
        return self.time_bounds.ms

    def histograms(self, int32_t flow=NONE):
        if flow != NONE:
            known_tenant(self, flow)
        return histogram_rows(self, flow)

    def explain(self, int64_t now_ns, bytes request_id, bytes tenant=b"", int32_t principal=NONE):
        return explain_id(self, now_ns, request_id, tenant, principal)

    def recent_request_ids(self, int32_t principal=NONE):
        return self.recent_ids.rows(principal)

    def check(self):
        """Verify every invariant. O(n)."""
        if self.fuse.what is not None:
            raise InvariantError(self.fuse.what)
        check_all(self)
