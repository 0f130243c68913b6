# Fair sharing by virtual token counters (Sheng et al., OSDI 2024, arXiv 2401.00588).
#
# A flow is the queue of one tenant in one class. It has one counter and a queue for each target:
# target 0 holds requests that may run in any pool, target p + 1 those that must run in pool p. Each
# target has a line of its non-empty queues, in each class by (counter, sequence number of the
# head). Under FCFS the counter's place in the key is 0. Counters are compared, and lifted, among
# the flows of a class: those of a better class are ahead by what it had before the others.
#
# Lift: each class has a level, the highest value that the least counter of its backlogged flows has
# had at a pick or a lift. A flow that becomes backlogged is lifted to the level less the credit. So
# a flow that was idle, or sent little, gets at most the credit and the bound of VTC ahead of the
# others; a credit of 0 is the paper's rule. The level never falls: with the least counter in its
# place, each newcomer would lower it by the credit for the next one.

cdef enum:
    RESUMED_EACH = 4096  # flows that one event looks at when their time is over, see restore
    CHARGES_AVERAGED = 32  # the moving average of charges forgets at this pace

# For so long an idle flow counts among those that share the pools.
cdef int64_t LINGER_NS = 10_000_000_000

ctypedef struct Flow:
    int64_t vtc
    int64_t average_milli  # moving average of its outputs, in thousandths of a token
    int64_t interval_ns  # moving average of the time between two grants
    int64_t granted_at_ns  # -1: never
    int64_t promised_tokens, posted_tokens
    int64_t input_tokens, cached_tokens, output_tokens, input_before, cached_before  # forgotten
    int64_t received, granted, completed, cancelled, expired
    Refusals* refusals  # NO_REFUSALS until the first
    FlowTimes* times  # where its times are counted: its own, or its class's other_times
    FlowTimes* own_times  # NULL until its tenant is shown, see histograms.pxi
    int32_t weight_milli
    int32_t queued, live
    int64_t queued_tokens, queued_work  # of input; of what they will be charged
    int32_t linger_next, linger_prev  # among the flows that were active lately
    int64_t linger_until_ns  # 0: it does not linger
    int32_t first_queue
    int32_t quota, own_quota  # first node of its chain; the node of its own limits; -1: none
    int32_t waits_at  # node whose quota it waits for; -1: none
    int32_t wait_head, wait_slot  # the request it waits with; its place among the waiters
    int64_t wait_lift, throttled_lift  # of the node, and of the desk, when it began to wait there
    int64_t open_charged  # what the counter carries for its leases
    int64_t owed  # what it carries for those of before a restart, see restore
    uint64_t salt  # of request ids, where its number does not name the tenant; 0: it does
    uint8_t resumed  # active before a restart, and so for a while after it
    uint8_t refuses  # it would rather be refused than wait for its quotas
    uint8_t dry_runs  # its requests are decided and counted, and all granted at once
    uint8_t exempt  # its class is
    uint8_t limited, born  # held to its share, it may not borrow; made at first sight
    Rate served  # while it is backlogged
    int64_t next_retry_at_ns  # when the last that was refused was told to come back
    int64_t wait_error_ns, waits_judged  # moving average of how wrong waits were foretold
    int64_t first_us, forecast_first_us, first_judged  # to the first token: what was, what was told
    int32_t cls  # its class
    int32_t base, sibling  # the tenant's flow in the default class; another one of it, -1: none
    int32_t default_class  # of requests that name none; here and below, of the base
    uint32_t named_classes  # that requests may name, as bits; 0: all that are not exempt
    int32_t throttled  # queues that are held to its share, see borrowing
    ShedAccuracy shed_accuracy  # see deadline_shedding.pxi
    int32_t guarantee  # first node with a share on its chain; -1: none
    int32_t first_position  # in pools, while there are several; -1: none
    int32_t answers  # that are stored
    int32_t maker  # made at first sight: 1 + the principal that named it; 0: not known

ctypedef struct Queue:
    Chain chain
    int32_t flow
    int32_t target
    int32_t next_queue
    int64_t work_in  # that was queued here, ever
    int32_t ordinal  # of the next arrival
    int32_t root  # of its treap, where it is served by deadline
    bint by_deadline
    bint throttled  # its head is beyond the share of its flow while that binds
    int32_t position  # of its flow in its pool, once known; -1: not yet, or for any pool


@cython.final
cdef class Flows:
    cdef Flow* items
    cdef Queue* queues
    cdef int32_t count, size, queue_count, queue_size
    cdef list actives  # of each class: flows that have something queued or in flight, by counter
    cdef list candidates  # line of queues for each target
    cdef list anywhere  # with several pools, the line for any of them in the order of each
    cdef bint local  # there are several, and flows have positions in them
    cdef bint one_line  # of many pools, for what may run anywhere, see local_position.pxi
    cdef Positions positions
    cdef PoolOrder pool_order
    cdef int order  # ORDER_*
    cdef int64_t grain  # of counters in the order, see locality
    cdef bint lifts
    cdef bint lifts_queued  # a flow is active while it has something queued, as in the paper
    cdef int64_t level[CLASSES_MAX]  # of each class, where flows are lifted to it
    cdef int64_t credit_max  # how far below the level a flow may begin, in micro; CREDIT_AUTO
    cdef int64_t average_charge  # moving average of what a request was charged in the end
    cdef int32_t last_active[CLASSES_MAX]  # of each class the flow that was so last; -1: none
    cdef int64_t now_ns
    cdef int64_t recent_weight  # of the flows that are active or were lately
    cdef int32_t recent_count
    cdef int32_t linger_first, linger_last  # those that were, in the order in which they went idle
    cdef int32_t queued_for[POOLS_MAX + 1]  # requests for each target
    cdef int64_t exempt_queued, exempt_live  # requests and leases of exempt flows
    cdef int64_t resuming_until_ns
    cdef int32_t resuming, resume_at  # flows that return; how many were looked at in the end
    cdef DirtyQueue changed
    cdef int64_t queued_work
    cdef int64_t backlog[CLASSES_MAX]  # work that is queued, by class
    cdef int64_t queued_weight[CLASSES_MAX]  # of the flows that have any
    cdef int64_t deep_weight[CLASSES_MAX]  # of those that have more than one
    cdef int32_t backlogged  # how many have any
    cdef int64_t next_retry_at_ns  # when the last was told to come back whom full queues refused
    cdef RetrySlots retry_slots  # of these
    cdef int64_t queued_tokens, exempt_tokens  # of input: in all queues, in those of exempt flows
    cdef Treaps treaps
    cdef SlabAllocator refusal_slab, times_slab
    cdef FlowTimes other_times[CLASSES_MAX]  # of each class, of all tenants that are not shown
    cdef bint by_deadline  # the order inside a queue that is asked for, see order
    cdef int32_t unsorted  # so many of the first queues may have the former one
    cdef Requests requests
    cdef Quotas quotas
    cdef Classes classes

    def __cinit__(
        self, int order, bint lifts, bint lifts_queued, Requests requests, Quotas quotas,
        Classes classes,
    ):
        cdef int32_t c
        self.order, self.grain = order, 1
        self.lifts, self.lifts_queued = lifts, lifts_queued
        for c in range(CLASSES_MAX):
            self.last_active[c] = NONE
        self.requests, self.quotas, self.classes = requests, quotas, classes
        self.changed = DirtyQueue()
        self.treaps, self.refusal_slab = Treaps(), SlabAllocator(sizeof(NO_REFUSALS))
        self.times_slab = SlabAllocator(sizeof(FlowTimes))
        self.actives = [Heap() for _ in range(CLASSES_MAX)]
        self.candidates, self.anywhere = [Line(classes)], []
        self.positions, self.pool_order = Positions(), PoolOrder()
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
        new.granted_at_ns = new.waits_at = new.wait_head = new.first_position = NONE
        new.next_retry_at_ns = LONG_AGO_NS
        new.weight_milli, new.base, new.sibling, new.cls = f.weight_milli, f.base, f.sibling, f.cls
        new.quota, new.own_quota, new.guarantee = f.quota, f.own_quota, f.guarantee
        new.first_queue, new.exempt = f.first_queue, f.exempt
        new.refuses, new.times, new.own_times = f.refuses, &self.other_times[f.cls], f.own_times
        new.default_class, new.named_classes = f.default_class, f.named_classes
        new.refusals = f.refusals
        if f.refusals != &NO_REFUSALS:
            memset(f.refusals, 0, sizeof(Refusals))
        if f.own_times != NULL:
            memset(f.own_times, 0, sizeof(FlowTimes))
        f[0] = new

    cdef int32_t add_sibling(self, int32_t base, int32_t cls) except -1:
        """A flow of the tenant in another class, with the same weight, quotas and mode."""
        cdef int32_t flow = self.add(self.items[base].weight_milli)
        cdef Flow* f = &self.items[flow]
        f.base, f.cls = base, cls
        f.sibling, self.items[base].sibling = self.items[base].sibling, flow
        f.exempt = self.classes.items[cls].exempt
        f.quota = NONE if f.exempt else self.items[base].quota
        f.guarantee = NONE if f.exempt else self.items[base].guarantee
        f.own_quota = self.items[base].own_quota
        f.refuses, f.dry_runs = self.items[base].refuses, self.items[base].dry_runs
        self._count_times(f, self.items[base].times == self.items[base].own_times)
        return flow

    cdef int _count_times(self, Flow* f, bint shown) except -1:
        if shown and f.own_times == NULL:
            f.own_times = <FlowTimes*>self.times_slab.alloc()
        f.times = f.own_times if shown else &self.other_times[f.cls]
        return 0

    cdef int show_times(self, int32_t flow, bint shown) except -1:
        """Count a tenant's times in histograms of its own, or in the shared ones. O(classes)."""
        while flow != NONE:
            self._count_times(&self.items[flow], shown)
            flow = self.items[flow].sibling
        return 0

    cdef void clear_times(self, int32_t cls) noexcept:
        """Begin the histograms of a class at 0: its place has gone to another one. O(flows)."""
        cdef int32_t flow
        memset(&self.other_times[cls], 0, sizeof(FlowTimes))
        for flow in range(self.count):
            if self.items[flow].cls == cls and self.items[flow].own_times != NULL:
                memset(self.items[flow].own_times, 0, sizeof(FlowTimes))

    cdef inline Heap active(self, int32_t flow):
        """The active flows of a flow's class."""
        return <Heap>self.actives[self.items[flow].cls]

    cdef inline void prefetch(self, int32_t flow) noexcept:
        """Fetch a flow that is looked at soon."""
        cdef size_t at
        for at in range(0, sizeof(Flow), 64):
            prefetch_line(<uint8_t*>&self.items[flow] + at)

    cdef inline int32_t find_queue(self, int32_t flow, int32_t target) noexcept:
        # A flow has as many queues as targets it has used: one or two.
        cdef int32_t q = self.items[flow].first_queue
        while q != NONE and self.queues[q].target != target:
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
        q = self.queue_count
        self.queue_count += 1
        memset(&self.queues[q], 0, sizeof(Queue))
        self.queues[q].flow = flow
        self.queues[q].target = target
        self.queues[q].chain.head = self.queues[q].chain.tail = self.queues[q].root = NONE
        self.queues[q].by_deadline = self.by_deadline
        self.queues[q].position = NONE
        self.queues[q].next_queue = self.items[flow].first_queue
        self.items[flow].first_queue = q
        return q

    cdef int64_t key_of(self, int32_t q) noexcept:
        """What orders the heads; ties go by arrival. O(1)."""
        if self.order == ORDER_COUNTER:
            return self.counter_in(q) // self.grain
        if self.order == ORDER_INPUT:
            return self.requests.items[self.queues[q].chain.head].prompt_tokens
        return 0

    cdef inline int64_t counter_in(self, int32_t q) noexcept:
        """The counter that orders a queue: of several pools, that in its own."""
        cdef Queue* queue = &self.queues[q]
        if queue.target == 0 or not self.local or not self.lifts:
            return self.items[queue.flow].vtc
        if queue.position == NONE:
            queue.position = self.find_position(queue.flow, queue.target - 1)
        return self.positions.items[queue.position].key

    cdef inline int64_t counter_at(self, int32_t flow, int32_t pool) noexcept:
        """The counter of a flow as a pool sees it, a newcomer's if it has none there. O(pools)."""
        cdef int32_t n
        if not self.local or not self.lifts or pool == NONE:
            return self.items[flow].vtc
        n = self.find_position(flow, pool)
        if n == NONE:
            return self.newcomer_at(self.items[flow].cls, pool)
        return self.positions.items[n].key

    cdef inline int64_t newcomer_at(self, int32_t cls, int32_t pool) noexcept:
        return max(<int64_t>0, self.positions.level(cls, pool)[0] - self.credit())

    cdef inline int32_t find_position(self, int32_t flow, int32_t pool) noexcept:
        """Where a flow stands in a pool; -1: it never queued anything there. O(pools)."""
        return self.positions.find(self.items[flow].first_position, pool)

    cdef inline bint is_billed(self, Queue* queue) noexcept:
        """Whether the head of a queue has what its quotas ask."""
        return (
            self.items[queue.flow].quota == NONE
            or self.requests.items[queue.chain.head].bill != 0
        )

    cdef int activate(self, int32_t flow, bint queues) except -1:
        """The flow gets something queued, or in flight. Lift: one that was idle is not served for
        the time it was away, but for the credit (section 4.1). O(log n)."""
        cdef Flow* f = &self.items[flow]
        if f.linger_until_ns:
            self._unlinger(flow)
        elif f.queued == 0 and f.live == 0:
            self.recent_count += 1
            self.recent_weight += f.weight_milli
        if self.active(flow).has(flow) or f.waits_at != NONE or f.throttled or (
            self.lifts_queued and not queues
        ):
            return 0
        if self.lifts:
            f.vtc = max(f.vtc, self.lift_of(f.cls) - self.credit())
        self.changed.mark(flow)
        return self.active(flow).put(flow, f.vtc, flow)

    cdef int64_t raise_level(self, int32_t cls) noexcept:
        """Let the level of a class follow its least active counter. It never falls. O(1)."""
        cdef Heap active = <Heap>self.actives[cls]
        if active.count:
            self.level[cls] = max(self.level[cls], active.nodes[0].key)
        return self.level[cls]

    cdef inline int64_t credit(self) noexcept:
        """How far below the level of its class a flow may begin, in weighted micro-tokens."""
        if not self.lifts_queued:
            return 0
        return self.average_charge if self.credit_max == CREDIT_AUTO else self.credit_max

    cdef int64_t lift_of(self, int32_t cls) noexcept:
        """Return what a flow of a class is lifted to, before the credit: the level. Under
        lift=active: the least active counter, else that of the flow active last. O(1)."""
        cdef Heap active = <Heap>self.actives[cls]
        if self.lifts_queued:
            return self.raise_level(cls)
        if active.count:
            return active.nodes[0].key
        return self.items[self.last_active[cls]].vtc if self.last_active[cls] != NONE else 0

    cdef void settle(self, int32_t flow) noexcept:
        """The flow may have become idle. O(log n)."""
        cdef Flow* f = &self.items[flow]
        if f.queued:
            return
        if (
            not f.resumed and self.active(flow).has(flow)
            and (f.live == 0 or self.lifts_queued)
        ):
            self.active(flow).remove(flow)
            self.last_active[f.cls] = flow
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
        self.recent_count -= 1
        self.recent_weight -= self.items[flow].weight_milli

    cdef void reweigh(self, int32_t flow, int32_t weight_milli) noexcept:
        """Give a flow another weight; leases keep theirs. O(1)."""
        cdef Flow* f = &self.items[flow]
        if f.linger_until_ns or f.queued or f.live:
            self.recent_weight += weight_milli - f.weight_milli
        if f.queued:
            self.queued_weight[f.cls] += weight_milli - f.weight_milli
        if f.queued > 1:
            self.deep_weight[f.cls] += weight_milli - f.weight_milli
        f.weight_milli = weight_milli

    cdef void note_grant(self, int32_t flow, int64_t now_ns) noexcept:
        # Time between grants, moving average with alpha = 1/5; what Retry-After is made of.
        cdef Flow* f = &self.items[flow]
        cdef int64_t gap
        self.changed.mark(flow)
        if f.granted_at_ns >= 0:
            gap = now_ns - f.granted_at_ns
            f.interval_ns += (gap - f.interval_ns) // 5 if f.interval_ns else gap
        f.granted_at_ns = now_ns

    cdef void average(self, int32_t flow, int64_t output_tokens) noexcept:
        """Learn an output, of each sequence: n = (4 n + output) / 5 (section 4.4 of the paper)."""
        cdef Flow* f = &self.items[flow]
        self.changed.mark(flow)
        if f.average_milli:
            f.average_milli = (4 * f.average_milli + output_tokens * 1000) // 5
        else:
            f.average_milli = output_tokens * 1000

    cdef void note_charge(self, const Request* r, int64_t price_in, int64_t price_out) noexcept:
        """Average what requests are charged in total, each at most what it asked for. O(1)."""
        cdef int64_t most = r.prompt_tokens * price_in
        most += <int64_t>r.output_max_tokens * r.sequences * price_out
        most = min(r.lease.charged, most * 1000 // r.lease.weight_milli)
        if self.average_charge:
            most = most // CHARGES_AVERAGED - self.average_charge // CHARGES_AVERAGED
            self.average_charge += most
        else:
            self.average_charge = most

    cdef void forget(self) noexcept:
        """Counters and rates as new. Only while nothing is active does order stay the same."""
        cdef int32_t i, pools = <int32_t>len(self.anywhere)
        self.next_retry_at_ns, self.retry_slots.count = LONG_AGO_NS, 0
        self.changed.mark_all(self.count)
        end_resumed(self, self.count)
        for i in range(self.count):
            self.items[i].interval_ns = 0
            self.items[i].granted_at_ns = NONE
            self.items[i].average_milli = 0
            forget_waits(&self.items[i], self.now_ns)
            if self.items[i].queued == 0 and self.items[i].live == 0:
                self.items[i].vtc = 0
                self.leave_pools(i)
        for i in range(CLASSES_MAX):
            if (<Heap>self.actives[i]).count == 0:
                self.last_active[i] = NONE
                self.level[i] = 0
                self.positions.forget(i, pools)
        memset(self.positions.pace, 0, pools * sizeof(int64_t))
        self.average_charge = 0
        while self.linger_first != NONE:
            self._leave(self.linger_first)

    cdef void leave_pools(self, int32_t flow) noexcept:
        """Let a flow that has nothing queued have no positions. O(pools)."""
        cdef int32_t q = self.items[flow].first_queue
        self.positions.release(self.items[flow].first_position)
        self.items[flow].first_position = NONE
        while q != NONE:
            self.queues[q].position = NONE
            q = self.queues[q].next_queue


cdef void forget_waits(Flow* f, int64_t now_ns) noexcept:
    rate_forget(&f.served, now_ns)
    f.next_retry_at_ns = LONG_AGO_NS
    if f.refusals != &NO_REFUSALS:
        f.refusals.retry_slots.count = 0
    f.wait_error_ns = f.waits_judged = f.first_us = f.forecast_first_us = f.first_judged = 0
    memset(&f.shed_accuracy, 0, sizeof(ShedAccuracy))
    f.input_before, f.cached_before = f.input_tokens, f.cached_tokens


cdef void end_resumed(Flows flows, int32_t count) noexcept:
    """Look at so many flows more: those that have not come back go idle. O(log n) each."""
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
        if flows.active(flow).has(flow) and f.queued == 0 and (f.live == 0 or flows.lifts_queued):
            flows.active(flow).remove(flow)
            flows.last_active[f.cls] = flow
            flows.changed.mark(flow)
