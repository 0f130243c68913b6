# Fair sharing by virtual token counters (Sheng et al., OSDI 2024, arXiv 2401.00588).
#
# A flow is the queue of one tenant in one class. It has one counter and a queue for each target:
# target 0 holds requests that may run in any pool, target p + 1 those that must run in pool p, and
# a target above POOLS_MAX those of a set of pools. Any pool and each pool have a line of non-empty
# queues, in each class by (counter, sequence number of the head); a set those of its pools. Under
# FCFS the counter's place in the key is 0. Counters are compared, and lifted, among the flows of a
# class: those of a better class are ahead by what it had before the others.
#
# Lift: each class has a level, the highest value that the least counter of its backlogged flows has
# had at a pick or a lift. A flow that becomes backlogged is lifted to the level less the credit. So
# a flow that was idle, or sent little, gets at most the credit and the bound of VTC ahead of the
# others; a credit of 0 is the paper's rule. The level never falls: with the least counter in its
# place, each newcomer would lower it by the credit for the next one.

cdef enum:
    RESUMED_EACH = 4096  # flows that one event looks at when their time is over, see restore

# An idle flow counts for this time among those that share the pools.
cdef int64_t LINGER_NS = 10_000_000_000

@cython.final
cdef class Flows:
    cdef Flow* items
    cdef Queue* queues
    cdef int32_t count, size, queue_count, queue_size
    cdef list actives  # for each class: flows of the root that have queued requests
    cdef void* active_at[CLASSES_MAX]  # the same, see Line
    cdef list families  # families of all nodes, see tree.pxi
    cdef int32_t first_stale[TREE_LEVELS]  # nodes of each depth that are not placed; -1: none
    cdef int32_t stale_count
    cdef list candidates  # line of queues for any pool, and for each pool
    cdef list anywhere  # with several pools, the line for any of them in the order of each
    cdef bint local  # there are several, and flows have positions in them
    cdef bint one_line  # with many pools, requests for any have one line, see local_position.pxi
    cdef IndexSet named_only  # pools that take no request without a pool, see pool_positions.pxi
    cdef Line no_line  # the line of requests for any pool then: always empty
    cdef Positions positions
    cdef PoolOrder pool_order
    cdef int order  # ORDER_*
    cdef object key_from, place_from  # functions from outside, or None; see external_order.pxi
    cdef int64_t grain  # the unit in which counters are ordered, see locality
    cdef bint lifts
    cdef int64_t level[CLASSES_MAX]  # the level to which flows of each class are lifted
    cdef int64_t credit_max  # how far below the level a flow may begin, in micro; CREDIT_AUTO
    cdef int64_t average_charge[TREE_LEVELS]  # moving average of what requests were charged
    cdef int64_t largest_charge  # largest recent charge, at weight 1, see flow_averages.pxi
    cdef int64_t lead_given_max  # sum over all that passed a head, in weighted micro-tokens
    cdef int64_t now_ns
    cdef int64_t recent_weight  # weight of the root's flows that are or were lately active
    cdef int32_t recent_count  # how many tenants' flows are, of all
    cdef int32_t linger_first, linger_last  # those that were, in the order in which they went idle
    cdef int32_t queued_for[POOLS_MAX + 1]  # requests for each target; of a set, for all its pools
    cdef int64_t exempt_queued, exempt_live  # requests and leases of exempt flows
    cdef int64_t resuming_until_ns
    cdef int32_t resuming, resume_at  # flows that return; how many were looked at in the end
    cdef DirtyQueue changed
    cdef int64_t queued_work
    cdef int64_t backlog[CLASSES_MAX]  # work that is queued, by class
    cdef int64_t queued_weight[CLASSES_MAX]  # weight of the root's flows with any queued request
    cdef int64_t deep_weight[CLASSES_MAX]  # weight of those with more than one
    cdef int32_t backlogged  # how many tenants' flows have any
    cdef int64_t next_retry_at_ns  # when the last retry is due that full queues refused
    cdef RetrySlots retry_slots  # retry slots of their queues
    cdef int64_t queued_tokens, exempt_tokens  # queued input: of all queues, of exempt flows
    cdef Treaps treaps
    cdef SlabAllocator refusal_slab, times_slab
    cdef FlowTimes other_times[CLASSES_MAX]  # times by class, of all tenants that are not shown
    cdef bint by_deadline  # the order inside a queue that is asked for, see order
    cdef bint keeps_places  # requests may come with a place that they had at an earlier leader
    cdef int32_t unsorted  # the number of first queues that may still have the former order
    cdef bint has_salts  # some flow has, or had, a `salt`
    cdef Requests requests
    cdef PoolSets sets
    cdef Quotas quotas
    cdef Classes classes
    cdef AgentSessions agents
    cdef Vouchers vouchers
    cdef int64_t held_tokens  # input of requests that wait for a cap

    def __cinit__(
        self, int order, bint lifts, Requests requests, Quotas quotas, Classes classes
    ):
        cdef int32_t c
        self.order, self.grain, self.lifts = order, 1, lifts
        for c in range(TREE_LEVELS):
            self.first_stale[c] = NONE
        self.requests, self.quotas, self.classes = requests, quotas, classes
        self.sets = requests.sets
        self.changed, self.agents, self.vouchers = DirtyQueue(), AgentSessions(), Vouchers()
        self.treaps, self.refusal_slab = Treaps(), SlabAllocator(sizeof(NO_REFUSALS))
        self.times_slab = SlabAllocator(sizeof(FlowTimes))
        self.actives = [Heap() for _ in range(CLASSES_MAX)]
        for c in range(CLASSES_MAX):
            self.active_at[c] = <void*>self.actives[c]
        self.candidates, self.anywhere, self.no_line = [Line(classes)], [], Line(classes)
        self.positions, self.pool_order, self.families = Positions(), PoolOrder(), []
        self.linger_first = self.linger_last = NONE
        self.next_retry_at_ns = LONG_AGO_NS

    def __dealloc__(self):
        free(self.items)
        free(self.queues)

    cdef int32_t add(self, int32_t weight_milli) except -1:
        cdef int32_t size
        cdef Flow* f
        if self.count == self.size:
            size = larger(self.size, 0)
            self.items = <Flow*>extend(self.items, size, sizeof(Flow))
            self.size = size
        f = &self.items[self.count]
        memset(f, 0, sizeof(Flow))
        f.weight_milli, f.base, f.refusals = weight_milli, self.count, &NO_REFUSALS
        f.first_queue = f.sibling = f.quota = f.own_quota = f.guarantee = NONE
        f.group = f.parent = f.family = NONE
        self.clear(self.count)
        self.count += 1
        self.changed.reserve(self.count)
        self.changed.mark(self.count - 1)
        return self.count - 1

    cdef void clear(self, int32_t flow) noexcept:
        """Let an idle flow without positions be as new, but for what it may take. O(1)."""
        cdef Flow* f = &self.items[flow]
        cdef Flow new
        memset(&new, 0, sizeof(Flow))
        new.granted_at_ns = new.gave_up_ns = NONE
        new.waits_at = new.wait_head = new.first_position = NONE
        new.next_retry_at_ns = LONG_AGO_NS
        new.weight_milli, new.base, new.sibling, new.cls = f.weight_milli, f.base, f.sibling, f.cls
        new.quota, new.own_quota, new.guarantee = f.quota, f.own_quota, f.guarantee
        new.first_queue, new.exempt = f.first_queue, f.exempt
        new.group, new.parent, new.family = f.group, f.parent, f.family
        new.place, new.depth = f.place, f.depth
        new.refuses, new.times, new.own_times = f.refuses, &self.other_times[f.cls], f.own_times
        new.default_class, new.named_classes = f.default_class, f.named_classes
        new.refusals = f.refusals
        if f.refusals != &NO_REFUSALS:
            memset(f.refusals, 0, sizeof(Refusals))
        if f.own_times != NULL:
            memset(f.own_times, 0, sizeof(FlowTimes))
        f[0] = new

    cdef int32_t add_sibling(self, int32_t base, int32_t cls) except -1:
        """Make a flow of the tenant in another class, with the same weight, quotas and mode."""
        cdef int32_t flow = self.add(self.items[base].weight_milli)
        cdef Flow* f = &self.items[flow]
        f.base, f.cls = base, cls
        f.sibling, self.items[base].sibling = self.items[base].sibling, flow
        f.exempt = self.classes.items[cls].exempt
        f.quota = NONE if f.exempt else self.items[base].quota
        f.guarantee = NONE if f.exempt else self.items[base].guarantee
        f.own_quota, f.group = self.items[base].own_quota, self.items[base].group
        f.refuses, f.dry_runs = self.items[base].refuses, self.items[base].dry_runs
        self.count_times(f, self.items[base].times == self.items[base].own_times)
        return flow

    cdef int count_times(self, Flow* f, bint shown) except -1:
        if shown and f.own_times == NULL:
            f.own_times = <FlowTimes*>self.times_slab.alloc()
        f.times = f.own_times if shown else &self.other_times[f.cls]
        return 0

    cdef inline bint may_take(self, int32_t pool, int32_t target) noexcept:
        """Return whether a pool takes requests for a target: it is that pool, or of that set, or
        they name none (-1) and it is not named only. O(1)."""
        if is_set(target):
            return set_has(&self.sets.of(target).members, pool)
        return target == pool or (target == NONE and not set_has(&self.named_only, pool))

    cdef inline Family family_of(self, int32_t node):
        return <Family>self.families[self.items[node].family]

    cdef inline Heap active(self, int32_t flow):
        """Return the heap of the active ones among a flow and its siblings in its class."""
        if self.items[flow].parent == NONE:
            return <Heap>self.active_at[self.items[flow].cls]
        return self.family_of(self.items[flow].parent).active

    cdef inline int32_t place_of(self, int32_t flow) noexcept:
        """Return the number of a flow among its siblings."""
        return flow if self.items[flow].parent == NONE else self.items[flow].place

    cdef inline bint is_active(self, int32_t flow) noexcept:
        cdef const Flow* f = &self.items[flow]
        if f.parent == NONE:
            return (<Heap>self.active_at[f.cls]).has(flow)
        return (<Family>self.families[self.items[f.parent].family]).active.has(f.place)

    cdef inline int rekey_active(self, int32_t flow) except -1:
        """Give an active flow its place by its counter. O(log n)."""
        return self.active(flow).put(self.place_of(flow), self.items[flow].vtc, flow)

    cdef int64_t least_active(self, int32_t flow) noexcept:
        """Return the least counter among a flow and its siblings, of which one is active. Counters
        grow, so entries have the ones of before, and the first is brought up to date here; a refund
        moves its entry at once. O(log n) amortised."""
        cdef Heap active = self.active(flow)
        cdef int64_t vtc = self.items[<int32_t>active.nodes[0].tie].vtc
        while vtc > active.nodes[0].key:
            active.rekey_first(vtc)
            vtc = self.items[<int32_t>active.nodes[0].tie].vtc
        return active.nodes[0].key

    cdef int lift(self, int32_t flow, int64_t credit) except -1:
        """Lift a flow that becomes active to the level less the credit. O(1)."""
        if self.lifts:
            self.items[flow].vtc = max(self.items[flow].vtc, self.raise_level(flow) - credit)
        self.changed.mark(flow)
        return 0

    cdef int join(self, int32_t flow, bint earns) except -1:
        """Count a flow among the active ones, and each node above it that was not; these are
        lifted, with the credit if they earn it. O(levels * log n)."""
        self.rekey_active(flow)
        while self.items[flow].parent != NONE:
            flow = self.items[flow].parent
            if self.is_active(flow):
                return 0
            self.lift(flow, self.credit(self.items[flow].depth) if earns else 0)
            self.rekey_active(flow)
        return 0

    cdef void part(self, int32_t flow) noexcept:
        """Count a flow no more among the active ones, nor a node of which it was the last.
        O(levels * log n)."""
        self.active(flow).remove(self.place_of(flow))
        while self.items[flow].parent != NONE:
            flow = self.items[flow].parent
            if self.family_of(flow).active.count:
                return
            self.changed.mark(flow)
            self.active(flow).remove(self.place_of(flow))

    cdef inline void prefetch(self, int32_t flow) noexcept:
        """Fetch what an Admit looks at of a flow."""
        cdef const Flow* f = &self.items[flow]
        prefetch_record(f, <const uint8_t*>&f.interval_ns - <const uint8_t*>f)

    cdef inline int32_t find_queue(self, int32_t flow, int32_t target) noexcept:
        cdef int32_t q = self.items[flow].first_queue
        while q != NONE and self.queues[q].target != target:  # one or two, as targets it used
            q = self.queues[q].next_queue
        return q

    cdef int32_t queue_of(self, int32_t flow, int32_t target) except -1:
        cdef int32_t q = self.find_queue(flow, target)
        cdef int32_t size
        if q != NONE:
            return q
        if self.queue_count == self.queue_size:
            size = larger(self.queue_size, 0)
            self.queues = <Queue*>extend(self.queues, size, sizeof(Queue))
            self.queue_size = size
        if target > POOLS_MAX:
            q = self._empty_set_queue(flow)
            if q != NONE:
                self.queues[q].target = target
                return q
        q = self.queue_count
        self.queue_count += 1
        memset(&self.queues[q], 0, sizeof(Queue))
        self.queues[q].flow = flow
        self.queues[q].target = target
        self.queues[q].chain.head = self.queues[q].chain.tail = self.queues[q].root = NONE
        self.queues[q].head = NONE
        self.queues[q].by_deadline = self.by_deadline
        self.queues[q].in_tree = self.needs_tree(&self.queues[q])
        self.queues[q].position = NONE
        self.queues[q].next_queue = self.items[flow].first_queue
        self.items[flow].first_queue = q
        return q

    cdef int32_t _empty_set_queue(self, int32_t flow) noexcept:
        """Return an empty queue that a flow had for a set, -1: there is none. A flow that names
        many sets one after the other needs few queues. O(targets of the flow)."""
        cdef int32_t q = self.items[flow].first_queue
        while q != NONE and (self.queues[q].target <= POOLS_MAX or self.queues[q].chain.count):
            q = self.queues[q].next_queue
        return q

    cdef inline bint needs_tree(self, const Queue* queue) noexcept:
        return queue.by_deadline or self.keeps_places or self.place_from is not None

    cdef int64_t key_of(self, int32_t q) noexcept:
        """Return the key by which heads are ordered; ties go by arrival. O(1)."""
        if self.order == ORDER_COUNTER:
            return self.counter_in(q) // self.grain
        if self.order == ORDER_INPUT and self.queues[q].head != NONE:  # a node has no requests
            return self.requests.items[self.queues[q].head].prompt_tokens
        return self.queues[q].key if self.order == ORDER_EXTERNAL else 0

    cdef inline int64_t counter_in(self, int32_t q) noexcept:
        """Return the counter that orders a queue: with several pools, the one in its own."""
        cdef Queue* queue = &self.queues[q]
        if queue.target == 0 or not self.local or not self.lifts:
            return self.items[queue.flow].vtc
        if queue.position == NONE:
            queue.position = self.find_position(queue.flow, queue.target - 1)
        return self.positions.items[queue.position].key

    cdef inline int64_t counter_at(self, int32_t flow, int32_t pool) noexcept:
        """Return the counter of a flow as a pool sees it, a newcomer's if it has none there.
        O(pools)."""
        cdef int32_t n
        if not self.local or not self.lifts or pool == NONE:
            return self.items[flow].vtc
        n = self.find_position(flow, pool)
        return self.newcomer_at(flow, pool) if n == NONE else self.positions.items[n].key

    cdef inline int64_t newcomer_at(self, int32_t flow, int32_t pool) noexcept:
        return max(
            <int64_t>0, self.level_in(flow, pool)[0] - self.credit(self.items[flow].depth)
        )

    cdef inline int64_t* level_in(self, int32_t flow, int32_t pool) noexcept:
        """Return the level among a flow and its siblings in a pool."""
        if self.items[flow].parent == NONE:
            return self.positions.level(self.items[flow].cls, pool)
        return &self.family_of(self.items[flow].parent).levels[pool]

    cdef inline int32_t find_position(self, int32_t flow, int32_t pool) noexcept:
        """Return where a flow stands in a pool; -1: it never queued anything there. O(pools), of a
        node O(1)."""
        if self.items[flow].family != NONE and pool < POOLS_ORDERED:
            return self.family_of(flow).positions[pool]
        return self.positions.find(self.items[flow].first_position, pool)

    cdef inline bint is_billed(self, Queue* queue) noexcept:
        """Return whether the head of a queue has what its quotas ask."""
        return (
            self.items[queue.flow].quota == NONE
            or self.requests.items[queue.head].bill != 0
        )

    cdef void end_idle(self, int32_t flow) noexcept:
        """The flow gets something queued, or in flight. O(1)."""
        cdef Flow* f = &self.items[flow]
        if f.linger_until_ns:
            self._unlinger(flow)
        elif f.queued == 0 and f.live == 0:
            self.count_recent(flow, 1)

    cdef int activate(self, int32_t flow) except -1:
        """The flow gets something queued. Lift: one that was idle is not served for the time it
        was away, but for the credit (section 4.1). O(log n)."""
        cdef Flow* f = &self.items[flow]
        self.end_idle(flow)
        if self.is_active(flow) or f.waits_at != NONE or f.throttled:
            return 0
        self.lift(flow, self.credit(f.depth))
        return self.join(flow, True)

    cdef inline int64_t* level_of(self, int32_t flow) noexcept:
        """Return the level among a flow and its siblings."""
        if self.items[flow].parent == NONE:
            return &self.level[self.items[flow].cls]
        return &self.family_of(self.items[flow].parent).level

    cdef int64_t raise_level(self, int32_t flow) noexcept:
        """Let that level follow the least active counter. It never falls. O(1)."""
        cdef Heap active = self.active(flow)
        cdef int64_t* level = self.level_of(flow)
        if active.count:
            level[0] = max(level[0], self.least_active(flow))
        return level[0]

    cdef void raise_levels(self, int32_t flow) noexcept:
        """Raise the levels of a flow and of the nodes above it. O(levels)."""
        while flow != NONE:
            self.raise_level(flow)
            flow = self.items[flow].parent

    cdef inline int64_t credit(self, int32_t depth) noexcept:
        """Return how far below its level a flow with `depth` nodes above it may begin, in weighted
        micro-tokens."""
        return self.average_charge[depth] if self.credit_max == CREDIT_AUTO else self.credit_max

    cdef void settle(self, int32_t flow) noexcept:
        """The flow may have become idle. O(log n)."""
        cdef Flow* f = &self.items[flow]
        if f.queued:
            return
        if not f.resumed and self.is_active(flow):
            self.part(flow)
            self.changed.mark(flow)
        if not f.live and not f.linger_until_ns:
            self.linger(flow)

    cdef void linger(self, int32_t flow) noexcept:
        """Count an idle flow among those that share the pools for some time yet. O(1)."""
        cdef Flow* f = &self.items[flow]
        f.linger_until_ns = self.now_ns + LINGER_NS
        f.linger_next = NONE
        f.linger_prev = self.linger_last
        if self.linger_last == NONE:
            self.linger_first = flow
        else:
            self.items[self.linger_last].linger_next = flow
        self.linger_last = flow

    cdef void _unlinger(self, int32_t flow) noexcept:
        cdef Flow* f = &self.items[flow]
        f.linger_until_ns = 0
        if f.linger_prev == NONE:
            self.linger_first = f.linger_next
        else:
            self.items[f.linger_prev].linger_next = f.linger_next
        if f.linger_next == NONE:
            self.linger_last = f.linger_prev
        else:
            self.items[f.linger_next].linger_prev = f.linger_prev

    cdef void enter(self, int64_t now_ns) noexcept:
        """Let flows go that have been idle for long. O(1) amortised."""
        cdef int32_t flow
        self.now_ns = now_ns
        if self.resuming and now_ns >= self.resuming_until_ns:
            end_resumed(self, RESUMED_EACH)
        while self.linger_first != NONE:
            flow = self.linger_first
            if self.items[flow].linger_until_ns > now_ns:
                break
            self._leave(flow)

    cdef void _leave(self, int32_t flow) noexcept:
        self._unlinger(flow)
        self.count_recent(flow, -1)

    cdef inline int64_t* recent_weight_of(self, int32_t flow) noexcept:
        """Return the weight of a flow and its siblings that are active or were lately."""
        if self.items[flow].parent == NONE:
            return &self.recent_weight
        return &self.family_of(self.items[flow].parent).recent_weight

    cdef inline int64_t* queued_weight_of(self, int32_t flow) noexcept:
        """Return the weight of a flow and its siblings that have something queued."""
        if self.items[flow].parent == NONE:
            return &self.queued_weight[self.items[flow].cls]
        return &self.family_of(self.items[flow].parent).queued_weight

    cdef inline int64_t* deep_weight_of(self, int32_t flow) noexcept:
        """Return the weight of a flow and its siblings that have more than one request queued."""
        if self.items[flow].parent == NONE:
            return &self.deep_weight[self.items[flow].cls]
        return &self.family_of(self.items[flow].parent).deep_weight

    cdef inline bint is_recent(self, int32_t flow) noexcept:
        """Return whether a flow is active or was lately; a node, if a child of it is."""
        cdef const Flow* f = &self.items[flow]
        if f.family != NONE:
            return self.family_of(flow).recent_count > 0
        return f.linger_until_ns != 0 or f.queued > 0 or f.live > 0

    cdef void count_recent(self, int32_t flow, int32_t more) noexcept:
        """Count a flow that begins (1) or ceases (-1) to share the pools, and each node of which
        it is the first or was the last. O(levels)."""
        cdef Family family
        self.pool_order.stirred = True
        self.recent_count += more
        self.recent_weight_of(flow)[0] += more * self.items[flow].weight_milli
        while self.items[flow].parent != NONE:
            flow = self.items[flow].parent
            family = self.family_of(flow)
            family.recent_count += more
            if family.recent_count != (more > 0):
                return
            self.recent_weight_of(flow)[0] += more * self.items[flow].weight_milli

    cdef void reweigh(self, int32_t flow, int32_t weight_milli) noexcept:
        """Give a flow another weight; leases keep theirs. O(1)."""
        cdef Flow* f = &self.items[flow]
        cdef int32_t more = weight_milli - f.weight_milli
        self.pool_order.stirred = True
        if self.is_recent(flow):
            self.recent_weight_of(flow)[0] += more
        if f.queued:
            self.queued_weight_of(flow)[0] += more
        if f.queued > 1:
            self.deep_weight_of(flow)[0] += more
        f.weight_milli = weight_milli


cdef void end_resumed(Flows flows, int32_t count) noexcept:
    """Look at `count` further flows: those without new requests go idle. O(log n) each."""
    cdef int32_t last = min(flows.count, flows.resume_at + count), flow
    cdef Flow* f
    while flows.resume_at < last and flows.resuming:
        flow = flows.resume_at
        flows.resume_at += 1
        f = &flows.items[flow]
        if not f.resumed:
            continue
        f.resumed = False
        flows.resuming -= 1
        if flows.is_active(flow) and f.queued == 0:
            flows.part(flow)
            flows.changed.mark(flow)
