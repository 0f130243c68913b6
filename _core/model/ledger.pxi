# The KV ledger: blocks promised to leases, pool by pool.
#
# promised = sum of the reservations of live leases; posted is the part that is materialised. The
# load of a pool has three parts: that sum (sum form) or the greatest load to come (peak form, see
# peak_usage); what the engine reports beyond all promises; what is still owed to leases from before
# a restart. A grant needs load <= capacity - headroom with the new lease counted. Growth, replay or
# a smaller capacity may push the load beyond that: the pool is then OVERDRAWN and grants nothing.

@cython.final
cdef class Ledger:
    cdef Pool* pools  # POOLS_MAX places that never move; memory is used by those in use
    cdef int32_t count
    cdef int64_t headroom_ppm
    cdef bint by_peak
    cdef bint closed  # an operator lets nothing into any pool any more
    cdef list claims  # streams that offer each pool, by epoch
    cdef Requests requests
    cdef Flows flows
    cdef Adapters adapters
    cdef PoolOrder order
    cdef Fuse fuse

    def __cinit__(
        self, bint by_peak, int64_t headroom_ppm, Requests requests, Flows flows,
        Adapters adapters, Fuse fuse,
    ):
        self.adapters = adapters
        self.pools = <Pool*>calloc(POOLS_MAX, sizeof(Pool))
        if self.pools == NULL:
            raise MemoryError()
        self.claims = []
        self.by_peak = by_peak
        self.headroom_ppm = headroom_ppm
        self.requests = requests
        self.flows, self.order = flows, flows.pool_order
        self.fuse = fuse

    cdef int32_t add(self) except -1:
        self.clear(self.count)
        self.claims.append({})
        self.count += 1
        return self.count - 1

    def __dealloc__(self):
        cdef int32_t pool
        for pool in range(self.count):
            free(self.pools[pool].growing.items)
            free(self.pools[pool].loras.leases)
            free(self.pools[pool].held)
        free(self.pools)

    cdef int claim(self, int32_t pool, int64_t epoch, int change) except -1:
        """Change the number of streams that offer a pool at an epoch. O(1)."""
        cdef dict claims = self.claims[pool]
        claims[epoch] = claims.get(epoch, 0) + change
        if claims[epoch] == 0:
            del claims[epoch]
        return 0

    cdef bint is_claimed(self, int32_t pool):
        """Return whether a stream offers a pool at the epoch that it has. O(1)."""
        cdef dict claims = self.claims[pool]
        return self.pools[pool].epoch in claims

    cdef void clear(self, int32_t pool) noexcept:
        free(self.pools[pool].growing.items)  # the pool held nothing any more
        free(self.pools[pool].loras.leases)
        free(self.pools[pool].held)
        memset(&self.pools[pool], 0, sizeof(Pool))
        self.pools[pool].first_lease = self.pools[pool].next = NONE
        self.pools[pool].oldest_session = self.pools[pool].newest_session = NONE
        self.pools[pool].telemetry_at_ns = NONE
        self.pools[pool].quota = self.pools[pool].principal = NONE
        self.pools[pool].prefill_budget.chain.head = NONE
        self.pools[pool].prefill_budget.chain.tail = NONE
        self.learn_anew(pool)

    cdef void learn_anew(self, int32_t pool) noexcept:
        cdef Pool* p = &self.pools[pool]
        self.order.touch(pool)
        p.headroom_ppm = self.headroom_ppm
        p.headroom_blocks = p.capacity_blocks * p.headroom_ppm // 1_000_000
        p.probes = True
        p.pressed = p.aged = False
        p.served = p.surplus_micro = 0
        p.light_since_ns = NONE
        p.light_milli = p.kept_milli = 0
        p.engine_excess_tokens = 0
        rate_forget(&p.drain, self.flows.now_ns)
        p.prefill_ns = p.prefill_tokens = p.prefill_error_ns = p.prefills_judged = 0
        p.overload = LOAD_UNDER
        p.calm_since_ns = NONE
        p.last_prefill_ns = 0
        p.opened_ns = NONE
        p.decode_ns = p.decode_milli = 0

    cdef void touch_all(self) noexcept:
        """Have all pools looked at again. O(pools)."""
        cdef int32_t pool
        for pool in range(self.count):
            self.order.touch(pool)

    cdef void forget(self) noexcept:
        """Reset the headroom, and what is kept. O(pools)."""
        cdef int32_t pool
        for pool in range(self.count):
            self.learn_anew(pool)

    cdef void size(
        self, int32_t pool, int64_t capacity_tokens, int64_t block_size, int64_t max_running,
        int64_t max_model_tokens,
    ) noexcept:
        cdef Pool* p = &self.pools[pool]
        p.block_size = block_size
        p.engine_tokens = capacity_tokens
        p.engine_max_running = max_running
        p.max_model_tokens = max_model_tokens
        self.limit(pool, &p.limits)

    cdef void limit(self, int32_t pool, const PoolLimits* limits) noexcept:
        """Let a pool hold and run the less of what its engine can and what is allowed. O(1)."""
        cdef Pool* p = &self.pools[pool]
        cdef int64_t longest, size
        p.limits = limits[0]
        self.order.touch(pool)
        self.order.stirred = True  # what no pool can hold any more leaves the line
        lora_weigh(&p.loras, self.adapters, p.limits.adapter_tokens)
        if p.block_size == 0:  # no stream has offered it yet
            return
        p.capacity_blocks = max(
            <int64_t>1, shortest(p.engine_tokens, p.limits.max_total_tokens) // p.block_size
        )
        p.headroom_blocks = p.capacity_blocks * p.headroom_ppm // 1_000_000
        p.max_running = shortest(p.engine_max_running, p.limits.max_running)
        p.prefill_budget.max_tokens = p.limits.batch_max_tokens
        if p.limits.batch_max_tokens == BATCH_AUTO:
            longest = shortest(p.limits.max_request_input_tokens, p.max_model_tokens)
            longest = shortest(longest, p.limits.max_request_total_tokens)
            longest = shortest(longest, p.engine_tokens)
            size = p.capacity_blocks * p.block_size
            p.prefill_budget.max_tokens = max(size // PREFILL_BUDGET_PART, longest)

    cdef inline void prefetch(self, int32_t pool, int32_t flow) noexcept:
        """Fetch a pool that is looked at soon, and what a flow holds there."""
        prefetch_record(&self.pools[pool], sizeof(Pool))
        if flow < self.pools[pool].held_count:
            prefetch_line(&self.pools[pool].held[flow])

    cdef inline bint serves(self, int32_t pool) noexcept:
        """Return whether the pool may grant anything."""
        cdef const Pool* p = &self.pools[pool]
        return p.attached and not p.draining and not self.closed

    cdef bint can_hold(self, int32_t pool, const Request* r) noexcept:
        """Return whether the request could ever run in the pool, all its output counted."""
        cdef const Pool* p = &self.pools[pool]
        cdef int64_t tokens, room
        if p.max_model_tokens and r.prompt_max_tokens + r.output_max_tokens > p.max_model_tokens:
            return False
        if p.max_running and r.sequences > p.max_running:
            return False
        if is_above(p.limits.max_request_input_tokens, r.prompt_tokens) or is_above(
            p.limits.max_request_total_tokens,
            r.prompt_tokens + <int64_t>r.output_max_tokens * r.sequences,
        ):
            return False
        tokens = sized_tokens(r, r.output_max_tokens)
        room = (p.capacity_blocks - r.sequences + 1) * p.block_size
        if self.requests.rare_of(r).adapter == NONE:
            return tokens <= room  # which spares the division: each Admit asks three times
        tokens = (tokens + p.block_size - 1) // p.block_size * p.block_size
        return tokens + self.lora_more(pool, r, True) <= room

    cdef int64_t lora_more(self, int32_t pool, const Request* r, bint alone) noexcept:
        """Return the tokens that the request's adapter takes in the pool beside those that are
        active there; `alone`: if none were. O(1)."""
        cdef const Pool* p = &self.pools[pool]
        cdef int32_t adapter = self.requests.rare_of(r).adapter
        if adapter == NONE or (lora_is_active(&p.loras, adapter) and not alone):
            return 0
        return lora_tokens(self.adapters, adapter, p.limits.adapter_tokens)

    cdef int64_t need(self, int32_t pool, const Request* r, int64_t output_tokens) noexcept:
        """Return the blocks for this much output of each sequence, and for a copy of its prompt for
        each."""
        return blocks_for(&self.pools[pool], sized_tokens(r, output_tokens), r.sequences)

    cdef int64_t load(self, int32_t pool, const GrowingLease* one_more) noexcept:
        """Return the tokens that the pool has to hold at worst, with one more lease if it is given.
        O(1), in the peak form O(leases of the pool)."""
        return self.load_above(pool, one_more, -1)

    cdef int64_t load_above(self, int32_t pool, const GrowingLease* new, int64_t enough) noexcept:
        """Return the same load; while the sum of the reservations is no more than `enough`, that
        sum, in O(1): no peak exceeds it."""
        cdef const Pool* p = &self.pools[pool]
        cdef int64_t beside = p.loras.tokens + unaccounted_tokens(p)
        cdef int64_t load = p.promised_blocks * p.block_size
        if new != NULL:
            load += new.whole
        if self.by_peak and load + beside > enough:
            load = min(
                load, growing_peak(&self.pools[pool].growing, self.requests, new, p.block_size)
            )
        return load + beside

    cdef int64_t allowance(self, int32_t pool) noexcept:
        """Return the load that the pool's test allows once it is there; a greater load overdraws
        the pool."""
        cdef const Pool* p = &self.pools[pool]
        return (p.capacity_blocks - min(<int64_t>0, p.headroom_blocks)) * p.block_size

    cdef GrowingLease figures(
        self, int32_t pool, const Request* r, int64_t blocks, int64_t output
    ) noexcept:
        """Tokens that a lease adds to the load, from its reserved blocks and the output that each
        of its sequences will have in all."""
        cdef const Pool* p = &self.pools[pool]
        cdef int64_t whole = blocks * p.block_size, held, each
        cdef GrowingLease run
        memset(&run, 0, sizeof(run))
        run.whole = whole
        run.id = NONE
        if not r.reports_progress or r.state == SUSPECT:
            return run
        each = (r.lease.output_tokens + r.sequences - 1) // r.sequences
        held = min(<int64_t>r.prompt_tokens * r.n + r.lease.output_tokens, whole)
        run.width = r.sequences
        run.tokens_left = min(max(<int64_t>0, output - each), (whole - held) // run.width)
        set_growth(&run, (held + run.width - 1) // run.width, p.block_size)
        return run

    cdef int shut_to(self, int32_t pool, const Request* r) noexcept:
        """Why the request cannot be granted now, however few tokens it would reserve; WAIT_NONE if
        they decide. O(1), in the peak form O(leases of the pool)."""
        cdef const Pool* p = &self.pools[pool]
        cdef int64_t allowance = self.allowance(pool)
        if p.attached == 0 or p.awaits_replays:
            return WAIT_DETACHED
        if not self.serves(pool):
            return WAIT_DRAINING
        if self.load_above(pool, NULL, allowance) > allowance:
            return WAIT_OVERDRAWN
        if p.max_running and p.running_sequences + r.sequences > p.max_running:
            return WAIT_MAX_RUNNING
        return WAIT_NONE

    cdef int verdict(
        self, int32_t pool, const Request* r, int64_t blocks, int64_t output, int64_t kept_tokens
    ) noexcept:
        """Return why a request that the pool is not shut to cannot be granted now beside the tokens
        kept for others; WAIT_NONE if it can. O(1), in the peak form O(leases of the pool)."""
        cdef const Pool* p = &self.pools[pool]
        cdef int64_t load, more, room, allowance = self.allowance(pool)
        cdef int32_t adapter
        cdef GrowingLease run
        adapter = self.requests.rare_of(r).adapter
        if adapter != NONE and not lora_is_active(&p.loras, adapter):
            if is_above(p.limits.max_loras, p.loras.active + 1):
                return WAIT_ADAPTERS
        if p.prefill_budget.tokens and r.reports_progress and is_above(
            p.prefill_budget.max_tokens, p.prefill_budget.tokens + r.prompt_tokens
        ):
            return WAIT_ROUND
        # Headroom is for growth; what is alone in the pool may use it all.
        if p.live == 0 and p.owed_tokens == 0:
            return WAIT_NONE
        run = self.figures(pool, r, blocks, output)
        room = (p.capacity_blocks - p.headroom_blocks) * p.block_size - kept_tokens
        more = self.lora_more(pool, r, False)
        load = more + self.load_above(pool, &run, min(allowance, room) - more)
        if load > allowance:
            return WAIT_MAX_TOTAL if is_below_engine(p) else WAIT_KV
        if load > room:
            return WAIT_HEADROOM
        return WAIT_NONE

    cdef int reserve(self, int32_t i, int64_t blocks) except -1:
        """Open the reservation of a lease in its pool. O(1)."""
        cdef Request* r = &self.requests.items[i]
        cdef Pool* p = &self.pools[r.pool]
        cdef int64_t filled = 0
        r.lease.pool_prev = NONE
        r.lease.pool_next = p.first_lease
        if p.first_lease != NONE:
            self.requests.items[p.first_lease].lease.pool_prev = i
        p.first_lease = i
        p.live += 1
        p.running_sequences += r.sequences
        lora_enter(
            &p.loras, self.adapters, self.requests.rare_of(r).adapter, p.limits.adapter_tokens
        )
        if r.whole_answer or not r.reports_progress:
            # No report will say when its input is in the cache, so it counts from the grant.
            filled = blocks_for(p, <int64_t>r.prompt_tokens * r.n, r.sequences)
        self.resize(i, blocks, min(blocks, filled))
        if r.reports_progress and not is_computed(r):
            chain_push(&p.prefill_budget.chain, self.requests.items, i)
            p.prefill_budget.tokens += r.prompt_tokens
            r.lease.in_prefill_budget = True
        return self.place(i)

    cdef void leave_prefill_budget(self, int32_t i) noexcept:
        """The engine has computed the input of a lease, or never will. O(1)."""
        cdef Request* r = &self.requests.items[i]
        cdef Pool* p = &self.pools[r.pool]
        if r.lease.in_prefill_budget:
            r.lease.in_prefill_budget = False
            chain_remove(&p.prefill_budget.chain, self.requests.items, i)
            p.prefill_budget.tokens -= r.prompt_tokens

    cdef void note_prefill(self, int32_t i, int64_t now_ns) noexcept:
        """The first tokens of a lease were reported. O(1)."""
        cdef Request* r = &self.requests.items[i]
        cdef int64_t elapsed_ns = now_ns - granted_at_ns(r)
        if elapsed_ns < PREFILL_MAX_NS:  # else its start is unknown
            self.pools[r.pool].last_prefill_ns = elapsed_ns
        self.leave_prefill_budget(i)

    cdef void expire_prefill_budget(self, int32_t pool, int64_t now_ns) noexcept:
        """Take those out of the round that were granted long ago. O(those)."""
        cdef Pool* p = &self.pools[pool]
        while p.prefill_budget.chain.count and self.prefill_budget_ends_ns(pool) <= now_ns:
            self.leave_prefill_budget(p.prefill_budget.chain.head)

    cdef int64_t prefill_budget_ends_ns(self, int32_t pool) noexcept:
        """When the first of a round leaves it, whatever is reported. O(1)."""
        return granted_at_ns(
            &self.requests.items[self.pools[pool].prefill_budget.chain.head]
        ) + PREFILL_MAX_NS

    cdef int64_t round_tokens(self, int32_t pool, int64_t now_ns) noexcept:
        """Return the round as it is now; nothing changes. O(those that would leave it)."""
        cdef int64_t tokens = self.pools[pool].prefill_budget.tokens
        cdef int32_t i = self.pools[pool].prefill_budget.chain.head
        while i != NONE and granted_at_ns(&self.requests.items[i]) + PREFILL_MAX_NS <= now_ns:
            tokens -= self.requests.items[i].prompt_tokens
            i = self.requests.items[i].next
        return tokens

    cdef int place(self, int32_t i) except -1:
        """Count a lease in the load as it is now: it was reported, grew or changed its state.
        O(1)."""
        cdef Request* r = &self.requests.items[i]
        cdef GrowingLeases* runs = &self.pools[r.pool].growing
        cdef GrowingLease run
        self.order.touch(r.pool)
        run = self.figures(r.pool, r, r.lease.reserved_blocks, r.lease.predicted_output)
        if run.width == 0:
            self.unplace(i)
            r.lease.fixed_tokens = run.whole
            runs.fixed_tokens += run.whole
            return 0
        if r.lease.growing_at == NONE:
            self.unplace(i)
            growing_add(runs, self.requests, i)
        growing_put(runs, r.lease.growing_at, &run)
        return 0

    cdef void unplace(self, int32_t i) noexcept:
        cdef Request* r = &self.requests.items[i]
        cdef GrowingLeases* runs = &self.pools[r.pool].growing
        if r.lease.growing_at != NONE:
            growing_remove(runs, self.requests, i)
        runs.fixed_tokens -= r.lease.fixed_tokens
        r.lease.fixed_tokens = 0

    cdef int resize(self, int32_t i, int64_t reserved, int64_t posted) except -1:
        """Let a lease hold `reserved` blocks, `posted` of them materialised. O(1)."""
        cdef Request* r = &self.requests.items[i]
        cdef Pool* p = &self.pools[r.pool]
        cdef Flow* f = &self.flows.items[r.flow]
        cdef int64_t more = reserved - r.lease.reserved_blocks
        cdef int64_t filled = posted - r.lease.posted_blocks
        cdef int32_t size
        if r.flow >= p.held_count:
            size = doubled(p.held_count, r.flow, 16)
            p.held = <int64_t*>grow(p.held, p.held_count, size, sizeof(int64_t))
            p.held_count = size
        p.held[r.flow] += more
        p.promised_blocks += more
        self.order.touch(r.pool)
        p.posted_blocks += filled
        f.promised_tokens += more * p.block_size
        f.posted_tokens += filled * p.block_size
        r.lease.reserved_blocks = <int32_t>reserved
        r.lease.posted_blocks = <int32_t>posted
        if p.promised_blocks < 0 or p.posted_blocks < 0 or f.promised_tokens < 0 or posted < 0:
            raise self.fuse.blow("ledger: a sum of reservations is negative")
        if posted > reserved:
            raise self.fuse.blow("ledger: a lease has posted more than it reserved")
        return 0

    cdef int release(self, int32_t i) except -1:
        """Give a lease's reservation back. O(1)."""
        cdef Request* r = &self.requests.items[i]
        cdef Pool* p = &self.pools[r.pool]
        self.unplace(i)
        self.leave_prefill_budget(i)
        lora_leave(
            &p.loras, self.adapters, self.requests.rare_of(r).adapter, p.limits.adapter_tokens
        )
        self.resize(i, 0, 0)
        if r.lease.pool_prev == NONE:
            p.first_lease = r.lease.pool_next
        else:
            self.requests.items[r.lease.pool_prev].lease.pool_next = r.lease.pool_next
        if r.lease.pool_next != NONE:
            self.requests.items[r.lease.pool_next].lease.pool_prev = r.lease.pool_prev
        r.lease.pool_next = r.lease.pool_prev = NONE
        p.live -= 1
        p.running_sequences -= r.sequences
        if p.live < 0 or p.running_sequences < 0:
            raise self.fuse.blow("ledger: more leases released than reserved")
        return 0
