# The Scheduler: what the events do to queues, counters, ledger and leases.

cdef class Session


# What a caller asks for, checked, names resolved.
ctypedef struct Ask:
    Hash128 key
    uint64_t payload
    uint64_t tag
    int64_t queue_ttl_ns  # 0: the default
    int32_t flow
    int32_t target  # pool, -1: any
    int32_t prompt_tokens, prompt_max_tokens, output_max_tokens, sequences, n
    int32_t owner, principal
    bint reports_progress


# Totals of a report; -1: absent.
ctypedef struct Usage:
    int64_t input_tokens, cached_tokens, output_tokens


POLICIES = ("fcfs", "vtc")

# Settings of the constructor: default, least and greatest value.
cdef dict LIMITS = {
    "lease_id_base": (1, 1, 1 << 62),
    "queue_ttl_ns": (30 * NS_PER_S, 1, 1 << 60),
    "lease_ttl_ns": (10 * NS_PER_S, 1, 1 << 60),
    "lease_grace_ns": (20 * NS_PER_S, 0, 1 << 60),
    "flow_queue_max": (1_000, 1, 1 << 24),
    "queue_max": (10_000, 1, 1 << 24),
    "leases_max": (65_536, 1, 1 << 24),
    "answers_max": (100_000, 0, 1 << 24),
    "answer_ttl_ns": (300 * NS_PER_S, 1, 1 << 60),
    "input_price_micro": (1_000_000, 0, PRICE_MICRO_MAX),
    "output_price_micro": (2_000_000, 0, PRICE_MICRO_MAX),
    "cached_price_ppm": (100_000, 0, 1_000_000),
    "headroom_ppm": (20_000, 0, 900_000),
    "quantile_ppm": (900_000, 1, 1_000_000),
    "samples_min": (10, 1, 1_000),
    "session_open_max": (16_384, 1, 1 << 20),
    "sessions_max": (4_096, 1, 1 << 20),
    "work_max": (1_024, 1, 1 << 30),
}


cdef dict checked_limits(dict given):
    cdef dict limits = {}
    for name in given:
        if name not in LIMITS:
            invalid(name, f"unknown setting; known: {', '.join(LIMITS)}")
    for name, (default, low, high) in LIMITS.items():
        limits[name] = given.get(name, default)
        if not low <= limits[name] <= high:
            invalid(name, f"must be from {low} to {high}, not {limits[name]}")
    return limits


@cython.final
cdef class Scheduler:
    cdef readonly int64_t queue_ttl_ns, lease_ttl_ns, lease_grace_ns, answer_ttl_ns
    cdef readonly int64_t flow_queue_max, queue_max, leases_max, answers_max
    cdef readonly int64_t session_open_max, sessions_max, work_max
    cdef int64_t input_price, output_price, cached_ppm
    cdef readonly uint64_t incarnation
    cdef uint64_t k0, k1
    cdef Requests requests
    cdef Flows flows
    cdef Ledger ledger
    cdef Predictor predictor
    cdef Heap deadlines  # every queued request and every lease, by due_ns or earlier
    cdef Table ids, leases, tags, names
    cdef dict flow_names, keys, pool_names
    cdef list flow_list, pool_list, sessions, ready_slots, free_slots
    cdef Writer writer
    cdef Chain answers  # ended requests, oldest first
    cdef Verdict* verdicts  # that belong to no session
    cdef int32_t verdict_count, verdict_taken, verdicts_max
    cdef Verdict captured  # verdict of the request that admit_wire() just asked for
    cdef int64_t capture
    cdef int64_t now_ns, seq, lease_next
    cdef int64_t refusals[REFUSAL_KINDS]  # of requests whose tenant has no flow
    cdef int64_t received, granted, completed, cancelled, expired, rejected, evicted
    cdef int64_t prompt_seen_max
    cdef uint64_t digest_value
    cdef int32_t unknown_flow
    cdef bint draining, has_more
    cdef Fuse fuse

    def __cinit__(
        self, *, bytes hash_key=b"\0" * 16, str policy="vtc", uint64_t incarnation=1, **limits
    ):
        if policy not in POLICIES:
            invalid("policy", f"unknown policy {policy!r}; known: {', '.join(POLICIES)}")
        if len(hash_key) != 16:
            invalid("hash_key", "must be 16 bytes")
        limits = checked_limits(limits)
        self.queue_ttl_ns, self.lease_ttl_ns = limits["queue_ttl_ns"], limits["lease_ttl_ns"]
        self.lease_grace_ns = limits["lease_grace_ns"]
        self.answer_ttl_ns, self.answers_max = limits["answer_ttl_ns"], limits["answers_max"]
        self.flow_queue_max, self.queue_max = limits["flow_queue_max"], limits["queue_max"]
        self.leases_max, self.work_max = limits["leases_max"], limits["work_max"]
        self.session_open_max = limits["session_open_max"]
        self.sessions_max = limits["sessions_max"]
        self.input_price = limits["input_price_micro"]
        self.output_price = limits["output_price_micro"]
        self.cached_ppm = limits["cached_price_ppm"]
        self.lease_next = limits["lease_id_base"]
        memcpy(&self.k0, <const char*>hash_key, 8)
        memcpy(&self.k1, <const char*>hash_key + 8, 8)
        self.requests = Requests()
        self.flows = Flows(policy == "fcfs", self.requests)
        self.fuse = Fuse()
        self.ledger = Ledger(
            limits["headroom_ppm"], self.requests, self.flows, self.fuse
        )
        self.predictor = Predictor(limits["quantile_ppm"], limits["samples_min"])
        self.deadlines = Heap()
        self.ids, self.leases, self.tags, self.names = Table(), Table(), Table(), Table()
        self.flow_names, self.keys, self.pool_names = {}, {}, {}
        self.flow_list, self.pool_list = [], []
        self.sessions, self.ready_slots, self.free_slots = [None], [], []
        self.writer = Writer()
        self.incarnation = incarnation
        self.answers.head = self.answers.tail = NONE
        self.unknown_flow = NONE

    def __dealloc__(self):
        free(self.verdicts)

    def set_flow(self, bytes name, int64_t weight_milli):
        cdef Hash128 h
        if not 0 < len(name) <= NAME_BYTES_MAX:
            invalid("tenant", f"a name has 1 to {NAME_BYTES_MAX} bytes")
        if not 0 < weight_milli <= WEIGHT_MILLI_MAX:
            invalid("weight", f"must be from 0.001 to {WEIGHT_MILLI_MAX // 1000}")
        known = self.flow_names.get(name)
        if known is not None:
            self.flows.items[<int32_t>known].weight_milli = <int32_t>weight_milli
            return known
        flow = self.flows.add(<int32_t>weight_milli)
        self.flow_names[name] = flow
        h = sip128(self.k0, self.k1 ^ NAME_SALT, <const uint8_t*><const char*>name, len(name))
        self.names.put(h.hi, h.lo, flow)
        self.flow_list.append(name)
        return flow

    def set_key(self, bytes api_key_sha256, int32_t flow):
        if len(api_key_sha256) != 32:
            invalid("api_key_sha256", "must be 32 bytes")
        known_flow(self, flow)
        self.keys[api_key_sha256] = flow

    def set_unknown(self, int32_t flow):
        if flow != NONE:
            known_flow(self, flow)
        self.unknown_flow = flow

    def flow_index(self, bytes name):
        return self.flow_names.get(name, NONE)

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
        cdef int32_t pool = register_pool(self, name, &f)
        if not self.ledger.pools[pool].configured:
            self.ledger.pools[pool].configured = 1
            self.ledger.pools[pool].attached += 1
        return pool

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

    def open_session(self, int32_t principal=0):
        cdef Session session
        if self.fuse.what is not None:
            raise InvariantError(self.fuse.what)
        if len(self.sessions) - 1 - len(self.free_slots) >= self.sessions_max:
            raise CallerError(
                CODE_RESOURCE_EXHAUSTED, "", f"at most {self.sessions_max:,} sessions can be open"
            )
        session = Session()
        session.core = self
        session.principal = principal
        if self.free_slots:
            session.owner = self.free_slots.pop()
            self.sessions[session.owner] = session
        else:
            session.owner = <int32_t>len(self.sessions)
            self.sessions.append(session)
        return session

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
        int64_t n=1,
    ):
        cdef Ask ask
        cdef int64_t prompts
        enter(self, now_ns)
        known_flow(self, flow)
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
        if not NONE <= pool < self.ledger.count:
            invalid("pool", f"no pool has the index {pool}")
        ask.flow = flow
        ask.target = pool
        ask.prompt_tokens = <int32_t>input_tokens
        ask.prompt_max_tokens = <int32_t>((input_tokens + prompts - 1) // prompts)
        ask.output_max_tokens = <int32_t>max_output_tokens
        ask.sequences = <int32_t>sequences
        ask.n = <int32_t>n
        ask.queue_ttl_ns = shortest(queue_ttl_ns, deadline_ns)
        ask.reports_progress = reports_progress
        ask.owner = 0
        ask.principal = principal
        ask.tag = tag
        identify(self, &ask, <const uint8_t*><const char*>request_id, len(request_id), 0, 0)
        return admit_request(self, &ask)

    def admit_wire(self, int64_t now_ns, int32_t principal, bytes data, int64_t queue_ttl_ns=0):
        cdef AdmitMessage message
        cdef Verdict refused
        cdef Request* r
        cdef int64_t handle
        cdef int32_t i
        enter(self, now_ns)
        parse_admit(&message, data_cursor(data))
        handle = admit_message(self, &message, 0, principal, 0, queue_ttl_ns)
        if handle < 0:
            fill_refusal(
                self, &refused, flow_of(self, &message.tenant, &message.key),
                target_of(self, &message.pool), <int>-handle, <uint64_t>self.received,
            )
            return encode_verdict(self, &refused)
        i = self.requests.lookup(handle)
        r = &self.requests.items[i]
        if r.state == QUEUED:
            self.capture = handle
            self.captured.outcome = 0
            dispatch(self)
            self.capture = 0
            if self.captured.outcome:
                return encode_verdict(self, &self.captured)
            return handle
        fill_grant(self, &refused, i)
        return encode_verdict(self, &refused)

    def poll(self, int64_t now_ns):
        cdef int32_t i
        enter(self, now_ns)
        self.has_more = False
        run_timers(self)
        dispatch(self)
        if self.verdict_count == 0:
            return []
        cdef int32_t first = self.verdict_taken
        # More than timers and grants can make: only evict_queued() leaves a rest for later.
        cdef int32_t last = <int32_t>min(self.verdict_count, first + 4 * self.work_max)
        out = [as_decision(self, &self.verdicts[i]) for i in range(first, last)]
        self.verdict_taken = last
        if last == self.verdict_count:
            self.verdict_count = self.verdict_taken = 0
        return out

    def next_deadline(self):
        if self.has_more or self.verdict_count:
            return self.now_ns
        return self.deadlines.nodes[0].key if self.deadlines.count else NONE

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
        r = &self.requests.items[i]
        return new_tuple(Ended, (
            r.outcome, max(0, r.input_tokens), r.cached_tokens, r.output_tokens, repeated
        ))

    def replay(
        self, int64_t now_ns, int32_t flow, bytes request_id, int64_t lease_id, int32_t pool,
        int64_t pool_epoch, int64_t reserved_tokens, int64_t prompt_tokens,
        int64_t max_output_tokens, int64_t input_tokens=0, int64_t cached_input_tokens=0,
        int64_t output_tokens=0, int64_t sequences=1, int32_t principal=0,
    ):
        cdef Ask ask
        cdef Usage u
        enter(self, now_ns)
        known_flow(self, flow)
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
        ask.principal = principal
        identify(self, &ask, <const uint8_t*><const char*>request_id, len(request_id), 0, 0)
        return replay_lease(self, &ask, lease_id, pool_epoch, reserved_tokens, &u)

    def encode(self, decision):
        cdef Verdict v
        (
            v.handle, v.tag, v.outcome, v.lease_id, v.pool, v.epoch, v.reserved_tokens,
            v.retry_after_ms, v.position, v.waited_ns, v.queue_max, v.queue_left,
            v.pool_capacity_tokens, v.pool_free_tokens,
        ) = decision
        if v.outcome not in OUTCOME_BYTES:
            invalid("outcome", f"unknown outcome {v.outcome}")
        if v.outcome == OUT_GRANTED:
            known_pool(self, v.pool)
        return encode_verdict(self, &v)

    def digest(self):
        return self.digest_value

    def describe(self, int64_t now_ns):
        """The state as text. O(flows + queued)."""
        stats = self.stats(now_ns, 50)
        lines = [
            f"schedsvc core: policy {stats['policy']}, {stats['totals']['queued']} queued,"
            f" {stats['totals']['live_leases']} leases, digest {stats['digest']:016x}"
            + (f", HALTED: {self.fuse.what}" if self.fuse.what is not None else "")
        ]
        for p in stats["pools"]:
            lines.append(
                f"pool {p['name']} epoch {p['epoch']}: {p['promised_tokens']} promised and"
                f" {p['posted_tokens']} posted of {p['capacity_tokens']} tokens,"
                f" {p['live_leases']} leases ({p['suspect_leases']} suspect), {p['queued']} queued,"
                f" waits for {p['wait_reason']}"
            )
        for f in stats["flows"]:
            lines.append(
                f"flow {f['tenant']} weight {f['weight_milli']}: vtc {f['vtc_micro']},"
                f" {f['queued']} queued, {f['live_leases']} leases,"
                f" {f['promised_tokens']} tokens promised"
            )
        return "\n".join(lines)

    def reset_learned(self):
        self.predictor.forget()
        self.flows.forget()
        self.digest_value = 0
        self.prompt_seen_max = 0

    def stats(self, int64_t now_ns, int flow_limit=1_000):
        cdef int32_t i
        order = nlargest(
            flow_limit, range(self.flows.count), key=lambda f: (service_of(self, f), -f)
        )
        return {
            "pools": [pool_stats(self, now_ns, i) for i in range(self.ledger.count)],
            "flows": [self.flow_stats(now_ns, i) for i in order],
            "totals": totals_of(self),
            "policy": "fcfs" if self.flows.fcfs else "vtc",
            "digest": self.digest_value,
            "draining": bool(self.draining),
        }

    def flow_stats(self, int64_t now_ns, int32_t flow):
        cdef Flow* f
        cdef int32_t q
        cdef int64_t oldest = now_ns
        known_flow(self, flow)
        f = &self.flows.items[flow]
        q = f.first_queue
        while q != NONE:
            if self.flows.queues[q].chain.count:
                oldest = min(
                    oldest, self.requests.items[self.flows.queues[q].chain.head].arrival_ns
                )
            q = self.flows.queues[q].next_queue
        return {
            "tenant": self.flow_list[flow].decode(),
            "weight_milli": f.weight_milli,
            "vtc_micro": f.vtc,
            "queued": f.queued,
            "live_leases": f.live,
            "promised_tokens": f.promised_tokens,
            "posted_tokens": f.posted_tokens,
            "input_tokens": f.input_tokens,
            "cached_input_tokens": f.cached_tokens,
            "output_tokens": f.output_tokens,
            "received": f.received,
            "granted": f.granted,
            "completed": f.completed,
            "cancelled": f.cancelled,
            "expired": f.expired,
            "oldest_queued_ms": (now_ns - oldest) // NS_PER_MS,
            "refusals": refusal_counts(f.refusals),
            "predicted_p50_tokens": max(0, self.predictor.quantile(flow, 1)),
            "predicted_quantile_tokens": max(0, self.predictor.quantile(flow, 0)),
        }

    def check(self):
        """Verify every invariant. O(n)."""
        if self.fuse.what is not None:
            raise InvariantError(self.fuse.what)
        check_requests(self)
        check_flows(self)
        check_pools(self)
        cdef int64_t live = self.requests.states[LIVE] + self.requests.states[SUSPECT]
        require(
            self, self.received == self.granted + self.requests.states[QUEUED] + self.rejected
            + self.evicted,
            "received = granted + queued + rejected + evicted",
        )
        require(
            self, self.granted == live + self.completed + self.cancelled + self.expired,
            "granted = live + completed + cancelled + expired",
        )
        require(
            self, <int64_t>self.deadlines.count == self.requests.states[QUEUED] + live,
            "every queued request and every lease is timed",
        )
        require(self, self.deadlines.valid() and self.flows.active.valid(), "heap order")
        require(self, self.answers.count == self.requests.states[ENDED], "stored answers")
